"""The delta table as Markdown: the rows for people, then decode, oracle, router and every other floor."""

import math
from collections.abc import Sequence
from typing import Any

from ruitong_lib.measure import floor as floors
from ruitong_lib.report import oracle as oracles
from ruitong_lib.report import router

Row = dict[str, Any]
RUNG_ORDER = ["rerun", "phase", *[r for r in floors.RUNGS if r != "rerun"], "two roundings"]


def number(x: float | None, digits: int = 3) -> str:
    """Format a number for a table; undefined is an en dash."""
    if x is None or not math.isfinite(x):
        return "–"
    return f"{x:.{digits}g}" if x == 0 or 1e-2 <= abs(x) < 1e4 else f"{x:.{digits - 1}e}"


def to_markdown(rows: Sequence[Row], *, title: str = "") -> str:
    """Return the table for people: the rows with their floors, then each delta over every other floor at hand."""
    head = (
        "axis", "reference → candidate", "n (prompts, positions)", "KL, nat [95 %]", "p99", "max",
        "flips (tied), top-1", "mass shift", "floor: rung, KL", "rounding: delta / floor", "R = delta / floor [95 %]",
        "verdict",
    )  # fmt: skip
    lines = [
        f"# {title or 'Delta table'}",
        "",
        *_how_to_read([r for r in rows if r["status"] == "ok"]),
        "",
        _line(head),
        _line(["---"] * len(head)),
    ]
    ok = [r for r in rows if r["status"] == "ok"]
    for r in ok:
        kl, top1, tv = (r["metrics"][m] for m in ("kl", "top1_agreement", "prob_mass_shift"))
        notes = r["notes"]
        lines.append(
            _line(
                [
                    r["axis"],
                    r["change"],
                    f"{r['n_prompts']}, {r['n_positions']}",
                    "identical" if notes["identical"] else _interval(kl),
                    number(kl["p99"]),
                    number(kl["max"]),
                    f"{notes['flips']} ({notes['tied_flips']}), {number(top1['value'], 4)}",
                    number(tv["value"]),
                    _floor_text(r["floor"]),
                    f"{r['rounding_class']} / {r['floor']['rounding_class'] if r['floor'] else '–'}",
                    _ratio_text(r["ratio"]),
                    r["verdict"]["verdict"] + (" (exploratory)" if r.get("exploratory") else ""),
                ]
            )
        )
    lines += [
        "",
        *[f"- {r['axis']}, {r['change']}: **{r['verdict']['verdict']}**, {_reasons(r)}" for r in ok],
    ]
    lines += [f"\n**{r['status']}** `{r['candidate']}`: {r['reason']}" for r in rows if r["status"] != "ok"]
    sections = [*_decode_lines(ok), "", *oracles.lines(ok), *router.lines(ok), *_every_floor_lines(ok)]
    return "\n".join([*lines, "", *sections]) + "\n"


def _reasons(row: Row) -> str:
    note = row["notes"].get("weights")
    return "; ".join([*row["verdict"]["reasons"], *([note] if note else [])])


def _how_to_read(rows: Sequence[Row]) -> list[str]:
    kl = "KL: mean over positions of the lower bound from the k best, both directions averaged"
    lines = {
        "replay": [
            f"{kl}, in replay of the anchor.",
            "Floor: the largest of batch size, batch composition and attention on the same hardware, engine and",
            "precision, without the row's own axis.",
        ],
        "decode": [
            f"{kl}, in decode up to and including the first difference.",
            "Floor: borrowed, one bf16 rounding; for two bf16 sides the sum of both sides' KL to one finer cell.",
            "Exploratory: the rules were set after these data had been seen.",
        ],
    }
    scorings = dict.fromkeys(r["scoring"] for r in rows)
    return [
        *[x for s in scorings for x in lines[s]],
        "R: ratio of sums over common positions, jackknife-t interval over prompts.",
        "A ratio across rounding classes (a one-rounding delta over a two-rounding floor) is no equivalence statement.",
    ]


def _decode_lines(rows: Sequence[Row]) -> list[str]:
    decoded = [r for r in rows if r.get("decode")]
    if not decoded:
        return []
    head = (
        "axis",
        "reference → candidate",
        "identical texts",
        "tokens lost to divergence",
        "length ratio",
        "its floor: identical texts, tokens lost",
    )
    out = ["## Decode: the cell's own greedy text", "", _line(head), _line(["---"] * len(head))]
    for r in decoded:
        m, floor = r["decode"]["metrics"], r["decode"].get("floor")
        n = m["identical_texts"]["n"]
        if not floor:
            out.append(_line([r["axis"], r["change"], "not shown: no floor of this row was decoded", "", "", ""]))
            continue
        fm = floor["metrics"]
        same = round(fm["identical_texts"]["value"] * fm["identical_texts"]["n"])
        base = f"{floor['rung']}: {same} of {fm['identical_texts']['n']}, {number(fm['mean_tokens_lost']['value'])}"
        out.append(
            _line(
                [
                    r["axis"],
                    r["change"],
                    f"{round(m['identical_texts']['value'] * n)} of {n}",
                    f"{_interval(m['mean_tokens_lost'])} of {r['decode']['notes']['horizon']}",
                    number(m["length_ratio"]["value"]),
                    base,
                ]
            )
        )
    return out


def _every_floor_lines(rows: Sequence[Row]) -> list[str]:
    """One line a floor, one column a row of the table: R [95 %]."""
    floors_seen = {(f["rung"], f["reference"], f["candidate"]): f for r in rows for f in r["over_every_floor"]}
    head = ["floor", "between", "KL, nat", "rounding", *[f"{r['axis']}: {r['change']}" for r in rows]]
    out = ["## Every delta over every other floor at hand: R [95 %]", "", _line(head), _line(["---"] * len(head))]
    for key, f in sorted(floors_seen.items(), key=lambda x: RUNG_ORDER.index(x[0][0])):
        over = [
            next((g for g in r["over_every_floor"] if (g["rung"], g["reference"], g["candidate"]) == key), None)
            for r in rows
        ]
        ratios = [
            "–" if g is None else _ratio_text({k: g[f"ratio_{k}"] for k in ("value", "lo", "hi", "status")})
            for g in over
        ]
        # The two-rounding sum belongs to a row's own two sides, so it has no one value.
        kl = "–" if f["rung"] == "two roundings" else number(f["mean_kl"])
        out.append(_line([f["rung"], f["between"], kl, f["rounding_class"], *ratios]))
    return out


def _interval(m: Row) -> str:
    return f"{number(m['value'])} [{number(m['lo'])}, {number(m['hi'])}]"


def _floor_text(floor: Row | None) -> str:
    if floor is None:
        return "none measured"
    side = "" if floor["side"] == "reference" else " (candidate's)"
    return f"{floor['rung']}{side}, {number(floor['mean_kl'])}"


def _ratio_text(ratio: Row | None) -> str:
    if ratio is None:
        return "no floor"
    return _interval(ratio) if ratio["status"] == "ok" else str(ratio["status"])


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"
