"""The accelerator check, on the CPU and a tiny model: it prints its tables and leaves its shards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ruitong_lib import schema
from ruitong_lib.paths import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


def check(*given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *given], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )


def test_it_prints_its_tables_and_leaves_its_shards(tiny_folder: Path, tmp_path: Path) -> None:
    given = ["--device", "cpu", "--prompts", "core-4", "--max-new-tokens", "4", "--batches", "1", "--threads", "1"]
    done = check(str(tiny_folder), *given, "--outputs", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    for head in ("axis", "distance to the CPU's fp32 cell", "decode against replay of one cell"):
        assert head in done.stdout
    assert "9 shards, 0 failed" in done.stdout
    assert schema.load(tmp_path / "gpu_check.nc").sizes["cell"] == 9
    shards = [schema.load(p) for p in (tmp_path / "cells").glob("*.nc")]
    assert {(str(s["precision"].item()), str(s["attention"].item())) for s in shards} >= {
        (p, a) for p in ("bf16", "fp16", "fp32", "w8a8") for a in ("sdpa", "eager")
    }


@pytest.mark.parametrize(("layers", "code"), [("1", 0), ("9", 2)])
def test_a_slice_is_a_model_and_no_more_than_there_is(
    tiny_folder: Path, tmp_path: Path, layers: str, code: int
) -> None:
    done = check(str(tiny_folder), "--slice", layers, str(tmp_path / "slice"))
    if code:
        assert done.returncode != 0
        assert "--slice must be from 1 to" in done.stderr
    else:
        assert done.returncode == 0, done.stderr[-2000:]
        config = json.loads((tmp_path / "slice" / "config.json").read_text(encoding="utf-8"))
        assert config["num_hidden_layers"] == 1
