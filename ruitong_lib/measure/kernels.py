"""The arithmetic of every metric, in numpy alone: alternatives on the last axis, NaN where a value is not known.

Order is always reference, candidate. ``lp``, ``lq`` are logprobs (nat) of the same ids on both sides, NaN where an
id is not known on both; ``rp``, ``rq`` are the probabilities outside those ids.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Array = NDArray[Any]

# Below this the mass outside the ids is rounding: 1 − Σp of float32 values is negative at most real positions.
REST_RESOLUTION = 1e-6


def _g(p: Array, d: Array) -> Floats:
    """p·(e^−d − 1 + d), d = ln p − ln q: a term of KL that is ≥ 0 by itself, without cancellation near d = 0."""
    x = -d
    small = np.abs(x) < 1e-4
    series = x * x / 2 + x * x * x / 6
    # p·e^x = q ≤ 1, so p < e^−700 where the cap bites: the term stays finite, and only gets smaller.
    exact = np.expm1(np.minimum(x, 700.0)) - x
    return np.asarray(p * np.where(small, series, exact), dtype=np.float64)


def kl_bound(lp: Array, lq: Array, rp: Array, rq: Array) -> Floats:
    """Lower bound of KL(p‖q) in nat from the ids known on both sides and one rest bucket; shape (...).

    Because Σp = Σq = 1, KL = Σ (p ln(p/q) − p + q) = Σ g(p, q) with each term ≥ 0 (Bregman form), so terms that are
    left out only lower it; lumping the rest into one bucket lowers it too (log-sum inequality, Cover & Thomas,
    doi:10.1002/047174882X, theorem 2.7.1). The rest term is left out where either rest is below 1e-6.
    NaN where no id is known.
    """
    lp, lq = np.asarray(lp, dtype=np.float64), np.asarray(lq, dtype=np.float64)
    known = np.isfinite(lp) & np.isfinite(lq)
    d = np.where(known, lp - lq, 0.0)
    total = np.where(known, _g(np.exp(np.where(known, lp, 0.0)), d), 0.0).sum(-1)
    rp, rq = np.asarray(rp, dtype=np.float64), np.asarray(rq, dtype=np.float64)
    rest = (rp >= REST_RESOLUTION) & (rq >= REST_RESOLUTION)
    ratio = np.log(np.where(rest, rp, 1.0)) - np.log(np.where(rest, rq, 1.0))
    total = total + np.where(rest, _g(np.where(rest, rp, 0.0), ratio), 0.0)
    return np.where(known.any(-1), total, np.nan)


def kl_symmetric(lp: Array, lq: Array, rp: Array, rq: Array) -> Floats:
    """Mean of the two directions of :func:`kl_bound`, in nat; shape (...)."""
    return (kl_bound(lp, lq, rp, rq) + kl_bound(lq, lp, rq, rp)) / 2


def prob_mass_shift(lp: Array, lq: Array, rp: Array, rq: Array) -> Floats:
    """Total variation ½Σ|p − q| on the known ids plus one rest bucket: a lower bound, in [0, 1]; shape (...)."""
    lp, lq = np.asarray(lp, dtype=np.float64), np.asarray(lq, dtype=np.float64)
    known = np.isfinite(lp) & np.isfinite(lq)
    p, q = (np.exp(np.where(known, x, -np.inf)) for x in (lp, lq))
    total = np.abs(p - q).sum(-1) + np.nan_to_num(np.abs(np.asarray(rp, np.float64) - np.asarray(rq, np.float64)))
    return np.where(known.any(-1), np.minimum(total / 2, 1.0), np.nan)


def max_delta(lp: Array, lq: Array, *, best: int = 10, prob: bool = False) -> Floats:
    """Largest |ln p − ln q| (nat), or |p − q| with ``prob``, over the first ``best`` ids; shape (...), NaN if none."""
    a, b = (np.asarray(x, dtype=np.float64)[..., :best] for x in (lp, lq))
    with np.errstate(invalid="ignore"):  # −inf − (−inf) is not known
        delta = np.abs(np.exp(a) - np.exp(b)) if prob else np.abs(a - b)
    return np.where(np.isfinite(delta).any(-1), np.where(np.isfinite(delta), delta, -np.inf).max(-1), np.nan)


def top_tied(logprob: Array, at: int = 0) -> NDArray[np.bool_]:
    """Whether entries ``at`` and ``at + 1`` of the sorted logprobs are exactly equal (a tie); shape (...)."""
    if logprob.shape[-1] <= at + 1:
        return np.zeros(logprob.shape[:-1], dtype=bool)
    return np.asarray(logprob[..., at] == logprob[..., at + 1])


def jaccard(a: Array, b: Array) -> Floats:
    """Jaccard similarity |A∩B| / |A∪B| of two sets of distinct ids on the last axis; −1 is padding; shape (...)."""
    shared = ((a[..., :, None] == b[..., None, :]) & (a[..., :, None] >= 0)).sum((-1, -2))
    union = (a >= 0).sum(-1) + (b >= 0).sum(-1) - shared
    return np.where(union > 0, shared / np.maximum(union, 1), np.nan)


def match(ids: Array, theirs: Array, values: Array) -> Floats:
    """Look up each of ``ids`` (..., k) in ``theirs`` (..., m) and return its value there, NaN where not listed."""
    out = np.full(np.broadcast_shapes(ids.shape, (*theirs.shape[:-1], ids.shape[-1])), np.nan)
    for j in range(theirs.shape[-1]):  # one pass an alternative keeps the memory at that of the result
        hit = (ids == theirs[..., j, None]) & (ids >= 0)
        np.copyto(out, values[..., j, None], where=hit)
    return out


def lattice_step(logprob: Array) -> float:
    """Return the step (nat) of the lattice that sorted logprobs sit on, NaN where there is none.

    Low-precision logits are multiples of a power of two, and so are differences of their logprobs, up to float32
    rounding. The step is the smallest difference above that rounding, if 99 % of all differences are multiples.
    """
    gaps = np.abs(np.diff(np.asarray(logprob, dtype=np.float64), axis=-1))
    gaps = gaps[np.isfinite(gaps) & (gaps > 1e-5)]
    if not gaps.size:
        return float("nan")
    step = 2.0 ** np.round(np.log2(gaps.min()))
    off = np.abs(gaps / step - np.round(gaps / step)) * step
    return float(step) if step >= 2e-4 and np.mean(off < 1e-5) >= 0.99 else float("nan")


def first_difference(a: Array, b: Array, na: Array, nb: Array) -> NDArray[np.int64]:
    """First position where two token rows (P, T) differ; the shorter length where one is a prefix; −1 where equal."""
    width = np.arange(a.shape[1])
    both = np.minimum(na, nb)
    differs = (a != b) & (width < both[:, None])
    first = np.where(differs.any(1), differs.argmax(1), both)
    return np.where(~differs.any(1) & (na == nb), -1, first)


def cumulative_incidence(time: Array, event: Array, horizon: int) -> tuple[Floats, Floats]:
    """Aalen–Johansen cumulative incidence of event 1 with event 2 competing (Aalen 1978, doi:10.1214/aos/1176344247).

    Parameters
    ----------
    time
        (P,) position of the event or of censoring, 0-based.
    event
        (P,) 1 the event, 2 the competing one, 0 censored.
    horizon
        Positions 0 … horizon − 1 are returned.

    Returns
    -------
    Incidence of events 1 and 2 up to and including each position; shape (horizon,) each.
    """
    n = np.arange(horizon)
    at_risk = (time[:, None] >= n).sum(0)
    hazards = [((time[:, None] == n) & (event[:, None] == e)).sum(0) / np.maximum(at_risk, 1) for e in (1, 2)]
    survival = np.cumprod(1 - hazards[0] - hazards[1])
    before = np.concatenate([[1.0], survival[:-1]])
    return np.cumsum(before * hazards[0]), np.cumsum(before * hazards[1])


def bootstrap_weights(n: int, draws: int, seed: int) -> NDArray[np.int64]:
    """Return (draws, n) counts of how often each of ``n`` prompts is drawn in a resample of ``n``."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=draws)


def log_ratio_jackknife(a: Array, b: Array) -> tuple[float, float]:
    """Return ln(Σa/Σb) and its delete-one jackknife standard error, over per-prompt sums ``a``, ``b`` (P,).

    Efron & Stein 1981, doi:10.1214/aos/1176345462. NaN where a sum, or a sum without one prompt, is not positive.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    n = len(a)
    without_a, without_b = a.sum() - a, b.sum() - b
    if n < 2 or min(a.sum(), b.sum(), without_a.min(), without_b.min()) <= 0:
        return float(np.log(a.sum() / b.sum())) if n and a.sum() > 0 and b.sum() > 0 else float("nan"), float("nan")
    leave_one = np.log(without_a) - np.log(without_b)
    error = np.sqrt((n - 1) / n * ((leave_one - leave_one.mean()) ** 2).sum())
    return float(np.log(a.sum()) - np.log(b.sum())), float(error)
