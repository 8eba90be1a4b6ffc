"""The figure of distances to the oracle."""

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ruitong_lib.errors import RuitongError
from ruitong_lib.measure import floor as floors
from ruitong_lib.measure.align import axis_name
from ruitong_lib.measure.oracle import Distance, distances, oracle_label
from ruitong_lib.report import drawing
from ruitong_lib.report.drawing import FLOOR, log_ticks, n_text, short
from ruitong_lib.report.plotdata import shown

_FIELDS = ("model", "hardware", "engine", "batch_size", "composition", "attention", "onednn_isa", "threads", "repeat")


@drawing.styled
def plot_oracle(ds: xr.Dataset, *, oracle: str = "", ax: Axes | None = None) -> Axes:
    """Draw how far each cell is from the oracle, the nearest first, each beside its own floor (its largest rung).

    Parameters
    ----------
    ds
        An aggregate.
    oracle
        Label of the oracle; by default the dataset's own.
    ax
        Where to draw; by default a new figure, 7 in wide.

    Raises
    ------
    RuitongError
        Where no cell can be held against the oracle, or none of them has a floor.
    """
    label = oracle_label(ds, oracle)
    found, refused = distances(ds, label)
    if not found:
        raise RuitongError(f"no cell can be held against the oracle: {next(iter(refused.values()), 'it is alone')}")
    rungs = floors.ladder(ds)
    theirs = [floors.floor_for(ds, d.cell, d.cell, rungs=rungs) for d in found]  # its own, whatever the oracle is
    if not any(theirs):
        raise RuitongError(
            "none of the cells has a floor, and no distance is drawn without one. Collect one of them with another "
            "batch_size or attention too, then aggregate again"
        )
    own = ax is None
    ax = drawing.axes(ax, (7.0, 1.75 + 0.24 * len(found)))
    ax.set_xscale("log")
    least = floors.RESOLUTION
    styles = drawing.precision_styles([d.precision for d in found])
    for y, (d, f) in enumerate(zip(found, theirs, strict=True)):
        colour, marker = styles[d.precision]
        if d.status == "ok":
            ax.plot([max(d.lo, least), d.hi], [y, y], color=colour, linewidth=1, solid_capstyle="butt")
            ax.plot([d.kl], [y], marker, color=colour, zorder=3)
        else:
            ax.plot([least], [y], marker, color=colour, markerfacecolor="white", zorder=3)
            text = "identical" if d.status == "identical" else f"below resolution ({short(d.kl)} as stored)"
            ax.annotate(text, (least, y), (6, 0), textcoords="offset points", va="center", fontsize=7)
        if f is not None and f.mean_kl >= least:
            ax.plot([f.mean_kl], [y], "|", color=FLOOR, markersize=11, markeredgewidth=1.4, zorder=2)
    ax.axvline(least, color=FLOOR, linewidth=0.6, linestyle=":", zorder=1)
    ax.set_xlim(least / 3, 3 * max([d.hi if d.hi > 0 else d.kl for d in found] + [f.mean_kl for f in theirs if f]))
    log_ticks(ax.xaxis)
    ax.set_yticks(range(len(found)), [_name(ds, d) for d in found])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(found) - 0.4, -0.6)
    ax.grid(True, axis="x")
    ax.set_xlabel("KL to the oracle (nat), mean over positions; line: 95 %, jackknife-t over prompts")
    handles = [Line2D([], [], color=c, marker=m, linestyle="none", label=p) for p, (c, m) in styles.items()]
    handles.append(Line2D([], [], color=FLOOR, marker="|", markersize=9, linestyle="none", label="its own floor"))
    inches = ax.get_position().height * drawing.figure_of(ax).get_figheight()
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.42 / max(inches, 0.5)), ncols=len(handles))
    exact = ds.sel(cell=label)
    n = n_text(drawing.span(d.n_prompts for d in found), drawing.span(d.n_positions for d in found))
    lines = [
        f"Distance to the oracle: replay in {exact['precision'].item()} on {exact['hardware'].item()}",
        f"{n}; nearest first; dotted: resolution of a shard",
        "A floor holds the rounding of two cells, a distance of one. Further is not worse: see direction.",
    ]
    drawing.title(ax, lines, 104, whole=own)
    return ax


def _name(ds: xr.Dataset, d: Distance) -> str:
    """Name a cell by its precision and by what most of the others do not share."""
    cell, parts = ds.sel(cell=d.cell), [d.precision]
    for field in _FIELDS:
        values = [str(v) for v in ds[field].values]
        usual = max(dict.fromkeys(values), key=values.count)
        if str(cell[field].item()) != usual:
            number = field in ("batch_size", "composition", "threads", "repeat")
            parts.append(f"{axis_name((field,))} {cell[field].item()}" if number else shown(cell[field].item()))
    return ", ".join(parts)
