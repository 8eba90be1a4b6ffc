"""Drift against answers: how far the numbers of a pair moved, and whether its answers to tasks did, in one row."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError
from ruitong_lib.measure.align import default_scoring, differs_in, one_cell
from ruitong_lib.measure.compare import compare
from ruitong_lib.measure.floor import floor_for, ladder
from ruitong_lib.measure.gates import FORMS, gate_table
from ruitong_lib.measure.pairs import judge_with_floor

_GATE = (
    "n", "silent", "changed", "bound", "floor_changed", "beyond", "beyond_bound", "difference", "near_tie",
    "inside_floor", "changed_inside_floor", "n_needed", "reason",
)  # fmt: skip


def drift_and_answers(
    reference: xr.Dataset,
    candidate: xr.Dataset,
    floor: tuple[xr.Dataset, xr.Dataset] | None,
    *,
    names: tuple[str, str] = ("", ""),
) -> list[dict[str, Any]]:
    """Return the drift of a pair beside the outcome of its gate, one row a form of the gate.

    Parameters
    ----------
    reference, candidate
        Shards (cell: 1) of one prompt set with gate items.
    floor
        The two shards of the noise floor; None where the pair is the floor itself, which then has no R.
    names
        What the rows call the two sides; by default their labels.

    Returns
    -------
    Rows with ``id``, ``reference``, ``candidate``, ``axis``, ``change`` (its two values), ``scoring``, ``kl`` (nat a
    position), ``n_positions``, ``ratio``, ``lo``, ``hi``, ``drift`` (the verdict on the numbers), ``form``, ``gate``
    (the verdict on the answers; REFUSED where the sides do not share the form) and the facts of the row "all" of
    :func:`ruitong_lib.measure.gates.gate_table`. NaN or None where there is no such number.

    Raises
    ------
    RefusedError
        For shards that cannot be compared at all.
    """
    scoring = default_scoring(reference, candidate)
    verdict = None
    if floor is None:
        comparison = compare(reference, candidate, scoring=scoring)
    else:
        comparison, verdict = judge_with_floor(reference, candidate, floor, scoring=scoring)
    r = verdict.ratio if verdict else None
    name = {"reference": names[0] or comparison.reference, "candidate": names[1] or comparison.candidate}
    facts = name | {
        "axis": comparison.axis,
        "change": _change(reference, candidate),
        "scoring": scoring,
        "kl": comparison.metrics["kl"].value,
        "n_positions": comparison.n_positions,
        **{k: getattr(r, v) if r else math.nan for k, v in (("ratio", "value"), ("lo", "lo"), ("hi", "hi"))},
        "drift": verdict.verdict if verdict else "the floor",
    }
    rows = []
    for form in FORMS:
        row = {"id": f"{name['reference']} → {name['candidate']}, {form}", **facts, "form": form}
        try:
            found = gate_table(reference, candidate, floor, forms=(form,))[-1]
        except RefusedError as e:
            rows.append(row | {"gate": "REFUSED", "reason": str(e)})
        else:
            rows.append(row | {"gate": found["verdict"], **{k: found.get(k) for k in _GATE}})
    return rows


def _change(reference: xr.Dataset, candidate: xr.Dataset) -> str:
    own = differs_in(one_cell(reference, "reference"), one_cell(candidate, "candidate"))
    return ", ".join(f"{reference[x].values.item()} → {candidate[x].values.item()}" for x in own)


def of_dataset(ds: xr.Dataset) -> list[dict[str, Any]]:
    """Return the rows of every cell of an aggregate against its reference, each with the floor that the rule picks.

    A cell that differs from the reference in what the floor is made of has no other floor: it is the floor.
    """
    reference, rungs = str(ds.attrs["reference"]), ladder(ds)
    rows = []
    for cell in map(str, ds["cell"].values):
        if cell != reference:
            floor = floor_for(ds, reference, cell, rungs=rungs)
            ends = (schema.select(ds, floor.reference), schema.select(ds, floor.candidate)) if floor else None
            rows += drift_and_answers(schema.select(ds, reference), schema.select(ds, cell), ends)
    return rows


def of_pairs(shards: Mapping[str, xr.Dataset], floor: tuple[str, str]) -> list[dict[str, Any]]:
    """Return the rows of every two of some shards; ``floor`` names two of them. Refused pairs are left out."""
    rows = []
    for a, b in itertools.combinations(shards, 2):
        ends = None if {a, b} == set(floor) else (shards[floor[0]], shards[floor[1]])
        try:
            rows += drift_and_answers(shards[a], shards[b], ends, names=(a, b))
        except RefusedError:
            continue
    return [r for r in rows if r["gate"] != "REFUSED"]


def to_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows for people: bounds are one-sided, 95 %, of the share before them."""
    lines = []
    for r in rows:
        line = {"axis": r["axis"], "reference → candidate": r["change"], "KL, nat": f"{r['kl']:.3g}",
                "R": f"{r['ratio']:.3g} [{r['lo']:.3g}, {r['hi']:.3g}]" if math.isfinite(r["ratio"]) else "",
                "numbers": r["drift"], "form": r["form"]}  # fmt: skip
        if r["gate"] != "REFUSED":
            beyond = r["changed"] if r["beyond"] is None else r["beyond"]
            bound = r["bound"] if r["beyond"] is None else r["beyond_bound"]
            line |= {"items": str(r["n"]), "changed": str(r["changed"]),
                     "floor": "" if r["floor_changed"] is None else str(r["floor_changed"]),
                     "beyond the floor": f"{beyond}, at most {100 * bound:.1f} %"}  # fmt: skip
        lines.append(line | {"answers": r["gate"]})
    return pd.DataFrame(lines).fillna("")
