import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError, RuitongError
from ruitong_lib.measure import floor as floors
from ruitong_lib.measure.align import align
from ruitong_lib.measure.compare import compare
from ruitong_lib.paths import NOTEBOOKS
from ruitong_lib.report import drawing, plotdata, plots
from ruitong_lib.testing import synthetic_shards

CELLS: list[dict[str, Any]] = [
    {},
    {"noise": 0.05, "hardware": "card-b"},
    {"noise": 0.02, "batch_size": 8},
    {"noise": 0.01, "attention": "eager"},
    {"repeat": 1},
    {"noise": 0.2, "precision": "w8a8"},
]


@pytest.fixture(scope="module")
def ds() -> xr.Dataset:
    shards = synthetic_shards(CELLS, n_prompts=18, n_positions=20, vocab=80, phase=0.01, seed=3).shards
    return schema.combine(shards)


@pytest.fixture(scope="module")
def labels(ds: xr.Dataset) -> list[str]:
    """The labels in the order of CELLS."""
    wanted = [("card-a", "bf16", 1, "sdpa", 0), ("card-b", "bf16", 1, "sdpa", 0), ("card-a", "bf16", 8, "sdpa", 0)]
    wanted += [("card-a", "bf16", 1, "eager", 0), ("card-a", "bf16", 1, "sdpa", 1), ("card-a", "w8a8", 1, "sdpa", 0)]
    names = ("hardware", "precision", "batch_size", "attention", "repeat")
    found = {tuple(ds[n].sel(cell=c).item() for n in names): str(c) for c in ds["cell"].values}
    return [found[w] for w in wanted]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """No figure function changes the global settings; a test's figures are closed after it."""
    before = mpl.rcParams.copy()
    yield
    assert mpl.rcParams == before
    plt.close("all")


def pair(ds: xr.Dataset, a: str, b: str, scoring: str = "replay") -> xr.Dataset:
    return align(schema.select(ds, a), schema.select(ds, b), scoring=scoring)


def words(figure: Any) -> str:
    """Every text of a figure."""
    return "\n".join(t.get_text() for t in figure.findobj(mpl.text.Text))


def only(ds: xr.Dataset, *cells: str) -> xr.Dataset:
    return ds.sel(cell=list(cells))


def test_ladder_draws_each_floor_with_its_interval(ds: xr.Dataset, labels: list[str]) -> None:
    ax = plots.plot_ladder(ds, draws=50)
    ticks = [t.get_text() for t in ax.get_yticklabels()]
    assert "batch size: 1 → 8, card-a" in ticks
    assert "attention: sdpa → eager, card-a" in ticks
    assert "precision: bf16 → w8a8, card-a" in ticks
    assert "rerun: 0 → 1, card-a" in ticks
    assert ax.get_xscale() == "log"
    assert "(nat)" in ax.get_xlabel()
    marks = [line for line in ax.lines if line.get_marker() in {"o", "D"} and line.get_label() != "_chosen"]
    assert len(marks) == len(plotdata.rungs(ds, "replay"))
    batch = next(f for f in floors.ladder(ds) if f.rung == "batch size")
    assert any(np.isclose(line.get_xdata()[0], batch.mean_kl) for line in marks)
    text = words(drawing.figure_of(ax))
    assert "18 prompts" in text
    assert "positions" in text
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["bf16", "w8a8"]


def test_ladder_draws_what_is_below_resolution_as_open_markers(ds: xr.Dataset) -> None:
    ax = plots.plot_ladder(ds, draws=50)
    at_line = [x for x in ax.lines if x.get_marker() == "o" and x.get_xdata()[0] == floors.RESOLUTION]
    assert at_line
    assert all(x.get_markerfacecolor() == "white" for x in at_line)
    assert "bit-identical" in words(drawing.figure_of(ax))


def test_ladder_says_below_resolution_where_the_floor_is_not_zero(ds: xr.Dataset, labels: list[str]) -> None:
    two = only(ds, labels[0], labels[2]).copy(deep=True)
    for name in ("anchor_logprob", "anchor_tail_logprob", "top_logprob", "top_token_id"):
        two[name].values[1] = two[name].values[0]
    two["anchor_logprob"].values[1, 0, 0, 0] -= 1e-4
    ax = plots.plot_ladder(two, draws=50)
    assert "<1e-8" in [t.get_text() for t in ax.texts]


def test_ladder_marks_the_floor_of_a_row(ds: xr.Dataset, labels: list[str]) -> None:
    ax = plots.plot_ladder(ds, reference=labels[0], candidate=labels[5], draws=50)
    chosen = floors.floor_for(ds, labels[0], labels[5])
    assert chosen is not None
    (ring,) = [line for line in ax.lines if line.get_label() == "_chosen"]
    assert ring.get_xdata()[0] == pytest.approx(chosen.mean_kl)
    (delta,) = [line for line in ax.lines if line.get_label() == "_delta"]
    kl = compare(schema.select(ds, labels[0]), schema.select(ds, labels[5])).metrics["kl"].value
    assert delta.get_xdata()[0] == pytest.approx(kl)
    assert f"its floor by the rule, {chosen.rung}" in words(drawing.figure_of(ax))


def test_ladder_without_a_floor_names_what_to_collect(ds: xr.Dataset, labels: list[str]) -> None:
    with pytest.raises(RuitongError, match="batch_size=8 or attention=eager"):
        plots.plot_ladder(only(ds, labels[0], labels[1]), scoring="decode")
    with pytest.raises(RuitongError, match="reference and candidate, or neither"):
        plots.plot_ladder(ds, candidate=labels[1])
    with pytest.raises(RuitongError, match="no cell 'nobody'"):
        plots.plot_ladder(ds, reference=labels[0], candidate="nobody")


def test_row_floor_leaves_out_the_rows_own_axis(ds: xr.Dataset, labels: list[str]) -> None:
    with pytest.raises(RuitongError, match="like the reference but with attention=eager, then"):
        plotdata.row_floor(only(ds, labels[0], labels[2]), labels[0], labels[2])
    with pytest.raises(RuitongError, match="batch_size=8 or attention=eager, scoring=both"):
        plotdata.row_floor(only(ds, labels[0], labels[1]), labels[0], labels[1], scoring="decode")


def test_delta_by_rank_and_probability_draws_the_floor_in_both_panels(ds: xr.Dataset, labels: list[str]) -> None:
    delta, floor = pair(ds, labels[0], labels[1]), pair(ds, labels[0], labels[2])
    figure = plots.plot_delta_rank_prob(delta, floor, rung="batch size", name="hardware: card-a → card-b")
    assert len(figure.axes) == 2
    for ax in figure.axes:
        assert [x.get_label() for x in ax.lines] == ["delta, median", "delta, p99", "floor, median", "floor, p99"]
        assert ax.get_yscale() == "log"
    assert "(nat)" in figure.axes[0].get_ylabel()
    k = delta.sizes["k"]
    assert list(figure.axes[0].lines[0].get_xdata()) == list(range(k))
    d = np.abs(delta["candidate_logprob"] - delta["reference_logprob"]).values[delta["valid"].values]
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), np.median(d, axis=0))
    np.testing.assert_allclose(figure.axes[0].lines[1].get_ydata(), np.quantile(d, 0.99, axis=0))
    text = words(figure)
    assert "floor: batch size, 18 prompts" in text
    assert "hardware: card-a → card-b; 18 prompts" in text


def test_probability_bins_count_every_value_once(ds: xr.Dataset, labels: list[str]) -> None:
    delta = pair(ds, labels[0], labels[1])
    spread = plotdata.delta_by_probability(delta)
    assert spread.n.sum() == int(delta["valid"].sum()) * delta.sizes["k"]
    assert np.isnan(spread.median[spread.n < plotdata.MIN_VALUES]).all()
    assert len(spread.x) == len(plotdata.PROBABILITY_EDGES) - 1
    inside = [lo < x < hi for x, (lo, hi) in zip(spread.x, itertools.pairwise(plotdata.PROBABILITY_EDGES), strict=True)]
    assert all(inside)


def test_an_identical_row_is_drawn_on_the_lower_edge(ds: xr.Dataset, labels: list[str]) -> None:
    figure = plots.plot_delta_rank_prob(
        pair(ds, labels[0], labels[4]), pair(ds, labels[0], labels[2]), rung="batch size"
    )
    lines = figure.axes[0].lines
    assert len(set(lines[0].get_ydata())) == 1
    assert lines[0].get_ydata()[0] < lines[2].get_ydata().min()
    assert "0: on the lower edge" in words(figure)
    both = plots.plot_delta_rank_prob(pair(ds, labels[0], labels[4]), pair(ds, labels[0], labels[4]), rung="rerun")
    assert both.axes[0].get_ylim()[0] > 0


def test_divergence_draws_both_curves_and_bands(ds: xr.Dataset, labels: list[str]) -> None:
    delta, floor = (pair(ds, labels[0], x, "decode") for x in (labels[5], labels[2]))
    ax = plots.plot_divergence(delta, floor, rung="batch size", name="precision: bf16 → w8a8", draws=40)
    kinds = [f"{side}: {what}" for side in ("delta", "floor") for what in ("texts differ", "both ended alike")]
    assert [x.get_label() for x in ax.lines] == kinds
    assert len(ax.collections) == 2
    by_label = {x.get_label(): x for x in ax.lines}
    curve = by_label["delta: texts differ"].get_ydata()
    assert curve[0] == 0
    assert (np.diff(curve) >= 0).all()
    diverged = int((delta["first_difference"] >= 0).sum())
    assert curve[-1] == pytest.approx(diverged / 18)
    assert "floor: batch size, 18 prompts" in words(drawing.figure_of(ax))
    band = plotdata.incidence(delta, draws=40)
    assert (band.lo <= band.diverged + 1e-12).all()
    assert (band.diverged <= band.hi + 1e-12).all()


def test_a_delta_is_never_drawn_without_its_floor(ds: xr.Dataset, labels: list[str]) -> None:
    delta, decode = pair(ds, labels[0], labels[1]), pair(ds, labels[0], labels[1], "decode")
    before = plt.get_fignums()
    with pytest.raises(RuitongError, match=r"no replay floor for .*card-b.* Collect a cell"):
        plots.plot_delta_rank_prob(delta, None)
    with pytest.raises(RuitongError, match=r"no decode floor .*scoring=both"):
        plots.plot_divergence(decode, None)
    with pytest.raises(RuitongError, match="no replay floor"):
        plots.plot_prompt_heatmap(compare(schema.select(ds, labels[0]), schema.select(ds, labels[1])), None)
    with pytest.raises(RuitongError, match="no decode floor"):
        plots.plot_replay_decode(only(ds, labels[0], labels[1]), labels[0], labels[1])
    assert plt.get_fignums() == before


def test_scorings_are_never_mixed(ds: xr.Dataset, labels: list[str]) -> None:
    replay, decode = pair(ds, labels[0], labels[1]), pair(ds, labels[0], labels[2], "decode")
    with pytest.raises(RuitongError, match="never mixed"):
        plots.plot_delta_rank_prob(replay, decode)
    with pytest.raises(RuitongError, match="decode only"):
        plots.plot_divergence(replay, pair(ds, labels[0], labels[2]))


def heatmap(ds: xr.Dataset, labels: list[str], candidate: int) -> Any:
    comparison = compare(schema.select(ds, labels[0]), schema.select(ds, labels[candidate]), draws=50)
    return plots.plot_prompt_heatmap(comparison, plotdata.row_floor(ds, labels[0], labels[candidate]))


def test_heatmap_sorts_by_category_and_marks_the_floor(ds: xr.Dataset, labels: list[str]) -> None:
    figure = heatmap(ds, labels, 5)
    grid, strip, bar = figure.axes
    prompts = [t.get_text() for t in grid.get_yticklabels()]
    category = dict(zip(ds["prompt"].values, ds["category"].values, strict=True))
    assert [category[p] for p in prompts] == sorted(category.values())
    assert [t.get_text() for t in strip.get_yticklabels()] == ["code", "list", "open"]
    floor = plotdata.row_floor(ds, labels[0], labels[5])
    assert {x.get_xdata()[0] for x in bar.lines if x.get_label().startswith("_child")} >= {floor.mean_kl}
    text = words(figure)
    assert f"floor: {floor.rung}, mean" in text
    assert "18 prompts" in text
    assert "dashed: delta / floor over all" in text
    (mesh,) = [c for c in grid.collections if isinstance(c, mpl.collections.QuadMesh)]
    n = int(compare(schema.select(ds, labels[0]), schema.select(ds, labels[5]), draws=50).n_positions)
    assert mesh.get_array().count() == n


def test_heatmap_strip_is_a_ratio_of_sums_on_common_positions(ds: xr.Dataset, labels: list[str]) -> None:
    floor = plotdata.row_floor(ds, labels[0], labels[5])
    kl = floors.pair_kl(schema.select(ds, labels[0]), schema.select(ds, labels[5]))
    cut = floor.kl.where(floor.kl["position"] < 5)
    got = plotdata.prompt_ratios(kl, cut)
    expected = kl.isel(position=slice(5)).sum("position") / floor.kl.isel(position=slice(5)).sum("position")
    np.testing.assert_allclose(got, expected.values)


def test_heatmap_of_an_identical_row_and_of_a_floor_below_resolution(ds: xr.Dataset, labels: list[str]) -> None:
    assert "delta 0 everywhere" in words(heatmap(ds, labels, 4))
    comparison = compare(schema.select(ds, labels[0]), schema.select(ds, labels[5]), draws=50)
    rerun = next(f for f in floors.ladder(ds) if f.rung == "rerun")
    text = words(plots.plot_prompt_heatmap(comparison, rerun))
    assert "ratio not defined: floor below resolution" in text
    assert "mean <1e-8 nat" in text


def test_heatmap_of_many_prompts_labels_categories_only() -> None:
    two = synthetic_shards([{}, {"noise": 0.1, "batch_size": 8}], n_prompts=90, n_positions=6, vocab=30, decode=False)
    a, b = two.shards
    floor = floors.pair_floor(a, b, scoring="replay")
    figure = plots.plot_prompt_heatmap(compare(a, b, draws=20), floor)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["code", "list", "open"]


def test_replay_decode_draws_both_clouds_and_the_diagonal(ds: xr.Dataset, labels: list[str]) -> None:
    ax = plots.plot_replay_decode(ds, labels[0], labels[5])
    delta, floor, diagonal = ax.lines
    assert delta.get_label().startswith("delta: 18 prompts")
    assert floor.get_label().startswith("floor: 18 prompts")
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata())
    assert ax.get_xlim() == ax.get_ylim()
    assert "floor: batch size" in words(drawing.figure_of(ax))


def test_replay_decode_compares_the_same_text_only() -> None:
    made = synthetic_shards([{}, {"noise": 0.3}], n_prompts=12, n_positions=16, vocab=60)
    a, b = made.shards
    cloud = plotdata.phase_cloud(a, b)
    np.testing.assert_allclose(cloud.replay, cloud.decode, rtol=0.6)  # without phase noise the two differ in known ids
    swapped = plotdata.phase_cloud(b, a)
    assert swapped.n_positions < int(a["n_tokens"].sel(scoring="replay").sum())
    assert cloud.n_positions > 0
    a["state"].values[0, 0] = schema.STATES.index("missing")
    with pytest.raises(RefusedError, match="no decode"):
        plotdata.phase_cloud(a, b)


def test_names_of_rows_and_floors(ds: xr.Dataset, labels: list[str]) -> None:
    assert plotdata.row_name(ds, labels[0], labels[1]) == "hardware: card-a → card-b"
    assert plotdata.row_name(ds, labels[2], labels[3]) == "mixed: batch size, attention: 8 → 1, sdpa → eager"
    assert plotdata.row_name(ds, labels[0], labels[0]) == "none"


def test_mean_interval_holds_the_mean_of_positions() -> None:
    kl = xr.DataArray([[1.0, 3.0, np.nan], [5.0, np.nan, np.nan]], dims=("prompt", "position"))
    mean, lo, hi = plotdata.mean_interval(kl, draws=200)
    assert mean == 3.0
    assert lo == 2.0
    assert hi == 5.0
    assert np.isnan(plotdata.mean_interval(kl.where(False))).all()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1e-8, "1e-8"),
        (0.00112, "1.1e-3"),
        (0.01, "0.01"),
        (2.0, "2"),
        (50.0, "50"),
        (1000.0, "1000"),
        (2e5, "2e5"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert drawing.short(value) == text


def test_functions_draw_into_the_axes_given(ds: xr.Dataset, labels: list[str]) -> None:
    decode = [pair(ds, labels[0], x, "decode") for x in (labels[5], labels[2])]
    _, axes = plt.subplots(1, 3, figsize=(12, 5))
    assert plots.plot_ladder(ds, draws=20, ax=axes[0]) is axes[0]
    assert plots.plot_divergence(*decode, draws=20, ax=axes[1]) is axes[1]
    assert plots.plot_replay_decode(ds, labels[0], labels[5], ax=axes[2]) is axes[2]
    assert all(ax.get_title(loc="left") or ax.get_title() for ax in axes)
    assert len(plt.get_fignums()) == 1


def test_no_text_is_below_seven_points(ds: xr.Dataset, labels: list[str]) -> None:
    for figure in (heatmap(ds, labels, 5), drawing.figure_of(plots.plot_ladder(ds, draws=20))):
        assert min(t.get_fontsize() for t in figure.findobj(mpl.text.Text) if t.get_text()) >= 7
        assert "$" not in words(figure)


def test_tick_labels_do_not_overlap(ds: xr.Dataset, labels: list[str]) -> None:
    decode = [pair(ds, labels[0], x, "decode") for x in (labels[5], labels[2])]
    drawn = [heatmap(ds, labels, 5), plots.plot_ladder(ds, draws=20), plots.plot_divergence(*decode, draws=20)]
    for figure in map(drawing.figure_of, drawn):
        for ax, name in itertools.product(figure.axes, ("x", "y")):
            lo, hi = sorted(getattr(ax, f"get_{name}lim")())
            axis = getattr(ax, f"{name}axis")
            at = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
            boxes = [t.get_window_extent() for x, t in at if lo <= x <= hi and t.get_text()]
            assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))


def test_saved_files_are_the_same_bytes_each_time(ds: xr.Dataset, labels: list[str], tmp_path: Path) -> None:
    saved = []
    for folder in ("one", "two/deeper"):
        figure = drawing.figure_of(plots.plot_ladder(ds, draws=20))
        saved.append(plots.save_figure(figure, "ladder", tmp_path / folder))
    assert [p.name for p in saved[0]] == ["ladder.svg", "ladder.pdf", "ladder.png"]
    for a, b in zip(*saved, strict=True):
        assert a.read_bytes() == b.read_bytes()
    svg = saved[0][0].read_text()
    assert "<dc:date>" not in svg
    assert "Noise-floor ladder" in svg  # text stays text
    assert b"CreationDate" not in saved[0][1].read_bytes()
    assert b"Software" not in saved[0][2].read_bytes()
    assert not plt.get_fignums()


def test_heatmaps_are_saved_the_same_each_time(ds: xr.Dataset, labels: list[str], tmp_path: Path) -> None:
    a, b = (plots.save_figure(heatmap(ds, labels, 5), "heatmap", tmp_path / f) for f in "ab")
    assert [x.read_bytes() for x in a] == [x.read_bytes() for x in b]


def test_nothing_else_imports_the_figures() -> None:
    code = "import sys, ruitong_lib.report.table; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_notebook_is_stripped_and_explains_itself() -> None:
    notebook = json.loads((NOTEBOOKS / "figures.ipynb").read_text(encoding="utf-8"))
    cells = notebook["cells"]
    assert sum("parameters" in c["metadata"].get("tags", []) for c in cells) == 1
    for before, cell in itertools.pairwise(cells):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            assert before["cell_type"] == "markdown"
            assert not any(line.startswith(("def ", "class ")) for line in cell["source"])
