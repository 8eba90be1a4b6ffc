"""Every pair of a set of shards, compared and judged as one table: one family, one floor chosen beforehand."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ruitong_lib.errors import RefusedError
from ruitong_lib.measure.align import align
from ruitong_lib.measure.compare import Comparison, compare
from ruitong_lib.measure.configuration import flip_gaps
from ruitong_lib.measure.floor import Floor, pair_floor, pair_kl, rounding_class, sum_floor
from ruitong_lib.measure.verdict import Verdict, holm, judge


@dataclasses.dataclass(frozen=True)
class Pair:
    """One row: compared and judged, or refused with the cause."""

    reference: str  # names of the shards in the mapping
    candidate: str
    comparison: Comparison | None = None
    verdict: Verdict | None = None  # against a floor of the row's own rounding class
    one_rounding: Verdict | None = None  # against the borrowed one-rounding floor, where that is another class
    largest_flip_gap: float = math.nan  # nat, on the reference's side
    refusal: str = ""


def judge_pairs(
    shards: Mapping[str, xr.Dataset], floor: tuple[str, str], *, stand_in: tuple[str, str], scoring: str = "decode"
) -> list[Pair]:
    """Compare and judge every pair of ``shards``, Holm-adjusted as one table.

    A row whose delta holds two bf16 roundings is judged against the sum of both sides' KL to the finer cell of
    ``floor`` (the same rounding class) and, beside it, against ``floor`` itself.

    Parameters
    ----------
    shards
        Name → shard (cell: 1), in the order of the table; the first of two is the reference.
    floor
        Names of the one-rounding floor: the finer cell (fp16 or fp32) and the coarser one.
    stand_in
        The one-rounding floor for the one row that is the floor itself.
    scoring
        "replay" or "decode".

    Returns
    -------
    A row a pair, refused ones among them.
    """
    finer = shards[floor[0]]
    one = pair_floor(finer, shards[floor[1]], scoring=scoring)
    second = pair_floor(shards[stand_in[0]], shards[stand_in[1]], scoring=scoring)
    to_finer = _to_finer(shards, floor[0], scoring)
    rows = [
        _row(shards, (a, b), floor=floor, floors=(one, second), to_finer=to_finer, scoring=scoring)
        for a, b in itertools.combinations(shards, 2)
    ]
    # Two tables, two families: each row against its own class, and the bf16/bf16 rows against the one-rounding floor.
    own = iter(holm([r.verdict for r in rows if r.verdict]))
    borrowed = iter(holm([r.one_rounding for r in rows if r.one_rounding]))
    return [
        dataclasses.replace(
            r,
            verdict=next(own) if r.verdict else None,
            one_rounding=next(borrowed) if r.one_rounding else None,
        )
        for r in rows
    ]


def _to_finer(shards: Mapping[str, xr.Dataset], finer: str, scoring: str) -> dict[str, xr.DataArray]:
    """Return each shard's KL to the finer cell, once for all pairs; refused ones are left out."""
    found = {}
    for name, shard in shards.items():
        with contextlib.suppress(RefusedError):
            found[name] = pair_kl(shards[finer], shard, scoring)
    return found


def _row(
    shards: Mapping[str, xr.Dataset],
    names: tuple[str, str],
    *,
    floor: tuple[str, str],
    floors: tuple[Floor, Floor],
    to_finer: Mapping[str, xr.DataArray],
    scoring: str,
) -> Pair:
    (a, b), (one, second) = names, floors
    reference, candidate = shards[a], shards[b]
    try:
        pair = align(reference, candidate, scoring=scoring)
    except RefusedError as e:
        return Pair(a, b, refusal=str(e))
    known: dict[str, Any] = {"scoring": scoring, "pair": pair}
    flipped, gap, _ = flip_gaps(pair)
    row = Pair(
        a,
        b,
        comparison=compare(reference, candidate, **known),
        largest_flip_gap=float(gap[flipped].max()) if flipped.any() else math.nan,
    )
    if names == floor:
        return dataclasses.replace(row, verdict=judge(reference, candidate, second, **known))
    precisions = [s["precision"].values.item() for s in (reference, candidate)]
    if rounding_class(*precisions) == one.rounding_class or not {a, b} <= set(to_finer):
        return dataclasses.replace(row, verdict=judge(reference, candidate, one, **known))
    parts = to_finer[a], to_finer[b]
    two = sum_floor(shards[floor[0]], reference, candidate, scoring=scoring, parts=parts)
    borrowed = judge(reference, candidate, one, others=[two], **known)
    own = judge(reference, candidate, two, others=[one], flips=borrowed.flips, **known)
    return dataclasses.replace(row, verdict=own, one_rounding=borrowed)


def to_frame(rows: list[Pair]) -> pd.DataFrame:
    """Return one line a pair for people: counts, R over both kinds of floor with intervals, verdicts."""
    lines = []
    for r in rows:
        line: dict[str, Any] = {"reference": r.reference, "candidate": r.candidate}
        if r.comparison is None or r.verdict is None:
            lines.append(line | {"verdict": "REFUSED"})
            continue
        c, v = r.comparison, r.verdict
        at_risk, texts = c.n_positions, c.metrics["identical_texts"]
        line |= {
            "identical texts": f"{round(texts.value * texts.n)}/{texts.n}",
            "top-1 agreement": f"{at_risk - c.notes['flips']}/{at_risk}",
            "tied flips": f"{c.notes['tied_flips']} of {c.notes['flips']}",
            "largest flip gap, nat": round(r.largest_flip_gap, 3),
            "mean KL, nat": float(f"{c.metrics['kl'].value:.3g}"),
            "R, one rounding": _shown(r.one_rounding) if r.one_rounding else _shown(v),
            "R, two roundings": _shown(v) if r.one_rounding else "",
            "verdict": v.verdict,
            "without a category": "{:.2f} to {:.2f}".format(*v.leave_one_category_out),
            "perplexity ratio": round(c.notes["perplexity_ratio"], 4),
        }
        lines.append(line)
    return pd.DataFrame(lines).astype(object).fillna("")


def _shown(v: Verdict) -> str:
    r = v.ratio
    return f"{r.value:.2f} [{r.lo:.2f}, {r.hi:.2f}]" if r and np.isfinite(r.value) else "not defined"


def judge_with_floor(
    reference: xr.Dataset, candidate: xr.Dataset, floor: tuple[xr.Dataset, xr.Dataset], *, scoring: str, looks: int = 1
) -> tuple[Comparison, Verdict]:
    """Compare two shards and judge them against the floor that two other shards make.

    Where a cell of the floor is finer than both sides (fp16 or fp32 under bf16/bf16), R over the two-rounding sum is
    listed too.

    Parameters
    ----------
    reference, candidate
        Shards (cell: 1).
    floor
        The floor's two shards.
    scoring
        "replay" or "decode".
    looks
        How often the data were to be looked at; α is divided by it.
    """
    pair = align(reference, candidate, scoring=scoring)
    one = pair_floor(*floor, scoring=scoring)
    precisions = [s["precision"].values.item() for s in (reference, candidate)]
    others = []
    for finer in floor:
        own = finer["precision"].values.item()
        if own not in precisions and rounding_class(*precisions) == f"2×{precisions[0]}" and _finer(own, precisions[0]):
            with contextlib.suppress(RefusedError):
                others.append(sum_floor(finer, reference, candidate, scoring=scoring))
    comparison = compare(reference, candidate, scoring=scoring, pair=pair)
    return comparison, judge(reference, candidate, one, scoring=scoring, others=others, looks=looks, pair=pair)


def _finer(a: str, b: str) -> bool:
    return rounding_class(a, b) == f"1×{b}"
