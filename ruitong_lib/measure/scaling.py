"""One side's logprobs against the other's: a temperature or a renormalisation leaves a straight line."""

import numpy as np
import xarray as xr

from ruitong_lib.errors import RefusedError
from ruitong_lib.measure.kernels import Array

# Rounding moves a row's slope by a few percent in either direction; a temperature moves every row's alike.
_SLOPE = 0.1
_AGREE = 0.8  # share of the positions that must show the same line
_MINIMUM = 5  # positions, and ids at each
_OFFSET = 0.02  # nat


def refuse(pair: xr.Dataset) -> None:
    """Refuse a pair of which one side's logprobs are the other's, scaled or shifted.

    A server may divide its logits by a temperature, or cut the distribution off and renormalise it, before it takes
    logprobs, and not say so. Then ln q = ln p / T + const at each position.

    Parameters
    ----------
    pair
        Of :func:`ruitong_lib.measure.align.align`.

    Raises
    ------
    RefusedError
        Naming the slope or the offset, and at how many positions.
    """
    lp, lq = (pair[f"{side}_logprob"].values[pair["valid"].values] for side in ("reference", "candidate"))
    known = np.isfinite(lp) & np.isfinite(lq)
    use = (known.sum(-1) >= _MINIMUM) & (np.nanmax(np.where(known, lp, -np.inf), -1, initial=-np.inf) > -np.inf)
    if use.sum() < _MINIMUM:
        return
    slope, offset, scatter = lines(lp[use], lq[use], known[use])
    fine = np.isfinite(slope)
    if fine.sum() < _MINIMUM:
        return
    s = float(np.median(slope[fine]))
    alike = float(np.mean(np.abs(slope[fine] - s) < _SLOPE * abs(s)))
    if abs(s - 1) > _SLOPE and alike >= _AGREE:
        raise RefusedError(
            f"temperature-scaled: the candidate's logprobs are the reference's times {s:.2f} at {alike:.0%} of "
            f"{int(fine.sum())} positions, as after dividing by a temperature of {1 / s:.2f}. Ask the server for raw "
            "logprobs (vLLM: --logprobs-mode raw_logprobs) at temperature 0 or 1"
        )
    o = float(np.median(offset))
    same_sign = float(np.mean(np.sign(offset) == np.sign(o)))
    flat = float(np.mean(scatter < np.abs(offset) / 4))
    if abs(o) > _OFFSET and same_sign >= 0.95 and flat >= _AGREE:
        side = "candidate" if o > 0 else "reference"
        raise RefusedError(
            f"renormalised: the {side}'s logprobs lie {abs(o):.3f} nat (median) above the other side's, by the same "
            f"amount for all alternatives of a position, at {flat:.0%} of {len(offset)} positions: it cut its "
            "distribution off (top-k, top-p) before taking them. Ask the server for raw logprobs"
        )


def lines(lp: Array, lq: Array, known: Array) -> tuple[Array, Array, Array]:
    """Fit lq = slope·lp + const over the known ids of each row (rows, k).

    Returns
    -------
    Slope (NaN where lp hardly varies), mean of lq − lp, and its standard deviation within the row; shapes (rows,).
    """
    n = known.sum(-1)
    x, y = (np.where(known, v, 0.0) for v in (lp, lq))
    mx, my = x.sum(-1) / n, y.sum(-1) / n
    dx, dy = (np.where(known, v - m[:, None], 0.0) for v, m in ((lp, mx), (lq, my)))
    var = (dx * dx).sum(-1)
    slope = np.where(var > 0.1, (dx * dy).sum(-1) / np.where(var > 0, var, 1.0), np.nan)
    return slope, my - mx, np.sqrt(((dy - dx) ** 2).sum(-1) / n)
