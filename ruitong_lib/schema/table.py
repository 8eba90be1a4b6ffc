"""The one table that drives building, checking, encoding, saving, loading and combining, and its coordinates."""

from typing import Any, NamedTuple

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
# Name of each coordinate → unit, meaning; for the labelled reprs.
MEANINGS: dict[str, tuple[str, str]] = {
    "cell": ("", "label of the cell, ending in its content key"),
    "scoring": ("", "decode: the cell's own greedy text; replay: the anchor's text"),
    "prompt": ("", "id of the prompt in its set"),
    "position": ("1", "token after the prompt; 0 is the first"),
    "k": ("1", "rank of the alternative; 0 is the best"),
    "model": ("", "hub id, folder, or smollm2-135m"),
    "revision": ("", "commit of the model"),
    "engine": ("", "transformers, or endpoint: a server"),
    "device": ("", "torch's name of the device"),
    "hardware": ("", "name, memory and architecture from the driver"),
    "precision": ("", "dtype or recipe of weights and activations"),
    "batch_size": ("1", "prompts in a batch, or requests in flight"),
    "composition": ("1", "which prompts share a batch: 0 is their order, n a shuffle seeded with n"),
    "attention": ("", "attention implementation"),
    "onednn_isa": ("", "cap on the CPU's instruction set; empty is none"),
    "deterministic": ("", "whether deterministic algorithms were asked for"),
    "threads": ("1", "CPU threads"),
    "seed": ("1", "seed of torch"),
    "repeat": ("1", "number of the rerun"),
    "prompts": ("", "prompt set"),
    "max_new_tokens": ("1", "token limit of a decoded text"),
    "anchor": ("", "cell whose text is replayed"),
    "category": ("", "kind of the prompt"),
    "language": ("", "language of the prompt"),
    "moe_layer": ("1", "number of a layer that routes"),
    "slot": ("1", "place among the experts that a token gets"),
}


class SchemaError(RuitongError):
    """A file that is not a shard or an aggregate of this schema."""


def describe(ds: xr.Dataset) -> xr.Dataset:
    """Say of each coordinate what it means and its unit; in place."""
    for name, (units, long_name) in MEANINGS.items():
        if name in ds.coords:
            ds.coords[name].attrs.update({"long_name": long_name, **({"units": units} if units else {})})
    return ds


def attributes(v: Variable) -> dict[str, Any]:
    """Return what a file says of a variable: meaning, unit, flags and padding."""
    attrs: dict[str, Any] = {"long_name": v.long_name}
    if v.units:
        attrs["units"] = v.units
    if v.flags:
        attrs["flag_values"] = np.arange(len(v.flags), dtype=np.int8)
        attrs["flag_meanings"] = " ".join(v.flags)
    if v.dtype.startswith("int"):
        attrs["padding_value"] = v.fill
    return attrs
