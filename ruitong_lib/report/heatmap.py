"""The heat map of a row: KL by prompt and position, and each prompt against its floor."""

import itertools
import math
import textwrap

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ruitong_lib.measure import floor as floors
from ruitong_lib.measure.compare import Comparison
from ruitong_lib.report import drawing, plotdata
from ruitong_lib.report.drawing import DELTA, FLOOR, MARK, log_ticks, n_text, short

LABELLED_ROWS = 80  # more prompts than this are labelled by category only


@drawing.styled
def plot_prompt_heatmap(comparison: Comparison, floor: floors.Floor | None, *, name: str = "") -> Figure:
    """Draw KL by prompt and position, with the floor's mean in the colour bar, and each prompt's ratio to the floor.

    Parameters
    ----------
    comparison, floor
        The row and its floor.
    name
        What the row is about; by default its axis.
    """
    floor = plotdata.needed(comparison.positions, floor)
    kl = plotdata.by_category(comparison.positions["kl"])
    n, width = kl.shape
    category = list(kl["category"].values.astype(str))
    starts = [i for i in range(n) if not i or category[i] != category[i - 1]]
    labelled = n <= LABELLED_ROWS
    figure = plt.figure(figsize=(7.0, 1.75 + (0.135 * n if labelled else 7.0)))
    ax, side = figure.subplots(1, 2, width_ratios=(4.4, 1))
    norm = _norm(kl, floor)
    colours = mpl.colormaps["viridis"].with_extremes(bad="#e8e8e8")
    seen = np.ma.masked_invalid(np.where(kl.notnull(), np.maximum(kl.values, norm.vmin or 0.0), np.nan))
    mesh = ax.pcolormesh(np.arange(width + 1), np.arange(n + 1), seen, norm=norm, cmap=colours, rasterized=True)
    for at in starts[1:]:
        ax.axhline(at, color="white", linewidth=1)
        side.axhline(at, color="#d9d9d9", linewidth=0.5)
    ax.set_xlabel(f"position ({comparison.scoring})")
    groups = [(a + b) / 2 for a, b in itertools.pairwise([*starts, n])], [category[a] for a in starts]
    for each in (ax, side):
        each.set_ylim(n, 0)
        each.tick_params(axis="y", length=0)
        each.set_yticks([])
    if labelled:
        ax.set_yticks(np.arange(n) + 0.5, kl["prompt"].values.astype(str))
        side.yaxis.tick_right()
        side.set_yticks(*groups)
    else:
        ax.set_yticks(*groups)
    total = _ratio_strip(side, kl, floor)
    bar = figure.colorbar(mesh, ax=ax, orientation="horizontal", aspect=50, pad=0.01, extend="min")
    log_ticks(bar.ax.xaxis)
    bar.set_label("KL (nat); grey: not compared; line: the floor's mean")
    for colour, points in (("white", 3.0), (MARK, 1.5)):
        bar.ax.axvline(max(floor.mean_kl, norm.vmin or 0.0), color=colour, linewidth=points)
    below = floor.mean_kl < floors.RESOLUTION
    mean = f"mean {'<' if below else ''}{short(floors.RESOLUTION if below else floor.mean_kl)} nat"
    lines = (
        f"KL by prompt and position, {name or comparison.axis}; {n_text(comparison.n_prompts, comparison.n_positions)}",
        f"floor: {floor.rung}, {mean}, {n_text(floor.n_prompts, floor.n_positions)}",
        total,
    )
    drawing.title(figure, lines, 104)
    return figure


def _norm(kl: xr.DataArray, floor: floors.Floor) -> LogNorm:
    """Span whole decades from a thousandth of the floor's mean, but what a shard resolves, to the largest value."""
    largest = max(float(kl.max()), floor.mean_kl, 100 * floors.RESOLUTION)
    smallest = max(min(floor.mean_kl, largest) / 1000, floors.RESOLUTION)
    return LogNorm(10 ** math.floor(math.log10(smallest)), 10 ** math.ceil(math.log10(largest)))


def _ratio_strip(ax: Axes, kl: xr.DataArray, floor: floors.Floor) -> str:
    """Draw each prompt's ratio of sums over the common positions; return the ratio over all, in words."""
    ax.set_xlabel("prompt's delta / floor")
    total = floors.ratio(kl, floor.kl)
    if total.status != "ok":
        said = "delta 0 everywhere" if total.status == "identical" else f"ratio not defined: {total.status}"
        ax.set_xticks([])
        text = "\n".join(textwrap.wrap(said, 18))
        ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=7)
        return said
    r = plotdata.prompt_ratios(kl, floor.kl)
    seen = np.array([*r[r > 0], total.value])
    lo, hi = min(float(seen.min()) / 1.5, 0.45), max(float(seen.max()) * 1.5, 2.2)
    rows = np.arange(len(r)) + 0.5
    ax.set_xscale("log")
    ax.plot(r[r > 0], rows[r > 0], "o", color=DELTA, markersize=3.5)
    ax.plot(np.full(len(r), lo)[r == 0], rows[r == 0], "o", color=DELTA, markerfacecolor="white", markersize=3.5)
    ax.set_xlim(lo / 1.3, hi)
    log_ticks(ax.xaxis, decades=1.3, most=5)
    ax.axvline(1, color=FLOOR, linewidth=1, zorder=1)
    ax.axvline(total.value, color=MARK, linewidth=1, linestyle="--", zorder=1)
    interval = f" [{short(total.lo)}, {short(total.hi)}]" if math.isfinite(total.lo) else ", no interval"
    zero = f"; open: delta 0 ({(r == 0).sum()} prompts)" if (r == 0).any() else ""
    return f"dashed: delta / floor over all, {short(total.value)}{interval}{zero}"
