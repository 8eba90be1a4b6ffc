"""Two sides compared by what they wrote alone: for a server without logprobs, or with logprobs that mean nothing."""

import math
from typing import Any

import numpy as np
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError
from ruitong_lib.measure import kernels
from ruitong_lib.measure.align import check_prompts, differs_in, one_cell
from ruitong_lib.measure.compare import Comparison, Value

_ABSENT = tuple(schema.STATES.index(s) for s in ("missing", "failed"))


def compare_texts(reference: xr.Dataset, candidate: xr.Dataset, *, draws: int = 2000, seed: int = 0) -> Comparison:
    """Compare the texts of two decodes, without any probability.

    Texts are compared by token ids where both sides have them for every token, else by characters. A row whose
    request failed is left out and counted; an empty text is a text, and differs from any other.

    Parameters
    ----------
    reference, candidate
        Shards (cell: 1), in this order, with a decode in any state.
    draws, seed
        Bootstrap over prompts: percentile intervals of 95 %.

    Returns
    -------
    Comparison with ``identical_texts`` (1), ``length_ratio`` (1; tokens or characters, ``notes`` says which) and
    ``common_prefix`` (1; the share of the longer text before the first difference, mean over prompts). Its scoring is
    "text", it has no positions and no KL, so no floor and no verdict follow from it.

    Raises
    ------
    RefusedError
        For other prompts or prompt ids, or where no prompt has a text on both sides.
    """
    a, b = one_cell(reference, "reference"), one_cell(candidate, "candidate")
    check_prompts(a, b)
    b = b.sel(prompt=a["prompt"])
    sides = [s.sel(scoring="decode") for s in (a, b)]
    there = ~np.any([np.isin(s["state"].values, _ABSENT) for s in sides], axis=0)
    if not there.any():
        raise RefusedError("no prompt has a text on both sides: collect both with scoring='decode' or 'both'")
    rows = [_by_ids(s) for s in sides]
    by_ids = all(r is not None for r in rows)
    texts: list[list[Any]] = [list(s["text"].values) for s in sides] if not by_ids else [list(r or ()) for r in rows]
    x, y = ([t for t, keep in zip(side, there, strict=True) if keep] for side in texts)
    lengths = np.array([[len(p), len(q)] for p, q in zip(x, y, strict=True)], dtype=np.float64)
    same = np.array([p == q for p, q in zip(x, y, strict=True)], dtype=np.float64)
    prefix = np.array([_common(p, q) for p, q in zip(x, y, strict=True)], dtype=np.float64)
    longest = lengths.max(1)
    share = np.where(longest > 0, prefix / np.maximum(longest, 1), 1.0)
    n = len(same)
    weights = kernels.bootstrap_weights(n, draws, seed)
    total = lengths.sum(0)
    drawn = weights @ lengths
    ratios = drawn[:, 1] / np.where(drawn[:, 0] > 0, drawn[:, 0], np.nan)
    ratio = float(total[1] / total[0]) if total[0] else math.nan
    return Comparison(
        reference=str(a["cell"].item()),
        candidate=str(b["cell"].item()),
        differs_in=differs_in(a, b),
        scoring="text",
        n_prompts=n,
        n_positions=0,
        metrics={
            "identical_texts": _value(float(same.mean()), weights @ same / n, n),
            "length_ratio": _value(ratio, ratios, n),
            "common_prefix": _value(float(share.mean()), weights @ share / n, n),
        },
        notes={
            "compared_by": "token ids" if by_ids else "characters",
            "left_out": int((~there).sum()),
            "empty": {s: int((v == 0).sum()) for s, v in zip(("reference", "candidate"), lengths.T, strict=True)},
            "states": {
                side: sorted({schema.STATES[i] for i in s["state"].values})
                for side, s in zip(("reference", "candidate"), sides, strict=True)
            },
        },
        positions=xr.Dataset(),
    )


def _common(a: Any, b: Any) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _by_ids(decode: xr.Dataset) -> list[list[int]] | None:
    """Return each row's token ids, or None where a token has none or a text has no tokens."""
    ids, n = decode["token_id"].values, decode["n_tokens"].values
    rows: list[list[int]] = [row[:length].tolist() for row, length in zip(ids, n, strict=True)]
    whole = all(min(r, default=0) >= 0 and (r or not t) for r, t in zip(rows, decode["text"].values, strict=True))
    return rows if whole else None


def _value(value: float, drawn: np.ndarray[Any, Any], n: int) -> Value:
    known = drawn[np.isfinite(drawn)]
    lo, hi = np.quantile(known, [0.025, 0.975]) if known.size else (math.nan, math.nan)
    return Value(value, "1", float(lo), float(hi), math.nan, math.nan, math.nan, n)
