"""The oracle: how far each side of a comparison is from a finer computation of the same answer.

An oracle is a replay of the same anchor in fp32, or in fp64 where a side is fp32 itself, usually on a CPU. It is not
exact, only much finer than what it is held against. Both distances are of prefill kernels (replay), so they say
nothing about the kernels that decode. *How far* (KL) and *better or worse* (direction) are two numbers and stay two.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import xarray as xr
from scipy import stats

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError
from ruitong_lib.measure import kernels, metrics
from ruitong_lib.measure.align import align, one_cell
from ruitong_lib.measure.compare import jsonable
from ruitong_lib.measure.floor import RESOLUTION, Ratio, ratio
from ruitong_lib.measure.verdict import gates

ORACLES = ("fp64", "fp32")


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far one cell is from the oracle, and in which direction, with 95 % intervals over prompts."""

    cell: str
    precision: str
    kl: float  # nat, mean over positions
    lo: float
    hi: float
    direction: float  # nat, mean of ln q(y) − ln o(y) of the anchor's token; NaN where either side wrote the anchor
    direction_lo: float
    direction_hi: float
    n_prompts: int
    n_positions: int
    status: str  # ok, identical, below resolution
    positions: xr.DataArray  # KL over (prompt, position)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold, without the array: NaN becomes null."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "positions"}
        cleaned: dict[str, Any] = jsonable(own)
        return cleaned


@dataclasses.dataclass(frozen=True)
class Triangle:
    """A reference and a candidate, both held against one oracle."""

    oracle: str
    oracle_precision: str
    reference: Distance
    candidate: Distance
    ratio: Ratio  # KL(candidate, oracle) / KL(reference, oracle): a ratio of sums over common positions
    further: str  # candidate, reference, neither (the interval holds 1), not defined
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold: NaN becomes null."""
        cleaned: dict[str, Any] = jsonable(
            {
                "oracle": self.oracle,
                "oracle_precision": self.oracle_precision,
                "reference": self.reference.to_dict(),
                "candidate": self.candidate.to_dict(),
                "ratio": vars(self.ratio),
                "further": self.further,
                "reason": self.reason,
            }
        )
        return cleaned


def check(cell: xr.Dataset, oracle: xr.Dataset, side: str = "cell") -> None:
    """Refuse an oracle that is none for this cell.

    Other prompts, another anchor and other weights are refused by :func:`ruitong_lib.measure.align.check` later.

    Parameters
    ----------
    cell, oracle
        Shards (cell: 1).
    side
        What to call the cell in the message.

    Raises
    ------
    RefusedError
        Where the oracle is not fp32 or fp64, is the cell itself, is not finer than it, or is another model.
    """
    a, o = one_cell(cell, side), one_cell(oracle, "oracle")
    ours, finest = a["precision"].item(), o["precision"].item()
    name, other = a["cell"].item(), o["cell"].item()
    if finest not in ORACLES:
        raise RefusedError(
            f"an oracle is computed in {' or '.join(ORACLES)}, got {other} in {finest or 'unknown precision'}; replay "
            "the same anchor with precision=fp32 on a CPU"
        )
    if name == other:
        raise RefusedError(f"the oracle {other} is the {side} itself; name another cell")
    if ours in ORACLES[: ORACLES.index(finest) + 1]:
        more = "collect one with precision=fp64" if ours == "fp32" else "there is nothing finer than fp64"
        raise RefusedError(f"the {side} {name} is {ours}, so an oracle in {finest} is no finer than it; {more}")
    known = [schema.provenance(x).get("weights_sha256") for x in (a, o)]
    if a["model"].item() != o["model"].item() and not all(known):
        raise RefusedError(
            f"the {side} is {a['model'].item()!r}, the oracle {o['model'].item()!r}, and no hash says that their "
            "weights are the same; replay the anchor in fp32 with the same model"
        )


def distance(cell: xr.Dataset, oracle: xr.Dataset, *, side: str = "cell") -> Distance:
    """Return how far a cell is from the oracle in replay, and in which direction.

    Both intervals are delete-one-prompt jackknife with Student's t, n − 1 degrees of freedom: of the logarithm of the
    mean for KL, which is positive, of the mean itself for the direction. Fewer than two prompts: NaN. Direction is no
    ranking: rounding that favours no token makes each of them less likely by about its KL, because exp is convex.

    Parameters
    ----------
    cell, oracle
        Shards (cell: 1), in this order.
    side
        What to call the cell in a refusal.

    Raises
    ------
    RefusedError
        See :func:`check` and :func:`ruitong_lib.measure.align.check`.

    References
    ----------
    Efron and Stein 1981, doi:10.1214/aos/1176345462
    """
    check(cell, oracle, side)
    pair = align(oracle, cell, scoring="replay")
    kl, moved = metrics.kl(pair), metrics.direction(pair)
    sums, counts = kl.sum("position").values, kl.notnull().sum("position").values
    rows = counts > 0
    n, positions = int(rows.sum()), int(counts.sum())
    mean = float(sums.sum() / positions) if positions else math.nan
    lo = hi = math.nan
    log_mean, error = kernels.log_ratio_jackknife(sums[rows], counts[rows])
    if math.isfinite(error):
        half = float(stats.t.ppf(0.975, n - 1)) * error
        lo, hi = math.exp(log_mean - half), math.exp(log_mean + half)
    status = "identical" if positions and mean == 0 else "below resolution" if mean < RESOLUTION else "ok"
    a = one_cell(cell, side)
    return Distance(
        a["cell"].item(), a["precision"].item(), mean, lo, hi, *_mean_jackknife(moved), n, positions, status, kl
    )


def _mean_jackknife(values: xr.DataArray) -> tuple[float, float, float]:
    """Return the mean over positions and its 95 % jackknife-t interval over prompts."""
    sums, counts = values.sum("position").values, values.notnull().sum("position").values
    sums, counts = sums[counts > 0], counts[counts > 0]
    n, nan = len(sums), math.nan
    if not n:
        return nan, nan, nan
    mean = float(sums.sum() / counts.sum())
    if n < 2:
        return mean, nan, nan
    without = (sums.sum() - sums) / (counts.sum() - counts)
    error = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    half = float(stats.t.ppf(0.975, n - 1)) * error
    return mean, mean - half, mean + half


def against_oracle(reference: xr.Dataset, candidate: xr.Dataset, oracle: xr.Dataset) -> Triangle:
    """Hold both sides of a comparison against one oracle: who is further from the finer answer, and by how much.

    The ratio is KL(candidate, oracle) / KL(reference, oracle), sums over common positions, with the jackknife-t
    interval of :func:`ruitong_lib.measure.floor.ratio`; swapping the sides inverts it. Where a distance lies below
    resolution (1e-8 nat) the ratio is not defined.

    Parameters
    ----------
    reference, candidate, oracle
        Shards (cell: 1) that replayed the same anchor.

    Raises
    ------
    RefusedError
        See :func:`distance`; named for the side that it concerns.
    """
    a, b = distance(reference, oracle, side="reference"), distance(candidate, oracle, side="candidate")
    o = one_cell(oracle, "oracle")
    verdict = _further(a, b, ratio(b.positions, a.positions))
    return Triangle(o["cell"].item(), o["precision"].item(), a, b, *verdict)


def _further(a: Distance, b: Distance, r: Ratio) -> tuple[Ratio, str, str]:
    """Return the ratio, or NaN with the reason, and which side is further from the oracle."""
    low = [side for side, d in (("reference", a), ("candidate", b)) if d.status != "ok"]
    if low:
        nan = math.nan
        r = Ratio(nan, nan, nan, r.n_prompts, r.n_positions, f"{' and '.join(low)} below resolution")
    least = int(gates()["minimum_prompts"])
    if r.n_prompts < least:
        return r, "not defined", f"{r.n_prompts} common prompts; nothing is said below {least}"
    if len(low) == 2:
        return r, "not defined", f"both are below {RESOLUTION:g} nat from the oracle"
    if low:
        other, d = ("candidate", b) if low == ["reference"] else ("reference", a)
        if d.lo > RESOLUTION:
            return r, other, f"the {low[0]} is below {RESOLUTION:g} nat from the oracle, the {other} above"
        return r, "not defined", f"the {low[0]} is below {RESOLUTION:g} nat from the oracle, the {other} hardly above"
    if r.lo > 1:
        return r, "candidate", "the whole interval of the ratio is above 1"
    if r.hi < 1:
        return r, "reference", "the whole interval of the ratio is below 1"
    if not math.isfinite(r.lo):
        return r, "not defined", f"the ratio has no interval ({r.status})"
    return r, "neither", "the interval of the ratio holds 1"


def distances(ds: xr.Dataset, oracle: str = "") -> tuple[list[Distance], dict[str, str]]:
    """Return every cell's distance to the oracle of an aggregate, the nearest first, and why others have none.

    Parameters
    ----------
    ds
        An aggregate.
    oracle
        Label of the oracle; by default the dataset's own (``attrs["oracle"]``).

    Raises
    ------
    RefusedError
        Where the dataset names no oracle, or it is not in it.
    """
    label = oracle_label(ds, oracle)
    exact = schema.select(ds, label)
    found, refused = [], {}
    for other in (str(c) for c in ds["cell"].values):
        if other == label:
            continue
        try:
            found.append(distance(schema.select(ds, other), exact))
        except RefusedError as e:
            refused[other] = str(e)
    return sorted(found, key=lambda d: (d.kl, d.cell)), refused


def oracle_label(ds: xr.Dataset, oracle: str = "") -> str:
    """Return the label of the oracle: the one given, else the dataset's own.

    Raises
    ------
    RefusedError
        Where there is none.
    """
    labels: Sequence[str] = [str(c) for c in ds["cell"].values]
    label = oracle or str(ds.attrs.get("oracle", ""))
    if not label:
        fine = [c for c, p in zip(labels, ds["precision"].values.astype(str), strict=True) if p in ORACLES]
        raise RefusedError(
            "the dataset names no oracle. Give the grid a key 'oracle: {precision: fp32}', or name one of its cells: "
            f"{', '.join(fine) or 'none is in fp32 or fp64'}"
        )
    if label not in labels:
        raise RefusedError(f"the oracle {label!r} is not in the dataset; it holds: {', '.join(labels)}")
    return label
