"""What the published table is made of: ``params/benchmark.yml``, and the one file that holds its data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xarray as xr
import yaml

from ruitong_lib import paths, schema
from ruitong_lib.errors import RuitongError, did_you_mean
from ruitong_lib.grid import aggregate
from ruitong_lib.gridfile import load_grid
from ruitong_lib.measure.compare import jsonable

_KNOWN = {"name": str, "version": str, "supersedes": str, "grids": list, "published": dict, "planned": list}
_PLANNED = ("model", "hardware", "axis", "change", "run")
PUBLISHED = "published"  # the group of the published corpora


def load_benchmark(path: str | Path = paths.PARAMS / "benchmark.yml") -> dict[str, Any]:
    """Read and check a benchmark file.

    Raises
    ------
    RuitongError
        For an unreadable file, an unknown key, a wrong type, or a planned row that lacks a field.
    """
    path = paths.found(str(path))
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise RuitongError(f"cannot read the benchmark {path}: {e}") from e
    if not isinstance(found, dict):
        raise RuitongError(f"{path} must be a mapping with the keys {', '.join(_KNOWN)}")
    for key, value in found.items():
        if key not in _KNOWN:
            raise RuitongError(f"{path}: unknown key {key!r}.{did_you_mean(str(key), _KNOWN)}")
        if not isinstance(value, _KNOWN[key]):
            raise RuitongError(f"{path}: {key} must be {_KNOWN[key].__name__}, got {value!r}")
    for row in found.get("planned", []):
        missing = [k for k in _PLANNED if not isinstance(row.get(k), str)]
        if missing:
            raise RuitongError(f"{path}: the planned row {row} lacks {', '.join(missing)}")
    return {k: found.get(k, t()) for k, t in _KNOWN.items()}


def gather(benchmark: dict[str, Any], *, outputs: str = "") -> tuple[xr.Dataset, dict[str, xr.Dataset]]:
    """Combine the shards of every grid of a benchmark, and its published corpora.

    Parameters
    ----------
    benchmark
        From :func:`load_benchmark`.
    outputs
        Folder of generated files; empty is the repository's.

    Returns
    -------
    The aggregate of the first grid, and the others by name: for ``schema.save(first, path, groups=others)``. What is
    not here is named in ``attrs["absent"]`` of the first, a JSON object from the source to the reason.

    Raises
    ------
    RuitongError
        When not one grid is collected.
    """
    from ruitong_lib.collect import corpora

    parts: dict[str, xr.Dataset] = {}
    absent: dict[str, str] = {}
    for file in benchmark["grids"]:
        try:
            grid = load_grid(file, **({"outputs": str(paths.outputs(outputs))} if outputs else {}))
            parts[grid.name] = aggregate(grid).assign_attrs(file=file)
        except RuitongError as e:
            absent[file] = str(e)
    if not parts:
        raise RuitongError("no grid of the benchmark is collected: " + "; ".join(absent.values()))
    names = benchmark["published"].get("corpora", [])
    try:
        shards = {n: corpora.open_shard(f"{corpora.PREFIX}{n}") for n in names}
    except RuitongError as e:
        absent[PUBLISHED] = str(e)
        shards = {}
    if shards:
        published = schema.combine(shards.values())
        labels = {n: str(s["cell"].values[0]) for n, s in shards.items()}
        parts[PUBLISHED] = published.assign_attrs(corpora=json.dumps(labels))
    first = next(iter(parts))
    return parts.pop(first).assign_attrs(absent=json.dumps(absent)), parts


def keep_result(name: str, content: Mapping[str, Any], outputs: str = "") -> Path:
    """Write ``results/<name>.json``, whose numbers ``ruitong table`` makes part of a release; return its path.

    NaN and infinity become null.
    """
    path = paths.outputs(outputs) / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(jsonable(content), indent=1, ensure_ascii=False), encoding="utf-8")
    return path
