"""What a calibration run says: thresholds, held-out check, power of every score against every fault."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from ruitong_lib.errors import RefusedError
from ruitong_lib.measure import scores
from ruitong_lib.measure.align import align
from ruitong_lib.measure.design import SIDES, Design, Layout
from ruitong_lib.measure.faults import FAULTS
from ruitong_lib.measure.gates import gate_table
from ruitong_lib.measure.shares import decide
from ruitong_lib.prompts import Prompt

if TYPE_CHECKING:
    from ruitong_lib.collect.replicas import Replica

POWER = 0.8
_FORM = ("constrained",)
_NUMBERS = ("anchor_logprob", "top_token_id", "top_logprob", "entropy")


class Shards(Protocol):
    """Where the shards of a run are found by their label."""

    def get(self, label: str) -> xr.Dataset:
        """Return a shard."""


def fault_label(name: str, severity: float) -> str:
    """Return the label of a broken replay."""
    return f"fault-{name}-{severity:g}"


def pair_of(design: Design, name: str, severity: float) -> int:
    """Return the held-out pair whose candidate a fault breaks: they take turns, so no pair decides the power."""
    return design.conditions().index((name, severity)) % (len(design.document["held_out"]) // 2)


def broken_replica(design: Design, held_out: Sequence["Replica"], name: str, severity: float) -> "Replica":
    """Return the cell that a fault breaks; one of the cache needs a cell that reads through it."""
    replica = held_out[2 * pair_of(design, name, severity) + 1]
    return dataclasses.replace(replica, split=True) if FAULTS[name].kind == "cache" else replica


def analyse(design: Design, layout: Layout, store: Shards, cells: Mapping[str, Sequence["Replica"]]) -> dict[str, Any]:
    """Score every replay, derive the thresholds, check them on the held-out side, and measure the power.

    Returns
    -------
    ``calibration`` (:func:`ruitong_lib.measure.scores.calibrate`), ``held_out``, ``gates`` (how many floor
    pairs a gate called DIFFERENT), ``power`` (one row a fault and severity), ``smallest`` (per fault and score, the
    mildest severity from which on 80 % are found), ``tables``: the scores of every replicate.
    """
    document = design.document
    shards = {side: [store.get(f"{side}-{i:02d}") for i in range(len(cells[side]))] for side in SIDES}
    tables, identical = {}, {}
    for side in SIDES:
        tables[side], identical[side] = _replicates(shards[side], layout.block)
    found = scores.calibrate(tables["calibration"], level=document["level"], minimum=document["minimum_replicates"])
    result: dict[str, Any] = {
        "design": design.name,
        "calibration": found | {"bit_identical": identical["calibration"], "floors": _floors(shards, cells, layout)},
        "held_out": _held_out(tables, found) | {"bit_identical": identical["held_out"]},
    }
    result["gates"] = _gate_alarms(shards, layout.items)
    rows, faulty = [], []
    for name, severity in design.conditions():
        table, facts = _fault(design, store, layout, shards["held_out"], name, severity)
        alarms = scores.alarms_of(table, found)
        hits = {s: int(alarms[s].sum()) for s in alarms}
        sound = tables["held_out"]
        sound = sound[(sound["pair"] == pair_of(design, name, severity)) & sound["block"].isin(table["block"])]
        ratio = float(table["kl"].mean() / sound["kl"].mean())  # the same pair and blocks, unbroken
        rows.append(
            {"fault": name, "severity": severity, "blocks": len(table), "kl_over_floor": ratio, "hits": hits} | facts
        )
        faulty.append(table.assign(kind="fault", fault=name, severity=severity))
    result["power"] = rows
    result["smallest"] = smallest(rows)
    every = [tables[side].assign(kind=side) for side in SIDES]
    result["tables"] = pd.concat([*every, *faulty], ignore_index=True)
    return result


def _replicates(shards: Sequence[xr.Dataset], blocks: Mapping[str, int]) -> tuple[pd.DataFrame, list[str]]:
    """Score each pair of cells on each block; leave out what is bit-identical, within a pair or to an earlier one."""
    rows, dropped = [], []
    arrays = [s["anchor_logprob"].values[0] for s in shards]
    of = np.array([blocks[str(p)] for p in shards[0]["prompt"].values])
    for i in range(0, len(shards), 2):
        table = scores.block_scores(shards[i], shards[i + 1], blocks).reset_index()
        for b in table["block"]:
            at = of == b
            same = np.array_equal(arrays[i][at], arrays[i + 1][at], equal_nan=True)
            # A cell that repeats an earlier pair's cell on this block would count one rounding twice.
            again = any(
                np.array_equal(arrays[j][at], arrays[k][at], equal_nan=True) for j in range(i) for k in (i, i + 1)
            )
            if same or again:
                dropped.append(f"pair {i // 2}, block {b}")
        table = table[[f"pair {i // 2}, block {b}" not in dropped for b in table["block"]]]
        rows.append(table.assign(pair=i // 2))
    return pd.concat(rows, ignore_index=True), dropped


def _floors(
    shards: Mapping[str, Sequence[xr.Dataset]], cells: Mapping[str, Sequence["Replica"]], layout: Layout
) -> list[dict[str, Any]]:
    """Return the mean KL of every pair: one kind of floor may be larger than another."""
    found = []
    for side in SIDES:
        for i in range(0, len(shards[side]), 2):
            table = scores.block_scores(shards[side][i], shards[side][i + 1], layout.block)
            names = [cells[side][j].name for j in (i, i + 1)]
            found.append({"side": side, "reference": names[0], "candidate": names[1], "kl": float(table["kl"].mean())})
    return found


def _held_out(tables: Mapping[str, pd.DataFrame], found: Mapping[str, Any]) -> dict[str, Any]:
    """Count the alarms of cells and prompts that the thresholds never saw, and hold them against the binomial."""
    table, names = tables["held_out"], list(found["scores"])
    values = {s: table[s].to_numpy(float) for s in names}
    values[scores.COMPOUND] = scores.compound(table, tables["calibration"], names)
    alarms = scores.alarms_of(table, found)
    rates = {
        s: scores.alarm_rate(table, alarms[s].to_numpy(), scores.effective_replicates(table, x))
        for s, x in values.items()
    }
    own = rates[scores.COMPOUND]
    counted, limit = own["rate"] * own["n_eff"], scores.held_out_limit(own["n_eff"], found["level"])
    within = counted <= limit
    return {"rates": rates, "n_eff": own["n_eff"], "alarms_at_n_eff": counted, "limit": limit, "within": within}


def _gate_alarms(shards: Mapping[str, Sequence[xr.Dataset]], items: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Judge the constrained answers of every floor pair, with the next pair of its side as the floor.

    The gate's margin is not calibrated here, so both sides count. A row a gate, with the exact 95 % interval of the
    share of pairs that were called DIFFERENT (Clopper and Pearson 1934, doi:10.1093/biomet/26.4.404) and
    ``needed``, the changes of a pair that would do: where the items are few this is far more than a floor ever changes,
    and no alarm says little.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for side in shards.values():
        for i in range(0, len(side), 2):
            a, b, c, d = (side[(i + j) % len(side)] for j in range(4))
            for row in gate_table(a, b, (c, d), items=items, forms=_FORM):
                found.setdefault(row["gate"], []).append(row)
    rows = []
    for gate, judged in found.items():
        n = max(r["n"] for r in judged)
        needed = next((k for k in range(n + 1) if decide(n, k, k, 0)["verdict"] == "DIFFERENT"), None)
        k = sum(r["verdict"] == "DIFFERENT" for r in judged)
        rate = stats.binomtest(k, len(judged)).proportion_ci(0.95)
        rows.append(
            {"gate": gate, "pairs": len(judged), "different": k, "rate": k / len(judged), "lo": float(rate.low),
             "hi": float(rate.high), "changed": sum(r["changed"] for r in judged),
             "items": sum(r["n"] for r in judged), "items_a_pair": n, "needed": needed}
        )  # fmt: skip
    return rows


def _fault(
    design: Design, store: Shards, layout: Layout, held_out: Sequence[xr.Dataset], name: str, severity: float
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Score a broken candidate against its pair's sound reference, with the sound candidate as the floor."""
    at = 2 * pair_of(design, name, severity)
    keep = [p for p in held_out[at]["prompt"].values if layout.block[str(p)] < _last(design)]
    reference, sound = (held_out[at + j].sel(prompt=keep) for j in (0, 1))
    if FAULTS[name].kind == "shard":
        candidate = FAULTS[name].function(sound, severity)
    else:
        candidate = store.get(fault_label(name, severity))
    facts: dict[str, Any] = {"refused": ""}
    try:
        align(reference, candidate)
    except RefusedError as e:
        facts["refused"] = str(e)
        # As if someone had got round the check of the prompt ids; what is refused for another reason stays refused.
        candidate["prompt_sha256"].values[:] = reference["prompt_sha256"].values
    # Nothing to be found: the defect changes no bit here (an fp16 clamp that nothing reaches).
    facts["no_effect"] = all(np.array_equal(candidate[v].values, sound[v].values, equal_nan=True) for v in _NUMBERS)
    table = scores.block_scores(reference, candidate, layout.block).reset_index()
    try:
        gate = gate_table(reference, candidate, (reference, sound), items=layout.items, forms=_FORM)[-1]
        facts |= {"gate": gate["verdict"], "gate_changed": gate["changed"], "gate_floor": gate["floor_changed"],
                  "gate_items": gate["n"]}  # fmt: skip
    except RefusedError as e:  # the options of processed logprobs may be gone
        facts |= {"gate": "REFUSED", "gate_reason": str(e)}
    return table, facts


def _last(design: Design) -> int:
    return int(design.document["blocks"]["calibration"] + design.document["blocks"]["faults"])


def smallest(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return, per fault and score, the mildest severity from which on at least 80 % of the blocks alarm; else None."""
    found: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(r["fault"] for r in rows):
        mine = [r for r in rows if r["fault"] == name]  # mild to severe
        found[name] = {}
        for s in mine[0]["hits"]:
            least = None
            for r in reversed(mine):
                if r["hits"][s] < POWER * r["blocks"]:
                    break
                least = r["severity"]
            found[name][s] = least
    return found
