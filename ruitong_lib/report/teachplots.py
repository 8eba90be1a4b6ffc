"""The lesson's figures (``notebooks/00_noise_floor.ipynb``): each draws numbers of :mod:`ruitong_lib.report.teach`."""

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure

from ruitong_lib.measure import metrics
from ruitong_lib.measure.align import align
from ruitong_lib.report import drawing, teach
from ruitong_lib.report.drawing import DELTA, FLOOR, MARK, precision_styles, short


@drawing.styled
def plot_lattice(x: float, *, precisions: Sequence[str] = ("bf16", "fp16")) -> Figure:
    """Draw the numbers that exist around ``x`` in each precision, where ``x`` lands, and how far that is."""
    figure, ax = plt.subplots(figsize=(7.0, 1.9))
    half = 2.6 * float(teach.step(x, precisions[0]))
    ax.axvline(x, color="#202020", linewidth=1, linestyle=":")
    said = []
    for row, precision in enumerate(precisions):
        colour, marker = precision_styles([precision])[precision]
        grid = float(teach.step(x, precision))
        centre = float(teach.rounded(x, precision))
        reach = np.arange(-math.ceil(2 * half / grid), math.ceil(2 * half / grid) + 1)
        near = np.array([v for v in centre + reach * grid if abs(v - x) <= half])
        ax.plot(near, np.full(len(near), row), "|", color=colour, markersize=14)
        ax.plot([centre], [row], marker, color=MARK, markersize=5, zorder=3)
        said.append(f"{precision}: {centre:.7g}, off by {short(abs(centre - x))} (step {short(grid)})")
    ax.set_yticks(range(len(precisions)), list(precisions))
    ax.set_ylim(len(precisions) - 0.4, -0.6)
    ax.set_xlim(x - half, x + half)
    ax.set_xlabel("every number that exists here; dotted: the exact value, marked: where it lands")
    drawing.title(figure, [f"{x:.7g} → " + "; ".join(said)], 110)
    return figure


@drawing.styled
def plot_sums(n: int, *, orders: int = 200) -> Figure:
    """Draw what the sum of the same ``n`` numbers comes to in many orders, in each precision."""
    figure, axes = plt.subplots(1, 3, figsize=(7.0, 2.3))
    for ax, precision in zip(axes, teach.FRACTION_BITS, strict=True):
        sums, exact = teach.shuffled_sums(n, precision, orders=orders)
        error = sums - exact
        colour, _ = precision_styles([precision])[precision]
        reach = max(float(np.abs(error).max()), 1e-12)
        ax.hist(error / reach, bins=np.linspace(-1.05, 1.05, 43), color=colour)
        ax.axvline(0, color="#202020", linewidth=0.8, linestyle=":")
        ax.set_xticks([-1, 0, 1], [short(-reach), "0", short(reach)])
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.set_title(f"{precision}: {len(np.unique(sums))} different sums")
    axes[1].set_xlabel("sum minus exact sum")
    drawing.title(figure, [f"The same {n} numbers, added in {orders} orders"], 110)
    return figure


@drawing.styled
def plot_near_tie(gap: float, *, precisions: Sequence[str] = ("fp32", "fp16", "bf16"), runs: int = 200) -> Figure:
    """Draw the difference of two logits that are exactly ``gap`` apart, over many kernels, in each precision."""
    figure, axes = plt.subplots(1, len(precisions), figsize=(7.0, 2.4), sharex=True)
    seen = {p: teach.near_tie(gap, p, runs=runs) for p in precisions}
    reach = max(float(np.abs(v).max()) for v in seen.values()) * 1.1 + 1e-6
    bins = np.linspace(-reach, reach, 62)
    for ax, (precision, difference) in zip(axes, seen.items(), strict=True):
        shares = teach.flip_shares(gap, precision, runs=runs)
        ax.hist(difference[difference >= 0], bins=bins, color=DELTA)
        ax.hist(difference[difference < 0], bins=bins, color=MARK)
        ax.axvline(0, color="#202020", linewidth=0.8)
        ax.axvline(gap, color=FLOOR, linewidth=0.8, linestyle=":")
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.set_title(f"{precision}: {shares['flip']:.0%} flip, {shares['tie']:.0%} tie")
    axes[len(precisions) // 2].set_xlabel("first logit − second logit (nat); dotted: the exact gap; left of 0: a flip")
    p = 1 / (1 + math.exp(-gap))
    drawing.title(
        figure, [f"Two tokens, exact gap {gap:g} nat (of the two, the first has {p:.1%}); {runs} kernels"], 110
    )
    return figure


@drawing.styled
def plot_agreement(frame: pd.DataFrame, noise: float) -> Figure:
    """Draw the three ways of counting top-1 agreement of :func:`agreement_by_noise`, with one noise marked."""
    figure, ax = plt.subplots(figsize=(7.0, 2.9))
    looks = (("before", FLOOR, "s", "before the first difference"), ("at risk", DELTA, "o", "with the difference"))
    for name, colour, marker, label in (*looks, ("replay", drawing.PALETTE[2], "^", "replay, every position")):
        ax.plot(frame.index, frame[name], marker=marker, color=colour, label=label)
    ax.axvline(noise, color=MARK, linestyle="--", linewidth=1)
    row = frame.loc[noise]
    ax.set_xscale("log")
    drawing.log_ticks(ax.xaxis)
    ax.set_xlabel("noise on each logit (nat, standard deviation)")
    ax.set_ylabel("top-1 agreement")
    ax.grid(True, axis="y")
    ax.legend(loc="lower left")
    said = ", ".join(f"{name} {row[name]:.1%}" for name in ("before", "at risk", "replay"))
    drawing.title(figure, [f"noise {noise:g}: {row['parted']:.0%} of the texts differ; top-1 agreement: {said}"], 110)
    return figure


@drawing.styled
def plot_position(reference: xr.Dataset, candidate: xr.Dataset, prompt: str, position: int, model: str) -> Figure:
    """Draw the probabilities of the anchor's likeliest tokens at one position, on both sides."""
    pair = align(reference, candidate).sel(prompt=prompt, position=position).isel(k=slice(8))
    ids = reference["anchor_token_id"].isel(cell=0).sel(prompt=prompt, position=position).values[:8]
    a, b = (np.exp(pair[f"{side}_logprob"].values) for side in ("reference", "candidate"))
    names = [str(x["precision"].values.flat[0]) for x in (reference, candidate)]
    figure, (ax, change) = plt.subplots(1, 2, figsize=(7.0, 2.7), sharey=True, width_ratios=(1.6, 1))
    y = np.arange(len(ids))
    for values, height, colour, name in ((a, -0.19, FLOOR, names[0]), (b, 0.19, DELTA, names[1])):
        ax.barh(y + height, values, 0.36, color=colour, label=name)
    ax.set_yticks(y, teach.words(ids, model))
    ax.set_ylim(len(ids) - 0.4, -0.6)
    ax.set_xlabel("probability")
    ax.legend(loc="lower right")
    change.barh(y, np.log(b) - np.log(a), 0.6, color=DELTA)
    change.axvline(0, color="#202020", linewidth=0.8)
    change.set_xlabel("Δlogprob (nat)")
    kl = float(metrics.kl(align(reference, candidate)).sel(prompt=prompt, position=position))
    drawing.title(figure, [f"{prompt}, position {position}, {names[0]} → {names[1]}: KL {short(kl)} nat"], 110)
    return figure
