"""What a calibration run shows people: thresholds, false alarms, and which score finds which fault."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ruitong_lib.measure.faults import FAULTS
from ruitong_lib.measure.operating import POWER
from ruitong_lib.measure.scores import COMPOUND, SCORES
from ruitong_lib.report import drawing

QUESTIONS = {  # the line that people ask for first
    "top-2 transposed at 1 position in 64": ("transposed", 1 / 64),
    "temperature 1 % off": ("temperature", 0.01),
    "temperature 5 % off": ("temperature", 0.05),
    "one corrupted position in 64": ("top1_demoted", 64),
    "KV position off by one": ("kv_position", 1),
}


def threshold_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """Return, per score: its threshold, the compound's limit, false alarms by cross-validation and held out."""
    c, held = result["calibration"], result["held_out"]
    rows = {}
    for s in [*c["scores"], COMPOUND]:
        facts = c["scores"].get(s, {"threshold": c["threshold"], "limit": math.nan, "unit": "1", "median": math.nan})
        rows[s] = {
            "unit": facts["unit"],
            "floor median": _short(facts["median"]),
            "threshold": _short(facts["threshold"]),
            "compound limit": _short(facts["limit"]),
            "false alarms": _rate(c["false_alarms"][s]),
            "held out": _rate(held["rates"][s]),
            "n_eff": f"{c['false_alarms'][s]['n_eff']:.1f}, {held['rates'][s]['n_eff']:.1f}",
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def gate_alarm_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """Return, per gate on answers, the floor pairs that it called DIFFERENT and the answers that changed in them."""
    rows = {
        r["gate"]: {
            "false alarms": _rate({**r, "alarms": r["different"], "n": r["pairs"]}),
            "changed answers": f"{r['changed']}/{r['items']} = {100 * r['changed'] / r['items']:.1f} %",
            "changes of a pair that it takes": f"{r['needed']} of {r['items_a_pair']}",
        }
        for r in result["gates"]
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def _short(x: float | None) -> str:
    return "" if x is None or not math.isfinite(x) else f"{x:.3g}"


def _rate(r: Mapping[str, float]) -> str:
    return f"{r['alarms']}/{r['n']} = {100 * r['rate']:.1f} % [{100 * r['lo']:.1f}, {100 * r['hi']:.1f}]"


def power_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """Return, per fault and severity: blocks found by the compound and by each score, KL over the floor, the gate."""
    rows = []
    for r in result["power"]:
        hits = {s: f"{n}/{r['blocks']}" for s, n in r["hits"].items()}
        changed = f"{r['gate']}, {r['gate_changed']}/{r['gate_items']}" if "gate_items" in r else r["gate"]
        rows.append(
            {
                "fault": r["fault"],
                "severity": f"{r['severity']:g}",
                "KL / floor": _short(r["kl_over_floor"]),
                "compound": hits.pop(COMPOUND),
                **hits,
                "gate, changed": changed,
                "note": "no effect here" if r["no_effect"] else "manifest refuses" if r["refused"] else "",
            }
        )
    return pd.DataFrame(rows)


def smallest_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """Return, per fault, the mildest severity from which on 80 % of the blocks alarm, by score; empty is none."""
    rows = {
        name: {
            "unit": FAULTS[name].unit,
            "tried": ", ".join(f"{s:g}" for s in FAULTS[name].severities),
            **{s: "" if v is None else f"{v:g}" for s, v in found.items()},
        }
        for name, found in result["smallest"].items()
    }
    table = pd.DataFrame.from_dict(rows, orient="index")
    return table[["unit", "tried", COMPOUND, *[c for c in table if c in SCORES]]]


def missed(result: Mapping[str, Any]) -> pd.DataFrame:
    """Return the known limits: what the compound finds in fewer than 80 % of the blocks."""
    rows = [
        {"fault": r["fault"], "severity": f"{r['severity']:g} ({FAULTS[r['fault']].unit})",
         "found": f"{r['hits'][COMPOUND]}/{r['blocks']}", "KL / floor": _short(r["kl_over_floor"])}
        for r in result["power"]
        if r["hits"][COMPOUND] < POWER * r["blocks"] and not r["no_effect"]
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["fault", "severity", "found", "KL / floor"])


def answers(result: Mapping[str, Any]) -> pd.DataFrame:
    """Return, for each of ``QUESTIONS``, which scores alarm in at least 80 % of the blocks, and in any."""
    rows = {}
    for question, (name, severity) in QUESTIONS.items():
        r = next((r for r in result["power"] if r["fault"] == name and r["severity"] == severity), None)
        if r is None:
            continue
        sure = [s for s, n in r["hits"].items() if n >= POWER * r["blocks"]]
        some = [f"{s} {n}/{r['blocks']}" for s, n in r["hits"].items() if 0 < n < POWER * r["blocks"]]
        rows[question] = {"seen by": ", ".join(sure) or "none", "sometimes by": ", ".join(some)}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["seen by", "sometimes by"])


def text(result: Mapping[str, Any]) -> str:
    """Return the whole result for a terminal."""
    c, held = result["calibration"], result["held_out"]
    parts = [
        f"{result['design']}: m = {c['m']} replicates, n_eff = {c['n_eff']:.1f}; compound threshold "
        f"{_short(c['threshold'])}",
        _frame(threshold_table(result)),
        f"held out: n_eff = {held['n_eff']:.1f}, alarms at n_eff {held['alarms_at_n_eff']:.1f}, at most "
        f"{held['limit']} (95 % quantile of Binomial(n_eff, {1 - c['level']:.2g})): "
        + ("within" if held["within"] else "TOO MANY"),
        "Floor pairs that a gate on answers called DIFFERENT, and answers that changed:",
        _frame(gate_alarm_table(result)),
        _frame(power_table(result), index=False),
        "Mildest severity from which on 80 % of the blocks are found:",
        _frame(smallest_table(result)),
        "Who sees it:",
        _frame(answers(result)),
        "Known limits, missed by the compound in more than 20 % of the blocks:",
        _frame(missed(result), index=False),
        f"{result['seconds_of_last_call']:.0f} s",
    ]
    return "\n\n".join(parts)


def _frame(table: pd.DataFrame, *, index: bool = True) -> str:
    return "none" if table.empty else table.to_string(index=index)


@drawing.styled
def plot_power(result: Mapping[str, Any], *, faults: Sequence[str] = ()) -> Figure:
    """Draw the share of blocks that each score finds, against the severity: one line of squares a fault and severity.

    Parameters
    ----------
    result
        Of a calibration run.
    faults
        Which to draw; by default all.
    """
    rows = [r for r in result["power"] if not faults or r["fault"] in faults]
    names = [COMPOUND, *[s for s in SCORES if s in rows[0]["hits"]]]
    share = np.array([[r["hits"][s] / r["blocks"] for s in names] for r in rows])
    fig, ax = plt.subplots(figsize=(6.5, max(2.8, 0.8 + 0.13 * len(rows))))
    image = ax.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    ax.set_xticks(range(len(names)), [s.replace("_", " ") for s in names], rotation=40, ha="right", fontsize=7)
    ax.set_yticks(range(len(rows)), [f"{r['fault']}  {r['severity']:g}" for r in rows], fontsize=5.5)
    for i in range(1, len(rows)):
        if rows[i]["fault"] != rows[i - 1]["fault"]:
            ax.axhline(i - 0.5, color="0.5", linewidth=0.5)
    ax.axvline(0.5, color="0.2", linewidth=0.8)
    ax.tick_params(length=0)
    bar = fig.colorbar(image, ax=ax, fraction=0.03, pad=0.02, aspect=40)
    bar.set_label("share of blocks found")
    drawing.title(
        fig, [f"What finds which fault ({rows[0]['blocks']} held-out blocks, thresholds at 5 % false alarms)"], 90
    )
    return fig


@drawing.styled
def plot_false_alarms(result: Mapping[str, Any]) -> Figure:
    """Draw the false-alarm rate of each score with its interval: cross-validated, and on held-out cells and prompts."""
    names = list(result["calibration"]["false_alarms"])
    fig, ax = plt.subplots(figsize=(5.5, 0.8 + 0.24 * len(names)))
    for shift, kind, colour, rates in (
        (-0.14, "calibration, cross-validated", drawing.FLOOR, result["calibration"]["false_alarms"]),
        (0.14, "held out", drawing.DELTA, result["held_out"]["rates"]),
    ):
        y = np.arange(len(names)) + shift
        rate, lo, hi = (np.array([100 * rates[s][k] for s in names]) for k in ("rate", "lo", "hi"))
        ax.errorbar(rate, y, xerr=[rate - lo, hi - rate], fmt="o", color=colour, label=kind, markersize=4, linewidth=1)
    ax.axvline(100 * (1 - result["calibration"]["level"]), color="0.3", linestyle="--", linewidth=0.8)
    ax.set_yticks(range(len(names)), [s.replace("_", " ") for s in names])
    ax.invert_yaxis()
    ax.set_xlabel("false alarms, % of replicates")
    ax.set_xlim(left=0)
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=2)
    c, held = result["calibration"], result["held_out"]
    n = held["rates"][COMPOUND]["n"]
    line = f"False alarms: n_eff {c['n_eff']:.1f} of {c['m']} replicates, held out {held['n_eff']:.1f} of {n}"
    drawing.title(fig, [line], 80)
    return fig


def save(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write both figures and the power table of a run; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    c, held = result["calibration"], result["held_out"]
    captions = {
        "power": f"Share of {result['power'][0]['blocks']} held-out blocks in which a score lies above its threshold, "
        f"by fault and severity; thresholds from {c['m']} floor replicates.",
        "false-alarms": "Share of floor replicates above the threshold, 95 % interval by a bootstrap over pairs and "
        f"blocks: {c['m']} cross-validated, {held['rates'][COMPOUND]['n']} held out. Dashed: the share aimed at.",
    }
    figures = {"power": plot_power(result), "false-alarms": plot_false_alarms(result)}
    return [
        path
        for kind, figure in figures.items()
        for path in drawing.save_figure(figure, f"{kind}-{result['design']}", folder, caption=captions[kind])
    ]
