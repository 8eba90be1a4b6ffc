"""Figures: every delta beside its floor, with the number of prompts and positions.

Each function takes its data first and its options by keyword, draws with ``ruitong.mplstyle`` and leaves the global
settings alone, and returns the Axes (one panel) or the Figure (several). Without a floor it raises a RuitongError
that names the cell to collect.
"""

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from ruitong_lib import schema
from ruitong_lib.errors import RuitongError
from ruitong_lib.measure import floor as floors
from ruitong_lib.measure.compare import DRAWS
from ruitong_lib.report import drawing, plotdata
from ruitong_lib.report.drawing import DELTA, FLOOR, MARK, counts, log_ticks, n_text, pair_name, save_figure, short
from ruitong_lib.report.heatmap import plot_prompt_heatmap

__all__ = [
    "plot_delta_rank_prob",
    "plot_divergence",
    "plot_ladder",
    "plot_prompt_heatmap",
    "plot_replay_decode",
    "save_figure",
]
_SIDES = (("delta", DELTA, "-"), ("floor", FLOOR, "--"))


@drawing.styled
def plot_ladder(
    ds: xr.Dataset,
    *,
    reference: str | None = None,
    candidate: str | None = None,
    scoring: str = "replay",
    draws: int = DRAWS,
    seed: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw every floor of an aggregate: mean KL by rung, with its 95 % interval by a bootstrap over prompts.

    Parameters
    ----------
    ds
        An aggregate.
    reference, candidate
        Labels of a row: the floor that the rule gives it is ringed, and its delta drawn as a line.
    scoring
        "replay" or "decode".
    draws, seed
        Of the bootstrap.
    ax
        Where to draw; by default a new figure, 7 in wide.
    """
    if (reference is None) != (candidate is None):
        raise RuitongError("a row has two sides: give reference and candidate, or neither")
    rungs = plotdata.rungs(ds, scoring)
    row = chosen = None
    if reference is not None and candidate is not None:
        row = (reference, candidate)
        chosen = plotdata.row_floor(ds, *row, scoring=scoring)
    names = [plotdata.floor_name(ds, f) for f in rungs]
    y = _heights(rungs, names)
    own = ax is None
    ax = drawing.axes(ax, (7.0, 1.3 + 0.165 * (y[-1] + 1)))
    ax.set_xscale("log")
    coarser = [f.rounding_class.split("×")[-1] for f in rungs]
    styles = drawing.precision_styles(coarser)
    top = 10 * floors.RESOLUTION
    for f, at, precision in zip(rungs, y, coarser, strict=True):
        mean, lo, hi = plotdata.mean_interval(f.kl, draws=draws, seed=seed)
        top = max(top, hi)
        colour, marker = styles[precision]
        look: dict[str, Any] = {"marker": marker, "color": colour, "linestyle": "none", "zorder": 3}
        if mean < floors.RESOLUTION:
            ax.plot([floors.RESOLUTION], [at], markerfacecolor="white", **look)
            text = "bit-identical" if not (f.kl > 0).any() else f"<{short(floors.RESOLUTION)}"
            ax.annotate(text, (floors.RESOLUTION, at), (6, 0), textcoords="offset points", va="center", fontsize=7)
        else:
            ax.plot([max(lo, floors.RESOLUTION), hi], [at, at], color=colour, linewidth=1, solid_capstyle="butt")
            ax.plot([mean], [at], **look)
        if chosen is not None and (f.reference, f.candidate) == (chosen.reference, chosen.candidate):
            x = max(mean, floors.RESOLUTION)
            ax.plot([x], [at], "o", markersize=10, markerfacecolor="none", color=MARK, zorder=4, label="_chosen")
    ax.axvline(floors.RESOLUTION, color=FLOOR, linewidth=0.6, linestyle=":", zorder=1)
    n = n_text(drawing.span(f.n_prompts for f in rungs), drawing.span(f.n_positions for f in rungs))
    lines = [
        "Noise-floor ladder: the delta between cells that differ in one thing that should not matter",
        f"{n}; {scoring}; dotted: resolution of a shard",
    ]
    if chosen is not None and row is not None:
        kl = floors.pair_kl(schema.select(ds, row[0]), schema.select(ds, row[1]), scoring)
        delta = max(float(kl.sum() / kl.notnull().sum()), floors.RESOLUTION)
        top = max(top, delta)
        ax.axvline(delta, color=MARK, linewidth=1, linestyle="--", zorder=1, label="_delta")
        lines.append(f"dashed: delta of {plotdata.row_name(ds, *row)}; ring: its floor by the rule, {chosen.rung}")
    ax.set_xlim(floors.RESOLUTION / 3, top * 3)
    log_ticks(ax.xaxis)
    _bands(ax, rungs, names, y)
    ax.set_xlabel("mean KL (nat); bar: 95 % interval, bootstrap over prompts")
    handles = [Line2D([], [], color=c, marker=m, linestyle="none", label=p) for p, (c, m) in styles.items()]
    inches = ax.get_position().height * drawing.figure_of(ax).get_figheight()
    ax.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -0.42 / max(inches, 0.5)), ncols=len(handles),
        title="coarser precision of the pair", borderpad=0, title_fontsize=7, alignment="left",
    )  # fmt: skip
    drawing.title(ax, lines, 104, whole=own)
    return ax


def _heights(rungs: Sequence[floors.Floor], names: Sequence[str]) -> list[float]:
    """Give each floor its height: floors of one name stand close together, rungs apart, long names wider."""
    y = [0.0]
    for (f, name), (g, other) in itertools.pairwise(zip(rungs, names, strict=True)):
        lines = len(_wrapped(name).split("\n")) + len(_wrapped(other).split("\n"))
        apart = 1.0 if f.rung == g.rung else 1.3
        y.append(y[-1] + (0.75 if name == other else max(apart, 0.36 * lines + 0.2)))
    return y


def _wrapped(name: str) -> str:
    return "\n".join(textwrap.wrap(name, 44))


def _bands(ax: Axes, rungs: Sequence[floors.Floor], names: Sequence[str], y: Sequence[float]) -> None:
    """Label each name once, and shade every other rung."""
    middles = [
        (name, float(np.mean([at for _, at in group])))
        for name, group in itertools.groupby(zip(names, y, strict=True), lambda x: x[0])
    ]
    ax.set_yticks([at for _, at in middles], [_wrapped(name) for name, _ in middles])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(y[-1] + 0.65, -0.65)
    for i, (_, group) in enumerate(itertools.groupby(zip(rungs, y, strict=True), lambda x: x[0].rung)):
        at = [a for _, a in group]
        if i % 2 == 0:
            ax.axhspan(at[0] - 0.65, at[-1] + 0.65, color="#f2f2f2", zorder=0, linewidth=0)


@drawing.styled
def plot_delta_rank_prob(
    pair_delta: xr.Dataset, pair_floor: xr.Dataset | None, *, rung: str = "", name: str = ""
) -> Figure:
    """Draw the median and the 99th percentile of |Δlogprob| by rank and by the reference's probability.

    Parameters
    ----------
    pair_delta, pair_floor
        Aligned pairs of one scoring (:func:`ruitong_lib.measure.compare.align`): the row and its floor.
    rung, name
        The floor's rung and what the row is about, for the title; by default the labels.
    """
    pair_floor = plotdata.need_pair(pair_delta, pair_floor)
    scoring, k = pair_delta.attrs["scoring"], pair_delta.sizes["k"]
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 3.1), sharey=True)
    panels = [
        [(get(pair), *side) for pair, side in zip((pair_delta, pair_floor), _SIDES, strict=True)]
        for get in (plotdata.delta_by_rank, plotdata.delta_by_probability)
    ]
    values = np.concatenate([[*s.median, *s.p99] for panel in panels for s, *_ in panel])
    positive = values[values > 0]
    bottom = max(1e-7, float(positive.min()) / 3) if positive.size else 1e-7
    for ax, panel in zip(axes, panels, strict=True):
        for spread, kind, colour, _ in panel:
            for how, marker, line in (("median", "o", "-"), ("p99", "^", "--")):
                v = getattr(spread, how)
                ax.plot(
                    spread.x, np.where(v < bottom, bottom, v), line, marker=marker, color=colour,
                    markerfacecolor=colour if kind == "delta" else "white", label=f"{kind}, {how}",
                    zorder=3 if kind == "delta" else 2,
                )  # fmt: skip
        ax.grid(True, axis="y")
    axes[0].set_yscale("log")
    axes[0].set_ylim(bottom / 1.6, float(positive.max()) * 2 if positive.size else 1e-5)
    log_ticks(axes[0].yaxis)
    axes[0].set_ylabel("|Δlogprob| (nat)")
    axes[0].set_xticks(range(0, k, max(1, math.ceil(k / 8))))
    whose = "anchor" if scoring == "replay" else "reference"
    axes[0].set_xlabel(f"rank among the {whose}'s top {k} (0: best)")
    axes[1].set_xscale("log")
    axes[1].set_xlim(10**-6.6, 1.3)
    log_ticks(axes[1].xaxis)
    axes[1].set_xlabel(f"reference's probability (bins of {plotdata.MIN_VALUES} values or more)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    lines = [
        f"Δlogprob, {scoring}, {pair_name(pair_delta, name)}; {counts(pair_delta)}",
        f"floor: {pair_name(pair_floor, rung)}, {counts(pair_floor)}",
    ]
    if (values < bottom).any():
        what = f"below {short(bottom)} nat" if ((values > 0) & (values < bottom)).any() else "0"
        lines[1] += f"; {what}: on the lower edge"
    drawing.title(figure, lines, 104)
    return figure


@drawing.styled
def plot_divergence(
    pair_delta: xr.Dataset,
    pair_floor: xr.Dataset | None,
    *,
    rung: str = "",
    name: str = "",
    draws: int = plotdata.CURVE_DRAWS,
    seed: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw the cumulative incidence of divergence of a decode pair and of its floor; the end of text competes.

    Parameters
    ----------
    pair_delta, pair_floor
        Aligned decode pairs: the row and its floor.
    rung, name
        The floor's rung and what the row is about, for the title; by default the labels.
    draws, seed
        Of the bootstrap over prompts that makes the 95 % bands.
    ax
        Where to draw; by default a new figure of one column.
    """
    pair_floor = plotdata.need_pair(pair_delta, pair_floor)
    curves = [plotdata.incidence(p, draws=draws, seed=seed) for p in (pair_delta, pair_floor)]
    own = ax is None
    ax = drawing.axes(ax, (3.5, 3.3))
    for curve, (kind, colour, line) in zip(curves, _SIDES, strict=True):
        diverged, ended, lo, hi = (np.concatenate([[0.0], x]) for x in curve)  # at no token, nothing has happened
        x = np.arange(len(diverged))
        ax.fill_between(x, lo, hi, step="post", color=colour, alpha=0.15, linewidth=0)
        ax.step(x, diverged, where="post", color=colour, linestyle=line, label=f"{kind}: texts differ")
        ax.step(x, ended, ":", where="post", color=colour, linewidth=0.7, label=f"{kind}: both ended alike")
    ax.set_xlim(0, max(len(c.diverged) for c in curves))
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
    ax.set_xlabel("tokens generated")
    ax.set_ylabel("share of prompts; band: 95 %")
    ax.grid(True)
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2)
    lines = (
        f"Divergence, decode, {pair_name(pair_delta, name)}",
        f"{counts(pair_delta)} at risk",
        f"floor: {pair_name(pair_floor, rung)}, {counts(pair_floor)}",
    )
    drawing.title(ax, lines, 54, whole=own)
    return ax


@drawing.styled
def plot_replay_decode(ds: xr.Dataset, reference: str, candidate: str, *, ax: Axes | None = None) -> Axes:
    """Draw each prompt's mean KL in decode against that in replay, for a row and for its floor.

    Only positions count where both continue the same text, so that the two differ in their kernels alone.

    Parameters
    ----------
    ds
        An aggregate.
    reference, candidate
        Labels of the row's cells.
    ax
        Where to draw; by default a new figure of one column.
    """
    floor = plotdata.row_floor(ds, reference, candidate, scoring="decode")
    rows = ((reference, candidate), (floor.reference, floor.candidate))
    clouds = [plotdata.phase_cloud(*(schema.select(ds, c) for c in row)) for row in rows]
    own = ax is None
    ax = drawing.axes(ax, (3.5, 3.9))
    values = np.concatenate([x for c in clouds for x in (c.replay, c.decode)])
    seen = values[values >= floors.RESOLUTION]
    hidden = len(seen) < len(values)
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (floors.RESOLUTION, 10 * floors.RESOLUTION)
    low = max(floors.RESOLUTION, low / 3) if hidden else low
    for c, (kind, colour, _), marker in zip(clouds, _SIDES, "os", strict=True):
        x, y = (np.maximum(v, low) for v in (c.replay, c.decode))
        face = colour if kind == "delta" else "none"
        label = f"{kind}: {n_text(len(x), c.n_positions)}"
        ax.plot(x, y, marker, color=colour, markerfacecolor=face, alpha=0.8, label=label)
    span = (low / 1.5, high * 1.5)
    ax.plot(span, span, color="#404040", linewidth=0.7, zorder=1)
    ax.set(xscale="log", yscale="log", xlim=span, ylim=span, aspect="equal")
    log_ticks(ax.xaxis)
    log_ticks(ax.yaxis)
    ax.grid(True)
    ax.set_xlabel("replay: mean KL of a prompt (nat)")
    ax.set_ylabel("decode: mean KL of a prompt (nat)")
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.15))
    lines = [
        f"Replay against decode, {plotdata.row_name(ds, reference, candidate)}",
        f"where texts agree so far; floor: {floor.rung}",
    ]
    if hidden:
        lines.append(f"below {short(floors.RESOLUTION)} nat: drawn at {short(low)}")
    drawing.title(ax, lines, 54, whole=own)
    return ax
