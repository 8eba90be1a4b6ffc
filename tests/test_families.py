"""Every model family of the benchmark, tiny and random, through decode, replay and compare."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from transformers import AutoModelForCausalLM, AutoTokenizer

from ruitong_lib import compare, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import forward, run_cell
from ruitong_lib.collect.transformers import collect
from ruitong_lib.measure.floor import floor_for, ladder, phase_kl
from ruitong_lib.prompts import load_prompts, render
from ruitong_lib.report.markdown import number, to_markdown
from ruitong_lib.report.table import delta_rows
from ruitong_lib.testing import FAMILIES, MIXTURES, synthetic_shards, tiny_model


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Wide enough that the order of a sum shows: at 64 most kernels here give the same bits for any batch.
    return tiny_model(family, tmp_path_factory.mktemp("family") / family, hidden_size=256)


def cell(folder: Path, **more: Any) -> Cell:
    base = {"model": str(folder), "prompts": "core-4", "max_new_tokens": 8, "scoring": "both", "precision": "fp32"}
    return Cell(**{**base, "threads": 1, **more})


@pytest.fixture(scope="module")
def bf16(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset, xr.Dataset]:
    """A bf16 cell that is its own anchor, and the fp32 replay of its text."""
    path, own = run_cell(cell(folder, precision="bf16", outputs=str(tmp_path_factory.mktemp("out"))), progress=False)
    return path, own, collect(cell(folder, anchor=str(path), scoring="replay"))


def test_fp32_replay_agrees_with_its_decode_within_1e4_nat(folder: Path) -> None:
    own = collect(cell(folder)).isel(cell=0)
    decode, replay = own.sel(scoring="decode"), own.sel(scoring="replay")
    assert (decode["token_id"].values == replay["token_id"].values).all()
    np.testing.assert_allclose(decode["logprob"].values, replay["logprob"].values, rtol=0, atol=1e-4)


def test_bf16_replay_agrees_with_its_decode_within_rounding(bf16: tuple[Path, xr.Dataset, xr.Dataset]) -> None:
    # The floor of the phase: decode and replay are two roundings of one text. If the decode's error is as large as the
    # replay's error e (which the fp32 replay measures), they lie at most 2e apart, and KL grows with the square: 4 KL.
    # A wrong position id or mask in the cache gives 0.01 nat and more here.
    _, own, exact = bf16
    rounding = compare(exact, own).metrics["kl"].value
    phase = float(phase_kl(own).mean())
    assert 1e-6 < rounding < 0.1
    assert phase <= 4 * rounding


def test_fp16_replay_agrees_with_its_decode_within_rounding(folder: Path, tmp_path: Path) -> None:
    path, own = run_cell(cell(folder, precision="fp16", outputs=str(tmp_path)), progress=False)
    rounding = compare(collect(cell(folder, anchor=str(path), scoring="replay")), own).metrics["kl"].value
    assert 1e-9 < rounding < 1e-3
    assert float(phase_kl(own).mean()) <= 4 * rounding


def test_batches_with_padding_stay_within_rounding(folder: Path, bf16: tuple[Path, xr.Dataset, xr.Dataset]) -> None:
    path, own, exact = bf16
    padded = collect(cell(folder, precision="bf16", anchor=str(path), scoring="replay", batch_size=3))
    result = compare(own, padded)
    assert result.axis == "batch size"
    assert result.metrics["kl"].value <= 4 * compare(exact, own).metrics["kl"].value
    known = result.metrics["router_agreement"]
    if schema.provenance(own).get("router") == "recorded":
        assert known.n == result.n_positions
        assert known.value > 0.9
    else:
        assert known.n == 0
        assert np.isnan(known.value)


def test_what_stands_in_the_padding_changes_nothing(
    family: str, folder: Path, bf16: tuple[Path, xr.Dataset, xr.Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = cell(folder, anchor=str(bf16[0]), scoring="replay", batch_size=4)
    zeros = collect(batch)
    pad = forward._pad

    def other(rows: Any, device: torch.device) -> Any:
        ids, mask = pad(rows, device)
        return (ids if mask is None else ids + 77 * (1 - mask)), mask

    monkeypatch.setattr(forward, "_pad", other)
    sevens = collect(batch)
    for name in ("anchor_logprob", "entropy", "top_logprob"):
        if family in MIXTURES:  # padding is routed too, and an expert's batch of tokens is another one
            np.testing.assert_allclose(sevens[name].values, zeros[name].values, rtol=0, atol=1e-4)
        else:
            np.testing.assert_array_equal(sevens[name].values, zeros[name].values)


def test_the_router_is_recorded_as_the_gate_chose(
    family: str, folder: Path, bf16: tuple[Path, xr.Dataset, xr.Dataset]
) -> None:
    _, _, exact = bf16
    if family not in MIXTURES:
        assert "expert_id" not in exact
        assert "router" not in schema.provenance(exact)
        return
    layers = [0, 1] if family == "qwen3_moe" else [1]  # the first layer of a tiny DeepSeek is dense
    assert exact["moe_layer"].values.tolist() == layers
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen: dict[int, Any] = {}
    for layer in layers:
        gate = model.get_submodule(f"model.layers.{layer}.mlp.gate")
        gate.register_forward_hook(lambda _m, _i, out, layer=layer: chosen.update({layer: out[-1].numpy()}))
    rows = render(load_prompts("core-4").prompts, AutoTokenizer.from_pretrained(folder))
    row = exact.isel(cell=0).sel(scoring="replay")
    for p, ids in enumerate(rows):
        n = int(row["n_tokens"][p])
        with torch.inference_mode():
            model(torch.tensor([ids + row["token_id"].values[p, : n - 1].tolist()]))
        for i, layer in enumerate(layers):
            expected = np.sort(chosen[layer][len(ids) - 1 :], axis=-1)
            np.testing.assert_array_equal(np.sort(row["expert_id"].values[p, :n, i], axis=-1), expected)
        assert (row["expert_id"].values[p, n:] == -1).all()
    assert exact["expert_id"].dtype == np.int16


class TestRegrouping:
    """Which prompts share a batch: a mixture's experts get other tokens, so it is a floor of its own."""

    @staticmethod
    def floor(folder: Path, tmp_path: Path, prompts: Path) -> Any:
        base = {"prompts": str(prompts), "batch_size": 4, "max_new_tokens": 6}
        path, one = run_cell(cell(folder, outputs=str(tmp_path), **base), progress=False)
        assert len(set(one["n_prompt_tokens"].values[0].tolist())) == 1
        other = collect(cell(folder, anchor=str(path), scoring="replay", composition=3, **base))
        rung = [f for f in ladder(schema.combine([one, other])) if f.rung == "batch composition"]
        return rung[0]

    def test_a_mixture_and_a_dense_model(self, tmp_path: Path) -> None:
        # Single letters: each is one token, so all prompts are equally long and nothing is padded.
        letters = np.random.default_rng(0).choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), (8, 20))
        prompts = tmp_path / "equal.jsonl"
        prompts.write_text("\n".join(json.dumps({"id": f"p{i}", "text": "".join(x)}) for i, x in enumerate(letters)))
        floors = {
            f: self.floor(tiny_model(f, tmp_path / f, hidden_size=256), tmp_path / f"out-{f}", prompts)
            for f in ("qwen3", "qwen3_moe")
        }
        # fp32, both far below resolution; models of this size often round alike in any batch (0 on both sides)
        assert floors["qwen3"].mean_kl <= floors["qwen3_moe"].mean_kl < 1e-8

    def test_the_rule_picks_it_and_the_table_names_it(self) -> None:
        cells: list[dict[str, Any]] = [
            {},
            {"noise": 0.4, "hardware": "card-b"},
            {"noise": 0.01, "batch_size": 8},
            {"noise": 0.1, "batch_size": 8, "composition": 1},
        ]
        ds = schema.combine(synthetic_shards(cells, n_positions=12, vocab=120, experts=(2, 2, 16)).shards)
        labels = [str(c) for c in ds["cell"].values]
        chosen = floor_for(ds, labels[0], labels[1])
        assert chosen is not None
        assert chosen.rung == "batch composition"
        rows = delta_rows(ds, reference=labels[0])
        row = next(r for r in rows if r["candidate"] == labels[1])
        text = to_markdown(rows)
        assert f"| batch composition, {number(chosen.mean_kl)} |" in text
        assert 0 < row["router"]["agreement"] < row["router"]["floor_agreement"] < 1
        assert "## Router: share of layers that chose the same experts" in text
        assert f"{row['router']['agreement']:.4f}" in text

    def test_a_table_of_dense_models_has_no_router(self) -> None:
        cells: list[dict[str, Any]] = [{}, {"noise": 0.02, "hardware": "card-b"}, {"noise": 0.01, "batch_size": 8}]
        ds = schema.combine(synthetic_shards(cells, n_positions=12, vocab=120).shards)
        rows = delta_rows(ds, reference=str(ds["cell"].values[0]))
        assert all(r["router"] is None for r in rows)
        assert "Router" not in to_markdown(rows)


def test_shards_with_and_without_a_router_share_a_file(tmp_path: Path) -> None:
    dense = synthetic_shards([{}], n_prompts=3, n_positions=6, k=4, vocab=60).shards[0]
    moe = synthetic_shards([{"model": "m"}], n_prompts=3, n_positions=8, k=4, vocab=60, experts=(3, 2, 8)).shards[0]
    wide = synthetic_shards([{"model": "w"}], n_prompts=3, n_positions=7, k=4, vocab=60, experts=(2, 4, 8)).shards[0]
    wide = wide.assign_coords(moe_layer=[2, 5])
    ds = schema.load(schema.save(schema.combine([dense, moe, wide]), tmp_path / "x.nc"))
    assert ds["expert_id"].dtype == np.int16
    assert ds["moe_layer"].values.tolist() == [0, 1, 2, 5]
    assert (ds["expert_id"].isel(cell=0) == -1).all()
    for shard in (moe, wide):
        back = schema.select(ds, shard["cell"].item()).sel(moe_layer=shard["moe_layer"], slot=shard["slot"])
        back = back.isel(position=slice(shard.sizes["position"]))
        np.testing.assert_array_equal(back["expert_id"].values, shard["expert_id"].values)
    own = compare(schema.select(ds, moe["cell"].item()), moe).metrics["router_agreement"]
    assert (own.value, own.n) == (1.0, int(moe["n_tokens"].sel(scoring="replay").sum()))
    assert compare(dense, dense).metrics["router_agreement"].n == 0
