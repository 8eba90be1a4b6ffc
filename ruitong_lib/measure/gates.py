"""Gates: whether the answers to tasks changed, candidate against reference, from two shards alone.

Two forms of one item. Free: the decoded text, read by the item's parser (:mod:`ruitong_lib.measure.answers`).
Constrained: the option with the largest logprob at the first position of the replay, which needs no able model and has
a margin. Changed is what differs from the reference, never from the key; the key gives the direction alone.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
import yaml

from ruitong_lib import paths, schema
from ruitong_lib.errors import RefusedError, RuitongError
from ruitong_lib.measure import answers
from ruitong_lib.measure.align import align, axis_name, check, differs_in, one_cell
from ruitong_lib.measure.shares import decide, upper_bound
from ruitong_lib.measure.verdict import mcnemar
from ruitong_lib.prompts import Prompt, load_prompts

FORMS = ("free", "constrained")
_LENGTH = schema.FINISH.index("length")


def answer_table(
    reference: xr.Dataset,
    candidate: xr.Dataset,
    *,
    floor: tuple[xr.Dataset, xr.Dataset] | None = None,
    items: Sequence[Prompt] | None = None,
    forms: Sequence[str] = FORMS,
) -> pd.DataFrame:
    """Return what both sides answered to each item.

    Parameters
    ----------
    reference, candidate
        Shards (cell: 1) of one prompt set with gate items. Free answers need a decode, constrained ones a replay.
    floor
        The two shards of the noise floor; fills ``inside_floor``.
    items
        The gate items; by default those of the shard's own prompt set, found by name and checked by hash.
    forms
        "free", "constrained"; a form that a side has not collected is left out.

    Returns
    -------
    One row per (prompt, form): ``prompt``, ``gate``, ``form`` ("free", "constrained"), ``reference_answer`` and
    ``candidate_answer`` (canonical text; None is "no parseable answer"), ``changed``, ``reference_margin`` and
    ``candidate_margin`` (nat: logprob of the best option less that of the second; NaN for the free form),
    ``inside_floor`` (constrained form with a floor: the larger of both margins is below twice the floor's largest
    change of a margin; else NA), ``reference_correct``, ``candidate_correct`` (by key, for direction; NA without key).

    Raises
    ------
    RefusedError
        For shards that cannot be compared, texts with other token limits, prompts that are no gate items, or a prompt
        set that is unknown or has changed since.
    """
    a, b = one_cell(reference, "reference"), one_cell(candidate, "candidate")
    known = {p.id: p for p in (gate_items(a) if items is None else items)}
    rows: list[dict[str, Any]] = []
    for form, scoring in zip(FORMS, schema.SCORINGS, strict=True):
        if form not in forms or not all(_has(side, form, scoring) for side in (a, b)):
            continue
        limits = [int(side["max_new_tokens"]) for side in (a, b)]
        if form == "free" and limits[0] != limits[1]:
            raise RefusedError(
                f"the sides decoded up to {limits[0]} and {limits[1]} tokens, so their texts are cut at other places. "
                "Collect both with one max_new_tokens, or compare the constrained form alone (--form constrained)"
            )
        if schema.provenance(a).get("identity") == "text":
            align(a, b, scoring=scoring)  # the texts have to show that both sides ran the same thing
        check(a, b, scoring)
        limit = margin_limit(*floor) if floor and form == "constrained" else math.nan
        sides = [_free(s, known) if form == "free" else _constrained(s, known) for s in (a, b)]
        rows += [
            _row(known[p], form, mine, sides[1][p], limit)
            for p, mine in sides[0].items()
            if p in sides[1]  # an option that one side's server did not list leaves no constrained form
        ]
    if not rows:
        raise RefusedError(
            f"no gate can be read from {a['cell'].item()} and {b['cell'].item()}: they share neither a decode (free "
            "answers) nor a replay that holds the answer options. Collect both with scoring='both' and prompts='gates'"
        )
    table = pd.DataFrame(rows)
    for side in ("reference", "candidate"):  # pandas turns None into NaN where the column is text
        table[f"{side}_answer"] = pd.Series([r[f"{side}_answer"] for r in rows], dtype=object)
    for name in ("inside_floor", "reference_correct", "candidate_correct"):
        table[name] = table[name].astype("boolean")
    return table


class Answer(NamedTuple):
    """One side's answer to one item."""

    answer: str | None
    margin: float = math.nan  # nat


def _row(item: Prompt, form: str, a: Answer, b: Answer, limit: float) -> dict[str, Any]:
    key = answers.key_answer(item)
    right = [None if key is None else x.answer is not None and answers.same(x.answer, key, item) for x in (a, b)]
    return {
        "prompt": item.id,
        "gate": item.gate,
        "form": form,
        "reference_answer": a.answer,
        "candidate_answer": b.answer,
        "changed": not answers.same(a.answer, b.answer, item),
        "reference_margin": a.margin,
        "candidate_margin": b.margin,
        "inside_floor": None if math.isnan(limit) else max(a.margin, b.margin) < limit,
        "reference_correct": right[0],
        "candidate_correct": right[1],
    }


def gate_items(shard: xr.Dataset, prompts: str = "") -> tuple[Prompt, ...]:
    """Return the gate items of a shard: those of its prompt set that it ran, facts and all.

    The set is found by the name in the provenance, or given, and has to have the hash that the shard was collected
    with. A published run, whose prompts have no set, takes the items of ``params/corpora.yml`` by the hash of their
    text.

    Parameters
    ----------
    shard
        Shard (cell: 1).
    prompts
        The set's name or file, where it is not where it was.

    Raises
    ------
    RefusedError
        For a set that is not here or has another hash, or that has no gate items.
    """
    cell = one_cell(shard, "shard")
    found = schema.provenance(cell)
    ran = {str(p) for p in cell["prompt"].values}
    if found.get("identity") == "text":
        items = tuple(p for p in _published() if p.id in ran)
    else:
        name, sha = prompts or str(found.get("cell", {}).get("prompts", "")), found.get("prompts", {}).get("sha256")
        label = cell["cell"].item()
        if not name or not sha:
            raise RefusedError(f"{label} does not say which prompt set it ran, so its answers cannot be read")
        try:
            known = load_prompts(name)
        except RuitongError as e:
            raise RefusedError(f"the prompt set {name!r} of {label} is not here; give its file (--prompts): {e}") from e
        if known.sha256 != sha:
            raise RefusedError(
                f"the prompt set {name!r} has SHA-256 {known.sha256[:12]}… here, {label} was collected with "
                f"{str(sha)[:12]}…: its items changed. Give the file of that time (--prompts), or collect again"
            )
        items = tuple(p for p in known.prompts if p.gate and p.id in ran)
    if not items:
        raise RefusedError(
            f"{cell['cell'].item()} ran {cell['prompts'].item()!r}, which has no gate items; collect prompts='gates', "
            "or give your own prompts a gate and a parser"
        )
    for item in items:
        answers.check(item)
    return items


@functools.cache
def _published() -> tuple[Prompt, ...]:
    document = yaml.safe_load((paths.PARAMS / "corpora.yml").read_text(encoding="utf-8"))
    return tuple(
        Prompt(f"q-{sha}", facts["gate"], facts.get("language", "en"), "", gate=facts["gate"], parser=facts["parser"],
               options=tuple(facts.get("options", ())), key=str(facts.get("key", "")),
               tolerance=float(facts.get("tolerance", 0)), pattern=facts.get("pattern", ""))
        for sha, facts in (document.get("gates") or {}).items()
    )  # fmt: skip


def _has(cell: xr.Dataset, form: str, scoring: str) -> bool:
    missing = schema.STATES.index("missing")
    ran = bool((cell["state"].sel(scoring=scoring).values != missing).all())
    return ran and (form == "free" or bool(schema.provenance(cell).get("options")))


def _free(cell: xr.Dataset, items: Mapping[str, Prompt]) -> dict[str, Answer]:
    cut = cell["finish_reason"].sel(scoring="decode").values == _LENGTH
    rows = zip(cell["prompt"].values, cell["text"].values, cut, strict=True)
    return {p: Answer(answers.parse(str(text), items[p], cut=bool(c))) for p, text, c in rows if p in items}


def _constrained(cell: xr.Dataset, items: Mapping[str, Prompt]) -> dict[str, Answer]:
    """Return the best option at position 0 of the replay; a tie goes to the option that the item lists first."""
    found = {}
    for p, known in option_logprobs(cell).items():
        lp = [known.get(o, math.nan) for o in items[p].options] if p in items else []
        if lp and all(map(math.isfinite, lp)):
            best, second = sorted(lp, reverse=True)[:2]
            found[p] = Answer(items[p].options[lp.index(best)], best - second)
    return found


def option_logprobs(shard: xr.Dataset) -> dict[str, dict[str, float]]:
    """Return this cell's logprob of each answer option: prompt id → option → nat, NaN where it was not recorded.

    The shard says which ids are options (provenance); the replay holds their exact logprobs at position 0.
    """
    cell = one_cell(shard, "shard")
    options: dict[str, dict[str, int]] = schema.provenance(cell).get("options") or {}
    ids = cell["anchor_token_id"].values[:, 0]
    logprob = cell["anchor_logprob"].values[:, 0].astype(np.float64)
    found = {}
    for row, prompt in enumerate(map(str, cell["prompt"].values)):
        if prompt in options:
            at = {int(i): float(x) for i, x in zip(ids[row], logprob[row], strict=True) if i >= 0}
            found[prompt] = {option: at.get(i, math.nan) for option, i in options[prompt].items()}
    return found


def margin_limit(reference: xr.Dataset, candidate: xr.Dataset) -> float:
    """Return twice the floor's largest change of an option margin (nat); NaN where the floor has none.

    The margin is that of the floor's reference: between its best and its second option.
    """
    sides = [option_logprobs(s) for s in (reference, candidate)]
    changes = []
    for p, lp in sides[0].items():
        other = sides[1].get(p, {})
        best, second = sorted(lp, key=lambda o: -lp[o])[:2]
        changes.append(abs((lp[best] - lp[second]) - (other.get(best, math.nan) - other.get(second, math.nan))))
    known = [x for x in changes if math.isfinite(x)]
    return 2 * max(known) if known else math.nan


def gate_table(
    reference: xr.Dataset,
    candidate: xr.Dataset,
    floor: tuple[xr.Dataset, xr.Dataset] | None = None,
    *,
    items: Sequence[Prompt] | None = None,
    forms: Sequence[str] = FORMS,
) -> list[dict[str, Any]]:
    """Return one row per gate and form, and one for all items of a form.

    Parameters
    ----------
    reference, candidate
        As :func:`answer_table`.
    floor
        Two shards that differ only in something that should not matter, over the same items.
    items, forms
        As :func:`answer_table`.

    Returns
    -------
    Rows with ``gate`` (a name, or "all"), ``form``, ``n`` (items that a side answered), ``silent`` (items that none
    did: they show no equality, so they are left out of all other numbers), ``unscored`` (constrained: items whose
    options share a first token here, or were not recorded), ``changed``, ``share``, ``bound`` (one-sided
    95 % Clopper–Pearson upper bound of the changed share), ``unparseable_reference``, ``unparseable_candidate``;
    ``floor`` (what it differs in), ``floor_changed``, ``floor_bound``, ``difference`` (changed share less the
    floor's, over the same items), ``beyond`` (items that changed and that the floor left alone) and ``beyond_bound``;
    ``inside_floor`` and ``changed_inside_floor`` (items whose option margin lies inside the floor, which ends at
    ``near_tie`` nat: constrained); ``lost``,
    ``gained``, ``p_direction`` (exact McNemar; never a ranking); ``margin``, ``verdict`` (EQUIVALENT, DIFFERENT,
    INCONCLUSIVE), ``reason``, ``n_needed``. What is not defined is NaN or None.

    Raises
    ------
    RefusedError
        See :func:`answer_table`; and for a floor over other items.

    Notes
    -----
    EQUIVALENT needs the bound inside the margin of ``params/gates.yml`` and its smallest number of items. The bound is
    that of the items which changed and which the floor left alone: exact, and an upper bound of the difference.
    DIFFERENT needs a floor, and the difference above the margin: the lower bound of the items that only the comparison
    changed less the upper bound of those that only the floor changed, each one-sided at 97.5 %.
    """
    items = gate_items(reference) if items is None else items
    if floor is not None and _labels(*floor) == _labels(reference, candidate):
        raise RefusedError(
            "the floor is this pair itself, so nothing could lie beyond it; give two other cells that differ only in "
            "something that should not matter"
        )
    gate_of = {i.id: i.gate for i in items}
    with_options = {i.id for i in items if i.options} & set(map(str, reference["prompt"].values))
    table = answer_table(reference, candidate, floor=floor, items=items, forms=forms)
    noise, name = None, ""
    if floor is not None:
        noise = answer_table(*floor, items=items, forms=tuple(dict.fromkeys(table["form"])))
        name = axis_name(differs_in(one_cell(floor[0], "floor"), one_cell(floor[1], "floor")))
    rows = []
    for form in FORMS:
        of_form = table[table["form"] == form].set_index("prompt")
        if of_form.empty:
            continue
        of_floor = None if noise is None else noise[noise["form"] == form].set_index("prompt")
        if of_floor is not None:
            _same_items(of_form, of_floor, form)
            of_floor = of_floor.loc[of_form.index]
        spoken = _answered(of_form)
        for gate in (*dict.fromkeys(of_form["gate"]), "all"):
            inside = of_form["gate"].eq(gate) | (gate == "all")
            part, n_silent = of_form[inside & spoken], int((inside & ~spoken).sum())
            quiet = None if of_floor is None else of_floor.loc[part.index, "changed"].to_numpy(dtype=bool)
            row = {"gate": gate, "form": form, "floor": name, "silent": n_silent, **_summary(part, quiet)}
            if form == "constrained":
                row["near_tie"] = margin_limit(*floor) if floor else math.nan
                row["unscored"] = len({p for p in with_options if gate in ("all", gate_of[p])} - set(of_form.index))
            rows.append(row)
    return rows


def _labels(*sides: xr.Dataset) -> set[str]:
    return {str(one_cell(s, "shard")["cell"].item()) for s in sides}


def _answered(table: pd.DataFrame) -> pd.Series:
    return table["reference_answer"].notna() | table["candidate_answer"].notna()


def _same_items(table: pd.DataFrame, floor: pd.DataFrame, form: str) -> None:
    other = table.index.difference(floor.index)
    if len(other):
        raise RefusedError(
            f"the floor answered {len(floor)} items in the {form} form and lacks {len(other)} of the comparison's "
            f"{len(table)} (e.g. {other[0]!r}); floor changes are subtracted item by item. Collect the floor's cells "
            "with the same prompts and scoring"
        )


def _summary(part: pd.DataFrame, noise: np.ndarray[Any, Any] | None) -> dict[str, Any]:
    changed = part["changed"].to_numpy(dtype=bool)
    n, k = len(changed), int(changed.sum())
    row: dict[str, Any] = {"n": n, "changed": k, "share": k / n if n else math.nan, "bound": upper_bound(k, n)}
    for side in ("reference", "candidate"):
        row[f"unparseable_{side}"] = int(part[f"{side}_answer"].isna().sum())
    moved = None if noise is None else int(noise.sum())
    only = k if noise is None else int((changed & ~noise).sum())
    row |= {
        "floor_changed": moved,
        "floor_bound": math.nan if moved is None else upper_bound(moved, n),
        "difference": math.nan if moved is None or not n else (k - moved) / n,
        "beyond": None if moved is None else only,
        "beyond_bound": math.nan if moved is None else upper_bound(only, n),
    }
    inside = part["inside_floor"].fillna(False).to_numpy(dtype=bool)
    row["inside_floor"] = int(inside.sum()) if part["inside_floor"].notna().any() else None
    row["changed_inside_floor"] = None if row["inside_floor"] is None else int((changed & inside).sum())
    keyed = part[part["reference_correct"].notna()]
    direction = mcnemar(*(keyed[f"{side}_correct"].astype(bool).tolist() for side in ("reference", "candidate")))
    row |= {"lost": direction["lost"], "gained": direction["gained"], "p_direction": direction["p_value"]}
    return row | decide(n, k, only, None if noise is None else int((noise & ~changed).sum()))
