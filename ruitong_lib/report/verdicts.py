"""Figures of verdicts: R of every pair against its margin, the gaps that flips sit at, what the simulation shows."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from ruitong_lib.measure.kernels import Array
from ruitong_lib.measure.pairs import Pair
from ruitong_lib.measure.simulate import Coverage, Rate
from ruitong_lib.report import drawing


@drawing.styled
def plot_ratios(rows: Sequence[Pair], *, margins: tuple[float, float] = (2.0, 4.0), ax: Axes | None = None) -> Axes:
    """Draw R with its 95 % interval for every pair that was compared, over both kinds of floor.

    Parameters
    ----------
    rows
        Pairs of :func:`ruitong_lib.measure.pairs.judge_pairs`.
    margins
        c against a floor of the same rounding class, and against a one-rounding floor.
    ax
        Where to draw; by default a new figure of two columns.
    """
    shown = [r for r in rows if r.verdict and r.verdict.ratio]
    own = ax is None
    ax = drawing.axes(ax, (7, 0.9 + 0.24 * len(shown)))
    same, other = drawing.DELTA, drawing.PALETTE[1]
    for y, r in enumerate(shown):
        for v, colour, marker, dy in ((r.verdict, same, "o", 0.13), (r.one_rounding, other, "s", -0.13)):
            if v and v.ratio:
                ax.plot([v.ratio.lo, v.ratio.hi], [y - dy] * 2, color=colour)
                ax.plot(v.ratio.value, y - dy, marker, color=colour)
    (c, c_one), top = margins, len(shown) - 0.4
    ax.axvline(1, color="black", linewidth=0.6)
    ax.axvline(c, color=same, linestyle="--", linewidth=0.8)
    ax.axvline(c_one, color=other, linestyle="--", linewidth=0.8)
    ax.plot([], [], "o-", color=same, label=f"over a floor of the same rounding class (margin {c:g})")
    ax.plot([], [], "s-", color=other, label=f"over the one-rounding floor (margin {c_one:g})")
    ax.set_ylim(top, -0.6)
    ax.set_yticks(range(len(shown)), [f"{r.reference} → {r.candidate}" for r in shown])
    ax.set_xscale("log")
    ticks = [
        t
        for t in (0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 10, 20, 50, 100)
        if ax.get_xlim()[0] <= t <= ax.get_xlim()[1]
    ]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("R = Σ KL delta / Σ KL floor; line: 95 %, jackknife-t over prompts")
    ax.grid(True, axis="x")
    ax.legend(loc="upper center", bbox_to_anchor=(0.4, -0.13), ncols=2)
    n = {r.verdict.ratio.n_prompts for r in shown if r.verdict and r.verdict.ratio}
    refused = sum(bool(r.refusal) for r in rows)
    lines = (f"{len(shown)} pairs, {drawing.span(n)} prompts each, decode up to and including the first difference",)
    drawing.title(ax, (*lines, f"{refused} pairs refused: another configuration"), 110, whole=own)
    return ax


@drawing.styled
def plot_flip_gaps(gaps: Mapping[str, Array], *, limit: float, ax: Axes | None = None) -> Axes:
    """Draw, for each group of pairs, the share of flips at or below each reference gap.

    Parameters
    ----------
    gaps
        Name of a group → reference gaps (nat) of its first differing tokens.
    limit
        Twice the floor's largest change: a flip beyond it is not rounding.
    ax
        Where to draw; by default a new figure of one column.
    """
    own = ax is None
    ax = drawing.axes(ax, (3.5, 3.0))
    styles = zip(gaps.items(), ("-", "--", ":"), (drawing.DELTA, drawing.MARK, drawing.FLOOR), strict=False)
    for (name, values), line, colour in styles:
        x = np.sort(np.maximum(values, 1 / 64))  # exact ties at the left edge of a log axis
        ax.step(
            [1 / 64, *x], np.arange(len(x) + 1) / len(x), line, where="post", color=colour, label=f"{name}, n {len(x)}"
        )
    ax.axvline(limit, color="black", linewidth=0.6)
    ax.annotate("beyond: not rounding", (limit, 0.04), (3, 0), textcoords="offset points", fontsize=7)
    ax.set_xscale("log")
    ax.set_xlim(1 / 64, 20)
    drawing.log_ticks(ax.xaxis)
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
    ax.set_xlabel("reference's gap at the flip, nat (ties at the left edge)")
    ax.set_ylabel("share of flips at or below")
    ax.grid(True)
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2))
    drawing.title(ax, ("Where the first differing tokens sit",), 54, whole=own)
    return ax


@drawing.styled
def plot_simulation(coverages: Sequence[Coverage], powers: Mapping[str, Rate]) -> Figure:
    """Draw coverage, false verdicts at R = c, and power at the planned n, each with its Monte-Carlo error (2 SE).

    Parameters
    ----------
    coverages
        One a number of prompts.
    powers
        Label of a plan → how often it decided rightly.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(7, 2.9))
    x = np.arange(len(coverages))
    ticks = [str(c.n_prompts) for c in coverages]
    kinds = (
        ("jackknife", "jackknife-t over prompts", "o-", drawing.DELTA),
        ("percentile_bootstrap", "percentile bootstrap", "s--", drawing.PALETTE[2]),
        ("iid_tokens", "tokens as if independent", "v:", drawing.MARK),
    )
    for name, label, line, colour in kinds:
        _rates(left, x, [getattr(c, name) for c in coverages], line=line, colour=colour, label=label)
    left.axhspan(0.93, 0.97, color="#e8e8e8", linewidth=0)
    left.set_title("95 % interval holds the truth")
    for name, label, line, colour in (
        ("false_equivalent", "U < c", "o-", drawing.DELTA),
        ("false_different", "L > c", "s--", drawing.PALETTE[1]),
    ):
        _rates(middle, x, [getattr(c, name) for c in coverages], line=line, colour=colour, label=label)
    middle.axhline(0.05, color="black", linewidth=0.6)
    middle.set_ylim(0, 0.06)
    middle.set_title("false verdicts where R = c")
    for ax in (left, middle):
        ax.set_xticks(x, ticks)
        ax.set_xlabel("prompts")
    at = np.arange(len(powers))
    _rates(right, at, list(powers.values()), line="o", colour=drawing.DELTA, label="simulated")
    right.axhline(0.8, color="black", linewidth=0.6)
    right.set_ylim(0.5, 1)
    right.set_xticks(at, list(powers), rotation=40, ha="right")
    right.set_title("power at the planned n")
    for ax in (left, middle, right):
        ax.yaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
        ax.grid(True, axis="y")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22))
    middle.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22))
    n = drawing.span(c.simulations for c in coverages)
    drawing.title(figure, (f"{n} simulated comparisons a point; bars: two Monte-Carlo standard errors",), 110)
    return figure


def _rates(ax: Axes, x: Array, rates: Sequence[Rate], *, line: str, colour: str, label: str) -> None:
    errors = [2 * r.error for r in rates]
    ax.errorbar(x, [r.value for r in rates], errors, fmt=line, color=colour, label=label, elinewidth=0.8)
