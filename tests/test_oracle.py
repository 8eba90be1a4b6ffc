"""The oracle: distances, ratio, direction and refusals on known shards; grid, table, figure; killed replays."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
import yaml
from running import papermill
from scipy import stats
from typer.testing import CliRunner

from ruitong_lib import grid, schema
from ruitong_lib.cell import Cell
from ruitong_lib.cli import app
from ruitong_lib.collect import finished, parts, run_cell, shard_path
from ruitong_lib.errors import DeviceUnavailableError, RefusedError, RuitongError
from ruitong_lib.gridfile import load_grid
from ruitong_lib.measure import oracle
from ruitong_lib.report import distances, table
from ruitong_lib.report.markdown import to_markdown
from ruitong_lib.testing import synthetic_shards

CELLS: list[dict[str, Any]] = [
    {"noise": 0.05},
    {"noise": 0.02, "precision": "fp16"},
    {"noise": 0.3, "precision": "w8a8"},
    {"noise": 1e-7, "precision": "fp32"},
    {"noise": 0.05, "batch_size": 8},
    {"precision": "fp64"},
]
BF16, FP16, W8A8, FP32, B8, FP64 = range(len(CELLS))


@pytest.fixture(scope="module")
def made() -> Any:
    return synthetic_shards(CELLS, n_prompts=20, n_positions=16, vocab=80, k=40, decode=False, seed=7)


@pytest.fixture
def shards(made: Any) -> list[xr.Dataset]:
    return [s.copy(deep=True) for s in made.shards]


def in_provenance(shard: xr.Dataset, **values: Any) -> xr.Dataset:
    shard["provenance"].values[0] = json.dumps(schema.provenance(shard) | values)
    return shard


class TestNumbers:
    def test_distances_are_the_exact_kl_from_below(self, made, shards):
        for i in (BF16, FP16, W8A8):
            d = oracle.distance(shards[i], shards[FP64])
            exact = float(made.exact_kl(FP64, i).mean())
            assert 0.8 * exact < d.kl <= exact * (1 + 1e-9)
            assert d.lo < d.kl < d.hi
            assert d.n_prompts == 20
            assert d.n_positions == int(made.n_tokens.sum())

    def test_the_interval_of_the_mean_is_a_jackknife_of_its_logarithm(self, shards):
        d = oracle.distance(shards[BF16], shards[FP64])
        kl = d.positions.values
        without = np.array([math.log(np.nanmean(np.delete(kl, i, 0))) for i in range(len(kl))])
        n = len(kl)
        error = math.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
        t = stats.t.ppf(0.975, n - 1)
        assert d.lo == pytest.approx(d.kl * math.exp(-t * error), rel=1e-9)
        assert d.hi == pytest.approx(d.kl * math.exp(t * error), rel=1e-9)

    def test_the_direction_is_the_mean_change_of_the_anchors_logprob(self, made, shards):
        d = oracle.distance(shards[W8A8], shards[FP64])
        token = shards[FP64]["token_id"].sel(scoring="replay").values[0]
        valid = token >= 0
        p, q = (
            np.take_along_axis(made.log_probs[i], np.maximum(token, 0)[..., None], -1)[..., 0] for i in (FP64, W8A8)
        )
        change = np.where(valid, q - p, np.nan)
        assert d.direction == pytest.approx(np.nanmean(change), abs=1e-6)
        without = np.array([np.nanmean(np.delete(change, i, 0)) for i in range(len(change))])
        n = len(change)
        half = stats.t.ppf(0.975, n - 1) * math.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
        assert d.direction_hi - d.direction == pytest.approx(half, rel=1e-4)

    def test_noise_that_favours_no_token_moves_the_direction_by_about_minus_kl(self):
        cells = [{"noise": 0.3}, {"precision": "fp64"}]
        a, exact = synthetic_shards(cells, n_prompts=200, n_positions=24, vocab=80, decode=False, seed=2).shards
        d = oracle.distance(a, exact)
        assert d.direction_lo < -d.kl < d.direction_hi < 0

    def test_ratio_and_who_is_further(self, made, shards):
        t = oracle.against_oracle(shards[FP16], shards[BF16], shards[FP64])
        a, b = (made.exact_kl(FP64, i).sum() for i in (FP16, BF16))
        assert t.ratio.value == pytest.approx(float(b / a), rel=0.1)
        assert 1 < t.ratio.lo < t.ratio.value < t.ratio.hi
        assert t.further == "candidate"
        back = oracle.against_oracle(shards[BF16], shards[FP16], shards[FP64])
        assert back.ratio.value == pytest.approx(1 / t.ratio.value)
        assert back.ratio.hi == pytest.approx(1 / t.ratio.lo)
        assert back.further == "reference"

    def test_equal_noise_is_not_told_apart(self, shards):
        t = oracle.against_oracle(shards[BF16], shards[B8], shards[FP64])
        assert t.ratio.lo < 1 < t.ratio.hi
        assert t.further == "neither"

    def test_padding_and_the_order_of_prompts_change_nothing(self, shards, pad_positions):
        a, b, o = (shards[i] for i in (FP16, BF16, FP64))
        t = oracle.against_oracle(a, b, o).to_dict()
        other = oracle.against_oracle(a.isel(prompt=slice(None, None, -1)), pad_positions(b, 5), o).to_dict()
        for side in ("reference", "candidate"):
            assert other[side]["kl"] == pytest.approx(t[side]["kl"], rel=1e-12)
            assert other[side]["direction_lo"] == pytest.approx(t[side]["direction_lo"], rel=1e-9)
        assert other["ratio"]["lo"] == pytest.approx(t["ratio"]["lo"], rel=1e-9)

    def test_below_resolution_has_no_ratio_and_still_says_who_is_further(self, shards):
        t = oracle.against_oracle(shards[FP32], shards[BF16], shards[FP64])
        assert t.reference.status == "below resolution"
        assert 0 < t.reference.kl < 1e-8
        assert math.isnan(t.ratio.value)
        assert t.ratio.status == "reference below resolution"
        assert t.further == "candidate"
        assert oracle.against_oracle(shards[BF16], shards[FP32], shards[FP64]).further == "reference"
        assert t.to_dict()["ratio"]["value"] is None

    def test_two_below_resolution_are_not_told_apart(self, shards):
        twin = shards[FP32].copy(deep=True).assign_coords(cell=["twin"])
        t = oracle.against_oracle(shards[FP32], twin, shards[FP64])
        assert t.further == "not defined"
        assert "both" in t.reason

    def test_an_exact_copy_is_identical(self, shards):
        copy = shards[FP64].copy(deep=True).assign_coords(cell=["copy"], precision=("cell", ["fp32"]))
        d = oracle.distance(copy, shards[FP64])
        assert (d.status, d.kl) == ("identical", 0.0)
        assert math.isnan(d.lo)

    def test_nothing_is_said_of_few_prompts(self, shards):
        few = [s.isel(prompt=slice(15)) for s in shards]
        t = oracle.against_oracle(few[FP16], few[W8A8], few[FP64])
        assert t.ratio.lo > 1
        assert (t.further, t.reason) == ("not defined", "15 common prompts; nothing is said below 16")

    def test_the_writer_of_the_anchor_has_no_direction(self, shards):
        own = str(shards[BF16]["cell"].values[0])
        for s in shards:
            s["anchor"] = ("cell", [own])
        assert math.isnan(oracle.distance(shards[BF16], shards[FP64]).direction)
        assert math.isfinite(oracle.distance(shards[FP16], shards[FP64]).direction)


class TestRefusals:
    @pytest.mark.parametrize(
        ("cell", "by", "message"),
        [
            (FP16, BF16, "an oracle is computed in fp64 or fp32, got .* in bf16"),
            (FP64, FP64, "is the cell itself"),
        ],
    )
    def test_what_is_no_oracle(self, shards, cell, by, message):
        with pytest.raises(RefusedError, match=message):
            oracle.distance(shards[cell], shards[by])

    def test_fp32_needs_fp64_and_fp64_has_none(self, shards):
        fp32 = shards[FP64].copy(deep=True).assign_coords(cell=["o"], precision=("cell", ["fp32"]))
        with pytest.raises(RefusedError, match=r"candidate .* in fp32 is no finer than it; .*precision=fp64"):
            oracle.against_oracle(shards[BF16], shards[FP32], fp32)
        with pytest.raises(RefusedError, match=r"reference .* is fp32"):
            oracle.against_oracle(shards[FP32], shards[BF16], fp32)
        with pytest.raises(RefusedError, match="nothing finer than fp64"):
            oracle.distance(shards[FP64], fp32)
        assert oracle.against_oracle(shards[BF16], shards[W8A8], fp32).further == "candidate"

    def test_another_anchor(self, shards):
        other = shards[FP64]
        other["anchor_token_id"].values[0, 0, 0, :2] = other["anchor_token_id"].values[0, 0, 0, 1::-1]
        with pytest.raises(RefusedError, match="different anchors"):
            oracle.distance(shards[BF16], other)

    def test_other_weights(self, shards):
        with pytest.raises(RefusedError, match="different weights"):
            oracle.distance(shards[BF16], in_provenance(shards[FP64], weights_sha256="x"))

    def test_another_model_unless_a_hash_says_it_is_the_same(self, shards):
        renamed = shards[FP64].assign_coords(model=("cell", ["other"]))
        assert oracle.distance(shards[BF16], renamed).status == "ok"
        with pytest.raises(RefusedError, match="no hash says"):
            oracle.distance(shards[BF16], in_provenance(renamed, weights_sha256=""))

    def test_other_prompts(self, shards):
        with pytest.raises(RefusedError, match="different prompts"):
            oracle.distance(shards[BF16], shards[FP64].isel(prompt=slice(18)))


@pytest.fixture
def ds(shards: list[xr.Dataset]) -> xr.Dataset:
    out = schema.combine(shards)
    out.attrs |= {"reference": str(shards[BF16]["cell"].values[0]), "oracle": str(shards[FP64]["cell"].values[0])}
    return out


class TestReports:
    def test_the_nearest_comes_first(self, ds):
        found, refused = oracle.distances(ds)
        assert [d.precision for d in found][:2] == ["fp32", "fp16"]
        assert found[-1].precision == "w8a8"
        assert [d.kl for d in found] == sorted(d.kl for d in found)
        assert refused == {}

    def test_an_fp32_cell_beside_an_fp32_oracle_is_refused_and_the_others_are_not(self, ds):
        fp32 = next(str(c) for c in ds["cell"].values if ds["precision"].sel(cell=c) == "fp32")
        kept = ds.sel(cell=ds["cell"] != ds.attrs["oracle"])
        second = ds.sel(cell=[fp32]).assign_coords(cell=["second"])
        found, refused = oracle.distances(xr.concat([kept, second], "cell", data_vars="all"), "second")
        assert {d.precision for d in found} == {"bf16", "fp16", "w8a8"}
        assert list(refused) == [fp32]

    def test_a_dataset_without_an_oracle_says_what_to_do(self, ds):
        del ds.attrs["oracle"]
        with pytest.raises(RefusedError, match=r"oracle: \{precision: fp32\}.*name one of its cells: synthetic"):
            oracle.distances(ds)
        with pytest.raises(RefusedError, match="'x' is not in the dataset"):
            oracle.distances(ds, "x")

    def test_the_table_has_a_section_and_no_row_of_the_oracle(self, ds):
        rows = table.delta_rows(ds)
        assert ds.attrs["oracle"] not in {r["candidate"] for r in rows}
        by = {r["candidate"]: r["oracle"] for r in rows}
        assert {p["further"] for p in by.values()} == {"candidate", "reference", "neither"}
        text = to_markdown(rows)
        section = text.split("## Distance to the oracle")[1].split("## Every delta")[0]
        assert section.count("\n| ") == 2 + 1 + len(rows)  # head, rule, the reference, the candidates
        assert "below resolution (" in section
        frame = table.to_frame(rows)
        assert frame["oracle.ratio.value"].notna().sum() == len(rows) - 1
        assert set(frame["oracle.further"]) == {"candidate", "reference", "neither"}
        json.dumps(rows, allow_nan=False)

    def test_without_an_oracle_the_table_is_as_before(self, ds):
        oracle_cell = ds.attrs.pop("oracle")
        rows = table.delta_rows(ds)
        assert "Distance to the oracle" not in to_markdown(rows)
        assert oracle_cell in {r["candidate"] for r in rows}

    def test_the_figure_orders_marks_and_names(self, ds):
        ax = distances.plot_oracle(ds)
        found, _ = oracle.distances(ds)
        names = [t.get_text() for t in ax.get_yticklabels()]
        assert len(names) == len(found)
        assert names[0] == "fp32"
        assert names[-1] == "w8a8"
        assert "bf16, batch size 8" in names
        points = [line for line in ax.lines if len(line.get_xdata()) == 1 and line.get_marker() != "|"]
        drawn = {float(p.get_ydata()[0]): float(p.get_xdata()[0]) for p in points}
        for y, d in enumerate(found):
            assert drawn[y] == pytest.approx(max(d.kl, 1e-8))
        floors = [line for line in ax.lines if line.get_marker() == "|"]
        assert len(floors) == 2  # bf16, batch 1 and 8
        assert any("below resolution" in t.get_text() for t in ax.texts)
        assert ax.get_ylim()[0] > ax.get_ylim()[1]
        plt.close("all")

    def test_no_figure_without_a_floor(self, ds):
        kept = ds.sel(cell=ds["batch_size"] == 1)
        with pytest.raises(RuitongError, match="no distance is drawn without one"):
            distances.plot_oracle(kept)
        plt.close("all")

    def test_the_notebook(self, ds, tmp_path):
        schema.save(ds, tmp_path / "ruitong.nc")
        done = papermill("oracle", tmp_path / "out.ipynb", "-p", "outputs", str(tmp_path))
        assert done.returncode == 0, done.stderr[-2000:]
        assert {p.name for p in (tmp_path / "figures").iterdir()} == {
            f"oracle.{e}" for e in ("svg", "pdf", "png", "txt")
        }

    def test_the_command(self, shards, tmp_path):
        paths = [str(schema.save(shards[i], tmp_path / f"{i}.nc")) for i in (FP16, BF16, FP64)]
        done = CliRunner().invoke(app, ["compare", *paths[:2], "--oracle", paths[2], "--json"])
        assert done.exit_code == 0
        found = json.loads(done.output)["oracle"]
        assert found["further"] == "candidate"
        assert found["ratio"]["lo"] > 1
        text = CliRunner().invoke(app, ["compare", *paths[:2], "--oracle", paths[2]]).output
        assert "further   candidate: the whole interval of the ratio is above 1" in text
        with pytest.raises(RefusedError, match="in bf16"):
            CliRunner().invoke(app, ["compare", *paths[::2], "--oracle", paths[1]], catch_exceptions=False)


@pytest.fixture(scope="module")
def grid_file(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    document = {
        "name": "tiny",
        "defaults": {"model": str(tiny_folder), "prompts": "core-4", "max_new_tokens": 6, "threads": 1},
        "anchor": {"precision": "fp32"},
        "reference": {"precision": "bf16"},
        "cells": [{"precision": "bf16", "batch_size": 2}],
        "oracle": {"precision": "fp64"},
    }
    path = tmp_path_factory.mktemp("grid") / "tiny.yml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


class TestGrid:
    def test_the_oracle_runs_last_on_the_cpu_whatever_the_device(self, grid_file):
        loaded = load_grid(grid_file, device="npu")
        assert loaded.anchor.device == loaded.reference.device == "npu"
        assert (loaded.oracle.device, loaded.oracle.precision, loaded.oracle.scoring) == ("cpu", "fp64", "replay")
        rows = grid.preview(loaded)
        assert [r["role"] for r in rows] == ["anchor", "reference", "cell", "oracle"]
        assert all("torch_npu" in r["missing"] and not r["label"] for r in rows)

    @pytest.mark.parametrize(
        ("patch", "message"),
        [
            ({"precision": "bf16"}, "oracle: precision must be fp32 or fp64, got 'bf16'"),
            ("fp64", "oracle must be a mapping"),
            ({"precison": "fp64"}, "oracle: unknown parameter 'precison'. Did you mean 'precision'"),
        ],
    )
    def test_a_bad_oracle(self, grid_file, tmp_path, patch, message):
        document = yaml.safe_load(grid_file.read_text(encoding="utf-8")) | {"oracle": patch}
        path = tmp_path / "bad.yml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        with pytest.raises(RuitongError, match=message):
            load_grid(path)

    def test_an_oracle_that_is_a_cell_already(self, grid_file, tmp_path):
        document = yaml.safe_load(grid_file.read_text(encoding="utf-8"))
        document["cells"].append({"precision": "fp64"})
        path = tmp_path / "twice.yml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        with pytest.raises(RuitongError, match="oracle is the same as cell 2; remove that one"):
            load_grid(path)

    def test_a_real_fp64_oracle_and_a_given_anchor(self, grid_file, tiny_folder, tmp_path, monkeypatch):
        import torch
        from transformers import AutoModelForCausalLM

        monkeypatch.setattr(grid, "execute_cell", lambda cell, _: run_cell(cell, progress=False))  # without kernels
        loaded = load_grid(grid_file, outputs=str(tmp_path))
        assert [r.status for r in grid.run(loaded)] == ["collected"] * 4
        ds = grid.aggregate(loaded)
        # Where the device is not here, or this machine would give other labels, the recorded ones count.
        for there in ({"device": "npu"}, {"threads": 3}):
            elsewhere = grid.aggregate(load_grid(grid_file, outputs=str(tmp_path), **there))
            xr.testing.assert_identical(elsewhere, ds)
        with pytest.raises(DeviceUnavailableError, match="torch_npu"):
            grid.aggregate(load_grid(grid_file, outputs=str(tmp_path / "empty"), device="npu"))
        exact = schema.select(ds, ds.attrs["oracle"])
        assert schema.provenance(exact)["precision"]["weights"] == "torch.float64"
        found, _ = oracle.distances(ds)
        assert found[0].precision == "fp32"
        assert 0 < found[0].kl < 1e-8  # fp32 and fp64 are other numbers, and nearer than a shard is said to resolve
        assert all(d.kl > 1e-7 for d in found[1:])
        # the shard's numbers are those of the model in float64
        model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64).eval()
        one = exact.isel(cell=0, prompt=0).sel(scoring="replay")
        from transformers import AutoTokenizer

        from ruitong_lib.prompts import load_prompts, render

        prompt = load_prompts("core-4").prompts[:1]
        (ids,) = render(prompt, AutoTokenizer.from_pretrained(tiny_folder), thinking=False)
        n = int(one["n_tokens"])
        text = [*ids, *one["token_id"].values[: n - 1].tolist()]
        with torch.inference_mode():
            lp = torch.log_softmax(model(torch.tensor([text])).logits[0, len(ids) - 1 :], -1).numpy()
        theirs = np.take_along_axis(lp, one["anchor_token_id"].values[:n], -1)
        np.testing.assert_allclose(one["anchor_logprob"].values[:n], theirs, atol=2e-6)
        # another run replays the given anchor, and collects none
        anchor = grid.plan(loaded)[0][1]
        second = load_grid(grid_file, outputs=str(tmp_path / "two"), anchor=str(anchor), threads=2)
        (_, path), (reference, _) = grid.plan(second)[:2]
        assert path == anchor
        run_cell(reference, progress=False)
        ds = grid.aggregate(second)
        assert set(ds["anchor"].values) == {anchor.stem}
        assert ds.sizes["cell"] == 2
        with pytest.raises(RuitongError, match="is no file"):
            load_grid(grid_file, anchor=str(tmp_path / "none.nc"))


KILLED = """
import os, signal, sys
from ruitong_lib.collect import parts, transformers
from ruitong_lib.collect import run_cell
from ruitong_lib.cell import Cell
parts.SECONDS = 0.0
add, done = parts.Parts.add, []
def dying(self, rows, out):
    add(self, rows, out)
    done.append(rows)
    if len(done) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
parts.Parts.add = dying
run_cell(Cell(**eval(sys.argv[1])), progress=False)
"""


class TestParts:
    @pytest.fixture
    def cell(self, grid_file: Path, tmp_path: Path) -> Cell:
        loaded = load_grid(grid_file, outputs=str(tmp_path / "a"), prompts="core-16", max_new_tokens=4)
        run_cell(loaded.anchor, progress=False)
        return grid.plan(loaded)[-1][0]

    @pytest.mark.filterwarnings("default")
    def test_a_killed_replay_goes_on_and_ends_bit_equal(self, cell, monkeypatch):
        import dataclasses

        fields = {f.name: getattr(cell, f.name) for f in dataclasses.fields(cell)}
        done = subprocess.run(
            [sys.executable, "-c", KILLED, repr(fields)], capture_output=True, timeout=300, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
        folder = parts.folder_of(shard_path(cell))
        assert finished(cell) is None
        assert len(list(folder.glob("*.npz"))) == 5
        (folder / "000002.npz").write_bytes(b"cut off")  # one part is broken: it is computed again

        computed = []
        add = parts.Parts.add
        monkeypatch.setattr(parts.Parts, "add", lambda self, rows, out: computed.extend(rows) or add(self, rows, out))
        path, resumed = run_cell(cell, progress=False)
        assert sorted(computed) == [2, *range(5, 16)]
        assert not folder.exists()
        assert schema.provenance(resumed)["timing"]["replay"]["prompts_kept_from_a_killed_run"] == 4
        computed.clear()
        _, whole = run_cell(dataclasses.replace(cell, overwrite=True), progress=False)
        assert sorted(computed) == list(range(16))
        for name in resumed.data_vars:
            if name != "provenance":
                xr.testing.assert_identical(resumed[name], whole[name])
        assert resumed["cell"].values == whole["cell"].values
        assert os.path.getsize(path) > 0

    def test_parts_of_something_else_are_not_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr(parts, "SECONDS", 0.0)
        out = {"x": np.arange(8.0).reshape(4, 2), "n": np.arange(4)}
        parts.Parts(tmp_path / "p", "one").add([1, 3], out)
        fresh = {"x": np.zeros((4, 2)), "n": np.zeros(4, dtype=int)}
        assert parts.Parts(tmp_path / "p", "two").restore(fresh) == set()
        assert not fresh["x"].any()
        assert parts.Parts(tmp_path / "p", "one").restore(fresh) == {1, 3}
        np.testing.assert_array_equal(fresh["x"], [[0, 0], [2, 3], [0, 0], [6, 7]])
        np.testing.assert_array_equal(fresh["n"], [0, 1, 0, 3])

    def test_a_short_replay_writes_none(self, tmp_path):
        kept = parts.Parts(tmp_path / "p", "one")
        kept.add([0], {"x": np.zeros(1)})
        assert not (tmp_path / "p").exists()

    def test_parts_of_a_shard_that_is_there_are_tidied_up(self, tmp_path):
        for name in ("done", "open"):
            (tmp_path / f".{name}.parts").mkdir()
        (tmp_path / "done.nc").touch()
        grid.remove_leftovers({tmp_path})
        assert [p.name for p in tmp_path.glob(".*.parts")] == [".open.parts"]
