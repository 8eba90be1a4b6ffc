"""Compare two cells: deltas per prompt and position, then summaries with intervals."""

import dataclasses
import math
from typing import Any

import numpy as np
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.measure import kernels
from ruitong_lib.measure.align import align, axis_name, differs_in, one_cell, reference_gap
from ruitong_lib.measure.metrics import METRICS

DRAWS = 2000  # bootstrap resamples of prompts


@dataclasses.dataclass(frozen=True)
class Value:
    """One metric of one comparison: undefined is NaN, and ``n`` says of how many positions (or prompts)."""

    value: float
    unit: str
    lo: float
    hi: float
    p50: float
    p99: float
    max: float
    n: int
    top_share: float = math.nan  # share of the total that the largest 1 % of positions carry


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The deltas between two cells under one scoring."""

    reference: str
    candidate: str
    differs_in: tuple[str, ...]
    scoring: str
    n_prompts: int
    n_positions: int
    metrics: dict[str, Value]
    notes: dict[str, Any]
    positions: xr.Dataset  # each metric over (prompt, position), NaN where not compared

    @property
    def axis(self) -> str:
        """What the row is about: the one field that differs, ``mixed`` for several, ``none``."""
        return axis_name(self.differs_in)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold: NaN becomes null."""
        out = dataclasses.asdict(dataclasses.replace(self, positions=xr.Dataset()))
        del out["positions"]
        cleaned: dict[str, Any] = jsonable(out)
        return cleaned


def jsonable(value: Any) -> Any:
    """Turn NaN and infinities into None and numpy scalars into Python's, at any depth."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(
    reference: xr.Dataset,
    candidate: xr.Dataset,
    *,
    scoring: str = "replay",
    draws: int = DRAWS,
    seed: int = 0,
    pair: xr.Dataset | None = None,
) -> Comparison:
    """Compare two shards.

    Parameters
    ----------
    reference, candidate
        Shards (cell: 1), in this order.
    scoring
        "replay" (every anchor position) or "decode" (positions at risk of divergence); never mixed. "text" compares
        what was written and nothing else (:func:`ruitong_lib.measure.texts.compare_texts`).
    draws, seed
        Bootstrap over prompts: percentile intervals of 95 %. A maximum has none (it grows with n).
    pair
        ``align(reference, candidate, scoring=scoring)``, where it is at hand.

    Returns
    -------
    Comparison

    Raises
    ------
    RefusedError
        See :func:`check`.
    """
    if scoring == "text":
        from ruitong_lib.measure.texts import compare_texts

        return compare_texts(reference, candidate, draws=draws, seed=seed)
    pair = align(reference, candidate, scoring=scoring) if pair is None else pair
    fields = xr.Dataset({name: facts.function(pair) for name, facts in METRICS.items()})
    weights = kernels.bootstrap_weights(pair.sizes["prompt"], draws, seed)
    values = {
        name: _summary(fields[name].values, facts.unit, facts.summary, weights) for name, facts in METRICS.items()
    }
    flips = int((fields["top1_agreement"] == 0).sum())
    notes: dict[str, Any] = {
        "flips": flips,
        "tied_flips": int(fields["tied_flips"].sum()),
        "not_ok_positions": pair.attrs["n_not_ok"],
        "third_party_anchor": bool(pair.attrs["third_party_anchor"]),
        "perplexity_ratio": math.exp(-values["direction"].value) if values["direction"].n else math.nan,
        "lattice_step": {
            side: kernels.lattice_step(pair[f"{side}_top_logprob"].values) for side in ("reference", "candidate")
        },
        "identical": is_identical(pair),
    }
    if pair.attrs.get("weights_note"):
        notes["weights"] = pair.attrs["weights_note"]
    if scoring == "decode":
        text, more = _text(pair, weights)
        values |= text
        notes |= more | {"hazard": flips / max(1, int(pair["valid"].sum()))}
    return Comparison(
        reference=pair.attrs["reference"],
        candidate=pair.attrs["candidate"],
        differs_in=differs_in(one_cell(reference, "reference"), one_cell(candidate, "candidate")),
        scoring=scoring,
        n_prompts=int(pair["valid"].any("position").sum()),
        n_positions=int(pair["valid"].sum()),
        metrics=values,
        notes=notes,
        positions=fields.assign(valid=pair["valid"], gap=reference_gap(pair)).assign_attrs(pair.attrs),
    )


def is_identical(pair: xr.Dataset) -> bool:
    """Whether both sides are as long, and bit-equal in each number of the compared positions (NaN equals NaN)."""
    if (pair["reference_n_tokens"].values != pair["candidate_n_tokens"].values).any():
        return False
    for name in ("token", "logprob", "rest", "top_id", "top_logprob"):
        a, b = pair[f"reference_{name}"], pair[f"candidate_{name}"]
        if not ((a == b) | (a.isnull() & b.isnull()) | ~pair["valid"]).all():
            return False
    return True


def _summary(field: np.ndarray[Any, Any], unit: str, how: str, weights: np.ndarray[Any, Any]) -> Value:
    """Summarise (prompt, position): sums over prompts and positions, never means of per-prompt means."""
    known = np.isfinite(field)
    n = int(known.sum())
    nan = math.nan
    if not n:
        return Value(nan, unit, nan, nan, nan, nan, nan, 0)
    flat = field[known]
    sums, counts = np.where(known, field, 0.0).sum(1), known.sum(1)
    lo = hi = nan
    if how == "max":
        value = float(flat.max())
    else:
        value = float(sums.sum() / n) if how == "mean" else float(sums.sum())
        drawn = weights @ sums
        if how == "mean":
            drawn = drawn / np.maximum(weights @ counts, 1)
        lo, hi = (float(x) for x in np.quantile(drawn, [0.025, 0.975]))
    total = np.abs(flat).sum()
    share = float(np.sort(np.abs(flat))[-math.ceil(n / 100) :].sum() / total) if total > 0 else nan
    p50, p99 = (float(x) for x in np.quantile(flat, [0.5, 0.99]))
    return Value(value, unit, lo, hi, p50, p99, float(flat.max()), n, share)


def _text(pair: xr.Dataset, weights: np.ndarray[Any, Any]) -> tuple[dict[str, Value], dict[str, Any]]:
    """Text metrics of a decode pair: they are per prompt, so ``n`` counts prompts."""
    first, n = pair["first_difference"].values, len(pair["prompt"])
    na, nb = pair["reference_n_tokens"].values, pair["candidate_n_tokens"].values
    nan = math.nan
    identical = (first < 0).astype(float)
    share = np.quantile(weights @ identical / n, [0.025, 0.975])
    ratio = np.quantile((weights @ nb) / (weights @ na), [0.025, 0.975])
    time, event = divergence_events(pair)
    horizon = pair.sizes["position"]
    lost = kernels.cumulative_incidence(time, event, horizon)[0].sum()
    draws = weights[: min(len(weights), 500)]
    rows = [np.repeat(np.arange(n), w) for w in draws]
    resampled = [kernels.cumulative_incidence(time[r], event[r], horizon)[0].sum() for r in rows]
    low, high = np.quantile(resampled, [0.025, 0.975])
    values = {
        "identical_texts": Value(float(identical.mean()), "1", float(share[0]), float(share[1]), nan, nan, nan, n),
        "length_ratio": Value(float(nb.sum() / na.sum()), "1", float(ratio[0]), float(ratio[1]), nan, nan, nan, n),
        "mean_tokens_lost": Value(float(lost), "tokens", float(low), float(high), nan, nan, nan, n),
    }
    return values, {"diverged": int((event == 1).sum()), "horizon": horizon}


def divergence_events(pair: xr.Dataset) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return per prompt when its two texts parted, and how: 1 diverged, 2 both ended alike, 0 cut at the limit.

    Most answers end by themselves, so the end is a competing event and not censoring, which it would have to be
    independent of divergence for. A text that its lower limit cut, and that agrees so far, is censored too.
    """
    first = pair["first_difference"].values
    na, nb = pair["reference_n_tokens"].values, pair["candidate_n_tokens"].values
    finish, theirs = pair["reference_finish_reason"].values, pair["candidate_finish_reason"].values
    shorter = np.where(na < nb, finish, theirs)
    cut = (na != nb) & (first == np.minimum(na, nb)) & (shorter == schema.FINISH.index("length"))
    ended = (finish == schema.FINISH.index("eos")) & ~cut
    event = np.where((first >= 0) & ~cut, 1, np.where(ended, 2, 0))
    return np.where(event == 1, first, np.minimum(na, nb) - 1), event
