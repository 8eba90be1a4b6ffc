"""The grid runner: real kernels, real kills; tiny random models keep it short."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from ruitong_lib import RuitongError, grid, paths, schema
from ruitong_lib.gridfile import load_grid

# ipykernel says so on stderr in each kernel, and papermill's own dependencies warn about themselves
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def grid_file(tiny_folder: Path, tmp_path: Path) -> Path:
    document = {
        "name": "tiny",
        "defaults": {"model": str(tiny_folder), "prompts": "core-4", "max_new_tokens": 6, "threads": 1},
        "anchor": {"precision": "fp32"},
        "reference": {"precision": "bf16"},
        "cells": [{"precision": "bf16", "batch_size": 2}],
    }
    path = tmp_path / "tiny.yml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def command(grid_file: Path, outputs: Path) -> list[str]:
    return [sys.executable, "-m", "ruitong_lib.cli", "grid", str(grid_file), "--outputs", str(outputs)]


def kernels_of(outputs: Path) -> list[int]:
    """Kernels whose current folder is this grid's: the only trace that a killed parent leaves."""
    found = []
    for proc in Path("/proc").iterdir():
        try:
            if proc.name.isdecimal() and (proc / "cwd").resolve() == outputs / "notebooks":
                found.append(int(proc.name))
        except OSError:
            continue
    return found


def test_a_grid_runs_resumes_and_reports_failures(grid_file: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "out"
    document = yaml.safe_load(grid_file.read_text(encoding="utf-8"))
    document["cells"].append({"precision": "bf16", "attention": "flash_attention_2"})  # not installed here: fails
    grid_file.write_text(yaml.safe_dump(document), encoding="utf-8")
    loaded = load_grid(grid_file, outputs=str(outputs))
    results = grid.run(loaded)
    assert [r.status for r in results] == ["collected", "collected", "collected", "failed"]
    assert "flash_attention_2" in results[3].reason or "cannot be loaded" in results[3].reason
    assert (outputs / "notebooks" / f"{results[3].label}.ipynb").is_file()  # shows where it stopped
    again = grid.run(loaded)
    assert [r.status for r in again] == ["kept", "kept", "kept", "failed"]
    ds = grid.aggregate(loaded)
    assert ds.attrs["reference"] == results[1].label
    assert results[3].label in ds.attrs["not_collected"]
    assert ds.sizes["cell"] == 3
    assert (ds["anchor"] == results[0].label).all()


def test_without_its_anchor_a_replay_fails_and_names_it(grid_file: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(grid_file.read_text(encoding="utf-8"))
    document["defaults"]["model"] = str(tmp_path / "no-such-model")
    grid_file.write_text(yaml.safe_dump(document), encoding="utf-8")
    loaded = load_grid(grid_file, outputs=str(tmp_path / "out"))
    results = grid.run(loaded)
    assert [r.status for r in results] == ["failed"] * 3
    assert "cannot be loaded" in results[0].reason
    assert results[1].reason == f"its anchor {results[0].label} failed"
    with pytest.raises(RuitongError, match="is not collected"):
        grid.aggregate(loaded)


def test_a_kernel_that_does_not_start_is_tried_again(
    grid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import papermill

    execute, calls = papermill.execute_notebook, []

    def flaky(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("Kernel died before replying to kernel_info")
        return execute(*args, **kwargs)

    monkeypatch.setattr(papermill, "execute_notebook", flaky)
    loaded = load_grid(grid_file, outputs=str(tmp_path / "out"))
    cell, path = grid.plan(loaded)[0]
    grid.execute_cell(cell, path.stem)
    assert len(calls) == 2
    assert schema.load(path).sizes["cell"] == 1


def test_leftovers_of_dead_writers_are_removed_and_of_live_ones_kept(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, alive = tmp_path / f".cell.{gone.pid}.tmp", tmp_path / f".cell.{os.getpid()}.tmp"
    dead.touch()
    alive.touch()
    grid.remove_leftovers({tmp_path})
    assert not dead.exists()
    assert alive.exists()


@pytest.mark.slow
def test_kill_9_at_random_moments(grid_file: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "out"
    rng = np.random.default_rng(5)
    kills = 0
    for attempt in range(20):
        process = subprocess.Popen(
            command(grid_file, outputs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if attempt % 2:  # at a random time
            time.sleep(rng.uniform(0.5, 9))
        else:  # while a shard is being written
            end = time.monotonic() + 12
            while time.monotonic() < end and process.poll() is None and not list(outputs.glob("cells/.*.tmp")):
                time.sleep(0.0005)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        for path in (outputs / "cells").glob("*.nc"):
            schema.load(path)  # whatever has its final name is whole
        if attempt % 3 == 2:  # start over, or the grid would soon be finished
            for path in (outputs / "cells").glob("*.nc"):
                path.unlink()
    assert kills >= 12
    deadline = time.monotonic() + 10
    while kernels_of(outputs) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert kernels_of(outputs) == []
    subprocess.run(command(grid_file, outputs), check=True, capture_output=True)
    assert len(list((outputs / "cells").glob("*.nc"))) == 3
    assert not list((outputs / "cells").glob(".*.tmp"))
    assert kernels_of(outputs) == []


def test_outputs_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert paths.outputs() == paths.ROOT / "outputs"
    monkeypatch.setenv("RUITONG_OUTPUTS", str(tmp_path))
    assert paths.outputs() == tmp_path
    assert paths.outputs(str(tmp_path / "x")) == tmp_path / "x"
