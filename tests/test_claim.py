"""Drift against answers: the rows of an aggregate and of pairs, the figure, the notebook from both folders."""

import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import pytest
import yaml
from running import papermill

from ruitong_lib import grid, schema
from ruitong_lib.collect import run_cell
from ruitong_lib.gridfile import load_grid
from ruitong_lib.measure import claim
from ruitong_lib.measure.compare import compare
from ruitong_lib.measure.floor import pair_kl
from ruitong_lib.measure.gates import gate_table
from ruitong_lib.paths import NOTEBOOKS, ROOT
from ruitong_lib.report.claim import plot_claim
from ruitong_lib.testing import tiny_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("claim")
    # large enough that another attention kernel rounds differently
    model = tiny_model("qwen3", folder / "tiny", hidden_size=256, layers=4)
    more = {"model": str(model), "prompts": "gates-12", "max_new_tokens": 4, "threads": 1, "scoring": "both"}
    file = folder / "tiny.yml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "tiny",
                "defaults": more,
                "anchor": {"precision": "fp32", "max_new_tokens": 3},
                "reference": {"precision": "bf16", "batch_size": 4},
                "cells": [
                    {"precision": "bf16", "batch_size": 4, "attention": "eager"},
                    {"precision": "fp16", "batch_size": 4},
                ],
            }
        ),
        encoding="utf-8",
    )
    loaded = load_grid(file, outputs=str(folder / "out"))
    for cell, _ in grid.plan(loaded):
        run_cell(cell, progress=False)
    return {"file": file, "out": folder / "out", "ds": grid.aggregate(loaded)}


@pytest.fixture(scope="module")
def rows(made):
    return claim.of_dataset(made["ds"])


def test_each_row_is_what_compare_floor_and_gates_say(made, rows):
    ds = made["ds"]
    assert [(r["change"], r["form"]) for r in rows] == [
        ("bf16 → fp32, 4 → 1, 4 → 3", "free"), ("bf16 → fp32, 4 → 1, 4 → 3", "constrained"),
        ("sdpa → eager", "free"), ("sdpa → eager", "constrained"),
        ("bf16 → fp16", "free"), ("bf16 → fp16", "constrained"),
    ]  # fmt: skip
    assert len({r["id"] for r in rows}) == len(rows)
    label = {r["change"]: r["candidate"] for r in rows}
    a, b, other = (schema.select(ds, x) for x in (ds.attrs["reference"], label["bf16 → fp16"], label["sdpa → eager"]))
    row = rows[-1]
    assert row["kl"] == compare(a, b).metrics["kl"].value
    assert row["ratio"] == pytest.approx(float(pair_kl(a, b).sum() / pair_kl(a, other).sum()))
    assert row["lo"] < row["ratio"] < row["hi"]
    gate = next(g for g in gate_table(a, b, (a, other)) if (g["gate"], g["form"]) == ("all", "constrained"))
    assert (row["n"], row["changed"], row["beyond"], row["gate"]) == (
        gate["n"], gate["changed"], gate["beyond"], gate["verdict"]
    )  # fmt: skip


def test_the_floor_itself_has_no_ratio_and_other_limits_no_free_form(rows):
    floor = next(r for r in rows if r["change"] == "sdpa → eager")
    assert floor["drift"] == "the floor"
    assert math.isnan(floor["ratio"])
    assert floor["floor_changed"] is None
    assert rows[0]["gate"] == "REFUSED"
    assert "max_new_tokens" in rows[0]["reason"]
    table = claim.to_frame(rows)
    assert table.loc[0, "answers"] == "REFUSED"
    assert not table.loc[0, "items"]
    assert "at most" in table.loc[5, "beyond the floor"]


def test_pairs_by_name(made):
    ds = made["ds"]
    shards = {str(c): schema.select(ds, str(c)) for c in ds["cell"].values if ".fp32." not in str(c)}
    a, b, c = shards
    found = claim.of_pairs({"a": shards[a], "b": shards[b], "c": shards[c]}, ("a", "b"))
    assert {(r["reference"], r["candidate"]) for r in found} == {("a", "b"), ("a", "c"), ("b", "c")}
    assert {r["drift"] for r in found if (r["reference"], r["candidate"]) == ("a", "b")} == {"the floor"}


def test_the_figure_shows_each_row_once(rows):
    fig = plot_claim(rows)
    left, right = fig.axes
    shown = [r for r in rows if r.get("n") and math.isfinite(r["ratio"])]
    assert shown
    names = [t.get_text() for t in left.get_yticklabels()]
    assert names == [f"{r['change']}, {r['form']}" for r in shown]
    assert [t.get_text().strip() for t in right.texts] == [f"{r['beyond']}/{r['n']}" for r in shown]
    assert {line.get_fillstyle() for line in right.lines if line.get_marker() == "D"} == {"none"}  # 12 items
    plt.close("all")


@pytest.mark.parametrize("cwd", [ROOT, NOTEBOOKS], ids=["root", "notebooks"])
def test_the_notebook(made, rows, tmp_path: Path, cwd: Path):
    given = ["-p", "grid", str(made["file"]), "-p", "outputs", str(made["out"]), "-p", "data", str(tmp_path)]
    done = papermill("gates", tmp_path / "out.ipynb", *given, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    kept = json.loads((made["out"] / "results" / "gates.json").read_text(encoding="utf-8"))
    assert [r["id"] for r in kept["rows"]] == [r["id"] for r in rows]
    assert kept["published"] == []
    assert {p.name for p in (made["out"] / "figures").iterdir()} == {f"claim.{e}" for e in ("svg", "pdf", "png", "txt")}
