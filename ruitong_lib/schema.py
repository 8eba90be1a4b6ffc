"""The shard: one table of variables drives building, checking, encoding, saving, loading and combining.

A shard holds one cell (dimension ``cell`` of length 1), an aggregate holds many; both have the schema below and
one validator. Dimensions: ``cell``, ``scoring`` ("decode", "replay"), ``prompt``, ``position`` (0 is the first
token after the prompt) and ``k`` (0 is the best alternative); a mixture of experts has ``moe_layer`` (number of the
decoder layer) and ``slot`` (place among the experts chosen, in no order). Hashes are taken of arrays, never of files.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import xarray as xr

from ruitong_lib.errors import RuitongError

SCHEMA_VERSION = 1
SCORINGS = ("decode", "replay")
FINISH = ("eos", "length", "not_applicable")
# The numbers are stored: new names go to the end. What each means is in collect/served/sanity.py and METHOD.
STATES = (
    "ok", "missing", "nan_logits", "masked", "degenerate", "no_logprobs", "empty", "failed", "wrong_length",
    "impossible", "collapsed", "renormalised", "processed", "not_greedy", "cut_off",
)  # fmt: skip
POSITION_STATES = ("ok", "masked", "censored", "short", "nan", "impossible", "byte_run", "ambiguous")


class Variable(NamedTuple):
    """One row of the schema: where a variable lives, how it is stored, what it means."""

    name: str
    dims: tuple[str, ...]
    dtype: str  # numpy dtype, or "str"
    fill: Any  # what padding holds
    units: str
    long_name: str
    flags: tuple[str, ...] = ()
    required: bool = True


_CPS = ("cell", "scoring", "prompt")
_CPSP = (*_CPS, "position")
_CPSPK = (*_CPSP, "k")
_ANCHOR = ("cell", "prompt", "position", "k")

VARIABLES: tuple[Variable, ...] = (
    Variable("prompt_sha256", ("cell", "prompt"), "str", "", "", "SHA-256 of the prompt's token ids"),
    Variable("n_prompt_tokens", ("cell", "prompt"), "int32", 0, "1", "length of the prompt in tokens"),
    Variable("token_id", _CPSP, "int32", -1, "1", "token at this position"),
    Variable("logprob", _CPSP, "float32", np.nan, "nat", "logprob of the token, raw and untempered"),
    Variable("top_token_id", _CPSPK, "int32", -1, "1", "ids of the k best tokens, ties by lowest id"),
    Variable("top_logprob", _CPSPK, "float32", np.nan, "nat", "logprobs of the k best tokens"),
    Variable("anchor_token_id", _ANCHOR, "int32", -1, "1", "the anchor's top-k ids at this position"),
    Variable("anchor_logprob", _ANCHOR, "float32", np.nan, "nat", "this cell's logprob of each anchor id (replay)"),
    Variable("tail_logprob", _CPSP, "float32", np.nan, "nat", "log of the mass outside the top-k"),
    Variable(
        "anchor_tail_logprob",
        ("cell", "prompt", "position"),
        "float32",
        np.nan,
        "nat",
        "log of the mass outside the anchor ids (replay)",
    ),
    Variable("entropy", _CPSP, "float32", np.nan, "nat", "entropy of the full distribution"),
    Variable("n_tokens", _CPS, "int32", 0, "1", "valid positions of the row: the mask"),
    Variable("finish_reason", _CPS, "int8", 2, "1", "why the row ended", FINISH),
    Variable("state", _CPS, "int8", 1, "1", "what became of the row", STATES),
    Variable("position_state", _CPSP, "int8", 3, "1", "what became of the position", POSITION_STATES),
    Variable("batch_index", ("cell", "prompt"), "int32", -1, "1", "number of the batch that the prompt ran in"),
    Variable("row_in_batch", ("cell", "prompt"), "int32", -1, "1", "row of the prompt in its batch"),
    Variable("text", ("cell", "prompt"), "str", "", "", "the cell's own decoded text, for people"),
    Variable("token_text", _CPSP, "str", "", "", "token as text, only where the source has no ids", required=False),
    Variable(
        "top_token_text",
        _CPSPK,
        "str",
        "",
        "",
        "alternatives as text, only where the source has no ids",
        required=False,
    ),
    Variable(
        "expert_id",
        (*_CPSP, "moe_layer", "slot"),
        "int16",
        -1,
        "1",
        "experts that the router chose, only for a mixture of experts",
        required=False,
    ),
    Variable("provenance", ("cell",), "str", "", "", "everything else about the run, as JSON"),
)
TABLE = {v.name: v for v in VARIABLES}

# Coordinates on `cell`: the frozen parameters that a comparison may differ in, in the order of a label.
CELL_COORDS: dict[str, str] = {
    "model": "str",
    "revision": "str",
    "engine": "str",
    "device": "str",
    "hardware": "str",
    "precision": "str",
    "batch_size": "int32",
    "composition": "int32",
    "attention": "str",
    "onednn_isa": "str",
    "deterministic": "bool",
    "threads": "int32",
    "seed": "int64",
    "repeat": "int32",
    "prompts": "str",
    "max_new_tokens": "int32",
    "anchor": "str",
}
PROMPT_COORDS = ("category", "language")


class SchemaError(RuitongError):
    """A file that is not a shard or an aggregate of this schema."""


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
            ds[v.name] = (v.dims, np.full([sizes[d] for d in v.dims], v.fill, dtype=dtype), _attrs(v))
    return ds


def _attrs(v: Variable) -> dict[str, Any]:
    attrs: dict[str, Any] = {"long_name": v.long_name}
    if v.units:
        attrs["units"] = v.units
    if v.flags:
        attrs["flag_values"] = np.arange(len(v.flags), dtype=np.int8)
        attrs["flag_meanings"] = " ".join(v.flags)
    if v.dtype.startswith("int"):
        attrs["padding_value"] = v.fill
    return attrs


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
    return (ds["position"] < ds["n_tokens"]).transpose(*_CPSP)


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
    return validate(ds, where=str(path))


def _map_text(array: xr.DataArray, change: Callable[[str], str]) -> xr.DataArray:
    if array.name == "provenance":  # JSON escapes by itself, and stays readable for anyone who opens the file
        change = str
    values = np.array([change(str(s)) for s in array.values.ravel()], dtype=object).reshape(array.shape)
    return array.copy(data=values)


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
                    p[v.name] = (v.dims, np.full([p.sizes[d] for d in v.dims], v.fill, dtype=dtype), _attrs(v))
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
    return validate(out, where="aggregate")


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


def provenance(cell: xr.Dataset) -> dict[str, Any]:
    """Return the parsed provenance of one cell (a Dataset without the dimension ``cell``, or of length 1)."""
    return cast(dict[str, Any], json.loads(str(cell["provenance"].values.reshape(-1)[0]) or "{}"))


def select(ds: xr.Dataset, cell: str) -> xr.Dataset:
    """Return one cell of an aggregate as a shard (dimension ``cell`` of length 1), prompts it never ran left out."""
    one = ds.sel(cell=[cell])
    return one.isel(prompt=np.flatnonzero(one["prompt_sha256"].values[0].astype(str) != ""))


def array_sha256(*arrays: np.ndarray[Any, Any]) -> str:
    """Hash arrays by shape, dtype and bytes; the same on every machine of the same byte order."""
    h = hashlib.sha256()
    for a in arrays:
        a = np.ascontiguousarray(a)  # noqa: PLW2901
        h.update(f"{a.dtype.str}{a.shape}".encode())
        h.update(a.tobytes())
    return h.hexdigest()


def anchor_sha256(token_id: np.ndarray[Any, Any], top_token_id: np.ndarray[Any, Any], n: np.ndarray[Any, Any]) -> str:
    """Hash an anchor, free of padding: per prompt its token ids (P, T) and top-k ids (P, T, K), cut at ``n`` (P)."""
    k = int(np.flatnonzero((top_token_id >= 0).any((0, 1))).max(initial=-1)) + 1  # beside a larger k, −1 follows
    tops = top_token_id[..., :k]
    return array_sha256(*[a[i, : n[i]].astype(np.int32) for i in range(len(n)) for a in (token_id, tops)])


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
