"""Every notebook through papermill, from the repository's root and from ``notebooks/``; and their hygiene."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
import yaml
from running import papermill

from ruitong_lib import grid, schema
from ruitong_lib.gridfile import load_grid
from ruitong_lib.paths import NOTEBOOKS, ROOT

ALL = sorted(NOTEBOOKS.glob("*.ipynb"))


def pairs(**values: Any) -> list[str]:
    return [x for name, value in values.items() for x in ("-p", name, str(value))]


@pytest.fixture(scope="module")
def outputs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small grid, collected cell by cell without kernels, as the notebooks find it."""
    from ruitong_lib.collect import run_cell

    folder = tmp_path_factory.mktemp("outputs")
    document = {
        "name": "tiny",
        "defaults": {"model": str(tiny_folder), "prompts": "core-4", "max_new_tokens": 8, "threads": 1},
        "anchor": {"precision": "fp32"},
        "reference": {"precision": "bf16", "scoring": "both"},
        "cells": [
            {"precision": "bf16", "batch_size": 2, "scoring": "both"},
            {"precision": "bf16", "attention": "eager", "scoring": "both"},
            {"precision": "fp16", "scoring": "both"},
        ],
    }
    file = folder / "tiny.yml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    for cell, _ in grid.plan(load_grid(file, outputs=str(folder))):
        run_cell(cell, progress=False)
    schema.save(grid.aggregate(load_grid(file, outputs=str(folder))), folder / "ruitong.nc")
    return folder


@pytest.mark.parametrize("cwd", [ROOT, NOTEBOOKS], ids=["root", "notebooks"])
def test_run_cell(tiny_folder: Path, tmp_path: Path, cwd: Path) -> None:
    given = pairs(
        model=tiny_folder, prompts="core-4", max_new_tokens=4, precision="bf16", batch_size=2, outputs=tmp_path
    )
    done = papermill("run_cell", tmp_path / "{precision}-b{batch_size}.ipynb", *given, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "bf16-b2.ipynb").is_file()
    (shard,) = (tmp_path / "cells").glob("*.nc")
    ds = schema.load(shard)
    assert shard.stem == ds["cell"].item()
    assert (ds["precision"].item(), ds["batch_size"].item()) == ("bf16", 2)
    assert (ds["n_tokens"] == 4).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"precison": "bf16"}, "unknown parameter 'precison'. Did you mean 'precision'?"),
        ({"batch_size": "eight"}, "batch_size must be int, got 'eight' (str)"),
        ({"overwrite": "true"}, "overwrite must be bool, got 'true' (str); papermill takes True and False"),
        ({"model": 12345}, "model must be str, got 12345 (int); papermill takes text with -r"),
        ({"device": "npu"}, "device 'npu' needs torch_npu, which is not installed"),
        ({"scoring": "replay"}, "pass anchor"),
    ],
)
def test_run_cell_refuses_before_a_model_is_loaded(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    output = tmp_path / "out.ipynb"
    done = papermill("run_cell", output, *pairs(**given))
    assert done.returncode == 1
    assert message in done.stderr
    ran = [c for c in json.loads(output.read_text(encoding="utf-8"))["cells"] if c.get("execution_count")]
    assert "Loading weights" not in json.dumps(ran)


@pytest.mark.parametrize("cwd", [ROOT, NOTEBOOKS], ids=["root", "notebooks"])
@pytest.mark.parametrize("name", ["aggregate", "compare", "delta_table"])
def test_readers(name: str, outputs: Path, tmp_path: Path, cwd: Path) -> None:
    given = pairs(outputs=outputs, **({"grid": outputs / "tiny.yml"} if name == "aggregate" else {}))
    done = papermill(name, tmp_path / "out.ipynb", *given, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    if name == "aggregate":
        assert schema.load(outputs / "ruitong.nc").sizes["cell"] == 5
    if name == "delta_table":
        rows = json.loads((outputs / "tables" / "delta_table.json").read_text(encoding="utf-8"))
        assert {r["axis"] for r in rows} == {"precision", "batch size", "attention"}
        assert all(r["floor"] for r in rows)  # no row without its floor
        ratios = [r["ratio"] for r in rows if r["ratio"]["lo"] is not None]
        assert ratios
        assert all(x["lo"] <= x["value"] <= x["hi"] for x in ratios)
        text = (outputs / "tables" / "delta_table.md").read_text(encoding="utf-8")
        assert text.count("| precision |") >= 3


def test_figures(outputs: Path, tmp_path: Path) -> None:
    done = papermill("figures", tmp_path / "out.ipynb", *pairs(outputs=outputs))
    assert done.returncode == 0, done.stderr[-3000:]
    for ending in ("svg", "pdf", "png"):
        assert len(list((outputs / "figures").glob(f"*.{ending}"))) >= 5


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
def test_hygiene(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in code)
    tagged = [c for c in code if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1
    source = "".join(tagged[0]["source"])
    assert source.startswith("# ruitong: parameters\n")
    for line, node in zip(source.splitlines()[1:], ast.parse(source).body, strict=True):
        assert isinstance(node, ast.AnnAssign)
        ast.literal_eval(node.value)  # a value that papermill can replace by itself
        assert "  # " in line  # --help-notebook prints it
    for c in code:
        for node in ast.walk(ast.parse("".join(c["source"]))):
            assert not isinstance(node, ast.ClassDef)
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 5
    assert sum("".join(c["source"]).startswith("# ") for c in cells if c["cell_type"] == "markdown") == 1


def test_parameters_of_run_cell_are_those_of_a_cell() -> None:
    from dataclasses import fields

    from ruitong_lib.cell import Cell

    cells = json.loads((NOTEBOOKS / "run_cell.ipynb").read_text(encoding="utf-8"))["cells"]
    source = next("".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", []))
    given = {n.target.id: ast.literal_eval(n.value) for n in ast.parse(source).body}
    expected = {f.name: f.default for f in fields(Cell)}
    assert given | {"scoring": "replay"} == expected  # run alone, a cell is its own anchor: scoring is "both"


def test_the_aggregate_is_labelled(outputs: Path) -> None:
    ds = schema.load(outputs / "ruitong.nc")
    assert ds.attrs["reference"] in ds["cell"].values
    one = ds.sel(cell=ds.precision == "fp16")
    assert isinstance(one, xr.Dataset)
    assert one["logprob"].attrs["units"] == "nat"
