"""Run a grid of cells through papermill, one kernel a cell: resumable, and honest about what failed."""

import dataclasses
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xarray as xr

from ruitong_lib import paths, schema
from ruitong_lib.cell import Cell, Grid
from ruitong_lib.collect import finished, shard_path
from ruitong_lib.errors import RuitongError

log = logging.getLogger("ruitong")
KERNEL_START_TRIES = 3


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one cell of a grid."""

    label: str
    path: Path
    status: str  # kept (it was there), collected, failed
    seconds: float = 0.0
    reason: str = ""


def plan(grid: Grid) -> list[tuple[Cell, Path]]:
    """Return the cells in the order in which they run, each with its shard's path: the anchor first."""
    anchor = shard_path(grid.anchor)
    cells = [dataclasses.replace(c, anchor=str(anchor)) if c.anchor else c for c in grid.cells]
    return [(grid.anchor, anchor), *[(c, shard_path(c)) for c in cells]]


def run(grid: Grid, *, report: Callable[[Result, int, int], None] | None = None) -> list[Result]:
    """Run every cell of a grid whose shard is not there yet.

    A cell counts as collected when papermill raised nothing, its shard is there, reads back, follows the schema and
    carries the cell's content key: papermill's own saved status says "completed" for cells that never ran. A failed
    cell is reported and the others go on; without the anchor nothing can be replayed, so then the replays fail too.

    Parameters
    ----------
    grid
        From :func:`ruitong_lib.cell.load_grid`.
    report
        Called after each cell with its result, the number done and the number in all.
    """
    planned = plan(grid)
    remove_leftovers({p.parent for _, p in planned})
    results: list[Result] = []
    for cell, path in planned:
        results.append(_run_one(cell, path, results[0] if results else None))
        if report is not None:
            report(results[-1], len(results), len(planned))
    _write_status(grid, results, planned[0][0])
    return results


def _run_one(cell: Cell, path: Path, anchor: Result | None) -> Result:
    start = time.perf_counter()
    if cell.anchor and anchor is not None and anchor.status == "failed":
        return Result(path.stem, path, "failed", reason=f"its anchor {anchor.label} failed")
    if not cell.overwrite and finished(cell) is not None:
        return Result(path.stem, path, "kept")
    reason = ""
    try:
        execute_cell(cell, path.stem)
    except Exception as e:  # whatever papermill, the kernel or the cell raised: the other cells go on
        reason = explain(e)
    ok = not reason and finished(cell) is not None
    reason = reason or ("" if ok else "the notebook ran, but left no shard with the cell's content key")
    seconds = time.perf_counter() - start
    return Result(path.stem, path, "collected" if ok else "failed", round(seconds, 2), reason)


def execute_cell(cell: Cell, stem: str) -> None:
    """Execute ``run_cell.ipynb`` for a cell in its own kernel; a kernel that fails to start is tried again.

    Raises
    ------
    Exception
        What papermill raises; the executed notebook is saved under ``outputs/notebooks`` and shows where it stopped.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillException

    folder = paths.outputs(cell.outputs) / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, KERNEL_START_TRIES + 1):
        try:
            papermill.execute_notebook(
                paths.NOTEBOOKS / "run_cell.ipynb",
                folder / f"{stem}.ipynb",
                parameters={**dataclasses.asdict(cell), "outputs": str(paths.outputs(cell.outputs))},
                kernel_name="python3",
                progress_bar=False,
                log_output=False,
                start_timeout=120,
                config=_kernel_config(),
                cwd=str(folder),
            )
            return
        except (PapermillException, DeadKernelError):
            raise  # the kernel was up: this is the cell's own failure
        except (RuntimeError, TimeoutError, OSError) as e:
            if attempt == KERNEL_START_TRIES:
                raise
            log.warning("the kernel of %s did not start (%s); try %d of %d", stem, e, attempt + 1, KERNEL_START_TRIES)


def _kernel_config() -> Any:
    """Talk to kernels over local sockets where the system has them: two TCP kernels can be given one port."""
    from traitlets.config import Config

    return Config({"KernelManager": {"transport": "ipc"}} if sys.platform.startswith("linux") else {})


def explain(error: Exception) -> str:
    """Return one line that says why a cell failed."""
    name = type(error).__name__
    if name == "PapermillExecutionError":
        return f"{getattr(error, 'ename', '')}: {getattr(error, 'evalue', '')}"
    if name == "DeadKernelError":
        return "the kernel died (often out of memory): try a smaller batch_size or a machine with more"
    return f"{name}: {error}"


def remove_leftovers(folders: set[Path]) -> None:
    """Remove temporary files whose writer is gone. A killed run leaves at most one, and no reader ever opens it."""
    for folder in folders:
        for file in folder.glob(".*.tmp") if folder.is_dir() else ():
            found = re.fullmatch(r"\..*\.(\d+)\.tmp", file.name)
            if found and not _alive(int(found.group(1))):
                file.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def status_path(grid: Grid) -> Path:
    """Return where a grid's last outcome is kept: ``outputs/cells/<name>.grid.json``."""
    return paths.outputs(grid.anchor.outputs) / "cells" / f"{grid.name}.grid.json"


def _write_status(grid: Grid, results: list[Result], anchor: Cell) -> None:
    path = status_path(grid)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {r.label: {"status": r.status, "seconds": r.seconds, "reason": r.reason} for r in results}
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    os.replace(temporary, path)


def aggregate(grid: Grid) -> xr.Dataset:
    """Combine the shards of a grid into one dataset.

    ``attrs["reference"]`` is the label of the grid's reference cell and ``attrs["not_collected"]`` a JSON object from
    the label of each missing cell to the reason, so that a table made from the dataset alone can show both.

    Raises
    ------
    RuitongError
        When the anchor or the reference is missing, with the line that collects them.
    """
    status = status_path(grid)
    known: dict[str, Any] = json.loads(status.read_text(encoding="utf-8")) if status.is_file() else {}
    planned = plan(grid)
    reference = planned[1][1].stem
    shards, missing = [], {}
    for cell, path in planned:
        ds = finished(cell)
        if ds is None:
            missing[path.stem] = known.get(path.stem, {}).get("reason") or "planned"
        else:
            shards.append(ds)
    for needed in (planned[0][1].stem, reference):
        if needed in missing:
            raise RuitongError(
                f"{needed} is not collected ({missing[needed]}); run 'ruitong grid params/{grid.name}.yml' first"
            )
    out = schema.combine(shards)
    out.attrs |= {"reference": reference, "grid": grid.name, "not_collected": json.dumps(missing)}
    return out


def aggregate_folder(folder: Path) -> xr.Dataset:
    """Combine every shard of a folder; the dataset then names no reference."""
    out = schema.combine(schema.load(p) for p in sorted(folder.glob("*.nc")))
    out.attrs |= {"not_collected": "{}"}
    return out
