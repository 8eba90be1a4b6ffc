"""Many cells in one dataset: shards combined along ``cell``, and one cell taken out again."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr

from ruitong_lib.schema.shard import provenance, validate
from ruitong_lib.schema.table import VARIABLES, SchemaError, attributes, describe


def combine(shards: Iterable[xr.Dataset]) -> xr.Dataset:
    """Put shards into one aggregate along ``cell``: the union of prompts and positions, padded by the schema.

    Raises
    ------
    SchemaError
        On duplicate cells, a prompt id with two categories or languages, or two prompts under one id for one
        tokenizer.
    """
    parts = [s.copy() for s in shards]
    if not parts:
        raise SchemaError("no shards to combine; collect some cells first: ruitong grid params/demo.yml")
    labels = [str(c) for p in parts for c in p["cell"].values]
    if len(set(labels)) < len(labels):
        twice = next(c for c in labels if labels.count(c) > 1)
        raise SchemaError(f"duplicate cell {twice!r}: the same cell was given twice")
    # A variable that some shards have is padding in the others; a dense model has no layer that routes.
    for v in VARIABLES:
        if not v.required and any(v.name in p for p in parts):
            dtype = object if v.dtype == "str" else v.dtype
            for p in parts:
                if v.name not in p:
                    for d in {"moe_layer", "slot"}.intersection(v.dims):
                        p.coords[d] = np.empty(0, np.int32)
                    p[v.name] = (v.dims, np.full([p.sizes[d] for d in v.dims], v.fill, dtype=dtype), attributes(v))
    # Category and language are filled with NaN, which conflicts with nothing; each prompt has them from some shard.
    fill = {v.name: v.fill for v in VARIABLES}
    try:
        out = xr.concat(
            parts,
            dim="cell",
            join="outer",
            fill_value=fill,
            compat="no_conflicts",
            coords="minimal",
            data_vars="all",
            combine_attrs="drop_conflicts",
        )
    except xr.MergeError as e:
        raise SchemaError(
            f"two shards give one prompt id different categories or languages: {e}; give the changed prompt a new id"
        ) from e
    for v in VARIABLES:
        if v.name in out and v.dtype != "str":
            out[v.name] = out[v.name].astype(v.dtype)
    out.attrs["title"] = "Ruitong aggregate"
    _check_prompt_hashes(out)
    return validate(describe(out), where="aggregate")


def _check_prompt_hashes(ds: xr.Dataset) -> None:
    # One tokenizer may render a prompt with and without thinking; comparing the two is refused later.
    seen: dict[tuple[Any, str], tuple[str, str]] = {}
    for c in range(ds.sizes["cell"]):
        one = ds.isel(cell=c)
        found = provenance(one)
        tokenizer = found.get("tokenizer_sha256", str(one["model"].values)), found.get("cell", {}).get("thinking")
        for p, sha in zip(one["prompt"].values, one["prompt_sha256"].values, strict=True):
            if not sha:
                continue
            label = str(one["cell"].values)
            before, first = seen.setdefault((tokenizer, str(p)), (str(sha), label))
            if before != sha:
                raise SchemaError(
                    f"prompt {str(p)!r} has other token ids in {label} than in {first}; "
                    "an edited prompt needs a new id, then collect those cells again"
                )


def select(ds: xr.Dataset, cell: str) -> xr.Dataset:
    """Return one cell of an aggregate as a shard (dimension ``cell`` of length 1), prompts it never ran left out."""
    one = ds.sel(cell=[cell])
    return one.isel(prompt=np.flatnonzero(one["prompt_sha256"].values[0].astype(str) != ""))
