"""Every public metric: a numpy kernel applied to an aligned pair of cells, its units set, and a row of facts.

A *pair* (:func:`ruitong_lib.measure.compare.align`) is a Dataset over (prompt, position[, k]) that holds both sides
of the comparison on the same ids, and the mask ``valid``. Each function below takes a pair and returns a DataArray
with dims (prompt, position), NaN where the position is not valid.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import xarray as xr

from ruitong_lib.measure import kernels

_SIDES = ("reference_logprob", "candidate_logprob", "reference_rest", "candidate_rest")


def _apply(kernel: Callable[..., Any], pair: xr.Dataset, *names: str, units: str, long_name: str) -> xr.DataArray:
    core = [["k"] if "k" in pair[n].dims else [] for n in names]
    out = xr.apply_ufunc(kernel, *[pair[n] for n in names], input_core_dims=core, keep_attrs=False)
    out = out.where(pair["valid"])
    out.attrs = {"units": units, "long_name": long_name}
    return cast(xr.DataArray, out)


def kl(pair: xr.Dataset) -> xr.DataArray:
    """Lower bound of the KL divergence, mean of both directions (nat); see :func:`kernels.kl_bound`."""
    return _apply(kernels.kl_symmetric, pair, *_SIDES, units="nat", long_name="KL divergence, lower bound")


def prob_mass_shift(pair: xr.Dataset) -> xr.DataArray:
    """Total variation, lower bound (1); linear in the shift where KL is quadratic."""
    return _apply(kernels.prob_mass_shift, pair, *_SIDES, units="1", long_name="probability mass shift, lower bound")


def max_delta_logprob(pair: xr.Dataset) -> xr.DataArray:
    """Largest |Δlogprob| over the ten best ids (nat)."""
    return _apply(kernels.max_delta, pair, *_SIDES[:2], units="nat", long_name="largest |Δlogprob| of the ten best ids")


def max_delta_prob(pair: xr.Dataset) -> xr.DataArray:
    """Largest |Δprobability| over the ten best ids (1)."""

    def kernel(lp: Any, lq: Any) -> Any:
        return kernels.max_delta(lp, lq, prob=True)

    return _apply(kernel, pair, *_SIDES[:2], units="1", long_name="largest |Δprobability| of the ten best ids")


def top1_agreement(pair: xr.Dataset) -> xr.DataArray:
    """1 where both sides have the same best id, else 0: strict, a tie is broken by lowest id on both sides."""

    def kernel(a: Any, b: Any) -> Any:
        return np.where((a[..., 0] >= 0) & (b[..., 0] >= 0), a[..., 0] == b[..., 0], np.nan)

    return _apply(kernel, pair, "reference_top_id", "candidate_top_id", units="1", long_name="top-1 agreement")


def tied_flips(pair: xr.Dataset) -> xr.DataArray:
    """1 where the best ids differ and either side has an exact tie for the best, else 0."""

    def kernel(a: Any, b: Any, la: Any, lb: Any) -> Any:
        return ((a[..., 0] != b[..., 0]) & (kernels.top_tied(la) | kernels.top_tied(lb))).astype(np.float64)

    names = ("reference_top_id", "candidate_top_id", "reference_top_logprob", "candidate_top_logprob")
    return _apply(kernel, pair, *names, units="1", long_name="top-1 flips with an exact tie on a side")


def top5_jaccard(pair: xr.Dataset) -> xr.DataArray:
    """Jaccard similarity of the two sides' five best ids (1)."""

    def kernel(a: Any, b: Any) -> Any:
        return kernels.jaccard(a[..., :5], b[..., :5])

    return _apply(kernel, pair, "reference_top_id", "candidate_top_id", units="1", long_name="top-5 Jaccard similarity")


def top5_identical(pair: xr.Dataset) -> xr.DataArray:
    """1 where both sides have the same set of five best ids, else 0."""
    jaccard = top5_jaccard(pair)
    same = (jaccard == 1).astype(np.float64).where(jaccard.notnull())
    same.attrs = {"units": "1", "long_name": "identical top-5 sets"}
    return same


def top5_boundary_ties(pair: xr.Dataset) -> xr.DataArray:
    """1 where, on a side, the fifth and sixth best are exactly tied, so that the set is arbitrary there."""

    def kernel(la: Any, lb: Any) -> Any:
        return (kernels.top_tied(la, 4) | kernels.top_tied(lb, 4)).astype(np.float64)

    names = ("reference_top_logprob", "candidate_top_logprob")
    return _apply(kernel, pair, *names, units="1", long_name="exact ties at the top-5 boundary")


def router_agreement(pair: xr.Dataset) -> xr.DataArray:
    """Share of the layers of a mixture of experts that chose the same set of experts on both sides (1).

    NaN for a dense model, and where a side did not record its router.
    """
    if "reference_experts" in pair:
        a, b = (np.sort(pair[f"{side}_experts"].values, axis=-1) for side in ("reference", "candidate"))
        known = (a[..., -1] >= 0) & (b[..., -1] >= 0)  # the last of a sorted set: -1 where the layer has none
        n = known.sum(-1)
        share = np.where(n > 0, ((a == b).all(-1) & known).sum(-1) / np.maximum(n, 1), np.nan)
    else:
        share = np.full(pair["valid"].shape, np.nan)
    out = pair["valid"].copy(data=np.where(pair["valid"].values, share, np.nan))
    out.attrs = {"units": "1", "long_name": "router's top-k agreement, mixtures of experts"}
    return out


def direction(pair: xr.Dataset) -> xr.DataArray:
    """Ln q(y) − ln p(y) of the anchor's token y (nat): positive where the candidate finds it likelier.

    Replay: NaN where the anchor is the reference's or the candidate's own text: its writer would always look better.
    Decode: the mean over both sides' own tokens, so that neither side's choice is favoured; swapping the sides changes
    the sign and nothing else. NaN where a side does not list the other's token.
    """
    if pair.attrs["scoring"] == "decode":
        return _antisymmetric(pair)
    out = (pair["candidate_token_logprob"] - pair["reference_token_logprob"]).where(pair["valid"])
    if not pair.attrs["third_party_anchor"]:
        out = out.where(False)
    out.attrs = {"units": "nat", "long_name": "Δlogprob of the anchor token"}
    return out


def _antisymmetric(pair: xr.Dataset) -> xr.DataArray:
    total = np.zeros(pair["valid"].shape)
    for writer in ("reference", "candidate"):
        token = pair[f"{writer}_token"].values[..., None]
        p, q = (
            kernels.match(token, pair[f"{side}_top_id"].values, pair[f"{side}_top_logprob"].values)[..., 0]
            for side in ("reference", "candidate")
        )
        total += (q - p) / 2
    out = pair["valid"].copy(data=np.where(pair["valid"].values, total, np.nan))
    out.attrs = {"units": "nat", "long_name": "Δlogprob of the two sides' own tokens, antisymmetrised"}
    return out


class Facts(NamedTuple):
    """What is known of a metric beforehand; tests hold it to that."""

    function: Callable[[xr.Dataset], xr.DataArray]
    unit: str
    perfect: float  # value of a cell against itself
    bounds: tuple[float, float]
    symmetric: bool  # swapping the sides changes nothing (an antisymmetric one changes sign)
    summary: str  # how positions become one value: mean, sum, max
    role: str


METRICS: dict[str, Facts] = {
    "kl": Facts(kl, "nat", 0.0, (0.0, np.inf), True, "mean", "primary"),
    "prob_mass_shift": Facts(prob_mass_shift, "1", 0.0, (0.0, 1.0), True, "mean", "reported with its ratio"),
    "max_delta_logprob": Facts(max_delta_logprob, "nat", 0.0, (0.0, np.inf), True, "max", "grows with n"),
    "max_delta_prob": Facts(max_delta_prob, "1", 0.0, (0.0, 1.0), True, "max", "grows with n"),
    "top1_agreement": Facts(top1_agreement, "1", 1.0, (0.0, 1.0), True, "mean", "strict"),
    "tied_flips": Facts(tied_flips, "1", 0.0, (0.0, np.inf), True, "sum", "flips that a tie explains"),
    "top5_jaccard": Facts(top5_jaccard, "1", 1.0, (0.0, 1.0), True, "mean", ""),
    "top5_identical": Facts(top5_identical, "1", 1.0, (0.0, 1.0), True, "mean", ""),
    "top5_boundary_ties": Facts(
        top5_boundary_ties, "1", np.nan, (0.0, np.inf), True, "sum", "sets that a tie makes arbitrary"
    ),
    "router_agreement": Facts(router_agreement, "1", 1.0, (0.0, 1.0), True, "mean", "mixtures of experts only"),
    "direction": Facts(direction, "nat", 0.0, (-np.inf, np.inf), False, "mean", "never a ranking of vendors"),
}
