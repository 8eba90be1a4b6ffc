"""What the figures share: the style sheet, colours and markers, ticks, titles, saving."""

import functools
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import matplotlib as mpl
import matplotlib.pyplot as plt
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ruitong_lib.report import labels

STYLE = Path(__file__).with_name("ruitong.mplstyle")
PALETTE = [mpl.colors.to_hex(c) for c in sns.color_palette("colorblind")]
DELTA, FLOOR, MARK = PALETTE[0], "#6b6b6b", PALETTE[3]
PRECISIONS = {
    "fp32": ("#333333", "s"),
    "fp16": (PALETTE[2], "^"),
    "bf16": (PALETTE[0], "o"),
    "w8a8": (PALETTE[1], "D"),
}
_OTHERS = ((PALETTE[4], "v"), (PALETTE[5], "P"), (PALETTE[9], "X"))
P = ParamSpec("P")
R = TypeVar("R")


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """Draw in the style sheet; what reads the settings late (ticks, layout) is made before they are put back."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with plt.style.context(STYLE):
            drawn = function(*args, **kwargs)
            labels.fit(figure_of(drawn))
            figure_of(drawn).draw_without_rendering()
        return drawn

    return wrapper


def figure_of(drawn: Any) -> Figure:
    """Return the figure of what a plot function returned."""
    return drawn if isinstance(drawn, Figure) else cast(Figure, drawn.get_figure(root=True))


def axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the Axes given, or those of a new figure of ``size`` inches."""
    return ax if ax is not None else plt.subplots(figsize=size)[1]


def title(drawn: Axes | Figure, lines: Iterable[str], width: int, *, whole: bool = True) -> None:
    """Write the title at the figure's left edge, or over the Axes where the figure is the caller's own."""
    text = "\n".join(part for line in map(labels.said, lines) for part in _wrap(line, width))
    if whole:
        figure_of(drawn).suptitle(text, x=0.01, ha="left")
    else:
        cast(Axes, drawn).set_title(text)


def _wrap(line: str, width: int) -> list[str]:
    """Break a line; a Chinese character is as wide as two letters and may stand at the end of a line."""
    wide = sum(labels.foreign(c) for c in line)
    return textwrap.wrap(line, max(10, int(width * len(line) / (len(line) + wide))) if wide else width)


def short(x: float, _: object = None) -> str:
    """Write a number in at most two digits, without the zeros of an exponent."""
    text = f"{x:.2g}" if x == 0 or 1e-2 <= abs(x) < 100 else f"{x:.0f}" if 100 <= abs(x) < 1e4 else f"{x:.1e}"
    return text.replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e")


def log_ticks(axis: Axis, *, decades: float = 2.0, most: int = 9) -> None:
    """Label a log axis plainly (the exponents of mathtext would fall below 7 pt); 2 and 5 too below ``decades``."""
    lo, hi = axis.get_view_interval()
    few = math.log10(hi / lo) < decades
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=most))
    axis.set_major_formatter(FuncFormatter(short))
    axis.set_minor_formatter(NullFormatter())


def precision_styles(precisions: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return a colour and a marker for each precision, finer ones first."""
    seen = list(dict.fromkeys(precisions))
    extra = itertools.cycle(_OTHERS)
    ordered = [p for p in PRECISIONS if p in seen] + [p for p in seen if p not in PRECISIONS]
    return {p: PRECISIONS[p] if p in PRECISIONS else next(extra) for p in ordered}


def n_text(prompts: int | str, positions: int | str) -> str:
    """Say how many prompts and positions."""
    return f"{prompts} prompts, {positions} positions"


def span(values: Iterable[int]) -> str:
    """Write a range of numbers, one number where all are equal."""
    seen = sorted(values)
    return f"{seen[0]}" if seen[0] == seen[-1] else f"{seen[0]}–{seen[-1]}"


def counts(pair: xr.Dataset) -> str:
    """Say how many prompts and positions an aligned pair compares."""
    valid = pair["valid"]
    return n_text(int(valid.any("position").sum()), int(valid.sum()))


def pair_name(pair: xr.Dataset, name: str) -> str:
    """Return ``name``, or the labels of a pair's two cells."""
    return name or f"{pair.attrs['reference']} → {pair.attrs['candidate']}"


def save_figure(fig: Figure, stem: str, folder: str | Path, *, caption: str = "") -> list[Path]:
    """Write a figure as SVG, PDF and PNG, the same bytes each time, and close it.

    Parameters
    ----------
    fig
        The figure.
    stem
        File name without its ending.
    folder
        Where to; made when missing.
    caption
        Written beside it as ``<stem>.txt``.

    Returns
    -------
    The paths: of the three pictures, then of the caption, if there is one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dates: dict[str, dict[str, Any]] = {
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
        "png": {"Software": None},
    }
    paths = [folder / f"{stem}.{ending}" for ending in dates]
    # A Chinese font is often of the CFF kind, which PDF readers refuse as Type 42.
    fonts = {"pdf.fonttype": 3} if labels.needs_cjk(fig) else {}
    with plt.style.context([STYLE, fonts]):
        for path, metadata in zip(paths, dates.values(), strict=True):
            fig.savefig(path, metadata=metadata)
    plt.close(fig)
    if caption:
        paths.append(folder / f"{stem}.txt")
        paths[-1].write_text(caption.rstrip() + "\n", encoding="utf-8")
    return paths
