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
from ruitong_lib.cell import Cell
from ruitong_lib.collect import finished, parts, shard_path
from ruitong_lib.errors import DeviceUnavailableError, RuitongError
from ruitong_lib.gridfile import Grid

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
    """Return the cells in the order in which they run, each with its shard's path: the anchor first, the oracle last.

    Raises
    ------
    DeviceUnavailableError
        Where a device is not here: a label names the hardware.
    """
    anchor = Path(grid.anchor_file) if grid.anchor_file else shard_path(grid.anchor)
    cells = [dataclasses.replace(c, anchor=str(anchor)) if c.anchor else c for c in _cells(grid)]
    return [(grid.anchor, anchor), *[(c, shard_path(c)) for c in cells]]


def _cells(grid: Grid) -> list[Cell]:
    return [*grid.cells, *([grid.oracle] if grid.oracle else [])]


def _roles(grid: Grid) -> list[str]:
    return ["anchor", "reference", *["cell"] * (len(grid.cells) - 1), *(["oracle"] if grid.oracle else [])]


def preview(grid: Grid) -> list[dict[str, Any]]:
    """Return what would run and where, without a model: one row a cell, in the order of :func:`plan`.

    A row has ``role`` (anchor, reference, cell, oracle), ``device``, ``changes`` (the fields that differ from the
    reference), ``label``, ``collected`` and ``missing``. Where the device is not here, the label is empty, because it
    names the hardware, and ``missing`` says why.
    """
    try:
        labels, missing = [(p.stem, p.is_file()) for _, p in plan(grid)], ""
    except DeviceUnavailableError as e:
        labels, missing = [("", False)] * (1 + len(_cells(grid))), str(e)
    base, rows = dataclasses.asdict(grid.reference), []
    for role, cell, (label, collected) in zip(_roles(grid), [grid.anchor, *_cells(grid)], labels, strict=True):
        own = {n: v for n, v in dataclasses.asdict(cell).items() if v != base[n] and n not in {"anchor", "scoring"}}
        changes = own or {n: base[n] for n in ("precision", "batch_size", "attention")}
        row: dict[str, Any] = {"role": role, "device": cell.device, "changes": changes, "label": label}
        rows.append(row | {"collected": collected, "missing": missing})
    return rows


def run(grid: Grid, *, report: Callable[[Result, int, int], None] | None = None) -> list[Result]:
    """Run every cell of a grid whose shard is not there yet.

    A cell counts as collected when papermill raised nothing, its shard is there, reads back, follows the schema and
    carries the cell's content key: papermill's own saved status says "completed" for cells that never ran. A failed
    cell is reported and the others go on; without the anchor nothing can be replayed, so then the replays fail too.

    Parameters
    ----------
    grid
        From :func:`ruitong_lib.gridfile.load_grid`.
    report
        Called after each cell with its result, the number done and the number in all.
    """
    planned = plan(grid)
    remove_leftovers({p.parent for _, p in planned})
    results: list[Result] = []
    for cell, path in planned:
        if not results and grid.anchor_file:
            schema.load(path)  # a given anchor that cannot be read stops the grid before a model is loaded
            results.append(Result(path.stem, path, "kept"))
        else:
            results.append(_run_one(cell, path, results[0] if results else None))
        if report is not None:
            report(results[-1], len(results), len(planned))
    _write_status(grid, results)
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
        for part in folder.glob(".*.parts") if folder.is_dir() else ():
            if part.with_name(f"{part.stem[1:]}.nc").is_file():  # killed between the shard and the tidying up
                parts.remove(part)


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


def _write_status(grid: Grid, results: list[Result]) -> None:
    path = status_path(grid)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {
        r.label: {"role": role, "status": r.status, "seconds": r.seconds, "reason": r.reason}
        for role, r in zip(_roles(grid), results, strict=True)
    }
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    os.replace(temporary, path)


def aggregate(grid: Grid) -> xr.Dataset:
    """Combine the shards of a grid into one dataset.

    ``attrs["reference"]`` is the label of the grid's reference cell, ``attrs["oracle"]`` that of its oracle where one
    is collected, and ``attrs["not_collected"]`` a JSON object from the label of each missing cell to the reason, so
    that a table made from the dataset alone can show all three. A grid that ran elsewhere, or with ``--device``, is not
    found by the labels that this machine would give: then those count that ``ruitong grid`` recorded beside its shards.

    Raises
    ------
    RuitongError
        When the anchor or the reference is missing, with the line that collects them.
    """
    status = status_path(grid)
    known: dict[str, Any] = json.loads(status.read_text(encoding="utf-8")) if status.is_file() else {}
    recorded = {label: row["role"] for label, row in known.items() if "role" in row}
    try:
        planned = plan(grid)
        roles = {path.stem: role for role, (_, path) in zip(_roles(grid), planned, strict=True)}
        found = {path.stem: finished(cell) for cell, path in planned[1:]}
        anchor = schema.load(planned[0][1]) if grid.anchor_file else finished(grid.anchor)
        found = {planned[0][1].stem: anchor, **found}
    except DeviceUnavailableError:
        if not recorded:
            raise
        found, roles = {}, {}
    if recorded and all(found[label] is None for label, role in roles.items() if role == "reference"):
        found, roles = {label: _recorded(status.parent / f"{label}.nc") for label in recorded}, recorded
    missing = {label: known.get(label, {}).get("reason") or "planned" for label, ds in found.items() if ds is None}
    labels = {role: label for label, role in roles.items() if role != "cell"}
    for label in (labels["anchor"], labels["reference"]):
        if label in missing:
            raise RuitongError(
                f"{label} is not collected ({missing[label]}); run 'ruitong grid params/{grid.name}.yml' first"
            )
    out = schema.combine(ds for ds in found.values() if ds is not None)
    out.attrs |= {"reference": labels["reference"], "grid": grid.name, "not_collected": json.dumps(missing)}
    if labels.get("oracle", "") in out["cell"].values:
        out.attrs["oracle"] = labels["oracle"]
    return out


def _recorded(path: Path) -> xr.Dataset | None:
    """Return a shard that was collected under the key its name ends in, or None."""
    try:
        ds = schema.load(path)
    except (ValueError, OSError):
        return None
    return ds if str(schema.provenance(ds).get("content_key", "")).startswith(path.stem[-8:]) else None


def aggregate_folder(folder: Path) -> xr.Dataset:
    """Combine every shard of a folder; the dataset then names no reference."""
    out = schema.combine(schema.load(p) for p in sorted(folder.glob("*.nc")))
    out.attrs |= {"not_collected": "{}"}
    return out
