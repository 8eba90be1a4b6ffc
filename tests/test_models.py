"""Models that are spread, sharded, cached or too large: where they lie, how they are identified, what does not fit."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ruitong_lib import RuitongError, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import memory, models, run_cell, shard_path
from ruitong_lib.collect.transformers import collect
from ruitong_lib.placement import memory_limits
from ruitong_lib.testing import tiny_model

GIB = 2**30


def cell(folder: Path, **more: Any) -> Cell:
    base = {"model": str(folder), "prompts": "core-4", "max_new_tokens": 6, "scoring": "both", "precision": "bf16"}
    return Cell(**{**base, "threads": 1, **more})


class TestLimits:
    @pytest.mark.parametrize(
        ("text", "limits"),
        [
            ("", None),
            ("auto", {}),
            ("0=40GiB,cpu=60GiB", {0: 40 * GIB, "cpu": 60 * GIB}),
            (" 1 = 1.5 GB , disk=2TiB", {1: 1_500_000_000, "disk": 2048 * GIB}),
            ("cpu=300KB", {"cpu": 300_000}),
        ],
    )
    def test_read(self, text: str, limits: Any) -> None:
        assert memory_limits(text, "cuda") == limits

    @pytest.mark.parametrize(
        ("text", "device", "message"),
        [
            ("lots", "cuda", r"must be empty \(one device\), 'auto', or limits such as .*, got 'lots'$"),
            ("0=40GiB,,cpu=1GiB", "cuda", "got '' in '0=40GiB,,cpu=1GiB'"),
            ("0=-4GiB", "cuda", "got '0=-4GiB'"),
            ("0=40Gib", "cuda", r"unknown unit 'Gib' in '0=40Gib'\. Did you mean 'GiB'\?"),
            ("0=40", "cuda", "unknown unit '' in '0=40'"),
            ("gpu=40GiB", "cuda", "unknown device 'gpu'.*Known are: cpu, disk, and the index"),
            ("0=1GiB", "cpu", "device 'cpu' has no index, got '0=1GiB'"),
            ("0=1GiB,0=2GiB", "npu", "'0' is given twice"),
            ("cpu=0GiB", "cpu", "'cpu=0GiB' is no memory at all"),
            ("auto", "cuda:1", r"leave the index out \(device='cuda'\)"),
        ],
    )
    def test_refused_before_anything_is_loaded(self, text: str, device: str, message: str) -> None:
        with pytest.raises(RuitongError, match=message):
            Cell(scoring="both", max_memory=text, device=device)

    def test_quantised_here_is_not_spread(self) -> None:
        with pytest.raises(RuitongError, match="cannot be used with precision='w8a8'"):
            Cell(scoring="both", max_memory="auto", precision="w8a8")
        assert Cell(scoring="both", max_memory="auto", precision="w8a8", checkpoint="org/q").max_memory == "auto"


class TestSpread:
    @pytest.fixture(scope="class")
    @staticmethod
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_model("qwen3", tmp_path_factory.mktemp("spread") / "tiny", layers=4)

    # 427 kB in bf16: the embedding and one layer stay in memory, the others are read from the disk at each pass
    SOME_ON_DISK = "cpu=210KB,disk=1GiB"

    def test_numbers_are_bit_equal_and_the_manifest_says_what_lies_where(self, folder: Path) -> None:
        whole, spread = collect(cell(folder)), collect(cell(folder, max_memory=self.SOME_ON_DISK))
        for name in ("token_id", "top_logprob", "tail_logprob", "entropy", "anchor_logprob"):
            np.testing.assert_array_equal(spread[name].values, whole[name].values)
        placement = schema.provenance(spread)["placement"]
        assert placement["offloaded"] == ["disk"]
        assert min(placement["modules"]["cpu"], placement["modules"]["disk"]) > 0
        assert placement["bytes"]["cpu"] < 210_000 < sum(placement["bytes"].values())
        assert "placement" not in schema.provenance(whole)
        assert schema.provenance(spread)["n_parameters"] == schema.provenance(whole)["n_parameters"]

    def test_batches_with_padding_too(self, folder: Path) -> None:
        more = {"batch_size": 3, "precision": "fp32"}
        whole, spread = collect(cell(folder, **more)), collect(cell(folder, **more, max_memory=self.SOME_ON_DISK))
        np.testing.assert_array_equal(spread["top_logprob"].values, whole["top_logprob"].values)

    def test_a_mixture_too(self, tmp_path: Path) -> None:
        folder = tiny_model("qwen3_moe", tmp_path / "moe", layers=3)
        whole, spread = collect(cell(folder)), collect(cell(folder, max_memory="cpu=300KB,disk=1GiB"))
        assert schema.provenance(spread)["placement"]["offloaded"] == ["disk"]
        for name in ("top_logprob", "expert_id"):
            np.testing.assert_array_equal(spread[name].values, whole[name].values)

    def test_auto_keeps_a_small_model_whole(self, folder: Path) -> None:
        placement = models.load(cell(folder, max_memory="auto")).manifest["placement"]
        assert placement["offloaded"] == []
        assert list(placement["modules"]) == ["cpu"]

    def test_the_disk_is_never_used_unasked(self, folder: Path) -> None:
        with pytest.raises(RuitongError, match=r"does not fit into max_memory: .* modules are left over.* disk=1GiB"):
            models.load(cell(folder, max_memory="cpu=210KB"))
        with pytest.raises(RuitongError, match="does not fit into max_memory"):
            models.load(cell(folder, max_memory="cpu=210KB,disk=10KB"))


class TestWeightFiles:
    @pytest.fixture
    @staticmethod
    def sharded(tmp_path: Path, tiny_folder: Path) -> Path:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = tmp_path / "sharded"
        model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
        model.save_pretrained(folder, max_shard_size="150KB")
        AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
        return folder

    def test_a_sharded_checkpoint_gives_the_same_numbers_and_all_its_shards_count(
        self, sharded: Path, tiny_folder: Path
    ) -> None:
        files = models.weight_files(sharded)
        assert len(files) > 2
        whole, shards = collect(cell(tiny_folder)), collect(cell(sharded))
        np.testing.assert_array_equal(shards["top_logprob"].values, whole["top_logprob"].values)
        lines = [f"{f.name} {hashlib.sha256(f.read_bytes()).hexdigest()}\n" for f in sorted(files)]
        expected = hashlib.sha256("".join(lines).encode()).hexdigest()
        assert models.weights_sha256(sharded) == schema.provenance(shards)["weights_sha256"] == expected
        for file in files:
            before = file.read_bytes()
            file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
            assert models.weights_sha256(sharded) != expected
            file.write_bytes(before)

    def test_files_that_the_index_does_not_name_are_not_weights(self, sharded: Path) -> None:
        before = models.weights_sha256(sharded)
        (sharded / "consolidated.safetensors").write_bytes(b"the same weights under other names")
        assert models.weights_sha256(sharded) == before

    def test_a_missing_shard_is_named_before_loading(self, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        lost = models.weight_files(sharded)[1]
        lost.unlink()
        from transformers import AutoModelForCausalLM

        monkeypatch.delattr(AutoModelForCausalLM, "from_pretrained")
        with pytest.raises(RuitongError, match=f"'sharded' lacks 1 of the .* weight files .*e.g. {lost.name}"):
            models.load(cell(sharded))

    def test_a_hub_cache_is_hashed_by_the_names_of_its_blobs(self, tmp_path: Path) -> None:
        snapshot, blobs = tmp_path / "snapshots" / "c0ffee", tmp_path / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        names = {"a" * 64: "model-00001-of-00002.safetensors", "b" * 64: "model-00002-of-00002.safetensors"}
        for sha, name in names.items():
            (blobs / sha).write_bytes(b"not read: its name is its hash")
            (snapshot / name).symlink_to(blobs / sha)
        lines = "".join(f"{name} {sha}\n" for sha, name in names.items())
        assert models.weights_sha256(snapshot) == hashlib.sha256(lines.encode()).hexdigest()
        # small files have git's SHA-1 for a name, which is no hash of their bytes alone: such a file is read
        (blobs / ("c" * 40)).write_bytes(b"read")
        (snapshot / "model-00003.safetensors").symlink_to(blobs / ("c" * 40))
        lines += f"model-00003.safetensors {hashlib.sha256(b'read').hexdigest()}\n"
        assert models.weights_sha256(snapshot) == hashlib.sha256(lines.encode()).hexdigest()

    def test_a_model_of_the_hub_runs_from_its_cache(self, tmp_path: Path, tiny_folder: Path) -> None:
        home, commit = tmp_path / "hf", "0123456789abcdef0123456789abcdef01234567"
        repo = home / "hub" / "models--org--tiny"
        snapshot = repo / "snapshots" / commit
        for folder in (snapshot, repo / "blobs", repo / "refs"):
            folder.mkdir(parents=True)
        (repo / "refs" / "main").write_text(commit)
        for file in tiny_folder.iterdir():
            large = file.suffix == ".safetensors"
            sha = (hashlib.sha256 if large else hashlib.sha1)(file.read_bytes()).hexdigest()
            (repo / "blobs" / sha).write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(Path("../../blobs") / sha)
        code = (
            "import json\nfrom ruitong_lib.cell import Cell\nfrom ruitong_lib.collect import models\n"
            "print(json.dumps(models.load(Cell(model='org/tiny', scoring='both')).manifest))"
        )
        environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        environment.pop("HF_HUB_CACHE", None)
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
        )
        manifest = json.loads(found.stdout.splitlines()[-1])
        assert manifest["commit"] == commit
        assert manifest["weights_sha256"] == models.weights_sha256(tiny_folder)  # read there, and here by its name


class TestOutOfMemory:
    LIMIT = 3

    @pytest.fixture
    def small_device(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """A device that holds three prompts at a time; returns the shapes that were tried."""
        load, shapes = models.load, []

        def limited(c: Cell) -> models.Loaded:
            loaded = load(c)

            def refuse(_module: Any, _args: Any, kwargs: Any) -> None:
                shapes.append(tuple(kwargs["input_ids"].shape))
                if len(kwargs["input_ids"]) > self.LIMIT:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

            loaded.model.get_decoder().register_forward_pre_hook(refuse, with_kwargs=True)
            return loaded

        monkeypatch.setattr(models, "load", limited)
        return shapes

    @pytest.mark.parametrize("batch_size", [4, 15])
    def test_the_size_that_fits_is_named_and_nothing_is_saved(
        self, tiny_folder: Path, tmp_path: Path, small_device: list[tuple[int, int]], batch_size: int
    ) -> None:
        c = cell(tiny_folder, prompts="core-16", batch_size=batch_size, outputs=str(tmp_path))
        fits = {4: 2, 15: 3}[batch_size]
        message = f"out of memory in decode with {batch_size} prompts .*20.00 GiB.*batch_size={fits} fits"
        with pytest.raises(RuitongError, match=message):
            run_cell(c, progress=False)
        assert not shard_path(c).exists()
        # It was tried with the longest prompts of the set, to the last token.
        longest = max(width for _, width in small_device)
        assert (fits, longest) in small_device
        assert small_device[-5:] == [(fits, 1)] * 5

    def test_replay_has_its_own(self, tiny_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        path, _ = run_cell(cell(tiny_folder, prompts="core-16", outputs=str(tmp_path)), progress=False)
        request.getfixturevalue("small_device")
        c = cell(tiny_folder, prompts="core-16", anchor=str(path), scoring="replay", batch_size=8)
        with pytest.raises(RuitongError, match=r"out of memory in replay with 8 prompts .*batch_size=2 fits"):
            collect(c)

    def test_a_batch_that_fits_is_not_touched(self, tiny_folder: Path, small_device: list[tuple[int, int]]) -> None:
        shard = collect(cell(tiny_folder, batch_size=3))
        assert shard["batch_index"].values.tolist() == [[0, 0, 0, 1]]

    def test_not_even_one(
        self, tiny_folder: Path, small_device: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TestOutOfMemory, "LIMIT", 0)
        with pytest.raises(RuitongError, match="not even batch_size=1 fits: spread the model"):
            collect(cell(tiny_folder))

    @pytest.mark.parametrize(
        ("error", "is_one"),
        [
            (torch.OutOfMemoryError("HIP out of memory"), True),
            (RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 61 GiB total)"), True),
            (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
            (MemoryError(), True),
            (RuntimeError("expected m1 and m2 to have the same dtype"), False),
            (ValueError("out of memory"), False),
        ],
    )
    def test_which_errors_say_so(self, error: Exception, is_one: bool) -> None:
        assert memory.is_out_of_memory(error) is is_one

        def work() -> None:
            raise error

        if is_one:
            assert memory.attempt(work)
        else:
            with pytest.raises(type(error)):
                memory.attempt(work)

    def test_weights_that_do_not_fit(self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers import Qwen3ForCausalLM

        def full(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.16 GiB")

        monkeypatch.setattr(Qwen3ForCausalLM, "to", full)
        with pytest.raises(RuitongError, match=r"do not fit on cpu \(CUDA out of memory.*max_memory='auto'"):
            models.load(cell(tiny_folder))
