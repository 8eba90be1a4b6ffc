"""Build an empty shard, check one against the table, and read what it says about itself."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import xarray as xr

from ruitong_lib.schema.table import (
    CELL_COORDS,
    PROMPT_COORDS,
    SCHEMA_VERSION,
    SCORINGS,
    TABLE,
    VARIABLES,
    SchemaError,
    attributes,
    describe,
)


def new_shard(
    cell: Mapping[str, Any],
    label: str,
    prompts: Mapping[str, Sequence[str]],
    *,
    n_positions: int,
    k: int,
    text_tokens: bool = False,
    moe: tuple[Sequence[int], int] = ((), 0),
) -> xr.Dataset:
    """Build an empty shard: every variable at its padding value.

    Parameters
    ----------
    cell
        One value for each name of ``CELL_COORDS``.
    label
        The cell's label, ending in 8 hex digits of its content key.
    prompts
        ``prompt`` (ids), ``category`` and ``language``, sequences of equal length.
    n_positions, k
        Lengths of the dimensions ``position`` and ``k``.
    text_tokens
        Add ``token_text`` and ``top_token_text``, for sources that give no ids.
    moe
        Add ``expert_id``: the numbers of the layers that route, and how many experts each token gets.

    Returns
    -------
    Dataset with dims (cell: 1, scoring: 2, prompt, position, k), writable in place.
    """
    sizes = {"cell": 1, "scoring": 2, "prompt": len(prompts["prompt"]), "position": n_positions, "k": k}
    ds = xr.Dataset(
        coords={
            "cell": [label],
            "scoring": list(SCORINGS),
            "prompt": np.asarray(prompts["prompt"], dtype=object).astype(str),
            "position": np.arange(n_positions, dtype=np.int32),
            "k": np.arange(k, dtype=np.int32),
            **{n: ("cell", np.asarray([cell[n]]).astype(t)) for n, t in CELL_COORDS.items()},
            **{n: ("prompt", np.asarray(prompts[n], dtype=object).astype(str)) for n in PROMPT_COORDS},
        },
        attrs={"title": "Ruitong shard", "schema_version": SCHEMA_VERSION, "Conventions": "CF-1.11"},
    )
    if moe[1]:
        layers, slots = moe
        ds = ds.assign_coords(moe_layer=np.asarray(layers, np.int32), slot=np.arange(slots, dtype=np.int32))
        sizes |= {"moe_layer": len(layers), "slot": slots}
    for v in VARIABLES:
        if v.required or (moe[1] if v.name == "expert_id" else text_tokens):
            dtype = object if v.dtype == "str" else v.dtype
            ds[v.name] = (v.dims, np.full([sizes[d] for d in v.dims], v.fill, dtype=dtype), attributes(v))
    return describe(ds)


def validate(ds: xr.Dataset, *, where: str = "dataset") -> xr.Dataset:
    """Check a shard or an aggregate against the schema and return it.

    Checks names, dims, dtypes, flag ranges, unique labels, that padding starts where ``n_tokens`` says, and that
    logprobs are not positive.

    Raises
    ------
    SchemaError
        Naming the variable, what was found and what is allowed.
    """
    version = ds.attrs.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SchemaError(
            f"{where}: schema_version is {version}, this version reads {SCHEMA_VERSION}; "
            "collect the cell again or use the version of ruitong that wrote it"
        )
    for name in ("cell", "scoring", "prompt", "position", "k", *CELL_COORDS, *PROMPT_COORDS):
        if name not in ds.coords:
            raise SchemaError(f"{where}: coordinate {name!r} is missing; present are {sorted(map(str, ds.coords))}")
    for v in VARIABLES:
        if v.name not in ds:
            if v.required:
                raise SchemaError(f"{where}: variable {v.name!r} is missing")
            continue
        array = ds[v.name]
        if array.dims != v.dims:
            raise SchemaError(f"{where}: {v.name} must have dims {v.dims}, got {array.dims}")
        kind_ok = array.dtype.kind in "OUT" if v.dtype == "str" else array.dtype == np.dtype(v.dtype)
        if not kind_ok:
            raise SchemaError(f"{where}: {v.name} must be {v.dtype}, got {array.dtype}")
        if v.flags and array.size and not (int(array.min()) >= 0 and int(array.max()) < len(v.flags)):
            raise SchemaError(f"{where}: {v.name} must be one of {v.flags} (0 to {len(v.flags) - 1})")
    if list(ds["scoring"].values) != list(SCORINGS):
        raise SchemaError(f"{where}: scoring must be {SCORINGS}, got {tuple(map(str, ds['scoring'].values))}")
    for dim in ("cell", "prompt"):
        values, counts = np.unique(ds[dim].values.astype(str), return_counts=True)
        if (counts > 1).any():
            raise SchemaError(f"{where}: duplicate {dim} {str(values[counts > 1][0])!r}; every label must be unique")
    valid = valid_positions(ds)
    if "token_text" not in ds and bool(((ds["token_id"] == -1) & valid & (ds["position_state"] == 0)).any()):
        raise SchemaError(f"{where}: token_id is padding inside n_tokens; the file is damaged")
    if bool(((ds["token_id"] != -1) & ~valid).any()):
        raise SchemaError(f"{where}: token_id goes on after n_tokens; the file is damaged")
    for name in ("logprob", "top_logprob", "anchor_logprob"):
        if bool((ds[name] > 1e-6).any()):
            raise SchemaError(f"{where}: {name} has positive values (a logprob is at most 0)")
    return ds


def valid_positions(ds: xr.Dataset) -> xr.DataArray:
    """Return the mask (cell, scoring, prompt, position): True where a position is not padding."""
    return (ds["position"] < ds["n_tokens"]).transpose(*TABLE["position_state"].dims)


def provenance(cell: xr.Dataset) -> dict[str, Any]:
    """Return the parsed provenance of one cell (a Dataset without the dimension ``cell``, or of length 1)."""
    return cast(dict[str, Any], json.loads(str(cell["provenance"].values.reshape(-1)[0]) or "{}"))
