"""What stands below a figure in a paper: what is drawn, of what, with n and the floor; plain text."""

import math

import xarray as xr

import ruitong_lib
from ruitong_lib import schema
from ruitong_lib.errors import RuitongError
from ruitong_lib.measure import floor as floors
from ruitong_lib.measure.compare import Comparison
from ruitong_lib.report import drawing, plotdata
from ruitong_lib.report.drawing import n_text, short

KINDS = {
    "ladder": (
        "Noise-floor ladder. Mean KL divergence (lower bound, both directions averaged) of every two cells that differ "
        "in one thing that should not matter. Bars: 95 % interval, bootstrap over prompts. Open markers: below the "
        "resolution of a shard. A rerun is shown and never used as the floor."
    ),
    "delta-rank-prob": (
        "Absolute change of logprob, median and 99th percentile, by rank among the anchor's best tokens (left) and by "
        "the reference's probability (right), for the row and for its floor."
    ),
    "heatmap": (
        "KL divergence by prompt and position (left), and each prompt's delta over its floor (right; dashed: over all, "
        "a ratio of sums)."
    ),
    "divergence": (
        "Cumulative incidence of divergence of greedy texts, for the row and for its floor, with the end of text as a "
        "competing event (Aalen-Johansen). Bands: 95 % interval, bootstrap over prompts."
    ),
    "replay-decode": (
        "Mean KL divergence of each prompt in decode against that in replay, where both continue the same text, for "
        "the row and for its floor (the legend has their n; below, the whole decode)."
    ),
}


def caption(
    kind: str,
    ds: xr.Dataset,
    *,
    name: str = "",
    comparison: Comparison | None = None,
    floor: floors.Floor | None = None,
) -> str:
    """Return the caption of a figure.

    Parameters
    ----------
    kind
        One of ``KINDS``.
    ds
        The aggregate that was drawn.
    name
        What the row is about (:func:`ruitong_lib.report.plotdata.row_name`).
    comparison, floor
        The row and its floor, in the figure's scoring; the ladder has neither.

    Raises
    ------
    RuitongError
        For an unknown kind, and for a delta without its floor.
    """
    if kind not in KINDS:
        raise RuitongError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    lines = [KINDS[kind], ""]
    if comparison is not None:
        if floor is None:
            raise RuitongError(f"no caption for {name or comparison.axis} without its floor")
        kl = comparison.metrics["kl"]
        n = n_text(comparison.n_prompts, comparison.n_positions)
        theirs = n_text(floor.n_prompts, floor.n_positions)
        lines += [
            f"Row: {name or comparison.axis}; {comparison.reference} → {comparison.candidate}.",
            f"Delta ({comparison.scoring}): mean KL {short(kl.value)} nat [{short(kl.lo)}, {short(kl.hi)}]; {n}.",
            f"Floor: {floor.rung}, {_mean(floor)}, {floor.rounding_class}; {theirs}; "
            f"{floor.reference} → {floor.candidate}.",
            f"Delta over floor: {_ratio(floors.ratio(comparison.positions['kl'], floor.kl))}.",
        ]
    else:
        rungs = plotdata.rungs(ds, "replay")
        n = n_text(drawing.span(f.n_prompts for f in rungs), drawing.span(f.n_positions for f in rungs))
        lines += [f"{len(rungs)} floors (replay); {n}."]
    lines += [_source(ds)]
    return "\n".join(lines) + "\n"


def _mean(floor: floors.Floor) -> str:
    below = floor.mean_kl < floors.RESOLUTION
    return f"mean KL {'<' if below else ''}{short(floors.RESOLUTION if below else floor.mean_kl)} nat"


def _ratio(ratio: floors.Ratio) -> str:
    if ratio.status != "ok":
        return ratio.status
    interval = f" [{short(ratio.lo)}, {short(ratio.hi)}]" if math.isfinite(ratio.lo) else ", no interval"
    return f"R {short(ratio.value)}{interval}, 95 %, jackknife-t over {ratio.n_prompts} prompts"


def _source(ds: xr.Dataset) -> str:
    """Name the data by their arrays, so that a figure is told from one of other data."""
    models, hardware = (", ".join(sorted(set(map(str, ds[c].values)))) for c in ("model", "hardware"))
    arrays = schema.array_sha256(ds["token_id"].values, ds["top_token_id"].values, ds["top_logprob"].values)
    grid = f"grid {ds.attrs['grid']}, " if "grid" in ds.attrs else ""
    return (
        f"Data: {grid}{ds.sizes['cell']} cells, {models}, {hardware}; arrays {arrays[:12]}; "
        f"ruitong {ruitong_lib.__version__}."
    )
