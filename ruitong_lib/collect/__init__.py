"""Collectors: each fills a shard. Nothing here imports torch before :func:`run_cell` has prepared for it."""

import functools
from pathlib import Path

import xarray as xr

from ruitong_lib import paths, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import devices, parts


def shard_path(cell: Cell) -> Path:
    """Return where a cell's shard belongs: ``outputs/cells/<label>.nc``."""
    anchor = anchor_label(cell.anchor)
    label = cell.label(hardware=hardware(cell), anchor=anchor)
    return paths.outputs(cell.outputs) / "cells" / f"{label}.nc"


def hardware(cell: Cell) -> str:
    """Return the label of the hardware: the driver's word for this machine, the user's for a server's."""
    return cell.hardware if cell.engine == "endpoint" else devices.hardware(cell.device)


def anchor_label(anchor: str) -> str:
    """Return the label of an anchor shard, which its file is named by; empty for a cell that is its own anchor."""
    return Path(anchor).stem if anchor else ""


def finished(cell: Cell) -> xr.Dataset | None:
    """Return the shard of a cell that was collected before under the same content key and anchor, or None.

    A file that cannot be read, or that holds something else, counts as not collected.
    """
    path = shard_path(cell)
    if not path.is_file():
        return None
    try:
        ds = schema.load(path)
        found = schema.provenance(ds)
        if cell.anchor:
            anchor = Path(cell.anchor)
            if found.get("anchor_sha256") != _anchor_sha256(anchor, anchor.stat().st_mtime_ns):
                return None
    except (ValueError, OSError):
        return None
    key = cell.key(hardware=hardware(cell), anchor=anchor_label(cell.anchor))
    return ds if found.get("content_key") == key else None


@functools.lru_cache(maxsize=8)  # each cell of a grid asks for the same one
def _anchor_sha256(path: Path, _changed: int) -> str | None:
    return schema.provenance(schema.load(path)).get("anchor_sha256")


def run_cell(cell: Cell, *, progress: bool = True) -> tuple[Path, xr.Dataset]:
    """Collect one cell and save its shard, or return the one that is there (``overwrite`` collects again).

    A replay that was killed goes on with the batch after the last one that it kept, and a served cell with the prompt
    after the last one.

    Parameters
    ----------
    cell
        What to run.
    progress
        Show a bar over the batches.

    Returns
    -------
    The shard's path and the shard.

    Raises
    ------
    RuitongError
        For anything that cannot be used; raised before the model is loaded wherever that is possible.
    """
    if cell.engine != "endpoint":
        devices.prepare(onednn_isa=cell.onednn_isa, device=cell.device, deterministic=cell.deterministic)
        devices.resolve(cell.device)
    path = shard_path(cell)
    folder = parts.folder_of(path)
    kept = None if cell.overwrite else finished(cell)
    if kept is not None or cell.overwrite:
        parts.remove(folder)
    if kept is not None:
        return path, kept
    from tqdm.auto import tqdm

    with tqdm(disable=not progress, mininterval=1, leave=False, unit="batch") as bar:

        def report(scoring: str, done: int, total: int) -> None:
            bar.set_description(scoring, refresh=False)
            bar.total = total
            bar.update(done - bar.n)

        if cell.engine == "endpoint":
            from ruitong_lib.collect.endpoint import collect as collect_served

            ds = collect_served(cell, progress=report)
        else:
            from ruitong_lib.collect.transformers import collect

            ds = collect(cell, progress=report, parts=folder)
    schema.save(ds, path)
    parts.remove(folder)
    return path, ds
