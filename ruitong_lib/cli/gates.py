"""The verb that compares answers."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ruitong_lib.cli import Json, Shard, app, print_json
from ruitong_lib.errors import RuitongError, did_you_mean

_EXIT = {"EQUIVALENT": 0, "DIFFERENT": 1, "INCONCLUSIVE": 3}


@app.command()
def gates(
    reference: Shard,
    candidate: Shard,
    floor: Annotated[
        tuple[str, str] | None, typer.Option(help="The two shards of the noise floor, over the same items.")
    ] = None,
    prompts: Annotated[
        str, typer.Option(help="File of the shards' prompt set, where it is not where it was; its hash is checked.")
    ] = "",
    form: Annotated[str, typer.Option(help="free or constrained; by default both, where both sides have them.")] = "",
    answers: Annotated[bool, typer.Option(help="List every item whose answer changed.")] = False,
    as_json: Json = False,
) -> None:
    """Compare the answers of two shards: how many changed, per gate and form, with their bounds. No model is needed.

    Exit code: 0 when every form is equivalent over all its items, 1 when one is different, 3 inconclusive, 2 refused.
    """
    from ruitong_lib.collect.corpora import open_shard
    from ruitong_lib.measure.compare import jsonable
    from ruitong_lib.measure.gates import FORMS, answer_table, gate_items, gate_table

    if form and form not in FORMS:
        raise RuitongError(f"form must be one of {', '.join(FORMS)}, got {form!r}.{did_you_mean(form, FORMS)}")
    forms = (form,) if form else FORMS
    a, b = open_shard(reference), open_shard(candidate)
    noise = (open_shard(floor[0]), open_shard(floor[1])) if floor else None
    items = gate_items(a, prompts)
    rows = gate_table(a, b, noise, items=items, forms=forms)
    changed: list[dict[str, Any]] = []
    if answers:
        table = answer_table(a, b, floor=noise, items=items, forms=forms)
        changed = jsonable(table[table["changed"]].astype(object).where(table.notna(), None).to_dict("records"))
    if as_json:
        print_json({"rows": jsonable(rows), **({"changed": changed} if answers else {})})
    else:
        print(_text(rows))
        for r in changed:
            print(f"{r['form']:12} {r['prompt']:30} {r['reference_answer']} → {r['candidate_answer']}")
    found = {r["verdict"] for r in rows if r["gate"] == "all"}
    raise typer.Exit(_EXIT[next(v for v in ("DIFFERENT", "INCONCLUSIVE", "EQUIVALENT") if v in found)])


def _text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the gate table as lines; each ≤ is the one-sided 95 % bound of the share before it."""
    head = (
        "form",
        "gate",
        "n",
        "changed",
        "≤",
        "no answer",
        "silent",
        "floor",
        "≤",
        "beyond",
        "≤",
        "near ties",
        "lost/gained",
    )
    lines = [(*head, "verdict")]
    for r in rows:
        near = "-" if r["inside_floor"] is None else f"{r['changed_inside_floor']}/{r['inside_floor']}"
        lines.append((
            r["form"], r["gate"], str(r["n"]), str(r["changed"]), _percent(r["bound"]),
            f"{r['unparseable_reference']}/{r['unparseable_candidate']}", str(r["silent"]), _count(r["floor_changed"]),
            _percent(r["floor_bound"]), _count(r["beyond"]), _percent(r["beyond_bound"]), near,
            f"{r['lost']}/{r['gained']}", r["verdict"],
        ))  # fmt: skip
    width = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = (0, 1, len(width) - 1)
    shown = [
        "  ".join(x.ljust(w) if i in left else x.rjust(w) for i, (x, w) in enumerate(zip(line, width, strict=True)))
        for line in lines
    ]
    reasons = [f"{r['form']}: {r['verdict']}: {r['reason']}" for r in rows if r["gate"] == "all"]
    return "\n".join([*(s.rstrip() for s in shown), "", *reasons])


def _percent(x: float) -> str:
    return "-" if math.isnan(x) else f"{100 * x:.1f}%"


def _count(x: int | None) -> str:
    return "-" if x is None else str(x)
