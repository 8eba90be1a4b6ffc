"""Noise floors: the ladder of what should not matter, the rule that picks a row's floor, and delta over floor.

The rule (nobody picks a floor after seeing the numbers): on the reference's own hardware, engine and precision, the
largest rung among batch size, batch composition and attention, leaving out the row's own axis; where the candidate's
side has one too, the smaller of the two sides counts. A rerun is usually bit-exact and is never *the* floor.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xarray as xr
from scipy import stats

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError
from ruitong_lib.measure import kernels, metrics
from ruitong_lib.measure.align import AXES, align, axis_name, differs_in

RESOLUTION = 1e-8  # nat: below this mean KL, stored float32 logprobs say nothing

# The ladder: rung -> the one field in which its two cells differ. "phase" is decode against replay of one cell.
RUNGS = {
    "rerun": "repeat",
    "batch size": "batch_size",
    "batch composition": "composition",
    "attention": "attention",
    "threads": "threads",
    "kernels": "onednn_isa",
    "precision": "precision",
    "engine": "engine",
}
FLOOR_RUNGS = ("batch size", "batch composition", "attention")
# Unit roundoff, from the finest on. TF32 rounds the factors of a product as fp16 does and nothing else, so it is finer.
_UNIT_ROUNDOFF = {
    "fp64": 2**-53, "fp32": 2**-24, "tf32": 2**-11, "fp16": 2**-11, "bf16": 2**-8, "w8a8": 2**-7, "fp8": 2**-4,
}  # fmt: skip
_COARSENESS = {p: i for i, p in enumerate(_UNIT_ROUNDOFF)}


@dataclasses.dataclass(frozen=True)
class Floor:
    """The delta between two cells that differ only in something that should not matter."""

    rung: str
    reference: str
    candidate: str
    precision: str
    hardware: str
    engine: str
    mean_kl: float  # nat
    n_prompts: int
    n_positions: int
    rounding_class: str
    kl: xr.DataArray  # (prompt, position)
    side: str = "reference"  # whose floor it is, of a row
    pair: xr.Dataset | None = None  # both sides aligned, where flips are to be held against it

    def to_dict(self) -> dict[str, Any]:
        """Return the facts without the arrays."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in {"kl", "pair"}}


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Delta over floor: R = Σ KL_delta / Σ KL_floor on common positions, with its 95 % jackknife-t interval."""

    value: float
    lo: float
    hi: float
    n_prompts: int
    n_positions: int
    status: str  # ok, identical, floor below resolution, no common positions, too few prompts
    error: float = math.nan  # jackknife standard error of ln R


def rounding_class(reference: str, candidate: str) -> str:
    """Name the coarsest rounding of a pair and how many sides carry it, e.g. ``2×bf16``, ``1×w8a8``.

    ``unknown`` where a side's precision is none of ours (an undeclared server's): it may be coarser than the other.
    """
    if not {reference, candidate} <= set(_COARSENESS):
        return "unknown"
    coarse = max(reference, candidate, key=_COARSENESS.__getitem__)
    return f"{(reference, candidate).count(coarse)}×{coarse}"


def pair_kl(reference: xr.Dataset, candidate: xr.Dataset, scoring: str = "replay") -> xr.DataArray:
    """Return the KL of two shards over (prompt, position), NaN where not compared."""
    return metrics.kl(align(reference, candidate, scoring=scoring))


def _floor(rung: str, a: xr.Dataset, b: xr.Dataset, kl: xr.DataArray, side: str = "reference") -> Floor:
    n = int(kl.notnull().sum())
    return Floor(
        rung=rung,
        reference=str(a["cell"].values[0]),
        candidate=str(b["cell"].values[0]),
        precision=str(a["precision"].values[0]),
        hardware=str(a["hardware"].values[0]),
        engine=str(a["engine"].values[0]),
        mean_kl=float(kl.sum() / n) if n else math.nan,
        n_prompts=int(kl.notnull().any("position").sum()),
        n_positions=n,
        rounding_class=rounding_class(str(a["precision"].values[0]), str(b["precision"].values[0])),
        kl=kl,
        side=side,
    )


def pair_floor(a: xr.Dataset, b: xr.Dataset, *, scoring: str) -> Floor:
    """Return the floor that two given shards make, named by what differs between them."""
    pair = align(a, b, scoring=scoring)
    field_rung = {f: r for r, f in RUNGS.items()}
    fields = differs_in(a.isel(cell=0), b.isel(cell=0))
    rung = field_rung.get(fields[0], fields[0]) if len(fields) == 1 else axis_name(fields)
    return dataclasses.replace(_floor(rung, a, b, metrics.kl(pair)), pair=pair)


def sum_floor(
    finer: xr.Dataset, a: xr.Dataset, b: xr.Dataset, *, scoring: str, parts: Sequence[xr.DataArray] = ()
) -> Floor:
    """Return the two-rounding floor of a pair: KL(finer, a) + KL(finer, b), where ``finer`` is one fp16 or fp32 cell.

    KL of independent roundings adds up, so this is what rounding on both sides explains by itself. ``parts`` are the
    two KLs, where they are at hand.
    """
    first, second = parts or [pair_kl(finer, side, scoring) for side in (a, b)]
    kl = first + second
    made = _floor("two roundings", finer, finer, kl)
    both = str(a["precision"].values[0]), str(b["precision"].values[0])
    return dataclasses.replace(made, candidate="both sides", rounding_class=rounding_class(*both))


def ladder(ds: xr.Dataset, *, scoring: str = "replay") -> list[Floor]:
    """Return every floor that an aggregate holds: each pair of cells that differs in exactly one field of the ladder.

    Pairs that cannot be compared (other anchors, NaN logits, a missing scoring) are left out. "phase" compares a
    cell's decode with its own replay where the prefixes are the same text.
    """
    cells = [schema.select(ds, str(c)) for c in ds["cell"].values]
    field_rung = {f: r for r, f in RUNGS.items()}
    found = []
    for a, b in itertools.combinations(cells, 2):
        differs = differs_in(a.isel(cell=0), b.isel(cell=0))
        if len(differs) != 1 or differs[0] not in field_rung:
            continue
        first, second = (a, b) if _order(a) <= _order(b) else (b, a)
        try:
            found.append(_floor(field_rung[differs[0]], first, second, pair_kl(first, second, scoring)))
        except RefusedError:
            continue
    if scoring == "replay":
        for c in cells:
            kl = phase_kl(c)
            if kl is not None:
                found.append(_floor("phase", c, c, kl))
    order = ["rerun", "phase", *list(RUNGS)[1:]]
    return sorted(found, key=lambda f: (order.index(f.rung), f.precision, f.reference, f.candidate))


def _order(cell: xr.Dataset) -> tuple[Any, ...]:
    """Put the plainer cell first: finer precision, smaller batch, sdpa before eager, no cap on kernels."""
    c = cell.isel(cell=0)
    return (
        _COARSENESS.get(c["precision"].item(), len(_COARSENESS)),
        c["batch_size"].item(),
        c["composition"].item(),
        c["attention"].item() != "sdpa",
        c["onednn_isa"].item(),
        -c["threads"].item(),
        c["repeat"].item(),
        c["cell"].item(),
    )


def phase_kl(shard: xr.Dataset) -> xr.DataArray | None:
    """Return KL between a cell's decode and its own replay (prompt, position), or None where it lacks one of them.

    The two read the same text up to and including the first position where the cell's own token and the anchor's
    differ; later positions are NaN.
    """
    c = shard.isel(cell=0)
    if (c["state"].values != 0).any():
        return None
    d, r = c.sel(scoring="decode"), c.sel(scoring="replay")
    na, nb = d["n_tokens"].values, r["n_tokens"].values
    first = kernels.first_difference(d["token_id"].values, r["token_id"].values, na, nb)
    last = np.where(first < 0, na, np.minimum(first + 1, np.minimum(na, nb)))
    lp = d["top_logprob"].values.astype(np.float64)
    lq = kernels.match(d["top_token_id"].values, r["top_token_id"].values, r["top_logprob"].values)
    lp = np.where(np.isfinite(lq), lp, np.nan)
    rest = [1 - np.nansum(np.exp(x), axis=-1) for x in (lp, lq)]
    kl = np.where(np.arange(lp.shape[1]) < last[:, None], kernels.kl_symmetric(lp, lq, *rest), np.nan)
    return xr.DataArray(kl, coords={"prompt": c["prompt"], "position": c["position"]}, dims=("prompt", "position"))


def floor_for(
    ds: xr.Dataset, reference: str, candidate: str, *, scoring: str = "replay", rungs: Sequence[Floor] | None = None
) -> Floor | None:
    """Return the floor of a row by the rule, or None where nothing was measured that could serve.

    Parameters
    ----------
    ds
        The aggregate.
    reference, candidate
        Labels of the row's cells.
    rungs
        The ladder, where it is already known.
    """
    rungs = ladder(ds, scoring=scoring) if rungs is None else rungs
    a, b = (ds.sel(cell=c) for c in (reference, candidate))
    own = differs_in(a, b)
    sides = []
    # Across precisions the candidate's own floor is of another size by design: fp16's would call bf16 noise a bug.
    both = (("reference", a), ("candidate", b))
    for side, cell in both[:1] if "precision" in own else both:
        mine = [f for f in rungs if _serves(f, ds, cell, own)]
        if mine:
            sides.append(dataclasses.replace(max(mine, key=lambda f: f.mean_kl), side=side))
    if not sides:
        return None
    if len(sides) == 2 and (sides[0].reference, sides[0].candidate) == (sides[1].reference, sides[1].candidate):
        return sides[0]  # a row within one hardware, engine and precision: both sides have the same floor
    return sides[0] if len(sides) == 1 and sides[0].side == "reference" else min(sides, key=lambda f: f.mean_kl)


def _serves(f: Floor, ds: xr.Dataset, cell: xr.Dataset, own: tuple[str, ...]) -> bool:
    """Whether a rung is on this cell's own hardware, engine and precision, and not on the row's own axis."""
    if f.rung not in FLOOR_RUNGS or RUNGS[f.rung] in own:
        return False
    theirs = ds.sel(cell=f.reference)
    fixed = [x for x in AXES if x not in {"batch_size", "composition", "attention", "repeat", "seed"}]
    return all(theirs[x].item() == cell[x].item() for x in fixed)


def ratio(delta: xr.DataArray, floor: xr.DataArray | Iterable[xr.DataArray], *, level: float = 0.95) -> Ratio:
    """Divide a delta by a floor: a ratio of sums over the positions common to all runs.

    The interval is ln R ± t·s, t with n − 1 degrees of freedom, s the delete-one-prompt jackknife error: deterministic,
    and symmetric in the two cells of each pair.

    Parameters
    ----------
    delta
        KL over (prompt, position), NaN where not compared.
    floor
        The floor's; or several, which add up (two one-rounding floors make a two-rounding one).
    level
        Confidence level.
    """
    floors = [floor] if isinstance(floor, xr.DataArray) else list(floor)
    # Prompts and positions that all runs have; of those, the positions that all runs compared.
    aligned = xr.align(delta, *floors, join="inner", copy=False)
    d, *fs = (x.transpose("prompt", "position").values for x in aligned)
    common = np.isfinite(np.stack([d, *fs])).all(0)
    rows = common.any(1)
    n, positions = int(rows.sum()), int(common.sum())
    a = np.where(common, d, 0.0).sum(1)[rows]
    b = np.where(common, np.sum(fs, axis=0), 0.0).sum(1)[rows]
    nan = math.nan
    if not positions:
        return Ratio(nan, nan, nan, 0, 0, "no common positions")
    if b.sum() / positions < RESOLUTION:
        status = "identical" if a.sum() == 0 else "floor below resolution"
        return Ratio(nan, nan, nan, n, positions, status)
    if a.sum() == 0:
        return Ratio(0.0, nan, nan, n, positions, "identical")
    log_r, error = kernels.log_ratio_jackknife(a, b)
    half = float(stats.t.ppf(0.5 + level / 2, n - 1)) * error if n > 1 else nan
    return Ratio(math.exp(log_r), math.exp(log_r - half), math.exp(log_r + half), n, positions, "ok", error)


def two_rounding_sum(
    ds: xr.Dataset, reference: str, candidate: str, *, scoring: str = "replay"
) -> tuple[str, list[xr.DataArray]] | None:
    """Return, for a bf16/bf16 row, both sides' KL to the same finer cell (fp16 or fp32), which add up to its class.

    Returns
    -------
    The finer cell's label and the two KL arrays, or None where the row is of another class or no such cell is here.
    """
    a, b = (schema.select(ds, c) for c in (reference, candidate))
    if rounding_class(a["precision"].item(), b["precision"].item()) != "2×bf16":
        return None
    for precision in ("fp32", "fp16"):
        for c in ds["cell"].values[ds["precision"].values == precision]:
            finer = schema.select(ds, str(c))
            try:
                return str(c), [pair_kl(finer, side, scoring) for side in (a, b)]
            except RefusedError:
                continue
    return None
