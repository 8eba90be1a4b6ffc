"""Faults of a stored shard: each returns a changed copy of its replay, with everything else as it was."""

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ruitong_lib import schema
from ruitong_lib.measure import kernels

_REPLAY = schema.SCORINGS.index("replay")
_OWN = ("logprob", "top_token_id", "top_logprob", "tail_logprob", "entropy")  # cell, scoring, prompt, position
_ANCHOR = ("anchor_logprob", "anchor_tail_logprob")  # cell, prompt, position


def _spread(n: int, share: float) -> NDArray[np.bool_]:
    """Pick ``share`` of ``n`` places, evenly spread: True where picked."""
    at = np.arange(1, n + 1)
    return np.asarray(np.floor(at * share + 1e-9) > np.floor((at - 1) * share + 1e-9))


def processed(shard: xr.Dataset, severity: float) -> xr.Dataset:
    """Replace raw logprobs by those behind the sampling filters top-k (k as stored) and top-p (``severity``).

    What the filters drop becomes −inf, the rest is normalised again. Entropy is that of the filtered distribution.
    """
    out = shard.copy(deep=True)
    top = out["top_logprob"].values[:, _REPLAY].astype(np.float64)
    p = np.exp(top)
    with np.errstate(divide="ignore", invalid="ignore"):
        keep = np.cumsum(p, -1) - p < severity  # the first that reaches top-p is kept
        kept = np.where(keep, p, 0.0)
        new = np.log(kept / kept.sum(-1, keepdims=True))
        anchor_ids, ids = out["anchor_token_id"].values, out["top_token_id"].values[:, _REPLAY]
        anchor = kernels.match(anchor_ids, ids, new)
        known = np.isfinite(out["anchor_logprob"].values)
        anchor = np.where(np.isnan(anchor) & known, -np.inf, anchor)
        rest = 1 - np.exp(np.where(np.isnan(anchor), -np.inf, anchor)).sum(-1)
        tail = np.where(np.isfinite(p).all(-1), np.log(np.maximum(rest, 0.0)), np.nan)
        entropy = -np.where(new > -np.inf, np.exp(new) * new, 0.0).sum(-1)
    for name, values in (("top_logprob", new), ("tail_logprob", np.where(np.isfinite(tail), -np.inf, tail))):
        out[name].values[:, _REPLAY] = values
    out["entropy"].values[:, _REPLAY] = np.where(np.isfinite(top).all(-1), entropy, np.nan)
    out["anchor_logprob"].values[:] = anchor
    out["anchor_tail_logprob"].values[:] = tail
    token = out["token_id"].values[:, _REPLAY]
    own = kernels.match(token[..., None], ids, new)[..., 0]
    before = out["logprob"].values[:, _REPLAY]
    out["logprob"].values[:, _REPLAY] = np.where(np.isfinite(before) & np.isnan(own), -np.inf, own)
    return out


def shifted(shard: xr.Dataset, severity: float) -> xr.Dataset:
    """Give each position the numbers of the next one, in a share of the prompts; the last keeps its own."""
    out = shard.copy(deep=True)
    n = out["n_tokens"].values[0, _REPLAY]
    for row in np.flatnonzero(_spread(len(n), severity)):
        take = np.minimum(np.arange(1, n[row] + 1), n[row] - 1)
        for name in _OWN:
            values = out[name].values[0, _REPLAY, row]
            values[: n[row]] = values[take]
        for name in _ANCHOR:
            values = out[name].values[0, row]
            values[: n[row]] = values[take]
    return out


def transposed(shard: xr.Dataset, severity: float) -> xr.Dataset:
    """Exchange the logprobs of the two best alternatives, at a share of the positions.

    The ids change places in the list of the best, and the two anchor ids that are the two best change logprobs.
    """
    out = shard.copy(deep=True)
    n = out["n_tokens"].values[0, _REPLAY]
    valid = np.arange(out.sizes["position"]) < n[:, None]
    rows, at = np.nonzero(valid)
    picked = _spread(len(rows), severity)
    rows, at = rows[picked], at[picked]
    ids = out["top_token_id"].values[0, _REPLAY]
    two = ids[rows, at, :2].copy()
    ids[rows, at, 0], ids[rows, at, 1] = two[:, 1], two[:, 0]
    anchor_ids, lp = out["anchor_token_id"].values[0], out["anchor_logprob"].values[0]
    logprob = out["top_logprob"].values[0, _REPLAY]
    for slot, other in ((0, 1), (1, 0)):
        where = anchor_ids[rows, at] == two[:, slot, None]
        new = np.where(where, logprob[rows, at, other][:, None], lp[rows, at])
        lp[rows, at] = np.where(where, new, lp[rows, at])
    token, own = out["token_id"].values[0, _REPLAY], out["logprob"].values[0, _REPLAY]
    exchanged = np.where(
        token[rows, at] == two[:, 0], logprob[rows, at, 1],
        np.where(token[rows, at] == two[:, 1], logprob[rows, at, 0], own[rows, at]),
    )  # fmt: skip
    own[rows, at] = exchanged
    return out
