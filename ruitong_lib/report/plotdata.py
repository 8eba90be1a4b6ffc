"""The numbers of the figures: what is drawn, apart from how (:mod:`ruitong_lib.report.plots`)."""

import math
from typing import NamedTuple, TypeVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError, RuitongError
from ruitong_lib.measure import floor as floors
from ruitong_lib.measure import kernels, metrics
from ruitong_lib.measure.align import align, axis_name, differs_in
from ruitong_lib.measure.compare import DRAWS, divergence_events

CURVE_DRAWS = 500  # resamples of prompts for a band: each draw is a whole curve
MIN_VALUES = 20  # a bin of fewer values has no 99th percentile worth a point
PROBABILITY_EDGES = (0.0, *(10.0 ** np.arange(-6, 0, 0.5)), 1.0)

T = TypeVar("T")
Floats = NDArray[np.float64]


class Spread(NamedTuple):
    """Median and 99th percentile of |Δlogprob| (nat) of each group, NaN where ``n`` is below ``MIN_VALUES``."""

    x: Floats
    median: Floats
    p99: Floats
    n: NDArray[np.int64]


class Incidence(NamedTuple):
    """Cumulative incidence at each position (share of prompts), with a 95 % band of the divergence."""

    diverged: Floats
    ended: Floats
    lo: Floats
    hi: Floats


class PhaseCloud(NamedTuple):
    """Mean KL (nat) of each prompt in replay and in decode, over the ``n_positions`` where both saw the same text."""

    replay: Floats
    decode: Floats
    n_positions: int


def shown(value: object) -> str:
    """Return a coordinate's value for a label; only a cap on kernels or a revision may be empty."""
    return str(value) if value != "" else "no cap"


def row_name(ds: xr.Dataset, reference: str, candidate: str) -> str:
    """Return what a row is about, e.g. ``precision: bf16 → w8a8``."""
    a, b = (ds.sel(cell=c) for c in (reference, candidate))
    fields = differs_in(a, b)
    changes = ", ".join(f"{shown(a[f].item())} → {shown(b[f].item())}" for f in fields)
    return f"{axis_name(fields)}: {changes}" if fields else axis_name(fields)


def floor_name(ds: xr.Dataset, f: floors.Floor) -> str:
    """Return what a floor changes, e.g. ``attention: sdpa → eager``, with the batch size where it is above 1."""
    a, b = (ds.sel(cell=c) for c in (f.reference, f.candidate))
    field = floors.RUNGS.get(f.rung)
    change = f"{shown(a[field].item())} → {shown(b[field].item())}" if field else "decode → replay"
    batch = f", b{a['batch_size'].item()}" if field != "batch_size" and a["batch_size"].item() > 1 else ""
    several = [c for c in ("model", "hardware", "engine") if len(np.unique(ds[c].values.astype(str))) > 1]
    where = "".join(f", {a[c].item()}" for c in several if c != field)
    return f"{f.rung}: {change}{batch}{where}"


def rungs(ds: xr.Dataset, scoring: str) -> list[floors.Floor]:
    """Return the ladder for a figure: floors of one name together, small ones first, a rerun's own rungs left out.

    Raises
    ------
    RuitongError
        Where there is no floor at all.
    """
    found = [
        f
        for f in floors.ladder(ds, scoring=scoring)
        if f.n_positions and (f.rung == "rerun" or not ds["repeat"].sel(cell=f.reference).item())
    ]
    if not found:
        raise RuitongError(
            f"no two of the {ds.sizes['cell']} cells differ in one thing only, so there is no {scoring} floor to draw. "
            "Collect one more cell like the reference, with batch_size=8 or attention=eager, then aggregate again"
        )
    order = list(dict.fromkeys(f.rung for f in found))
    least: dict[str, float] = {}
    for f in found:
        name = floor_name(ds, f)
        least[name] = min(f.mean_kl, least.get(name, math.inf))
    return sorted(found, key=lambda f: (order.index(f.rung), least[floor_name(ds, f)], floor_name(ds, f), f.mean_kl))


def row_floor(ds: xr.Dataset, reference: str, candidate: str, *, scoring: str = "replay") -> floors.Floor:
    """Return the floor of a row by the rule.

    Raises
    ------
    RuitongError
        Where there is none, naming the cell to collect.
    """
    known = [str(c) for c in ds["cell"].values]
    for label in (reference, candidate):
        if label not in known:
            raise RuitongError(f"no cell {label!r}; the dataset holds: {', '.join(known)}")
    found = floors.floor_for(ds, reference, candidate, scoring=scoring)
    if found is None:
        raise RuitongError(_no_floor(reference, candidate, _options(ds, reference, candidate), scoring))
    return found


def _options(ds: xr.Dataset, reference: str, candidate: str) -> list[str]:
    a = ds.sel(cell=reference)
    own = differs_in(a, ds.sel(cell=candidate))
    other = {"batch_size": 8 if a["batch_size"].item() == 1 else 1, "composition": a["composition"].item() + 1}
    choices: dict[str, int | str] = {**other, "attention": "eager" if a["attention"].item() == "sdpa" else "sdpa"}
    if a["batch_size"].item() == 1:
        del choices["composition"]  # no prompts share a batch
    return [f"{name}={value}" for name, value in choices.items() if name not in own]


def _no_floor(reference: str, candidate: str, options: list[str], scoring: str) -> str:
    both = ", scoring=both" if scoring == "decode" else ""
    return (
        f"no {scoring} floor for {candidate} against {reference}, and no delta is drawn without one. Collect a cell "
        f"like the reference but with {' or '.join(options)}{both}, then aggregate again"
    )


def needed(delta: xr.Dataset, floor: T | None) -> T:
    """Return the floor of a delta (a pair, or a comparison's positions), whatever it is held in.

    Raises
    ------
    RuitongError
        Where there is none, naming the cell to collect.
    """
    if floor is None:
        reference, candidate, scoring = (str(delta.attrs[a]) for a in ("reference", "candidate", "scoring"))
        raise RuitongError(_no_floor(reference, candidate, ["another batch_size", "another attention"], scoring))
    return floor


def need_pair(pair: xr.Dataset, pair_floor: xr.Dataset | None) -> xr.Dataset:
    """Return the floor's pair.

    Raises
    ------
    RuitongError
        Where there is none or it is of another scoring, naming the cell to collect.
    """
    pair_floor, scoring = needed(pair, pair_floor), pair.attrs["scoring"]
    if pair_floor.attrs["scoring"] != scoring:
        raise RuitongError(
            f"the delta is of {scoring} and its floor of {pair_floor.attrs['scoring']}; they are never mixed. "
            f"Align the floor's cells with scoring={scoring!r}"
        )
    return pair_floor


def mean_interval(kl: xr.DataArray, *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float, float]:
    """Return the mean over positions with its 95 % percentile interval by a bootstrap over prompts."""
    sums, counts = kl.sum("position").values, kl.notnull().sum("position").values
    ran = counts > 0
    if not ran.any():
        return math.nan, math.nan, math.nan
    weights = kernels.bootstrap_weights(int(ran.sum()), draws, seed)
    drawn = (weights @ sums[ran]) / (weights @ counts[ran])
    lo, hi = np.quantile(drawn, [0.025, 0.975])
    return float(sums.sum() / counts.sum()), float(lo), float(hi)


def by_category(kl: xr.DataArray) -> xr.DataArray:
    """Sort prompts by category, then by id."""
    return kl.isel(prompt=np.lexsort((kl["prompt"].values.astype(str), kl["category"].values.astype(str))))


def prompt_ratios(kl: xr.DataArray, floor: xr.DataArray) -> Floats:
    """Return each prompt's delta over floor: sums over their common positions, NaN where the floor is 0."""
    theirs = floor.reindex_like(kl)
    common = kl.notnull() & theirs.notnull()
    a, b = (x.where(common).sum("position").values for x in (kl, theirs))
    return np.where(b > 0, a / np.where(b > 0, b, 1.0), np.nan)


def _deltas(pair: xr.Dataset) -> tuple[Floats, Floats]:
    """Return |Δlogprob| and the reference's logprob over (position, k), NaN where either side does not know the id."""
    ref, cand = (pair[f"{side}_logprob"].values[pair["valid"].values] for side in ("reference", "candidate"))
    delta = np.abs(cand - ref)
    return np.where(np.isfinite(delta), delta, np.nan), ref


def _spread(x: Floats, groups: list[Floats]) -> Spread:
    known = [g[np.isfinite(g)] for g in groups]
    both = [np.quantile(g, [0.5, 0.99]) if g.size >= MIN_VALUES else (math.nan, math.nan) for g in known]
    median, p99 = np.array(both, dtype=np.float64).reshape(-1, 2).T
    return Spread(x, median, p99, np.array([g.size for g in known]))


def delta_by_rank(pair: xr.Dataset) -> Spread:
    """Return |Δlogprob| by rank: of the anchor's ids in replay, of the reference's in decode."""
    delta, _ = _deltas(pair)
    return _spread(np.arange(delta.shape[1], dtype=np.float64), list(delta.T))


def delta_by_probability(pair: xr.Dataset) -> Spread:
    """Return |Δlogprob| by the reference's probability, in bins of half a decade; ``x`` is a bin's middle."""
    delta, ref = _deltas(pair)
    where = np.digitize(np.exp(ref), PROBABILITY_EDGES[1:-1])
    middles = np.sqrt(np.array(PROBABILITY_EDGES[1:-1]) * np.array(PROBABILITY_EDGES[2:]))
    x = np.array([middles[0] / 10**0.5, *middles])
    return _spread(x, [delta[where == i] for i in range(len(x))])


def incidence(pair: xr.Dataset, *, draws: int = CURVE_DRAWS, seed: int = 0) -> Incidence:
    """Return the cumulative incidence of divergence, and of the end of text, of a decode pair."""
    if pair.attrs["scoring"] != "decode":
        raise RuitongError("texts part in decode only: align the cells with scoring='decode'")
    time, event = divergence_events(pair)
    horizon = pair.sizes["position"]
    diverged, ended = kernels.cumulative_incidence(time, event, horizon)
    rows = [np.repeat(np.arange(len(time)), w) for w in kernels.bootstrap_weights(len(time), draws, seed)]
    curves = np.stack([kernels.cumulative_incidence(time[r], event[r], horizon)[0] for r in rows])
    lo, hi = np.quantile(curves, [0.025, 0.975], axis=0)
    return Incidence(diverged, ended, lo, hi)


def phase_cloud(reference: xr.Dataset, candidate: xr.Dataset) -> PhaseCloud:
    """Return each prompt's KL in replay and in decode, over the positions where both were asked the same.

    A decode position counts while the reference's own text, and so the candidate's, is still the anchor's.

    Raises
    ------
    RefusedError
        Where a side has no decode (or no replay), or the texts left the anchor at once.
    """
    pairs = {s: align(reference, candidate, scoring=s) for s in schema.SCORINGS}
    width = min(p.sizes["position"] for p in pairs.values())
    decode, replay = (p.isel(position=slice(width)) for p in (pairs["decode"], pairs["replay"]))
    n = [np.minimum(p["reference_n_tokens"].values, width) for p in (decode, replay)]
    first = kernels.first_difference(decode["reference_token"].values, replay["reference_token"].values, *n)
    same = (first[:, None] < 0) | (np.arange(width) <= first[:, None])
    kl = [metrics.kl(p).values for p in (replay, decode)]
    common = same & np.isfinite(kl[0]) & np.isfinite(kl[1])
    counts = common.sum(1)
    if not counts.any():
        raise RefusedError("no position where decode and replay continue the same text; nothing to hold side by side")
    means = [np.where(common, x, 0.0).sum(1)[counts > 0] / counts[counts > 0] for x in kl]
    return PhaseCloud(means[0], means[1], int(common.sum()))
