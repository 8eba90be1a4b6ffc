"""Scores of a block of prompts, their thresholds from floor replicates, and how often those alarm.

A replicate is (cell pair × block of prompts): rows of a table with the columns ``pair`` and ``block`` and one column a
metric, larger is worse. Everything here is numpy; nothing knows how the table was measured.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray
from scipy import stats

from ruitong_lib.errors import RuitongError
from ruitong_lib.measure import metrics
from ruitong_lib.measure.align import align
from ruitong_lib.measure.configuration import flip_gaps
from ruitong_lib.measure.gates import option_logprobs
from ruitong_lib.measure.shares import upper_bound

Floats = NDArray[np.float64]


class Score(NamedTuple):
    """What is known of a score beforehand."""

    unit: str
    resolution: float  # the least step beyond the replicates: one event, or one step of bf16's lattice
    meaning: str


# Larger is worse. The means of signed changes see what moves every position the same way.
SCORES: dict[str, Score] = {
    "kl": Score("nat", 1e-6, "mean KL, both directions"),
    "mass_shift": Score("1", 1e-4, "mean probability mass shift"),
    "max_delta_logprob": Score("nat", 1 / 16, "largest |Δlogprob| of the ten best ids"),
    "max_delta_prob": Score("1", 1e-2, "largest |Δprobability| of the ten best ids"),
    "top1_flips": Score("1", 1e-2, "share of positions with another best token"),
    "flip_gap": Score("nat", 1 / 16, "largest top-1/top-2 gap at a flip, the larger of both sides'; 0 without a flip"),
    "top5_changed": Score("1", 1e-2, "mean of 1 − Jaccard of the five best"),
    "entropy_shift": Score("nat", 1e-3, "|mean Δentropy|"),
    "direction": Score("nat", 1e-3, "|mean Δlogprob of the anchor's token|"),
    "option_margin": Score("nat", 1 / 16, "gate items: mean |Δ margin between the best two options|"),
    "changed_options": Score("1", 1 / 8, "gate items: share whose best option changed"),
}
COMPOUND = "compound"


def block_scores(reference: xr.Dataset, candidate: xr.Dataset, blocks: Mapping[str, int]) -> pd.DataFrame:
    """Return every score of every block.

    Parameters
    ----------
    reference, candidate
        Shards (cell: 1) with a replay of one third-party anchor.
    blocks
        Prompt id → block.

    Returns
    -------
    One row a block (index ``block``), one column a score; NaN where a block has no gate item.

    Raises
    ------
    RefusedError
        See :func:`ruitong_lib.measure.align.check`.
    """
    pair = align(reference, candidate)
    of = np.array([blocks[str(p)] for p in pair["prompt"].values])
    names = sorted(set(of.tolist()))
    member = of == np.array(names)[:, None]
    valid = pair["valid"].values

    def mean(field: Any) -> Floats:
        x = np.asarray(field, np.float64)
        known = valid & np.isfinite(x)
        with np.errstate(invalid="ignore"):  # no known position: NaN
            return np.asarray((member @ np.where(known, x, 0.0).sum(1)) / (member @ known.sum(1)))

    def largest(field: Any) -> Floats:
        rows = np.where(valid, np.nan_to_num(np.asarray(field, np.float64), nan=-np.inf), -np.inf).max(1)
        return np.asarray(np.where(member, rows, -np.inf).max(1))

    flipped, _, gap = flip_gaps(pair)
    width = pair.sizes["position"]
    a, b = (s["entropy"].sel(scoring="replay").values[0, :, :width] for s in (reference, candidate))
    order = [list(map(str, candidate["prompt"].values)).index(str(p)) for p in pair["prompt"].values]
    jaccard = metrics.top5_jaccard(pair).values
    found = {
        "kl": mean(metrics.kl(pair)),
        "mass_shift": mean(metrics.prob_mass_shift(pair)),
        "max_delta_logprob": largest(metrics.max_delta_logprob(pair)),
        "max_delta_prob": largest(metrics.max_delta_prob(pair)),
        "top1_flips": mean(flipped),
        "flip_gap": np.maximum(largest(np.where(flipped, gap, 0.0)), 0.0),
        "top5_changed": mean(1 - jaccard),
        "entropy_shift": np.abs(mean(b[order].astype(np.float64) - a)),
        "direction": np.abs(mean(metrics.direction(pair))),
    }
    return pd.DataFrame(
        {**found, **_gate_scores(reference, candidate, blocks, names)}, index=pd.Index(names, name="block")
    )


def _gate_scores(a: xr.Dataset, b: xr.Dataset, blocks: Mapping[str, int], names: Sequence[int]) -> dict[str, Floats]:
    sides = [option_logprobs(s) for s in (a, b)]
    moved: dict[int, list[float]] = {i: [] for i in names}
    changed: dict[int, list[bool]] = {i: [] for i in names}
    for prompt, lp in sides[0].items():
        other = sides[1].get(prompt, {})
        if not all(math.isfinite(x) and math.isfinite(other.get(o, math.nan)) for o, x in lp.items()):
            continue  # an option that a side does not know leaves the item undefined
        best, second = sorted(lp, key=lambda o: -lp[o])[:2]
        moved[blocks[prompt]].append(abs((lp[best] - lp[second]) - (other[best] - other[second])))
        changed[blocks[prompt]].append(best != max(other, key=lambda o: other[o]))
    return {
        "option_margin": np.array([np.mean(moved[i]) if moved[i] else np.nan for i in names]),
        "changed_options": np.array([np.mean(changed[i]) if changed[i] else np.nan for i in names]),
    }


def names_of(table: pd.DataFrame) -> list[str]:
    """Return the scores of a table that have a value in every row, in the order of ``SCORES``."""
    return [s for s in SCORES if s in table and table[s].notna().all()]


def rank_scaled(x: Floats, calibration: Floats, resolution: float, *, among: NDArray[np.bool_] | None = None) -> Floats:
    """Put a score on a scale that all scores share.

    Up to the largest calibration value: the mid-rank among them, as a share (0 to 1). Beyond it, where ranks end:
    1 + (x − largest) / (largest − median), so that values which no replicate reached still have an order, in steps of
    the metric's own spread. ``resolution`` is the least step.

    Parameters
    ----------
    x
        Values (n,).
    calibration
        Values of the calibration replicates (m,).
    resolution
        As :class:`Score`.
    among
        Which calibration values count for which x (n, m); by default all.
    """
    among = np.ones((len(x), len(calibration)), dtype=bool) if among is None else among
    value = x[:, None]
    rank = ((among & ~(calibration >= value)).sum(1) + (among & ~(calibration > value)).sum(1)) / 2 / among.sum(1)
    theirs = np.where(among, calibration, np.nan)
    largest, median = np.nanmax(theirs, axis=1), np.nanmedian(theirs, axis=1)
    beyond = 1 + (x - largest) / np.maximum(largest - median, resolution)
    return np.asarray(np.where(x > largest, beyond, rank))


def compound(
    table: pd.DataFrame, calibration: pd.DataFrame, names: Sequence[str], *, among: NDArray[np.bool_] | None = None
) -> Floats:
    """Return the compound score of each row: the largest of its rank-scaled scores; shape (rows,)."""
    scaled = [
        rank_scaled(table[s].to_numpy(float), calibration[s].to_numpy(float), SCORES[s].resolution, among=among)
        for s in names
    ]
    return np.asarray(np.max(scaled, axis=0))


def left_out(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Return, for each replicate (row), which others share neither its pair nor its block (columns)."""
    pair, block = table["pair"].to_numpy(), table["block"].to_numpy()
    return np.asarray((pair[:, None] != pair) & (block[:, None] != block))


def calibration_compound(table: pd.DataFrame, names: Sequence[str]) -> Floats:
    """Return the compound score of each calibration replicate, scaled by those that share nothing with it.

    Scaled by itself too, no replicate could lie beyond the largest, and a new one could: the threshold would be too
    low.
    """
    return compound(table, table, names, among=left_out(table))


def cross_validated_alarms(table: pd.DataFrame, names: Sequence[str], level: float) -> NDArray[np.bool_]:
    """Return which calibration replicates the compound score would call an alarm, had they not been there.

    The threshold is derived anew from the replicates that share neither pair nor block with the one that is judged,
    their scaling included: nothing of it, its pair or its block is in it.
    """
    without = [order_statistic(calibration_compound(table[others], names), level) for others in left_out(table)]
    return np.asarray(calibration_compound(table, names) > np.array(without))


def order_statistic(values: Floats, level: float) -> float:
    """Return the ⌈level (m + 1)⌉-th smallest of m values: a new one lies above it with probability ≤ 1 − level.

    Infinite where m is too small to have it. Distribution-free for exchangeable values (Vovk, Gammerman and Shafer
    2005, doi:10.1007/b106715; Lei et al. 2018, doi:10.1080/01621459.2017.1307116). Replicates that share pairs and
    blocks are not exchangeable, so there the rate is a target, and has to be measured.
    """
    k = math.ceil(level * (len(values) + 1) - 1e-9)
    return float(np.sort(values)[k - 1]) if k <= len(values) else math.inf


def limits(calibration: pd.DataFrame, names: Sequence[str], threshold: float) -> dict[str, float]:
    """Return the value of each score above which the compound score exceeds ``threshold``."""
    found = {}
    for s in names:
        c = np.sort(calibration[s].to_numpy(float))
        if threshold >= 1:
            found[s] = float(c[-1] + (threshold - 1) * max(float(c[-1] - np.median(c)), SCORES[s].resolution))
        else:
            scaled = rank_scaled(c, c, SCORES[s].resolution)
            inside = c[scaled <= threshold]
            found[s] = float(inside[-1]) if len(inside) else float(c[0])
    return found


def effective_replicates(table: pd.DataFrame, values: Floats, *, share: float = 0.2) -> float:
    """Return n_eff: as many independent replicates would fix the rate of alarms as well as these.

    Two-way random effects of pair and block (analysis of variance without replication; Searle, Casella and McCulloch,
    doi:10.1002/9780470316856, chapter 4) of the indicator "among the highest fifth" (fewer where values are tied).
    Alarms are the highest twentieth, too few to measure their correlation well; where it is stronger there, this n_eff
    is too large. A component below 0 counts as 0. Where it cannot be estimated: the smaller number of pairs and blocks.
    """
    cut = np.quantile(values, 1 - share)
    high = table.assign(high=(values > cut).astype(float)).pivot(index="pair", columns="block", values="high")
    y = high.dropna().to_numpy()  # a pair that lost a replicate to bit-identity is left out of this estimate
    rows, columns = y.shape
    if min(rows, columns) < 2 or y.std() == 0:
        return float(min(table["pair"].nunique(), table["block"].nunique()))
    grand, by_row, by_column = y.mean(), y.mean(1), y.mean(0)
    ms_row = columns * ((by_row - grand) ** 2).sum() / (rows - 1)
    ms_column = rows * ((by_column - grand) ** 2).sum() / (columns - 1)
    left = y - by_row[:, None] - by_column + grand
    ms_error = (left**2).sum() / ((rows - 1) * (columns - 1))
    pair, block = max(0.0, (ms_row - ms_error) / columns), max(0.0, (ms_column - ms_error) / rows)
    total = pair + block + ms_error
    spread = pair / rows + block / columns + ms_error / (rows * columns)
    return float(min(len(values), total / spread * len(values) / y.size))


def alarm_rate(
    table: pd.DataFrame, alarms: NDArray[np.bool_], n_eff: float, *, draws: int = 2000, seed: int = 0
) -> dict[str, float]:
    """Return the share of alarms with its 95 % interval, by a bootstrap over pairs and blocks.

    Both are drawn with replacement and a replicate counts as often as its pair times its block was drawn (Owen 2007,
    doi:10.1214/07-AOAS122). A bootstrap of no alarms has no width, so the upper end is at least that of Clopper and
    Pearson at n_eff.
    """
    codes = [pd.factorize(table[c])[0] for c in ("pair", "block")]
    rng = np.random.default_rng(seed)
    w = np.ones((draws, len(table)))
    for c in codes:
        n = c.max() + 1
        w *= rng.multinomial(n, np.full(n, 1 / n), size=draws)[:, c]
    total = w.sum(1)
    drawn = (w @ alarms)[total > 0] / total[total > 0]
    k, n = int(alarms.sum()), len(alarms)
    lo, hi = np.quantile(drawn, [0.025, 0.975])
    whole = max(1, round(n_eff))
    exact = upper_bound(min(whole, math.ceil(k / n * whole - 1e-9)), whole, 0.975)
    return {"alarms": k, "n": n, "rate": k / n, "lo": float(lo), "hi": float(max(hi, exact)), "n_eff": float(n_eff)}


def held_out_limit(n_eff: float, level: float) -> int:
    """Return the 95 % quantile of Binomial(n_eff, 1 − level): more alarms than that are too many."""
    return int(stats.binom.ppf(0.95, max(1, math.floor(n_eff)), 1 - level))


def calibrate(table: pd.DataFrame, *, level: float, minimum: int) -> dict[str, Any]:
    """Derive every threshold from the floor replicates.

    Parameters
    ----------
    table
        Columns ``pair``, ``block`` and the scores; bit-identical replicates already left out.
    level
        1 − the false-alarm rate that is aimed at.
    minimum
        Fewest replicates.

    Returns
    -------
    ``m``, ``threshold`` (of the compound score), ``n_eff``, ``scores``: for each its own ``threshold``, the ``limit``
    at which the compound alarms, ``median``, ``largest``; ``false_alarms``: for each score and the compound, with the
    threshold of the replicates that share neither pair nor block (:func:`cross_validated_alarms`).

    Raises
    ------
    RuitongError
        For fewer replicates than ``minimum``.
    """
    m = len(table)
    if m < minimum:
        raise RuitongError(
            f"{m} replicates are left after bit-identical ones were taken out, and {minimum} are needed; "
            "add cells or blocks to the design"
        )
    names = names_of(table)
    values = {s: table[s].to_numpy(float) for s in names} | {COMPOUND: calibration_compound(table, names)}
    threshold = order_statistic(values[COMPOUND], level)
    at = limits(table, names, threshold)
    others = left_out(table)
    alarms = {s: np.array([x > order_statistic(values[s][o], level) for x, o in zip(values[s], others, strict=True)])
              for s in names}  # fmt: skip
    alarms[COMPOUND] = cross_validated_alarms(table, names, level)
    rates = {s: alarm_rate(table, alarms[s], effective_replicates(table, x)) for s, x in values.items()}
    return {
        "m": m,
        "level": level,
        "threshold": threshold,
        "n_eff": rates[COMPOUND]["n_eff"],
        "scores": {
            s: {
                "threshold": order_statistic(values[s], level),
                "limit": at[s],
                "median": float(np.median(values[s])),
                "largest": float(values[s].max()),
                "unit": SCORES[s].unit,
            }
            for s in names
        },
        "false_alarms": rates,
    }


def alarms_of(table: pd.DataFrame, calibrated: Mapping[str, Any]) -> pd.DataFrame:
    """Return which rows of a table alarm, by each score's own threshold and by the compound; same index, booleans."""
    found = {s: table[s].to_numpy(float) > facts["threshold"] for s, facts in calibrated["scores"].items()}
    found[COMPOUND] = np.any([table[s].to_numpy(float) > f["limit"] for s, f in calibrated["scores"].items()], axis=0)
    return pd.DataFrame(found, index=table.index)
