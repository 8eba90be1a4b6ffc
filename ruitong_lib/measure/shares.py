"""Exact one-sided bounds of a share, k of n (Clopper and Pearson 1934, doi:10.1093/biomet/26.4.404), its verdict."""

import math
from typing import Any

import numpy as np
from scipy import stats

from ruitong_lib.measure.verdict import gates as margins


def upper_bound(k: int, n: int, level: float = 0.95) -> float:
    """Return the one-sided upper bound of a share, k of n; NaN for n = 0."""
    return math.nan if not n else 1.0 if k == n else float(stats.beta.ppf(level, k + 1, n - k))


def lower_bound(k: int, n: int, level: float = 0.95) -> float:
    """Return the one-sided lower bound of a share, k of n; NaN for n = 0."""
    return math.nan if not n else 0.0 if k == 0 else float(stats.beta.ppf(1 - level, k, n - k + 1))


def items_needed(k: int, n: int, margin: float, *, least: int, most: int = 100_000) -> int | None:
    """Return the fewest items, from ``least``, whose upper bound is below the margin if the share k/n stays.

    None where the share is not below the margin, or above ``most``.
    """
    share = k / n if n else 0.0
    if share >= margin:
        return None
    # The bound jumps up where share · m passes a whole number, so every m is looked at, in growing blocks.
    start, size = least, 256
    while start <= most:
        m = np.arange(start, min(start + size, most + 1))
        at = np.ceil(share * m - 1e-9)
        inside = stats.beta.ppf(0.95, at + 1, m - at) < margin
        if inside.any():
            return int(m[inside.argmax()])
        start, size = start + size, 2 * size
    return None


def decide(n: int, changed: int, beyond: int, floor_only: int | None) -> dict[str, Any]:
    """Hold a share of changed answers against the margin of ``params/gates.yml``.

    Parameters
    ----------
    n, changed
        Items, and those that changed.
    beyond, floor_only
        Items that changed and that the floor left alone, and the reverse; without a floor ``changed`` and None.

    Returns
    -------
    ``verdict``, ``reason``, ``margin``, ``n_needed`` (see :func:`ruitong_lib.measure.gates.gate_table`).
    """
    rule = margins()["changed_answers"]
    if not n:
        return {
            "margin": float(rule["value"]),
            "n_needed": None,
            "verdict": "INCONCLUSIVE",
            "reason": "no answers at all",
        }
    margin, least = float(rule["value"]), int(rule["minimum_items"])
    bound = upper_bound(beyond, n)
    what = f"{beyond} of {n} changed" + ("" if floor_only is None else " beyond the floor")
    shown = f"{what}: at most {100 * bound:.2g} %"
    out: dict[str, Any] = {"margin": margin, "n_needed": None}
    if floor_only is not None:
        lowest = lower_bound(beyond, n, 0.975) - upper_bound(floor_only, n, 0.975)
        if lowest > margin:
            why = f"{what}, {floor_only} by the floor alone: at least {100 * lowest:.2g} % more than the floor"
            return out | {"verdict": "DIFFERENT", "reason": why}
    # Where the floor changes many answers elsewhere, "left alone by the floor" excuses much: then all changes count.
    noisy = floor_only is not None and floor_only > margin * n and upper_bound(changed, n) >= margin
    if bound < margin and n >= least and not noisy:
        return out | {"verdict": "EQUIVALENT", "reason": f"{shown}, inside the margin of {100 * margin:g} %"}
    needed = items_needed(beyond, n, margin, least=max(least, n))
    settle = f"{needed} items would do at this share" if needed else "no number of items is in sight at this share"
    reasons = [shown, settle]
    if floor_only is None and lower_bound(changed, n) > margin:
        reasons = [
            f"{shown}, at least {100 * lower_bound(changed, n):.2g} %",
            "no floor was given, which may explain it",
        ]
    elif noisy:
        reasons.append(f"the floor alone changed {floor_only} others, so this form is noisy by itself")
    return out | {"verdict": "INCONCLUSIVE", "reason": "; ".join(reasons), "n_needed": needed}
