"""The collector against vLLM on this CPU: an engine row, its own ladder, its phase, and a server that dies."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xarray as xr
import yaml
from vllm_server import Server

from ruitong_lib import schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import run_cell
from ruitong_lib.gridfile import load_grid
from ruitong_lib.measure import floor as floors
from ruitong_lib.measure.verdict import EXIT
from ruitong_lib.paths import PARAMS
from ruitong_lib.report.markdown import to_markdown
from ruitong_lib.report.table import delta_rows

pytestmark = [pytest.mark.served, pytest.mark.model, pytest.mark.slow]
GRID = PARAMS / "served.yml"
N_PROMPTS = 32


class Collected(NamedTuple):
    """The grid params/served.yml, run against the server."""

    anchor: Path
    reference: str
    served: dict[int, Cell]  # by requests in flight
    shards: dict[str, xr.Dataset]  # by label, the anchor first

    def shard(self, cell: Cell) -> xr.Dataset:
        return self.shards[cell.label(hardware=cell.hardware, anchor=self.anchor.stem)]

    @property
    def aggregate(self) -> xr.Dataset:
        return schema.combine(self.shards.values())


@pytest.fixture(scope="session")
def collected(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Collected:
    # half as many tokens as the grid: enough positions, half the time
    grid = load_grid(GRID, outputs=str(tmp_path_factory.mktemp("outputs")), max_new_tokens=16)
    anchor, ds = run_cell(grid.anchor, progress=False)
    shards, served, reference = {anchor.stem: ds}, {}, ""
    for c in grid.cells:
        where = {"base_url": server.base_url} if c.engine == "endpoint" else {}
        cell = dataclasses.replace(c, anchor=str(anchor), **where)
        path, ds = run_cell(cell, progress=False)
        shards[path.stem] = ds
        reference = reference or path.stem
        if cell.engine == "endpoint":
            served[cell.batch_size] = cell
    return Collected(anchor, reference, served, shards)


def test_the_server_can_do_everything_that_is_measured(collected: Collected) -> None:
    for cell in collected.served.values():
        ds = collected.shard(cell)
        probe = schema.provenance(ds)["probe"]
        assert probe["server"]["name"] == "vLLM"
        assert (probe["route"], probe["replay"]) == ("completions", "prompt_logprobs")
        assert probe["logprob_mode"] == "raw"
        assert probe["server"]["prefix_cache"] == "off"
        assert schema.provenance(ds)["identity"] == "ids"
        assert ds.sizes["prompt"] == N_PROMPTS
        assert (ds["state"] == schema.STATES.index("ok")).all()
        anchor_lp = ds["anchor_logprob"].values[
            np.broadcast_to(ds["anchor_token_id"].values >= 0, ds["anchor_logprob"].shape)
        ]
        assert np.isfinite(anchor_lp).mean() > 0.99  # the rest are beyond the hundred best: censored


def test_transformers_against_vllm_is_a_row_with_its_floor(collected: Collected) -> None:
    rows = delta_rows(collected.aggregate, reference=collected.reference)
    (row,) = [r for r in rows if r["axis"] == "engine"]
    print(to_markdown([row]))
    assert row["status"] == "ok"
    assert row["change"] == "transformers → endpoint"
    assert row["floor"]["rung"] == "batch size"
    assert row["n_prompts"] == row["ratio"]["n_prompts"] == N_PROMPTS
    assert row["n_positions"] > 400
    # Two engines, one model: bf16 apart. Positions shifted by one, or another template, are whole nats.
    assert 1e-8 < row["metrics"]["kl"]["value"] < 0.02
    assert row["metrics"]["top1_agreement"]["value"] > 0.95
    assert 0 < row["ratio"]["lo"] < row["ratio"]["value"] < row["ratio"]["hi"]
    assert row["verdict"]["verdict"] in set(EXIT) - {"refused"}
    assert row["decode"]["metrics"]["kl"]["value"] < 0.02
    assert row["decode"]["floor"]["rung"] == "batch size"


def test_the_replay_of_the_server_agrees_with_its_own_decode(collected: Collected) -> None:
    phase = floors.phase_kl(collected.shard(collected.served[1]))
    assert phase is not None
    assert int(phase.notnull().sum()) > 200
    batch = max(
        float(f.mean_kl) for f in floors.ladder(collected.aggregate) if (f.rung, f.engine) == ("batch size", "endpoint")
    )
    # Prefill and decode kernels round differently, as batches of another size do: one class, and METHOD's margin of 2.
    assert float(phase.mean()) < 2 * batch


def test_requests_in_flight_are_a_ladder(collected: Collected) -> None:
    served = [collected.shard(c) for c in collected.served.values()]
    assert sorted(collected.served) == [1, 8, 32]
    for scoring in schema.SCORINGS:
        rungs = floors.ladder(schema.combine(served), scoring=scoring)
        batch = [f for f in rungs if f.rung == "batch size"]
        assert len(batch) == 3
        assert all(f.n_prompts == N_PROMPTS and 0 <= f.mean_kl < 0.02 for f in batch)
        assert max(f.mean_kl for f in batch) > 0  # what ran together did change something


@pytest.mark.parametrize("in_flight", [1, 8])
def test_a_server_that_dies(collected: Collected, server: Server, tmp_path: Path, in_flight: int) -> None:
    """Killed mid-run: exit 2 and why; after a restart the same command goes on, to the shard of an undisturbed run."""
    cell = collected.served[in_flight]
    undisturbed = collected.shard(cell)
    label = str(undisturbed["cell"].values[0])
    grid = tmp_path / "one.yml"
    grid.write_text(yaml.safe_dump(_one_cell(cell)), encoding="utf-8")
    outputs = tmp_path / "outputs"
    command = [sys.executable, "-m", "ruitong_lib.cli", "grid", str(grid)]
    command += ["--outputs", str(outputs), "--anchor", str(collected.anchor)]
    raw = outputs / "cells" / "raw" / label

    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        _wait_for(lambda: len(list(raw.glob("*.decode.json.gz"))) >= 8 or run.poll() is not None)
        server.kill()
        said, _ = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
    assert run.returncode == 2, said
    assert "cannot be reached" in said
    assert "are kept; the same command goes on from there" in said
    assert "Traceback" not in said
    assert not (outputs / "cells" / f"{label}.nc").exists()
    kept = {f: f.stat().st_mtime_ns for f in raw.iterdir()}
    assert 8 <= len(kept) < N_PROMPTS

    server.start()
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert again.returncode == 0, again.stderr
    assert {f: f.stat().st_mtime_ns for f in kept} == kept  # not asked for again
    resumed = schema.load(outputs / "cells" / f"{label}.nc")
    for name in ("prompt", "prompt_sha256", "state"):
        assert (resumed[name].values == undisturbed[name].values).all()
    if in_flight == 1:
        for name in set(undisturbed.data_vars) - {"provenance"}:
            a, b = undisturbed[name].values, resumed[name].values
            assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), name
    else:
        floor = floors.pair_kl(collected.shard(collected.served[1]), undisturbed)
        assert float(floors.pair_kl(undisturbed, resumed).mean()) < 2 * float(floor.mean())


def _one_cell(cell: Cell) -> dict[str, Any]:
    """Return a grid with this cell alone, over a text that is there already."""
    fields = {f.name: getattr(cell, f.name) for f in dataclasses.fields(cell)}
    changed = {n: v for n, v in fields.items() if v != getattr(Cell(scoring="both"), n)}
    return {
        "name": "one",
        "defaults": {},
        "reference": {n: v for n, v in changed.items() if n not in {"anchor", "outputs"}} | {"scoring": "both"},
    }


def _wait_for(done: Any, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"nothing after {seconds:.0f} s"
        time.sleep(0.1)
