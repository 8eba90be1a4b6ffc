"""The collector on tiny random models: every number against an independent computation."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from transformers import AutoModelForCausalLM, AutoTokenizer

from ruitong_lib import RefusedError, RuitongError, compare, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import devices, epilogue, finished, forward, models, run_cell
from ruitong_lib.collect.transformers import collect
from ruitong_lib.prompts import load_prompts, render
from ruitong_lib.testing import exact_kl, tiny_model


@pytest.fixture(scope="module", params=("qwen3", "llama", "deepseek_v3"))  # all families: test_families.py
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp("family") / f"tiny-{request.param}")


def cell(folder: Path, **more: Any) -> Cell:
    base = {"model": str(folder), "prompts": "core-4", "max_new_tokens": 8, "scoring": "both", "precision": "fp32"}
    return Cell(**{**base, "threads": 1, **more})


def forward_logits(folder: Path, shard: xr.Dataset, scoring: str, prompt: int) -> torch.Tensor:
    """The full logits that scored a row, from the model called the plain way."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = render(load_prompts("core-4").prompts, tokenizer)[prompt]
    row = shard.isel(cell=0).sel(scoring=scoring).isel(prompt=prompt)
    n = int(row["n_tokens"])
    text = ids + row["token_id"].values[: n - 1].tolist()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([text])).logits[0, len(ids) - 1 :]


def test_numbers_agree_with_the_plain_forward(folder: Path) -> None:
    shard = collect(cell(folder))
    for scoring, prompt in (("decode", 0), ("replay", 1), ("replay", 3)):
        row = shard.isel(cell=0).sel(scoring=scoring).isel(prompt=prompt)
        n = int(row["n_tokens"])
        lp = forward_logits(folder, shard, scoring, prompt).double().log_softmax(-1).numpy()
        own = row["token_id"].values[:n]
        # 1e-4: the collector's own forward uses other kernels (no full logits); the same logits are tested below
        np.testing.assert_allclose(row["logprob"].values[:n], lp[np.arange(n), own], atol=1e-4)
        order = np.argsort(-lp, axis=1, kind="stable")[:, :20]
        np.testing.assert_allclose(row["top_logprob"].values[:n], np.take_along_axis(lp, order, 1), atol=1e-4)
        assert (row["top_token_id"].values[:n, 0] == order[:, 0]).all()
        np.testing.assert_allclose(row["entropy"].values[:n], -(np.exp(lp) * lp).sum(1), atol=1e-4)
        masked = lp.copy()
        np.put_along_axis(masked, row["top_token_id"].values[:n].astype(int), -np.inf, 1)
        np.testing.assert_allclose(row["tail_logprob"].values[:n], np.logaddexp.reduce(masked, axis=1), atol=1e-4)


def test_logprobs_are_a_float64_log_softmax_of_the_same_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score, worst = epilogue.score, [0.0]

    def checked(logits: torch.Tensor, k: int, ids: torch.Tensor | None = None) -> epilogue.Rows:
        rows = score(logits, k, ids)
        lp = logits.double().log_softmax(-1)
        off = (rows.top_logprob - lp.gather(1, rows.top_token_id.long())).abs().max()
        if ids is not None:
            off = max(off, (rows.logprob - lp.gather(1, ids.long())).abs().max())
        worst.append(float(off))
        return rows

    monkeypatch.setattr(epilogue, "score", checked)
    collect(cell(folder, precision="bf16"))
    assert 0 < max(worst) < 1e-5


def test_greedy_decode_is_generate(folder: Path) -> None:
    shard = collect(cell(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for i, ids in enumerate(render(load_prompts("core-4").prompts, tokenizer)):
        got = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
        )[0, len(ids) :]
        row = shard.isel(cell=0).sel(scoring="decode").isel(prompt=i)
        assert row["token_id"].values[: int(row["n_tokens"])].tolist() == got.tolist()


def test_batches_change_nothing_in_fp32_beyond_rounding(folder: Path) -> None:
    one, four = collect(cell(folder)), collect(cell(folder, batch_size=3))
    np.testing.assert_array_equal(one["token_id"].values, four["token_id"].values)
    np.testing.assert_allclose(one["top_logprob"].values, four["top_logprob"].values, atol=2e-4)
    assert four["batch_index"].values.tolist() == [[0, 0, 0, 1]]
    assert four["row_in_batch"].values.tolist() == [[0, 1, 2, 0]]


def test_decode_and_replay_of_one_text_agree(folder: Path) -> None:
    one = collect(cell(folder)).isel(cell=0)
    d, r = one.sel(scoring="decode"), one.sel(scoring="replay")
    assert (d["token_id"].values == r["token_id"].values).all()
    np.testing.assert_allclose(d["logprob"].values, r["logprob"].values, atol=1e-4)
    np.testing.assert_allclose(one["anchor_logprob"].values, d["top_logprob"].values, atol=1e-3)
    assert (one["anchor_token_id"].values == d["top_token_id"].values).all()


def test_composition_shuffles_batches_and_says_so(folder: Path) -> None:
    rows = [forward.batch_rows(10, 4, c) for c in (0, 1, 2)]
    assert rows[0] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(sorted(i for b in r for i in b) == list(range(10)) for r in rows)
    assert rows[1] != rows[2] != rows[0]
    assert rows[1] == forward.batch_rows(10, 4, 1)


def test_kl_bound_is_below_the_exact_kl(folder: Path, tmp_path: Path) -> None:
    path, anchor = run_cell(cell(folder, outputs=str(tmp_path)), progress=False)
    other = collect(cell(folder, precision="bf16", anchor=str(path), scoring="replay"))
    comparison = compare(anchor, other)
    assert comparison.differs_in == ("precision",)
    exact = exact_kl(anchor, folder, "core-4")
    bound = comparison.positions["kl"].values
    known = np.isfinite(bound)
    assert known.sum() == int(anchor["n_tokens"].sel(scoring="replay").sum())
    # the exact value comes from one prompt at a time and plain kernels, as the collector's batch of one does
    assert (bound[known] <= exact[:, : bound.shape[1]][known] * (1 + 1e-6) + 1e-9).all()
    assert (np.nansum(bound, axis=1) > 0).all()


def test_generation_config_changes_nothing_and_is_recorded(tmp_path: Path, tiny_folder: Path) -> None:
    changed = tiny_model("qwen3", tmp_path / "changed")
    config = json.loads((changed / "generation_config.json").read_text(encoding="utf-8"))
    config |= {"repetition_penalty": 1.3, "do_sample": True, "top_k": 5, "temperature": 0.6}
    (changed / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    plain, other = collect(cell(tiny_folder)), collect(cell(changed))
    np.testing.assert_array_equal(plain["token_id"].values, other["token_id"].values)
    np.testing.assert_array_equal(plain["top_logprob"].values, other["top_logprob"].values)
    assert schema.provenance(other)["generation_config_ignored"]["repetition_penalty"] == 1.3
    assert schema.provenance(other)["logprob_mode"] == "raw"


def test_nan_logits_are_a_state_and_refuse_the_comparison(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, good = run_cell(cell(tiny_folder, outputs=str(tmp_path)), progress=False)
    load = models.load

    def overflowing(c: Cell) -> models.Loaded:
        loaded = load(c)
        with torch.inference_mode():
            loaded.model.get_output_embeddings().weight[7] = torch.inf
        return loaded

    monkeypatch.setattr(models, "load", overflowing)
    bad = collect(cell(tiny_folder, anchor=str(path)))
    assert (bad["state"].values == schema.STATES.index("nan_logits")).all()
    assert (bad["n_tokens"].sel(scoring="decode").values == 1).all()  # stops at the first NaN, never emits id 0
    assert (bad["token_id"].sel(scoring="decode").values == -1).all()
    assert np.isnan(bad["top_logprob"].values).all()
    with pytest.raises(RefusedError, match="nan_logits"):
        compare(good, bad)


def test_w8a8_recipe_is_recorded_and_changes_numbers(tiny_folder: Path, tmp_path: Path) -> None:
    path, _ = run_cell(cell(tiny_folder, precision="bf16", outputs=str(tmp_path)), progress=False)
    bf16 = collect(cell(tiny_folder, precision="bf16", anchor=str(path), scoring="replay"))
    int8 = collect(cell(tiny_folder, precision="w8a8", anchor=str(path), scoring="replay"))
    recipe = schema.provenance(int8)["precision"]
    assert recipe["left_out"] == ["lm_head"]
    assert recipe["linear_layers"] == 14
    assert schema.provenance(int8)["weights_sha256"] == schema.provenance(bf16)["weights_sha256"]
    result = compare(bf16, int8)
    assert result.axis == "precision"
    assert result.metrics["kl"].value > 1e-6


def test_a_finished_cell_is_kept_and_a_changed_one_is_not(tiny_folder: Path, tmp_path: Path) -> None:
    c = cell(tiny_folder, outputs=str(tmp_path))
    path, first = run_cell(c, progress=False)
    before = path.stat().st_mtime_ns
    assert run_cell(c, progress=False)[0] == path
    assert path.stat().st_mtime_ns == before
    other, _ = run_cell(dataclasses.replace(c, repeat=1), progress=False)
    assert other != path
    path.write_bytes(path.read_bytes()[:5000])
    assert finished(c) is None  # cut short: collected again, not read
    _, again = run_cell(c, progress=False)
    for name in ("token_id", "top_logprob", "entropy", "anchor_logprob"):
        np.testing.assert_array_equal(first[name].values, again[name].values)


def test_bad_anchors_are_refused_before_the_model_is_loaded(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, anchor = run_cell(cell(tiny_folder, outputs=str(tmp_path)), progress=False)

    def no_model(_: Cell) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(models, "load", no_model)
    with pytest.raises(RuitongError, match="same prompts in the same order"):
        collect(cell(tiny_folder, anchor=str(path), prompts="core-16"))
    with pytest.raises(RuitongError, match="stores k=20, this cell asks for top_k=30"):
        collect(cell(tiny_folder, anchor=str(path), top_k=30))
    with pytest.raises(RuitongError, match="no shard at"):
        collect(cell(tiny_folder, anchor=str(tmp_path / "none.nc")))
    anchor["state"].values[0, 0] = schema.STATES.index("missing")
    with pytest.raises(RuitongError, match="no usable decode"):
        collect(cell(tiny_folder, anchor=str(schema.save(anchor, tmp_path / "undecoded.nc"))))


def test_an_anchor_of_another_tokenizer_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    path, _ = run_cell(cell(tiny_folder, outputs=str(tmp_path)), progress=False)
    plain = tiny_model("qwen3", tmp_path / "plain", chat_template=False)
    with pytest.raises(RuitongError, match="other token ids"):
        collect(cell(plain, anchor=str(path)))


def test_errors_name_what_to_do(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(RuitongError, match="cannot be loaded"):
        collect(cell(tmp_path / "nothing"))
    with pytest.raises(RuitongError, match="lower max_new_tokens"):
        collect(cell(tiny_folder, max_new_tokens=900_000))
    with pytest.raises(RuitongError, match="Did you mean 'cpu'"):
        cell(tiny_folder, device="cpuu")
    for kind in ("cuda", "rocm", "xpu", "mps"):
        if not (kind == "mps" and torch.backends.mps.is_available()) and not torch.cuda.is_available():
            with pytest.raises(RuitongError, match=f"device '{kind}' is not here: torch"):
                devices.resolve(kind)


def test_onednn_isa_comes_before_torch() -> None:
    with pytest.raises(RuitongError, match="Restart the kernel"):
        devices.prepare(onednn_isa="AVX512_CORE")


def test_import_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys\n"
        "import ruitong_lib, ruitong_lib.cli, ruitong_lib.grid, ruitong_lib.report.table, ruitong_lib.collect\n"
        "print(*{m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'matplotlib', 'torchao'})\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == []


def test_rerun_in_a_new_process_is_bit_identical(tiny_folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom ruitong_lib.cell import Cell\nfrom ruitong_lib.collect import run_cell\n"
        f"run_cell(Cell(model={str(tiny_folder)!r}, prompts='core-4', max_new_tokens=8, scoring='both', "
        f"precision='bf16', threads=1, outputs={str(tmp_path)!r}, repeat=int(sys.argv[1])), progress=False)\n"
    )
    for repeat in ("0", "1"):
        subprocess.run([sys.executable, "-c", code, repeat], check=True)
    a, b = (schema.load(p) for p in sorted((tmp_path / "cells").glob("*.nc")))
    assert {a["repeat"].item(), b["repeat"].item()} == {0, 1}
    for name in a.data_vars:
        if name != "provenance":
            np.testing.assert_array_equal(a[name].values, b[name].values, err_msg=str(name))


@pytest.mark.skipif("amx" not in devices.cpu_label(), reason="this CPU has no AMX, so a cap on it changes nothing")
def test_amx_and_avx512_kernels_leave_different_hashes() -> None:
    code = (
        "import sys\nfrom ruitong_lib.collect import devices\ndevices.prepare(onednn_isa=sys.argv[1])\n"
        "import torch\nfrom ruitong_lib.provenance import matmul_sha256\nprint(matmul_sha256(torch.device('cpu')))\n"
    )
    run = [sys.executable, "-c", code]
    hashes = [subprocess.check_output([*run, isa], text=True) for isa in ("", "", "AVX512_CORE")]
    assert hashes[0] == hashes[1] != hashes[2]
