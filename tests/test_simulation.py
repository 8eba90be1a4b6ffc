import math
import os
from pathlib import Path

import numpy as np
import pytest

from ruitong_lib.collect import corpora
from ruitong_lib.measure import floor as floors
from ruitong_lib.measure import kernels, simulate
from ruitong_lib.measure.verdict import prompts_needed

DATA = Path(os.environ.get("RUITONG_DATA") or Path(__file__).parents[2] / "shared" / "corpora")


def test_many_at_once_is_the_kernel() -> None:
    d = simulate.draw(n_prompts=20, ratio=1.5, simulations=3, seed=1)
    value, error = simulate.log_ratio(d)
    for i in range(3):
        assert (value[i], error[i]) == pytest.approx(kernels.log_ratio_jackknife(d.delta[i], d.floor[i]))


def test_the_truth_is_the_ratio_of_expectations() -> None:
    d = simulate.draw(n_prompts=200_000, ratio=1.7, simulations=1, seed=2)
    assert float(d.delta.sum() / d.floor.sum()) == pytest.approx(1.7, rel=0.02)


@pytest.mark.parametrize(("n", "least"), [(16, 0.91), (61, 0.93)])
def test_coverage_and_false_verdicts(n: int, least: float) -> None:
    c = simulate.coverage(n_prompts=n, simulations=1500, draws=400, seed=4)
    slack = 3 * c.jackknife.error
    assert least - slack <= c.jackknife.value <= 0.97 + slack
    assert c.false_equivalent.value <= 0.05 + 3 * c.false_equivalent.error
    assert c.false_different.value <= 0.05 + 3 * c.false_different.error
    assert c.iid_tokens.value < c.jackknife.value - 3 * c.jackknife.error  # tokens are no clusters
    assert c.percentile_bootstrap.value < c.jackknife.value


@pytest.mark.slow
@pytest.mark.parametrize(("n", "least"), [(16, 0.91), (61, 0.93), (540, 0.93)])
def test_coverage_in_full(n: int, least: float) -> None:
    c = simulate.coverage(n_prompts=n, simulations=4000, seed=0)
    assert least <= c.jackknife.value <= 0.97
    assert c.false_equivalent.value <= 0.05
    assert c.false_different.value <= 0.05
    assert c.iid_tokens.value < 0.9
    assert c.jackknife.error < 0.005


@pytest.mark.parametrize(("ratio", "margin"), [(1.4, 2.0), (1.2, 2.0), (3.0, 2.0), (2.26, 4.0)])
def test_power_keeps_the_planner_s_promise(ratio: float, margin: float) -> None:
    spread = simulate.coverage(n_prompts=61, simulations=1000, draws=50, seed=5).spread
    pilot = floors.Ratio(ratio, math.nan, math.nan, 61, 2000, "ok", spread / math.sqrt(61))
    n = prompts_needed(pilot, margin)
    assert n is not None
    power = simulate.power(n_prompts=n, ratio=ratio, margin=margin, simulations=2000, seed=6)
    assert 0.80 - 0.02 - 3 * power.error <= power.value <= 0.88


def test_a_rate_shows_its_error() -> None:
    assert str(simulate.Rate(0.945, 0.0036)) == "94.5 % ± 0.4"


@pytest.mark.skipif(not (DATA / "a40_61.json").is_file(), reason=f"no published corpora in {DATA}")
def test_the_simulation_has_the_shape_of_the_corpora() -> None:
    names = ("a100_fp16_61", "a100_bf16_61", "a40_61", "mi300x", "rtx6000ada_61", "h100")
    s = {n: corpora.read(DATA / f"{n}.json") for n in names}
    base = floors.pair_kl(s["a100_fp16_61"], s["a100_bf16_61"], "decode").values
    pairs = [("a40_61", "mi300x"), ("a40_61", "rtx6000ada_61"), ("h100", "mi300x"), ("a100_bf16_61", "a40_61")]
    real = [simulate.shape(floors.pair_kl(s[a], s[b], "decode").values, base) for a, b in pairs]
    rng = np.random.default_rng(0)
    drawn = [simulate.shape(*simulate.positions(rng, 61, 2.0)) for _ in range(200)]
    for name, low, high in (("top_share", 0.8, 1.25), ("top_prompt", 0.8, 1.35), ("correlation", 0.9, 1.1)):
        middle = np.mean([d[name] for d in drawn])
        assert low * min(r[name] for r in real) <= middle <= high * max(r[name] for r in real)
    # No easier than the corpora: as wide a spread, and more clustered, than the worst of their pairs.
    assert np.mean([d["spread"] for d in drawn]) >= 0.95 * max(r["spread"] for r in real)
    assert np.mean([d["clustering"] for d in drawn]) >= max(r["clustering"] for r in real)
