"""A shard or aggregate as a netCDF-4 file: written whole or not at all, checked when it is read."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ruitong_lib.schema.shard import validate
from ruitong_lib.schema.table import SchemaError, describe


def save(ds: xr.Dataset, path: str | os.PathLike[str], *, groups: Mapping[str, xr.Dataset] | None = None) -> Path:
    """Validate and write a shard or aggregate: netCDF-4, compressed, to a temporary file that then replaces ``path``.

    A reader sees the old file or the whole new one, whatever happens to the writer. Text is escaped so that NUL and
    lone surrogates survive (:func:`load` restores it). ``groups`` are further aggregates kept in the same file, each in
    a netCDF group of its name: what shares no prompts with the rest would only pad it.
    """
    path = Path(path)
    parts = {"": ds.assign_attrs(groups=json.dumps(sorted(groups))) if groups else ds, **(groups or {})}
    encoded = {name: _encoded(part, f"{path} {name}".strip()) for name, part in parts.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    try:
        for name, (out, encoding) in encoded.items():
            where: Any = {"group": name, "mode": "a"} if name else {}
            out.to_netcdf(temporary, engine="h5netcdf", encoding=encoding, **where)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _encoded(ds: xr.Dataset, where: str) -> tuple[xr.Dataset, dict[str, dict[str, Any]]]:
    # A loaded string remembers the length it had on disk, and would cut a longer one of another shard to it.
    out = ds.drop_encoding()
    encoding: dict[str, dict[str, Any]] = {}
    for name in (*ds.data_vars, *ds.coords):
        if out[name].dtype.kind in "OUT":
            out[name] = _map_text(out[name], escape)
        else:
            encoding[str(name)] = {"_FillValue": None}
            if out[name].size:
                encoding[str(name)] |= {"zlib": True, "complevel": 4, "shuffle": True}
    return validate(out, where=where), encoding


def load(path: str | os.PathLike[str], *, group: str = "") -> xr.Dataset:
    """Read a shard or aggregate into memory, check it, and close the file.

    ``group`` names a further aggregate of the file; ``attrs["groups"]`` of the first one lists them, as JSON.

    Raises
    ------
    SchemaError
        When the file is missing, is not netCDF-4, is cut short, or does not follow the schema.
    """
    path = Path(path)
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.nc"))[:5] if path.parent.is_dir() else []
        raise SchemaError(f"no shard at {path}" + (f"; the folder holds {', '.join(near)}, …" if near else ""))
    try:
        ds = xr.load_dataset(path, engine="h5netcdf", group=group or None).drop_encoding()
    except Exception as e:
        raise SchemaError(f"{path} cannot be read as netCDF-4 ({type(e).__name__}: {e}); collect the cell again") from e
    for name in (*ds.data_vars, *ds.coords):
        if ds[name].dtype.kind in "OUT":
            ds[name] = _map_text(ds[name], unescape)
    return validate(describe(ds), where=str(path))


def _map_text(array: xr.DataArray, change: Callable[[str], str]) -> xr.DataArray:
    if array.name == "provenance":  # JSON escapes by itself, and stays readable for anyone who opens the file
        change = str
    values = np.array([change(str(s)) for s in array.values.ravel()], dtype=object).reshape(array.shape)
    return array.copy(data=values)


def escape(text: str) -> str:
    r"""Escape what netCDF strings cannot hold (NUL, lone surrogates) and the backslash, reversibly."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        f"\\u{ord(c):04x}" if c == "\0" or "\ud800" <= c <= "\udfff" else "\\\\" if c == "\\" else c for c in text
    )


def unescape(text: str) -> str:
    """Undo :func:`escape`."""
    parts, i = [], 0
    while i < len(text):
        if text[i] != "\\":
            parts.append(text[i])
            i += 1
        elif text[i + 1] == "\\":
            parts.append("\\")
            i += 2
        else:
            parts.append(chr(int(text[i + 2 : i + 6], 16)))
            i += 6
    return "".join(parts)
