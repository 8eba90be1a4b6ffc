import dataclasses
import os
import re

import pytest

from ruitong_lib import cell as module
from ruitong_lib.cell import CHOICES, RANGES, Cell, check_types, from_notebook, parameters, slug
from ruitong_lib.errors import RuitongError

FIELDS = [f.name for f in dataclasses.fields(Cell)]
OK = {"scoring": "both"}
SERVED = {"engine": "endpoint", "base_url": "http://127.0.0.1:8000/v1", "hardware": "NVIDIA H200"}


def build(**values):
    return Cell(**(OK | values))


class TestChecks:
    def test_defaults_with_an_anchor_are_a_cell(self):
        c = Cell(anchor="x.nc")
        assert (c.model, c.precision, c.batch_size, c.scoring) == ("smollm2-135m", "bf16", 1, "replay")
        with pytest.raises(dataclasses.FrozenInstanceError):
            c.seed = 1

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("batch_size", "8", "batch_size must be int, got '8' (str)"),
            ("batch_size", True, "batch_size must be int, got True (bool)"),
            ("batch_size", 8.0, "batch_size must be int, got 8.0 (float)"),
            ("seed", None, "seed must be int, got None (NoneType)"),
            ("revision", 1, "revision must be str, got 1 (int); papermill takes text with -r"),
            ("thinking", "true", "thinking must be bool, got 'true' (str); papermill takes True and False"),
            ("overwrite", 1, "overwrite must be bool, got 1 (int)"),
        ],
    )
    def test_exact_types(self, name, value, message):
        with pytest.raises(RuitongError, match=re.escape(message)):
            build(**{name: value})

    @pytest.mark.parametrize("name", CHOICES)
    def test_choices(self, name):
        for value in CHOICES[name]:
            if name == "scoring":
                continue
            more = SERVED if value == "endpoint" else {}
            assert getattr(build(**{**more, name: value}), name) == value
        with pytest.raises(RuitongError, match=f"{name} must be one of '.*got 'nonsense'"):
            build(**{name: "nonsense"})

    @pytest.mark.parametrize(
        ("name", "value", "meant"),
        [("precision", "bf61", "bf16"), ("attention", "eagre", "eager"), ("scoring", "bot", "both")],
    )
    def test_did_you_mean(self, name, value, meant):
        with pytest.raises(RuitongError, match=f"got '{value}'. Did you mean '{meant}'\\?"):
            build(**{name: value})

    @pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "rocm", "npu", "xpu", "mps", "npu:1", "cuda:12"])
    def test_devices(self, device):
        assert build(device=device).device == device

    @pytest.mark.parametrize("device", ["npu:", "npu:x", "npu:-1", "", "gpu", "CUDA", "cuda:1:2", "npu: 1"])
    def test_no_devices(self, device):
        with pytest.raises(RuitongError, match=re.escape(f"(npu:1), got {device!r}.")):
            build(device=device)

    def test_device_did_you_mean(self):
        with pytest.raises(RuitongError, match="Did you mean 'cuda'"):
            build(device="cudda:1")

    @pytest.mark.parametrize("name", RANGES)
    def test_ranges(self, name):
        low, high = RANGES[name]
        more = {"batch_size": 2} if name == "composition" else {}
        for value in (low, high):
            assert getattr(build(**{name: value, **more}), name) == value
        for value in (low - 1, high + 1):
            with pytest.raises(RuitongError, match=f"{name} must be from {low} to {high}, got {value}"):
                build(**{name: value, **more})

    def test_composition_needs_a_batch(self):
        with pytest.raises(RuitongError, match="with batch_size=1 none do"):
            build(composition=1)
        assert build(composition=1, batch_size=2).composition == 1

    def test_scoring_and_anchor_go_together(self):
        with pytest.raises(RuitongError, match="scoring='replay' needs a text to replay: pass anchor"):
            Cell(scoring="replay")
        with pytest.raises(RuitongError, match="scoring='decode' replays nothing"):
            Cell(scoring="decode", anchor="x.nc")
        assert Cell(scoring="both", anchor="x.nc").anchor == "x.nc"
        assert Cell(scoring="decode").anchor == ""

    def test_check_types_knows_the_closest_name(self):
        with pytest.raises(
            RuitongError, match=r"unknown parameter 'batchsize'\. Did you mean 'batch_size'\? Known are: model, "
        ):
            check_types({"batchsize": 8})
        with pytest.raises(RuitongError, match=r"unknown parameter 'zzz'\. Known are: model, "):
            check_types({"zzz": 8})


def other(name):
    """Another allowed value of a field."""
    values = {
        "model": "org/other",
        "revision": "main",
        "device": "cuda",
        "precision": "fp16",
        "batch_size": 4,
        "composition": 7,
        "attention": "eager",
        "onednn_isa": "AVX2",
        "deterministic": True,
        "max_memory": "cpu=4GiB",
        "checkpoint": "org/quantised",
        "base_url": "http://127.0.0.1:9000/v1",
        "served_model": "other",
        "api_key_env": "RUITONG_API_KEY",
        "hardware": "NVIDIA A100",
        "threads": 3,
        "seed": 3,
        "repeat": 3,
        "prompts": "core-61",
        "thinking": True,
        "max_new_tokens": 9,
        "scoring": "decode",
        "top_k": 5,
        "outputs": "/elsewhere",
        "overwrite": True,
    }
    return values[name]


class TestKey:
    BASE = build(batch_size=2)
    WHERE = {"hardware": "h", "anchor": "a"}  # noqa: RUF012

    @pytest.mark.parametrize("name", [f for f in FIELDS if f not in {"engine", "anchor"}])
    def test_each_field_that_changes_numbers_changes_it(self, name):
        base = self.BASE
        if name in {"base_url", "served_model", "api_key_env", "hardware"}:
            base = build(**SERVED)
        if name == "checkpoint":
            base = build(precision="w8a8")
        changed = dataclasses.replace(base, **{name: other(name)})
        same = changed.key(**self.WHERE) == base.key(**self.WHERE)
        # an endpoint's hardware comes in as the argument, as every cell's does
        assert same == (name in {"outputs", "overwrite", "base_url", "api_key_env", "hardware"})

    def test_engine_changes_it(self):
        assert build(**SERVED).key(**self.WHERE) != build().key(**self.WHERE)

    def test_hardware_and_the_anchors_label_count_and_its_path_does_not(self):
        key = self.BASE.key(**self.WHERE)
        assert self.BASE.key(hardware="i", anchor="a") != key
        assert self.BASE.key(hardware="h", anchor="b") != key
        moved = dataclasses.replace(self.BASE, anchor="/some/where/a.nc")
        assert moved.key(**self.WHERE) == key

    def test_versions_of_the_packages_that_compute_count(self, monkeypatch):
        key = self.BASE.key(**self.WHERE)
        quantised = dataclasses.replace(self.BASE, precision="w8a8")
        before = quantised.key(**self.WHERE)
        monkeypatch.setattr(module, "_version", lambda p: "9" if p == "torchao" else module.metadata.version(p))
        assert self.BASE.key(**self.WHERE) == key
        assert quantised.key(**self.WHERE) != before
        monkeypatch.setattr(module, "_version", lambda p: "9")
        assert self.BASE.key(**self.WHERE) != key

    def test_collect_version_counts(self, monkeypatch):
        key = self.BASE.key(**self.WHERE)
        monkeypatch.setattr(module, "COLLECT_VERSION", module.COLLECT_VERSION + 1)
        assert self.BASE.key(**self.WHERE) != key

    def test_prompts_count_by_content(self, tmp_path):
        one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
        for path in (one, two):
            path.write_text('{"id": "a", "text": "Hello"}\n')
        keys = [dataclasses.replace(self.BASE, prompts=str(p)).key(**self.WHERE) for p in (one, two)]
        assert keys[0] == keys[1]
        two.write_text('{"id": "a", "text": "Hello."}\n')
        os.utime(two, ns=(1, 1))
        assert dataclasses.replace(self.BASE, prompts=str(two)).key(**self.WHERE) != keys[0]

    def test_weights_swapped_under_one_path_count(self, tmp_path):
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"weights")
        c = dataclasses.replace(self.BASE, model=str(tmp_path))
        key = c.key(**self.WHERE)
        assert c.key(**self.WHERE) == key
        file.write_bytes(b"weights!")
        assert c.key(**self.WHERE) != key
        key = c.key(**self.WHERE)
        os.utime(file, ns=(1, 1))
        assert c.key(**self.WHERE) != key


class TestManifest:
    def test_holds_no_path_of_this_machine(self, tmp_path):
        (tmp_path / "p.jsonl").write_text('{"id": "a", "text": "Hello"}\n')
        (tmp_path / "my model").mkdir()
        c = build(model=str(tmp_path / "my model"), prompts=f"{tmp_path}/p.jsonl", outputs=str(tmp_path))
        assert str(tmp_path) in c.model
        assert str(tmp_path) in c.prompts
        m = c.manifest()
        assert (m["model"], m["prompts"], m["deterministic"]) == ("my model", "p.jsonl", False)
        assert str(tmp_path) not in str(m)
        assert set(m) == set(FIELDS) - set(module.NOT_NUMBERS)

    def test_keeps_what_is_no_path(self):
        m = build(model="Qwen/Qwen3-8B", device="npu:1", prompts="core-16").manifest()
        assert (m["model"], m["device"], m["prompts"]) == ("Qwen/Qwen3-8B", "npu:1", "core-16")


class TestLabel:
    @pytest.mark.parametrize(
        "model",
        ["Qwen/Qwen3-8B", "/data/My Model/", "../x", "C:\\m\\n", "模型", "a" * 50, "..", "CON", "org/a:b*c?.v1"],
    )
    def test_is_a_file_name_on_every_system(self, model):
        label = build(model=model).label(hardware="NVIDIA A100 80GB PCIe / (x)", anchor="")
        assert re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+){4}", label)
        assert len(label) < 200
        assert build(model=model).key(hardware="NVIDIA A100 80GB PCIe / (x)", anchor="")[:8] == label.rsplit(".", 1)[1]

    def test_reads_as_designed(self):
        label = build(model="Qwen/Qwen3-8B", batch_size=8).label(hardware="A100", anchor="")
        assert re.fullmatch(r"qwen3-8b\.a100\.bf16\.b8\.[0-9a-f]{8}", label)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("A  b", "a-b"),
            ("Intel Xeon (amx_bf16)", "intel-xeon-amx_bf16"),
            ("", "none"),
            ("///", "none"),
            ("-x-", "x"),
        ],
    )
    def test_slug(self, text, expected):
        assert slug(text) == expected


OURS = "# ruitong: parameters\nmodel = 'smollm2-135m'\nbatch_size: int = 1\nscoring = 'both'\n"


def namespace(*sources):
    """A notebook's globals after running these cells."""
    found = {"In": ["", *sources]}
    for source in sources:
        exec(source, found)
    return found


class TestParameters:
    def test_own_cell_alone(self):
        assert parameters(namespace(OURS)) == {"model": "smollm2-135m", "batch_size": 1, "scoring": "both"}

    def test_injected_values_win(self):
        found = parameters(namespace(OURS, "# Parameters\nbatch_size = 8\n"))
        assert found == {"model": "smollm2-135m", "batch_size": 8, "scoring": "both"}

    def test_a_typo_in_the_injected_cell(self):
        # papermill only logs it and runs on with the default
        with pytest.raises(RuitongError, match=r"unknown parameter 'batchsize'\. Did you mean 'batch_size'\?"):
            parameters(namespace(OURS, "# Parameters\nbatchsize = 8\n"))

    def test_a_typo_in_the_own_cell(self):
        with pytest.raises(RuitongError, match=r"unknown parameter 'modle'\. Did you mean 'model'"):
            from_notebook(namespace("# ruitong: parameters\nmodle = 'x'\n"))

    def test_a_wrong_type(self):
        with pytest.raises(RuitongError, match="batch_size must be int, got '8'"):
            from_notebook(namespace(OURS, "# Parameters\nbatch_size = '8'\n"))

    def test_a_cell_that_is_run_again_replaces_its_earlier_self(self):
        wrong, right = "# Parameters\nbatchsize = 8\n", "# Parameters\nbatch_size = 4\n"
        assert parameters(namespace(OURS, wrong, right))["batch_size"] == 4
        again = OURS.replace("int = 1", "int = 2")
        assert parameters(namespace(OURS, "x = 1", again))["batch_size"] == 2

    def test_other_cells_are_not_parameters(self):
        found = parameters(namespace("import os\n", OURS, "unrelated = 3\n", "  # Parameters\nx = 1"))
        assert set(found) == {"model", "batch_size", "scoring"}

    def test_not_run_yet(self):
        with pytest.raises(RuitongError, match="run the cell that starts with '# ruitong: parameters' first"):
            parameters(namespace("# Parameters\nbatch_size = 8\n"))

    def test_a_notebook_of_other_names(self):
        source = "# ruitong: parameters\nreference = 'a'\ncandidate = 'b'\n"
        found = parameters(namespace(source, "# Parameters\ncandidate = 'c'\n"))
        assert found == {"reference": "a", "candidate": "c"}
        with pytest.raises(RuitongError, match="unknown parameter 'model'"):
            parameters(namespace(source, "# Parameters\nmodel = 'c'\n"))

    def test_from_notebook_is_a_cell(self):
        assert from_notebook(namespace(OURS, "# Parameters\nbatch_size = 8\n")) == Cell(scoring="both", batch_size=8)
