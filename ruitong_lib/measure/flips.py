"""Top-1 flips beyond those that the floor makes at the same gaps between the reference's two best tokens."""

import math
from typing import Any

import numpy as np
import xarray as xr

from ruitong_lib.measure import kernels, metrics
from ruitong_lib.measure.align import reference_gap

GAP_EDGES = (0.0, 1 / 16, 3 / 16, 5 / 16, 1 / 2, 3 / 4, 5 / 4, math.inf)  # nat; fixed in METHOD


def flips_beyond_floor(delta: xr.Dataset, floor: xr.Dataset, *, draws: int = 2000, seed: int = 0) -> dict[str, float]:
    """Count top-1 flips beyond those that the floor makes at the same reference gaps.

    observed − Σ_b N(b)·flips_floor(b)/N_floor(b) over bins b of the reference's top-1/top-2 gap (``GAP_EDGES``).
    A flip is *unambiguous* where the gap is more than twice the floor's largest change of a top-1/top-2 difference.

    Parameters
    ----------
    delta, floor
        Aligned pairs (:func:`ruitong_lib.measure.compare.align`).

    Returns
    -------
    ``observed``, ``expected``, ``beyond`` with ``lo`` and ``hi`` (95 %, prompts resampled on both sides),
    ``unambiguous``, ``unambiguous_gap`` (nat), ``positions_without_floor`` (in bins that the floor never visited).
    """
    counts = [_binned_flips(p) for p in (delta, floor)]
    (n, flips), (n_floor, flips_floor) = counts
    observed, expected, missing = _beyond(n.sum(0), flips.sum(0), n_floor.sum(0), flips_floor.sum(0))
    w = [kernels.bootstrap_weights(len(x), draws, seed + i) for i, x in enumerate((n, n_floor))]
    drawn_o, drawn_e, _ = _beyond(w[0] @ n, w[0] @ flips, w[1] @ n_floor, w[1] @ flips_floor)
    lo, hi = np.quantile(drawn_o - drawn_e, [0.025, 0.975])
    limit = 2 * largest_gap_change(floor)
    gap, flipped = reference_gap(delta).values, _flipped(delta)
    return {
        "observed": float(observed),
        "expected": float(expected),
        "beyond": float(observed - expected),
        "lo": float(lo),
        "hi": float(hi),
        "unambiguous": float((flipped & (gap > limit)).sum()) if math.isfinite(limit) else math.nan,
        "unambiguous_gap": limit,
        "positions_without_floor": float(missing),
    }


def _flipped(pair: xr.Dataset) -> np.ndarray[Any, Any]:
    return np.asarray((metrics.top1_agreement(pair) == 0).values)


def _binned_flips(pair: xr.Dataset) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    gap, flipped = reference_gap(pair).values, _flipped(pair)
    bins = np.digitize(gap, GAP_EDGES[1:-1])
    inside = np.isfinite(gap)
    one_hot = (bins[..., None] == np.arange(len(GAP_EDGES) - 1)) & inside[..., None]
    return one_hot.sum(1), (one_hot & flipped[..., None]).sum(1)


def _beyond(n: Any, flips: Any, n_floor: Any, flips_floor: Any) -> tuple[Any, Any, Any]:
    rate = flips_floor / np.maximum(n_floor, 1)
    return flips.sum(-1), (n * rate).sum(-1), np.where(n_floor == 0, n, 0).sum(-1)


def largest_gap_change(pair: xr.Dataset) -> float:
    """Return the largest |Δ(lp1 − lp2)| (nat) between the sides, for the reference's two best ids; NaN if unknown."""
    two = pair["reference_top_id"].values[..., :2]
    theirs = kernels.match(
        two, pair["candidate_top_id"].values, pair["candidate_top_logprob"].values.astype(np.float64)
    )
    ours = pair["reference_top_logprob"].values[..., :2].astype(np.float64)
    change = np.abs((ours[..., 0] - ours[..., 1]) - (theirs[..., 0] - theirs[..., 1]))
    change = change[pair["valid"].values & np.isfinite(change)]
    return float(change.max()) if change.size else math.nan
