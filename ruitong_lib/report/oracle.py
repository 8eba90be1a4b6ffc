"""The delta table's section on the oracle: how far each cell is from it, and in which direction."""

import math
from collections.abc import Sequence
from typing import Any

import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError
from ruitong_lib.measure.oracle import against_oracle

Row = dict[str, Any]
READ = (
    "KL to a finer replay of the same anchor, mean over positions; 95 % intervals, jackknife-t over prompts.",
    "Ratio: KL(candidate, oracle) / KL(reference, oracle). Both are of prefill kernels, not of those that decode.",
    "How far and better or worse are two things. Direction: ln q(y) − ln o(y) of the anchor's token; rounding that",
    "favours no token gives about −KL, not 0.",
)


def section(ds: xr.Dataset, reference: xr.Dataset, candidate: xr.Dataset) -> Row | None:
    """Return a row's part on the oracle of the dataset: a triangle, ``{"refused": why}``, or None without an oracle."""
    label = str(ds.attrs.get("oracle", ""))
    if label not in ds["cell"].values:
        return None
    try:
        return against_oracle(reference, candidate, schema.select(ds, label)).to_dict()
    except RefusedError as e:
        return {"refused": str(e)}


def flat(part: Row | None) -> Row:
    """Return a row's part on the oracle as columns of one flat line."""
    if not part or "refused" in part:
        return {"oracle.refused": part["refused"]} if part else {}
    names = ("kl", "lo", "hi", "direction", "status")
    line = {"oracle": part["oracle"], "oracle.further": part["further"]}
    line |= {f"oracle.{side}.{n}": part[side][n] for side in ("reference", "candidate") for n in names}
    return line | {f"oracle.ratio.{n}": part["ratio"][n] for n in ("value", "lo", "hi", "status")}


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the section as Markdown: the reference, then the candidates, the nearest first; none without an oracle."""
    held = [r for r in rows if r.get("oracle")]
    known = [r for r in held if "refused" not in r["oracle"]]
    if not held:
        return []
    head = ("cell", "KL to the oracle, nat [95 %]", "ratio [95 %]", "further", "direction, nat [95 %]")
    out = ["## Distance to the oracle", "", *READ, "", _line(head), _line(["---"] * len(head))]
    if known:
        first = known[0]["oracle"]["reference"]
        out.append(_line(["the reference", distance_text(first), "1", "", direction_text(first)]))
    for r in sorted(known, key=lambda r: r["oracle"]["candidate"]["kl"]):
        part = r["oracle"]
        name, side = f"{r['axis']}: {r['change']}", part["candidate"]
        out.append(_line([name, distance_text(side), ratio_text(part["ratio"]), part["further"], direction_text(side)]))
    out += [f"\n**no oracle** for `{r['candidate']}`: {r['oracle']['refused']}" for r in held if r not in known]
    return [*out, ""]


def distance_text(d: Row) -> str:
    """Return one distance with its interval; below resolution the words, and what the shard holds."""
    if d["status"] == "below resolution":
        return f"below resolution ({_number(d['kl'])} as stored)"
    return str(d["status"]) if d["status"] != "ok" else _interval(d["kl"], d["lo"], d["hi"])


def direction_text(d: Row) -> str:
    """Return one direction with its interval."""
    if d["direction"] is None or not math.isfinite(d["direction"]):
        return "not shown: it wrote the anchor, or the oracle did"
    return _interval(d["direction"], d["direction_lo"], d["direction_hi"])


def ratio_text(r: Row) -> str:
    """Return the ratio with its interval, or why there is none."""
    return _interval(r["value"], r["lo"], r["hi"]) if r["status"] == "ok" else str(r["status"])


def _interval(value: float | None, lo: float | None, hi: float | None) -> str:
    return f"{_number(value)} [{_number(lo)}, {_number(hi)}]"


def _number(x: float | None) -> str:
    from ruitong_lib.report.markdown import number  # the table is made of this section

    return number(x)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"
