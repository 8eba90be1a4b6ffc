import json
import math

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from ruitong_lib import schema
from ruitong_lib.measure import floor
from ruitong_lib.measure.floor import floor_for, ladder, phase_kl, ratio, rounding_class
from ruitong_lib.testing import synthetic_shards

SIZES: dict = {"n_prompts": 8, "n_positions": 12, "k": 10, "vocab": 60, "decode": False}


def aggregate(cells, **sizes):
    """Cells by name, and the aggregate; spread 0, so that noise alone decides which rung is largest."""
    made = synthetic_shards(list(cells.values()), **{**SIZES, "spread": 0.0, **sizes}).shards
    return schema.combine(made), {n: str(s["cell"].values[0]) for n, s in zip(cells, made, strict=True)}


def field(values, prompts=None):
    values = np.asarray(values, dtype=float)
    prompts = [f"p{i}" for i in range(len(values))] if prompts is None else prompts
    return xr.DataArray(
        values, {"prompt": prompts, "position": np.arange(values.shape[1])}, dims=("prompt", "position")
    )


LADDER = {
    "base": {},
    "rerun": {"repeat": 1},
    "b8": {"noise": 0.03, "batch_size": 8},
    "b8 shuffled": {"noise": 0.03, "batch_size": 8, "composition": 5},
    "eager": {"noise": 0.06, "attention": "eager"},
    "isa": {"noise": 0.05, "onednn_isa": "AVX512_CORE"},
    "fp16": {"noise": 0.004, "precision": "fp16"},
    "t2": {"threads": 2},
    "other card": {"noise": 0.05, "hardware": "card-b"},
    "vllm": {"noise": 0.05, "engine": "vllm"},
}


@pytest.fixture(scope="module")
def measured():
    return aggregate(LADDER)


@pytest.fixture(scope="module")
def rungs(measured):
    return ladder(measured[0])


class TestLadder:
    def test_each_pair_that_differs_in_one_field_of_the_ladder(self, measured, rungs):
        names = {label: n for n, label in measured[1].items()}
        assert [(f.rung, names[f.reference], names[f.candidate]) for f in rungs] == [
            ("rerun", "base", "rerun"),
            ("batch size", "base", "b8"),
            ("batch composition", "b8", "b8 shuffled"),
            ("attention", "base", "eager"),
            ("threads", "t2", "base"),
            ("kernels", "base", "isa"),
            ("precision", "fp16", "base"),
            ("engine", "base", "vllm"),
        ]

    def test_order_of_cells_does_not_matter(self, measured, rungs):
        ds = measured[0]
        again = ladder(ds.isel(cell=np.arange(ds.sizes["cell"])[::-1]))
        assert [f.to_dict() for f in again] == [f.to_dict() for f in rungs]

    def test_deterministic_kernels_are_their_own_configuration(self):
        # their floors are not those of the plain kernels, and a row between the two is titled by the switch
        cells = {
            "plain": {}, "plain b8": {"noise": 0.03, "batch_size": 8}, "det": {"noise": 0.05, "deterministic": True},
            "det fp16": {"precision": "fp16", "deterministic": True},
        }  # fmt: skip
        ds, labels = aggregate(cells)
        assert floor_for(ds, labels["plain"], labels["plain b8"]) is None  # its own axis
        assert floor_for(ds, labels["det"], labels["det fp16"]) is None
        assert floor_for(ds, labels["plain"], labels["det"]).rung == "batch size"

    def test_facts_of_a_rung(self, rungs):
        f = next(f for f in rungs if f.rung == "attention")
        assert f.mean_kl == pytest.approx(float(f.kl.mean()))
        assert f.n_positions == f.kl.notnull().sum()
        assert f.n_prompts == 8
        assert (f.precision, f.hardware, f.engine, f.rounding_class) == ("bf16", "card-a", "synthetic", "2×bf16")
        assert next(f for f in rungs if f.rung == "rerun").mean_kl == 0
        assert next(f for f in rungs if f.rung == "precision").rounding_class == "1×bf16"

    def test_facts_are_json(self, rungs):
        facts = json.loads(json.dumps(rungs[1].to_dict()))
        assert facts["rung"] == "batch size"
        assert "kl" not in facts

    def test_what_cannot_be_compared_is_left_out(self, measured):
        ds, labels = measured[0].copy(deep=True), measured[1]
        at = list(ds["cell"].values).index(labels["eager"])
        ds["state"].values[at, 1, 0] = schema.STATES.index("nan_logits")
        assert "attention" not in {f.rung for f in ladder(ds)}

    def test_decode_has_no_phase(self):
        ds, _ = aggregate({"base": {}, "b8": {"noise": 0.03, "batch_size": 8}}, decode=True)
        assert [f.rung for f in ladder(ds)] == ["phase", "phase", "batch size"]
        assert [f.rung for f in ladder(ds, scoring="decode")] == ["batch size"]


A = {
    "a": {},
    "a b8": {"noise": 0.03, "batch_size": 8},
    "a eager": {"noise": 0.06, "attention": "eager"},
    "a rerun": {"noise": 0.5, "repeat": 1},
    "a isa": {"noise": 0.5, "onednn_isa": "AVX2"},
    "a t2": {"noise": 0.5, "threads": 2},
}
OTHERS = {
    "a fp16": {"precision": "fp16"},
    "a s1": {"noise": 0.1, "seed": 1},
    "b": {"hardware": "card-b"},
    "b eager": {"hardware": "card-b", "attention": "eager", "noise": 0.3},
    "b b4": {"hardware": "card-b", "batch_size": 4, "noise": 0.01},
    "b b8": {"hardware": "card-b", "batch_size": 8, "noise": 0.2},
}
ELSEWHERE = {
    name + more: fields | patch
    for name, fields in (
        ("precision", {"precision": "fp16", "repeat": 2}),
        ("hardware", {"hardware": "card-c"}),
        ("engine", {"engine": "vllm"}),
    )
    for more, patch in (("", {}), (" b8", {"batch_size": 8, "noise": 0.03}))
}


@pytest.fixture(scope="module")
def world():
    ds, labels = aggregate({**A, **OTHERS, **ELSEWHERE}, n_prompts=4)
    return ds, labels, ladder(ds)


class TestTheRule:
    """The floor of a row: nobody picks it after seeing the numbers."""

    @pytest.fixture
    def pick(self, world):
        ds, labels, rungs = world
        names = {label: n for n, label in labels.items()}

        def pick(cells, reference, candidate):
            here = {labels[n] for n in (*cells, reference, candidate)}
            mine = [f for f in rungs if {f.reference, f.candidate} <= here]
            found = floor_for(ds.sel(cell=sorted(here)), labels[reference], labels[candidate], rungs=mine)
            return None if found is None else (found.rung, names[found.reference], names[found.candidate], found.side)

        return pick

    def test_the_largest_rung_on_the_references_side(self, pick):
        assert pick(A, "a", "b") == ("attention", "a", "a eager", "reference")

    def test_the_ladder_is_made_where_none_is_given(self, world):
        ds, labels, _ = world
        few = ds.sel(cell=[labels[n] for n in ("b", "a", "a b8")])
        found = floor_for(few, labels["a"], labels["b"])
        assert (found.rung, found.candidate) == ("batch size", labels["a b8"])

    def test_without_the_rows_own_axis(self, pick):
        assert pick(A, "a", "a eager") == ("batch size", "a", "a b8", "reference")
        assert pick(A, "a", "a b8") == ("attention", "a", "a eager", "reference")

    def test_a_mixed_row_leaves_out_all_its_axes(self, pick):
        assert pick(A, "a", "b eager") == ("batch size", "a", "a b8", "reference")

    def test_the_smaller_of_the_two_sides(self, pick):
        assert pick([*A, "b b4"], "a", "b") == ("batch size", "b", "b b4", "candidate")
        assert pick([*A, "b b8"], "a", "b") == ("attention", "a", "a eager", "reference")
        # on each side the largest counts, whichever is the smaller of the two then
        assert pick([*A, "b b4", "b eager"], "a", "b") == ("attention", "a", "a eager", "reference")

    def test_swapping_the_row_picks_the_same_floor(self, pick):
        there, back = pick([*A, "b b4"], "a", "b"), pick([*A, "b b4"], "b", "a")
        assert there[:3] == back[:3]
        assert back[3] == "reference"

    def test_the_candidates_side_alone_serves(self, pick):
        assert pick(["b b8"], "a", "b") == ("batch size", "b", "b b8", "candidate")

    def test_rerun_threads_kernels_and_precision_never_serve(self, pick):
        assert pick(["a rerun", "a isa", "a t2", "a fp16"], "a", "b") is None

    @pytest.mark.parametrize("field", ["precision", "hardware", "engine"])
    def test_a_floor_from_elsewhere_does_not_serve(self, pick, world, field):
        _, labels, rungs = world
        pair = {labels[field], labels[f"{field} b8"]}
        assert any({f.reference, f.candidate} == pair for f in rungs)
        assert pick([field, f"{field} b8"], "a", "b") is None

    def test_both_sides_of_one_hardware_have_one_floor(self, pick):
        assert pick(A, "a", "a s1") == ("attention", "a", "a eager", "reference")


class TestRatio:
    def test_by_hand(self):
        delta, under = field([[4.0, 2.0], [6.0, 8.0], [1.0, 3.0]]), field([[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]])
        r = ratio(delta, under)
        assert r.value == pytest.approx(24 / 8)
        assert (r.n_prompts, r.n_positions, r.status) == (3, 6, "ok")
        logs = np.log([18 / 6, 10 / 4, 20 / 6])
        error = np.sqrt(2 / 3 * ((logs - logs.mean()) ** 2).sum())
        half = stats.t.ppf(0.975, 2) * error
        assert (r.lo, r.hi) == pytest.approx((3 * np.exp(-half), 3 * np.exp(half)))
        wide = ratio(delta, under, level=0.99)
        assert wide.lo < r.lo < r.hi < wide.hi

    def test_common_positions_alone_count(self):
        delta, under = field([[4.0, np.nan], [6.0, 8.0]]), field([[1.0, 100.0], [np.nan, 2.0]])
        r = ratio(delta, under)
        assert (r.value, r.n_positions, r.n_prompts) == (pytest.approx(12 / 3), 2, 2)

    def test_common_prompts_alone_count_in_any_order(self):
        delta, under = field([[4.0], [6.0], [9.0]], ["a", "b", "c"]), field([[2.0], [1.0], [50.0]], ["b", "a", "x"])
        r = ratio(delta, under)
        assert (r.value, r.n_prompts) == (pytest.approx(10 / 3), 2)

    def test_a_shorter_floor(self):
        r = ratio(field([[1.0, 2.0, 30.0]]), field([[1.0, 1.0]]))
        assert (r.value, r.n_positions) == (1.5, 2)
        assert math.isnan(r.lo)  # one prompt has no interval

    def test_several_floors_add_up(self):
        delta = field([[4.0, 2.0], [6.0, 8.0]])
        r = ratio(delta, [field([[1.0, 1.0], [2.0, 2.0]]), field([[1.0, np.nan], [1.0, 1.0]])])
        assert (r.value, r.n_positions) == (pytest.approx(18 / 8), 3)

    def test_swapping_the_two_gives_the_reciprocal(self):
        rng = np.random.default_rng(0)
        one, two = field(rng.lognormal(size=(9, 5))), field(rng.lognormal(size=(9, 5)))
        there, back = ratio(one, two), ratio(two, one)
        assert (there.value, there.lo, there.hi) == pytest.approx((1 / back.value, 1 / back.hi, 1 / back.lo))

    def test_order_of_prompts_and_padding_change_nothing(self):
        rng = np.random.default_rng(1)
        one, two = field(rng.lognormal(size=(9, 5))), field(rng.lognormal(size=(9, 5)))
        plain = ratio(one, two)
        assert ratio(one.isel(prompt=rng.permutation(9)), two).value == pytest.approx(plain.value)
        padded = field(np.pad(two.values, ((0, 0), (0, 4)), constant_values=np.nan))
        assert ratio(one, padded) == plain

    @pytest.mark.parametrize("value", [0.0, 9e-9])
    def test_floor_below_resolution_is_no_divisor(self, value):
        r = ratio(field([[1e-3, 1e-3]] * 3), field([[value, value]] * 3))
        assert r.status == "floor below resolution"
        assert math.isnan(r.value)
        assert (r.n_prompts, r.n_positions) == (3, 6)

    def test_floor_at_the_resolution_divides(self):
        assert ratio(field([[1e-3]] * 3), field([[1.1e-8]] * 3)).status == "ok"

    def test_nothing_over_nothing_is_identical(self):
        assert ratio(field([[0.0]] * 3), field([[0.0]] * 3)).status == "identical"
        r = ratio(field([[0.0]] * 3), field([[1e-3]] * 3))
        assert (r.value, r.status) == (0.0, "identical")

    def test_no_common_positions(self):
        r = ratio(field([[1.0, np.nan]]), field([[np.nan, 1.0]]))
        assert (r.status, r.n_positions) == ("no common positions", 0)
        assert math.isnan(r.value)
        assert ratio(field([[1.0]], ["a"]), field([[1.0]], ["b"])).status == "no common positions"

    def test_interval_covers_the_truth(self):
        # both sides have the same per-prompt law, so R = 1; 95 % intervals of 200 draws cover it at least 180 times
        rng = np.random.default_rng(2)
        hits = 0
        for _ in range(200):
            r = ratio(field(rng.lognormal(size=(16, 1))), field(rng.lognormal(size=(16, 1))))
            hits += r.lo <= 1 <= r.hi
        assert 180 <= hits <= 199

    def test_is_the_ratio_of_known_noise(self):
        # KL grows with the square of the noise: twice the noise is four times the KL
        cells = [{}, {"noise": 0.04, "hardware": "card-b"}, {"noise": 0.02, "batch_size": 8}]
        s = synthetic_shards(cells, n_prompts=24, n_positions=30, k=20, vocab=80, spread=0.0, decode=False)
        r = ratio(*(floor.pair_kl(s.shards[0], x) for x in s.shards[1:]))
        exact = float(s.exact_kl(0, 1).sum() / s.exact_kl(0, 2).sum())
        assert exact == pytest.approx(4, rel=0.1)
        assert r.value == pytest.approx(exact, rel=0.05)
        assert r.lo < 4 < r.hi


class TestPhase:
    def test_zero_where_decode_and_replay_agree(self):
        s = synthetic_shards([{"noise": 0.5}], **{**SIZES, "decode": True})
        kl = phase_kl(s.shards[0])
        assert kl.max() == 0
        d, r = (s.shards[0].isel(cell=0).sel(scoring=x)["token_id"].values for x in schema.SCORINGS)
        for p in range(8):
            differ = np.flatnonzero((d[p] != r[p]) & (r[p] >= 0))
            read = differ[0] + 1 if len(differ) else s.n_tokens[p]
            assert kl.notnull().values[p].sum() == read
        assert (d != r).any()

    def test_a_cache_that_rounds_otherwise_shows(self):
        s = synthetic_shards([{}], **{**SIZES, "decode": True, "phase": 0.02})
        kl = phase_kl(s.shards[0])
        assert 1e-6 < float(kl.mean()) < 1e-2
        rung = next(f for f in ladder(schema.combine(s.shards)) if f.rung == "phase")
        assert rung.mean_kl == pytest.approx(float(kl.mean()))

    @pytest.mark.parametrize("decode", [False, True])
    def test_none_without_both(self, decode):
        s = synthetic_shards([{}], **{**SIZES, "decode": decode})
        if decode:
            s.shards[0]["state"].values[0, 1] = schema.STATES.index("missing")
        assert phase_kl(s.shards[0]) is None


class TestRoundings:
    @pytest.mark.parametrize(
        ("one", "two", "name"),
        [
            ("bf16", "bf16", "2×bf16"),
            ("fp16", "bf16", "1×bf16"),
            ("bf16", "fp32", "1×bf16"),
            ("fp16", "fp16", "2×fp16"),
            ("w8a8", "bf16", "1×w8a8"),
            ("fp32", "fp32", "2×fp32"),
            ("fp64", "fp32", "1×fp32"),
            ("tf32", "fp32", "1×tf32"),
            ("tf32", "fp16", "1×fp16"),
            ("fp8", "w8a8", "1×fp8"),
            ("fp8", "bf16", "1×fp8"),
            ("undeclared", "bf16", "unknown"),
            ("undeclared", "undeclared", "unknown"),
        ],
    )
    def test_class(self, one, two, name):
        assert rounding_class(one, two) == rounding_class(two, one) == name

    CELLS = {  # noqa: RUF012
        "a": {"noise": 0.03},
        "b": {"noise": 0.04, "hardware": "card-b"},
        "fp16": {"precision": "fp16"},
    }

    def test_independent_roundings_add_up(self):
        ds, labels = aggregate(self.CELLS, n_prompts=16, n_positions=24)
        label, both = floor.two_rounding_sum(ds, labels["a"], labels["b"])
        assert label == labels["fp16"]
        direct = floor.pair_kl(*(schema.select(ds, labels[x]) for x in "ab"))
        assert float(sum(both).sum() / direct.sum()) == pytest.approx(1, abs=0.1)
        summed = floor.sum_floor(*(schema.select(ds, labels[x]) for x in ("fp16", "a", "b")), scoring="replay")
        assert summed.mean_kl == pytest.approx(float(sum(both).mean()))
        assert summed.rounding_class == "2×bf16"

    def test_fp32_before_fp16(self):
        ds, labels = aggregate({**self.CELLS, "fp32": {"precision": "fp32"}})
        assert floor.two_rounding_sum(ds, labels["a"], labels["b"])[0] == labels["fp32"]

    def test_none_for_another_class_or_without_a_finer_cell(self):
        ds, labels = aggregate(self.CELLS)
        assert floor.two_rounding_sum(ds, labels["fp16"], labels["b"]) is None
        ds, labels = aggregate({n: self.CELLS[n] for n in "ab"})
        assert floor.two_rounding_sum(ds, labels["a"], labels["b"]) is None
