"""The verdict: is a delta more than its floor, by the rule of DESIGN §4 and the margins of ``params/gates.yml``.

With [L, U] the 95 % interval of R on KL and c the margin: U < c and L ≤ 1 is EQUIVALENT, U < c and L > 1 WITHIN MARGIN,
L > c DIFFERENT, anything else INCONCLUSIVE. A top-1 flip that the floor cannot explain is DIFFERENT by itself. Nothing
is decided below 16 prompts, and "not significant" is never "equivalent".
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import yaml
from scipy import stats

from ruitong_lib import paths
from ruitong_lib.errors import RuitongError
from ruitong_lib.measure import kernels, metrics
from ruitong_lib.measure.align import align
from ruitong_lib.measure.compare import is_identical, jsonable
from ruitong_lib.measure.configuration import flip_gaps
from ruitong_lib.measure.flips import flips_beyond_floor
from ruitong_lib.measure.floor import FLOOR_RUNGS, Floor, Ratio, ratio, rounding_class

EXIT = {"IDENTICAL": 0, "EQUIVALENT": 0, "WITHIN MARGIN": 0, "DIFFERENT": 1, "REFUSED": 2, "INCONCLUSIVE": 3}
POWER = 2.8  # 1.96 + 0.84: a two-sided test at 5 % with 80 % power


@dataclasses.dataclass(frozen=True)
class Margin:
    """A number that decides, where it comes from, and since when."""

    value: float
    derivation: str
    date: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one comparison comes to, and everything it rests on."""

    verdict: str  # a key of EXIT
    reasons: tuple[str, ...]
    reference: str
    candidate: str
    scoring: str
    rounding_class: str
    ratio: Ratio | None = None
    margin: Margin | None = None
    floor: Floor | None = None
    borrowed: str = ""  # why the floor is not the row's own
    n_at_estimate: int | None = None  # prompts that would settle an INCONCLUSIVE one if R is what it looks like
    p_value: float = math.nan  # two-sided, of R = c
    p_holm: float = math.nan  # the same within its table
    leave_one_category_out: tuple[float, float] = (math.nan, math.nan)
    flips: dict[str, float] | None = None
    mass_shift: Ratio | None = None
    every_floor: tuple[dict[str, Any], ...] = ()

    @property
    def exit_code(self) -> int:
        """0 equivalent, within margin or identical; 1 different; 2 refused; 3 inconclusive."""
        return EXIT[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold: NaN becomes null, and the floor loses its arrays."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        own["floor"] = self.floor.to_dict() if self.floor else None
        for name in ("ratio", "margin", "mass_shift"):
            own[name] = dataclasses.asdict(own[name]) if own[name] else None
        cleaned: dict[str, Any] = jsonable(own | {"exit_code": self.exit_code})
        return cleaned


@functools.cache
def gates(path: Path = paths.PARAMS / "gates.yml") -> dict[str, Any]:
    """Return the margins; a file that lacks a value, its derivation or its date is refused."""
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group in ("kl_ratio", "mass_shift_ratio", "absolute_kl"):
        for name, row in document[group].items():
            missing = [key for key in ("value", "derivation", "date") if not row.get(key)]
            if missing:
                raise RuitongError(f"{path}: {group}.{name} lacks its {', '.join(missing)}; a margin needs all three")
    return document


def margin_for(delta: str, floor: str) -> tuple[Margin, str]:
    """Return c for a delta and a floor of the given rounding classes, and what to say where the classes differ."""
    rows = gates()["kl_ratio"]
    if "unknown" in {delta, floor}:
        return Margin(**rows["same_class"]), "a side's precision is unknown, so its rounding class is too"
    if delta == floor:
        return Margin(**rows["same_class"]), ""
    (many, coarse), (few, coarse_floor) = delta.split("×"), floor.split("×")
    if coarse == coarse_floor and (many, few) == ("2", "1"):
        return Margin(**rows["one_rounding_floor"]), f"a one-rounding floor ({floor}) under a {delta} delta"
    return Margin(**rows["same_class"]), f"the floor ({floor}) is of another rounding class than the delta ({delta})"


def borrowed_from(floor: Floor, reference: xr.Dataset, candidate: xr.Dataset) -> str:
    """Say what makes a floor a borrowed one; empty for a floor of the row by the rule."""
    if floor.rung == "two roundings":
        return ""  # made of the row's own two cells
    for cell in (reference, candidate):
        own = all(getattr(floor, n) == cell[n].values.item() for n in ("hardware", "engine", "precision"))
        if own and floor.rung in FLOOR_RUNGS:
            return ""
    return f"{floor.rung} on {floor.hardware}"


def judge(
    reference: xr.Dataset,
    candidate: xr.Dataset,
    floor: Floor | None,
    *,
    scoring: str = "replay",
    others: Sequence[Floor] = (),
    flips: dict[str, float] | None = None,
    looks: int = 1,
    pair: xr.Dataset | None = None,
) -> Verdict:
    """Judge one comparison against its floor.

    Parameters
    ----------
    reference, candidate
        Shards (cell: 1).
    floor
        *The* floor, chosen before (:func:`ruitong_lib.measure.floor.floor_for`,
        :func:`~ruitong_lib.measure.floor.pair_floor`); None where there is none.
    scoring
        "replay" or "decode".
    others
        Every other floor at hand; R over each is listed and decides nothing.
    flips
        :func:`held_against` another floor, where ``floor`` is a sum and has no flips of its own.
    looks
        How often the data were to be looked at; α is divided by it.
    pair
        ``align(reference, candidate, scoring=scoring)``, where it is at hand.

    Returns
    -------
    Verdict; swapping reference and candidate changes neither it nor R.

    Raises
    ------
    RefusedError
        See :func:`ruitong_lib.measure.align.check`.
    """
    pair = align(reference, candidate, scoring=scoring) if pair is None else pair
    kl = metrics.kl(pair)
    precisions = [s["precision"].values.item() for s in (reference, candidate)]
    base = Verdict(
        verdict="INCONCLUSIVE",
        reasons=(),
        reference=pair.attrs["reference"],
        candidate=pair.attrs["candidate"],
        scoring=scoring,
        rounding_class=rounding_class(*precisions),
        floor=floor,
        every_floor=tuple(_over(kl, f, reference, candidate) for f in (*([floor] if floor else []), *others)),
    )
    if is_identical(pair):
        return dataclasses.replace(base, verdict="IDENTICAL", reasons=("every compared number is bit-equal",))
    if floor is None:
        return dataclasses.replace(base, reasons=("no floor was measured: a delta without a floor is no finding",))
    if {floor.reference, floor.candidate} == {base.reference, base.candidate}:
        return dataclasses.replace(base, reasons=("this pair is the floor itself: R is 1 by construction",))
    level = 1 - (1 - gates()["level"]) / looks
    r = ratio(kl, floor.kl, level=level)
    margin, about = margin_for(base.rounding_class, floor.rounding_class)
    base = dataclasses.replace(base, ratio=r, margin=margin, borrowed=borrowed_from(floor, reference, candidate))
    reasons = [f"borrowed floor: {base.borrowed}"] if base.borrowed else []
    if about:
        reasons.append(about)
    if floor.pair is not None:
        shift = ratio(metrics.prob_mass_shift(pair), metrics.prob_mass_shift(floor.pair), level=level)
        base = dataclasses.replace(base, mass_shift=shift)
    # A floor below resolution changed no logprob, so twice its largest change would call every near-tie a bug.
    if flips is None and floor.pair is not None and r.status != "floor below resolution":
        flips = held_against(pair, floor.pair)
    base = dataclasses.replace(base, flips=flips)
    if r.n_prompts < gates()["minimum_prompts"]:
        few = f"{r.n_prompts} prompts in common; no verdict below {gates()['minimum_prompts']}"
        return dataclasses.replace(base, reasons=(few, *reasons))
    if base.flips and base.flips["unambiguous"] > 0:
        n, gap = int(base.flips["unambiguous"]), base.flips["unambiguous_gap"]
        bug = f"{n} top-1 flips at a gap above {gap:.3g} nat, twice the floor's largest change: not rounding"
        return dataclasses.replace(base, verdict="DIFFERENT", reasons=(bug, *reasons))
    if r.status != "ok":
        return _without_ratio(base, kl, precisions, reasons, level)
    decided = _decide(r, margin.value, "R", reasons)
    if "another rounding class" in about and decided.get("verdict") in {"EQUIVALENT", "WITHIN MARGIN"}:
        # A floor of more roundings is larger by itself, so a small R says nothing; a large one does.
        decided = {
            "verdict": "INCONCLUSIVE",
            "reasons": ("no equivalence across rounding classes", *decided["reasons"]),
        }
    return dataclasses.replace(
        base,
        **decided,
        p_value=_p_value(r, margin.value),
        leave_one_category_out=leave_one_category_out(kl, floor.kl, pair["category"]),
    )


def _p_value(r: Ratio, c: float) -> float:
    """Return the two-sided p of R = c, from the interval's own t."""
    distance = abs(math.log(r.value / c))
    t = distance / r.error if r.error else math.inf if distance else 0.0
    return float(2 * stats.t.sf(t, r.n_prompts - 1))


def _decide(r: Ratio, c: float, name: str, reasons: Sequence[str]) -> dict[str, Any]:
    """Apply the rule to an interval; ``name`` is what the interval is of."""
    if not math.isfinite(r.lo):
        return {"reasons": (f"{name} {r.value:.3g} has no interval: one prompt carries the whole delta", *reasons)}
    shown = f"{name} {r.value:.3g} [{r.lo:.3g}, {r.hi:.3g}]"
    if r.lo > c:
        return {"verdict": "DIFFERENT", "reasons": (f"{shown} lies above the margin {c:g}", *reasons)}
    if r.hi < c:
        alike = name == "R" and r.lo <= 1
        where = "" if name != "R" else " and reaches down to the floor" if alike else " but above the floor"
        verdict = "EQUIVALENT" if alike else "WITHIN MARGIN"
        return {"verdict": verdict, "reasons": (f"{shown} lies below the margin {c:g}{where}", *reasons)}
    n = prompts_needed(r, c)
    settle = "no number of prompts is in sight" if n is None else f"about {n} prompts if {name} is what it looks like"
    why = f"{shown} holds the margin {c:g}; to settle it: {settle}, on a fresh sample"
    return {"verdict": "INCONCLUSIVE", "reasons": (why, *reasons), "n_at_estimate": n}


def prompts_needed(r: Ratio, c: float, *, most: int = 100_000) -> int | None:
    """Return n = (2.8 s / ln(c/R))² + 2, s the per-prompt spread of ln R: 80 % power at 5 %. None above ``most``.

    The 2 is what Student's t costs over the normal (Guenther 1981, doi:10.1080/00031305.1981.10479363); without it the
    simulation reached 76 to 79 %.
    """
    distance = math.log(c / r.value) if r.value > 0 else math.inf
    if distance == 0 or not math.isfinite(r.error):
        return None
    n = (POWER * r.error / distance) ** 2 * r.n_prompts
    return max(math.ceil(n) + 2, gates()["minimum_prompts"]) if n <= most else None


def _without_ratio(
    base: Verdict, kl: xr.DataArray, precisions: Sequence[str], reasons: list[str], level: float
) -> Verdict:
    """Judge where R is not defined: 0/0 is identical, else the absolute margin of the coarser precision decides."""
    assert base.ratio is not None
    if float(kl.sum()) == 0:
        return dataclasses.replace(base, verdict="IDENTICAL", reasons=("KL is 0 at every position (0/0)", *reasons))
    if base.ratio.status != "floor below resolution":
        why = f"R is not defined: {base.ratio.status} on the positions of all runs"
        return dataclasses.replace(base, reasons=(why, *reasons))
    reasons = ["floor below resolution (mean KL < 1e-8 nat): R is not defined, the absolute margin decides", *reasons]
    known = gates()["absolute_kl"]
    coarse = next((p for p in ("bf16", "fp16", "fp32") if p in precisions), "")
    if not set(precisions) <= set(known):
        why = f"gates.yml has no absolute margin for {', '.join(sorted(set(precisions) - set(known))) or 'undeclared'}"
        return dataclasses.replace(base, margin=None, reasons=(why, *reasons))
    margin = Margin(**known[coarse])
    sums, counts = kl.sum("position").values, kl.notnull().sum("position").values
    log_mean, error = kernels.log_ratio_jackknife(sums[counts > 0], counts[counts > 0])
    half = stats.t.ppf(0.5 + level / 2, (counts > 0).sum() - 1) * error
    lo, value, hi = (math.exp(log_mean + x) for x in (-half, 0, half))
    mean = dataclasses.replace(base.ratio, value=value, lo=lo, hi=hi, error=error, n_prompts=int((counts > 0).sum()))
    decided = _decide(mean, margin.value, "mean KL", reasons)
    return dataclasses.replace(base, **decided, margin=margin)


def _over(kl: xr.DataArray, f: Floor, reference: xr.Dataset, candidate: xr.Dataset) -> dict[str, Any]:
    return {
        **f.to_dict(),
        "borrowed": borrowed_from(f, reference, candidate),
        "ratio": dataclasses.asdict(ratio(kl, f.kl)),
    }


def held_against(pair: xr.Dataset, floor: xr.Dataset) -> dict[str, float]:
    """Return the flips beyond the floor, with the unambiguous ones counted by the larger of both sides' gaps.

    A flip moved the difference of two logprobs by at least the gap of either side, so the larger gap is the evidence,
    and it is the same whichever side is called the reference.
    """
    flips = flips_beyond_floor(pair, floor)
    flipped, _, gap = flip_gaps(pair)
    if math.isfinite(flips["unambiguous_gap"]):
        flips["unambiguous"] = float((flipped & (gap > flips["unambiguous_gap"])).sum())
    return flips


def leave_one_category_out(delta: xr.DataArray, floor: xr.DataArray, category: xr.DataArray) -> tuple[float, float]:
    """Return the smallest and largest R that leaving out one category of prompts gives; NaN below two categories."""
    d, f = xr.align(delta, floor, join="inner", copy=False)
    common = (d.notnull() & f.notnull()).values
    a, b = (np.where(common, x.values, 0.0).sum(1) for x in (d, f))
    of = category.sel(prompt=d["prompt"]).values.astype(str)
    names = [c for c in np.unique(of) if c]
    if len(names) < 2:
        return math.nan, math.nan
    values = [float(a[of != c].sum() / b[of != c].sum()) for c in names if b[of != c].sum() > 0]
    return min(values, default=math.nan), max(values, default=math.nan)


def holm(verdicts: Sequence[Verdict], *, alpha: float = 0.05) -> list[Verdict]:
    """Adjust a table's verdicts on its primary metric (Holm 1979); what does not survive becomes INCONCLUSIVE.

    The family is every row whose interval was held against a margin; each row's p is two-sided, of R = c.
    """
    p = np.array([v.p_value for v in verdicts])
    adjusted = np.full(len(p), math.nan)
    family = np.flatnonzero(np.isfinite(p))
    order = family[np.argsort(p[family], kind="stable")]
    steps = p[order] * (len(order) - np.arange(len(order)))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    out = []
    for v, q in zip(verdicts, adjusted, strict=True):
        fell = math.isfinite(q) and q > alpha and v.verdict != "INCONCLUSIVE"
        why = f"{v.verdict} by itself, but p = {q:.3g} among the {len(order)} rows of its table (Holm)"
        changes: dict[str, Any] = {"verdict": "INCONCLUSIVE", "reasons": (why, *v.reasons)} if fell else {}
        out.append(dataclasses.replace(v, p_holm=float(q), **changes))
    return out


def mcnemar(reference_right: Sequence[bool], candidate_right: Sequence[bool]) -> dict[str, float]:
    """Test the direction of task flips exactly (McNemar 1947): whether more of the changed answers got worse.

    Says nothing about how many changed, and a large p is no equivalence.

    Returns
    -------
    ``n`` items, ``lost`` (right → wrong), ``gained`` (wrong → right), ``p_value`` two-sided; NaN where none changed.
    """
    a, b = np.asarray(reference_right, dtype=bool), np.asarray(candidate_right, dtype=bool)
    if a.shape != b.shape:
        raise RuitongError(f"both sides must answer the same items, got {len(a)} and {len(b)}")
    lost, gained = int((a & ~b).sum()), int((~a & b).sum())
    p = float(stats.binomtest(lost, lost + gained).pvalue) if lost + gained else math.nan
    return {"n": len(a), "lost": lost, "gained": gained, "p_value": p}
