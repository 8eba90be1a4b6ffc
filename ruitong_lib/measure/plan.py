"""How many prompts, tokens and minutes a verdict takes, from a pilot: fixed beforehand, run once.

Looking until decided raised false EQUIVALENT from 5 % to 22 %, so more prompts than planned means a fresh sample.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RuitongError
from ruitong_lib.measure import metrics
from ruitong_lib.measure.align import align
from ruitong_lib.measure.compare import jsonable
from ruitong_lib.measure.floor import Ratio, ratio, rounding_class
from ruitong_lib.measure.verdict import gates, margin_for, prompts_needed


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run for 80 % power at 5 %; None where no number can be promised."""

    n_prompts: int | None
    reason: str
    ratio: Ratio  # of the pilot
    margin: float
    spread: float  # s: per-prompt spread of ln R
    n_cells: int  # cells to run on the fresh prompts: reference, candidate and the floor's
    tokens_per_prompt: float  # mean over those cells
    n_tokens: int | None  # all cells together
    tokens_per_second: float  # NaN where nothing was measured or given
    minutes: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        cleaned: dict[str, Any] = jsonable(dataclasses.asdict(self))
        return cleaned


def plan(
    reference: xr.Dataset,
    candidate: xr.Dataset,
    floor: tuple[xr.Dataset, xr.Dataset],
    *,
    scoring: str = "replay",
    margin: float | None = None,
    tokens_per_second: float = math.nan,
) -> Plan:
    """Plan a comparison from a pilot of the same four cells.

    Parameters
    ----------
    reference, candidate
        Shards (cell: 1) of the pilot.
    floor
        The two shards of its floor.
    scoring
        "replay" or "decode".
    margin
        c; by default that of ``params/gates.yml`` for the rounding classes at hand.
    tokens_per_second
        Speed to reckon with; by default the slowest that the pilot's shards recorded.

    Raises
    ------
    RefusedError
        Where the pilot cannot be compared.
    RuitongError
        For a margin that is not positive, a speed that is not, or a pilot whose R is not defined.
    """
    if margin is not None and not margin > 0:
        raise RuitongError(f"margin must be above 0 (R at most the margin is acceptable), got {margin}")
    if tokens_per_second <= 0:
        raise RuitongError(f"tokens_per_second must be above 0, got {tokens_per_second}")
    kl, base = (metrics.kl(align(a, b, scoring=scoring)) for a, b in ((reference, candidate), floor))
    r = ratio(kl, base)
    if r.status != "ok" or not math.isfinite(r.error) or r.error == 0:
        raise RuitongError(f"the pilot's R is not defined ({r.status}, {r.n_prompts} prompts): no plan can rest on it")
    classes = [
        rounding_class(a["precision"].values.item(), b["precision"].values.item())
        for a, b in ((reference, candidate), floor)
    ]
    c = margin_for(classes[0], classes[1])[0].value if margin is None else margin
    cells = {s["cell"].values.item(): s for s in (reference, candidate, *floor)}
    per_prompt = float(np.mean([s["n_tokens"].sel(scoring=scoring).values.mean() for s in cells.values()]))
    speed = tokens_per_second if math.isfinite(tokens_per_second) else _slowest(cells, scoring)
    least = gates()["minimum_prompts"]
    n, reason = None, f"none: the pilot's interval [{r.lo:.3g}, {r.hi:.3g}] holds the margin {c:g}, R may be c itself"
    if not r.lo <= c <= r.hi:
        n = prompts_needed(r, c)
        reason = f"R {r.value:.3g} against the margin {c:g}; at least {least}" if n else "none: R is too close to c"
    tokens = None if n is None else math.ceil(n * per_prompt * len(cells))
    return Plan(
        n_prompts=n,
        reason=reason,
        ratio=r,
        margin=c,
        spread=r.error * math.sqrt(r.n_prompts),
        n_cells=len(cells),
        tokens_per_prompt=per_prompt,
        n_tokens=tokens,
        tokens_per_second=speed,
        minutes=tokens / speed / 60 if tokens is not None and math.isfinite(speed) else None,
    )


def _slowest(cells: dict[str, xr.Dataset], scoring: str) -> float:
    """Return the lowest speed that the cells recorded, tokens a second; NaN where one recorded none."""
    timings = [schema.provenance(s).get("timing", {}).get(scoring, {}) for s in cells.values()]
    speeds = [t.get("tokens_per_second") for t in timings]
    return min(speeds) if all(speeds) else math.nan
