"""The figure of drift against answers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ruitong_lib.measure.verdict import gates
from ruitong_lib.report import drawing


@drawing.styled
def plot_claim(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw R of each pair's numbers (left, 95 %) beside the share of answers that changed beyond the floor (right).

    The line at the right goes up to the one-sided 95 % bound. A pair is filled where its items are enough for an
    equivalence, and open where they are not.

    Parameters
    ----------
    rows
        Of :mod:`ruitong_lib.measure.claim`; those without R or without an answered item are left out.
    """
    margin, smallest = (gates()["changed_answers"][k] for k in ("value", "minimum_items"))
    shown = [r for r in rows if r.get("n") and math.isfinite(r["ratio"]) and r["ratio"] > 0]
    fig, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(7, 1.5 + 0.22 * len(shown)))
    for y, r in enumerate(shown):
        style = {"color": drawing.DELTA, "markersize": 4, "linewidth": 1}
        share, fill = r["beyond"] / r["n"], "full" if r["n"] >= smallest else "none"
        left.errorbar(r["ratio"], y, xerr=[[r["ratio"] - r["lo"]], [r["hi"] - r["ratio"]]], fmt="o", **style)
        right.errorbar(share, y, xerr=[[0], [r["beyond_bound"] - share]], fmt="D", fillstyle=fill, **style)
        right.annotate(f" {r['beyond']}/{r['n']}", (r["beyond_bound"], y), va="center", size=7)
    left.set_yticks(range(len(shown)), [f"{r['change']}, {r['form']}" for r in shown])
    left.set_ylim(len(shown) - 0.5, -0.5)
    left.axvline(1, color="black", linewidth=0.6)
    left.set_xscale("log")
    drawing.log_ticks(left.xaxis)
    left.set_xlabel("numbers: R = KL delta / KL floor")
    right.axvline(margin, color="0.3", linestyle="--", linewidth=0.8)
    right.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    right.set_xlim(-0.01, 1.25 * max([margin, *[r["beyond_bound"] for r in shown]]))
    right.set_xlabel("answers changed beyond the floor,\nup to the 95 % bound")
    note = f"Dashed: the gate's margin, {100 * margin:g} %. Open: fewer than {smallest} items, no equivalence."
    drawing.title(fig, ["How far the numbers drift, and how many answers change", note], 100)
    return fig
