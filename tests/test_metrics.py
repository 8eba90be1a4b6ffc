import numpy as np
import pytest
import xarray as xr

from ruitong_lib.measure.align import align
from ruitong_lib.measure.metrics import METRICS
from ruitong_lib.testing import synthetic_shards

NAMES = list(METRICS)


@pytest.fixture(scope="module")
def truth():
    return synthetic_shards(
        [{}, {"noise": 0.08, "hardware": "card-b"}], n_prompts=10, n_positions=14, k=12, vocab=90, seed=3,
        experts=EXPERTS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair(truth):
    return align(*truth.shards)


def in_replay(truth, per_position):
    """The expected (prompt, position) array, NaN after the anchor's end, from full float64 distributions."""
    p, q = truth.log_probs
    expected = np.full(p.shape[:2], np.nan)
    for i, n in enumerate(truth.n_tokens):
        for t in range(n):
            expected[i, t] = per_position(p[i, t], q[i, t], truth.shards[0]["anchor_token_id"].values[0, i, t])
    return expected[:, : truth.n_tokens.max()]


def kl_with_rest(p, q, ids):
    def one(a, b):
        a, b = ([*np.exp(x[ids]), np.exp(np.delete(x, ids)).sum()] for x in (a, b))
        return sum(x * np.log(x / y) for x, y in zip(a, b, strict=True))

    return (one(p, q) + one(q, p)) / 2


def shift_with_rest(p, q, ids):
    a, b = (np.array([*np.exp(x[ids]), np.exp(np.delete(x, ids)).sum()]) for x in (p, q))
    return np.abs(a - b).sum() / 2


EXPERTS = (3, 2, 8)  # layers, experts chosen, experts in all


def routed(x, layer):
    return set(np.argsort(-x[layer * 8 : layer * 8 + 8])[:2].tolist())


def five(x):
    return set(np.argsort(-x)[:5].tolist())


ORACLES = {
    "kl": kl_with_rest,
    "prob_mass_shift": shift_with_rest,
    "max_delta_logprob": lambda p, q, ids: np.abs(p - q)[ids[:10]].max(),
    "max_delta_prob": lambda p, q, ids: np.abs(np.exp(p) - np.exp(q))[ids[:10]].max(),
    "top1_agreement": lambda p, q, ids: float(p.argmax() == q.argmax()),
    "tied_flips": lambda p, q, ids: 0.0,  # continuous noise: no ties; see the tests below
    "top5_jaccard": lambda p, q, ids: len(five(p) & five(q)) / len(five(p) | five(q)),
    "top5_identical": lambda p, q, ids: float(five(p) == five(q)),
    "top5_boundary_ties": lambda p, q, ids: 0.0,
    "router_agreement": lambda p, q, ids: np.mean([routed(p, i) == routed(q, i) for i in range(3)]),
    "direction": lambda p, q, ids: q[ids[0]] - p[ids[0]],
}


def test_each_metric_has_an_oracle():
    assert set(ORACLES) == set(METRICS)


@pytest.mark.parametrize("name", NAMES)
def test_against_the_oracle(name, truth, pair):
    got = METRICS[name].function(pair)
    assert got.dims == ("prompt", "position")
    # float32 logprobs are off by 2^-24 of themselves; a KL term of relative error 2δ/d
    np.testing.assert_allclose(got.values, in_replay(truth, ORACLES[name]), rtol=1e-3, atol=2e-6)
    if name in {"top1_agreement", "top5_jaccard", "top5_identical"}:
        assert (got == 1).any()
        assert (got < 1).any()


def test_kl_and_mass_shift_are_lower_bounds(truth, pair):
    kl, exact = METRICS["kl"].function(pair), truth.exact_kl()
    exact = exact.isel(position=slice(kl.sizes["position"]))
    assert (kl <= exact * (1 + 1e-3) + 1e-9).where(pair["valid"], True).all()
    assert 0.5 < float(kl.sum() / exact.sum()) < 1
    p, q = np.exp(truth.log_probs[:, :, : kl.sizes["position"]])
    tv = METRICS["prob_mass_shift"].function(pair)
    assert (tv <= np.abs(p - q).sum(-1) / 2 + 1e-6).where(pair["valid"], True).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scoring", ["replay", "decode"])
def test_a_cell_against_itself_is_perfect(name, scoring, truth):
    facts = METRICS[name]
    same = align(truth.shards[1], truth.shards[1], scoring=scoring)
    got = facts.function(same)
    perfect = 0.0 if np.isnan(facts.perfect) else facts.perfect  # ties belong to a cell, here there are none
    np.testing.assert_array_equal(got.values, np.where(same["valid"], perfect, np.nan))


@pytest.mark.parametrize("name", NAMES)
def test_units_and_names_are_set_by_the_metric(name, pair):
    pair = pair.copy()
    for v in pair.data_vars:
        pair[v].attrs["units"] = "furlong"
    got = METRICS[name].function(pair)
    assert got.attrs["units"] == METRICS[name].unit
    assert got.attrs["long_name"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("noise", [0.02, 3.0])
def test_bounds(name, noise):
    s = synthetic_shards([{}, {"noise": noise}], n_prompts=4, n_positions=10, k=8, vocab=40, seed=4, experts=EXPERTS)
    got = METRICS[name].function(align(*s.shards)).values
    low, high = METRICS[name].bounds
    known = got[np.isfinite(got)]
    assert known.size
    assert low <= known.min()
    assert known.max() <= high


@pytest.fixture(scope="module", params=["replay", "decode"])
def variants(request, truth, pad_positions):
    """The pair, and what must leave it as it is: the sides swapped, the prompts in another order, padding."""
    a, b = truth.shards
    order = np.random.default_rng(5).permutation(10)
    pairs = {
        "plain": (a, b),
        "swapped": (b, a),
        "one side in another order": (a, b.isel(prompt=order)),
        "both in another order": (a.isel(prompt=order), b.isel(prompt=np.arange(10)[::-1])),
        "reference padded": (pad_positions(a, 5), b),
        "candidate padded": (a, pad_positions(b, 5)),
        "both padded": (pad_positions(a, 2), pad_positions(b, 7)),
    }
    return order, {name: align(*p, scoring=request.param) for name, p in pairs.items()}


@pytest.mark.parametrize("name", NAMES)
def test_swapping_the_sides(name, variants):
    _, pairs = variants
    there, back = (METRICS[name].function(pairs[x]).values for x in ("plain", "swapped"))
    if METRICS[name].symmetric:
        np.testing.assert_allclose(back, there, rtol=1e-12, atol=1e-15)
    else:
        np.testing.assert_allclose(back, -there, rtol=1e-12)
        assert np.nanmax(np.abs(there)) > 0


@pytest.mark.parametrize("name", NAMES)
def test_order_of_prompts_and_padding_change_nothing(name, variants):
    order, pairs = variants
    got = {n: METRICS[name].function(p) for n, p in pairs.items()}
    for same in ("one side in another order", "reference padded", "candidate padded", "both padded"):
        xr.testing.assert_identical(got[same], got["plain"])
    xr.testing.assert_identical(got["both in another order"], got["plain"].isel(prompt=order))


@pytest.mark.parametrize("name", NAMES)
def test_a_masked_position_is_nan_and_no_other_changes(name, truth):
    a, b = (s.copy(deep=True) for s in truth.shards)
    plain = METRICS[name].function(align(a, b)).values
    b["position_state"].values[0, 1, 2, 3] = 1
    b["anchor_logprob"].values[0, 2, 3] = np.nan
    got = METRICS[name].function(align(a, b)).values
    assert np.isnan(got[2, 3])
    plain[2, 3] = np.nan
    np.testing.assert_array_equal(got, plain)


class TestTies:
    def flip(self, truth):
        """Swap the two best of the candidate at one position where both sides agree; return the position."""
        a, b = (s.copy(deep=True) for s in truth.shards)
        agree = a["top_token_id"].values[0, 1, ..., 0] == b["top_token_id"].values[0, 1, ..., 0]
        p, t = np.argwhere(agree & (a["token_id"].values[0, 1] >= 0))[0]
        ids = b["top_token_id"].values[0, 1, p, t]
        ids[:2] = ids[1::-1]
        return a, b, p, t

    def test_a_flip_without_a_tie(self, truth):
        a, b, p, t = self.flip(truth)
        pair = align(a, b)
        assert METRICS["top1_agreement"].function(pair).values[p, t] == 0
        assert METRICS["tied_flips"].function(pair).values[p, t] == 0

    @pytest.mark.parametrize("side", [0, 1])
    def test_a_flip_with_a_tie_on_one_side(self, truth, side):
        a, b, p, t = self.flip(truth)
        lp = (a, b)[side]["top_logprob"].values[0, 1, p, t]
        lp[1] = lp[0]
        pair = align(a, b)
        assert METRICS["top1_agreement"].function(pair).values[p, t] == 0
        tied = METRICS["tied_flips"].function(pair).values
        assert tied[p, t] == 1
        assert np.nansum(tied) == 1

    def test_a_tie_without_a_flip_counts_nothing(self, truth):
        a, b = (s.copy(deep=True) for s in truth.shards)
        agree = a["top_token_id"].values[0, 1, 0, 0, 0] == b["top_token_id"].values[0, 1, 0, 0, 0]
        assert agree
        a["top_logprob"].values[0, 1, 0, 0, 1] = a["top_logprob"].values[0, 1, 0, 0, 0]
        assert METRICS["tied_flips"].function(align(a, b)).sum() == 0

    @pytest.mark.parametrize("side", [0, 1])
    def test_ties_at_the_boundary_of_the_top_five(self, truth, side):
        a, b = (s.copy(deep=True) for s in truth.shards)
        lp = (a, b)[side]["top_logprob"].values[0, 1, 1, 2]
        lp[5] = lp[4]
        ties = METRICS["top5_boundary_ties"].function(align(a, b)).values
        assert ties[1, 2] == 1
        assert np.nansum(ties) == 1


class TestUnknownIds:
    """A source that gives no ids at a position: undefined is NaN, never 0 or 1."""

    @pytest.mark.parametrize("name", ["top1_agreement", "top5_jaccard", "top5_identical"])
    def test_nan(self, truth, name):
        a, b = (s.copy(deep=True) for s in truth.shards)
        for s in (a, b):
            s["top_token_id"].values[0, 1, 1, 2] = -1
        got = METRICS[name].function(align(a, b)).values
        assert np.isnan(got[1, 2])
        assert np.isfinite(got[1, 1])


class TestDirection:
    def test_is_nan_where_a_side_wrote_the_text(self, truth):
        a, b = (s.copy(deep=True) for s in truth.shards)
        for s in (a, b):
            s["anchor"] = ("cell", b["cell"].values.astype(object))
        pair = align(a, b)
        assert pair.attrs["third_party_anchor"] == 0
        assert METRICS["direction"].function(pair).isnull().all()

    def test_of_a_decode_takes_both_sides_tokens(self, truth):
        # where both wrote the same token it is its Δlogprob; at a flip the mean over the two tokens
        a, b = truth.shards
        pair = align(a, b, scoring="decode")
        got = METRICS["direction"].function(pair).values
        sides = [s.isel(cell=0).sel(scoring="decode") for s in (a, b)]
        flips = 0
        for p, t in np.argwhere(pair["valid"].values):
            p_of, q_of = (
                dict(zip(s["top_token_id"].values[p, t], s["top_logprob"].values[p, t], strict=True)) for s in sides
            )
            tokens = [int(s["token_id"].values[p, t]) for s in sides]
            flips += tokens[0] != tokens[1]
            expected = np.mean([q_of.get(y, np.nan) - p_of.get(y, np.nan) for y in tokens])
            np.testing.assert_allclose(got[p, t], expected, atol=1e-6)
        assert flips > 0

    def test_positive_where_the_candidate_likes_the_anchor_more(self, truth):
        a, b = (s.copy(deep=True) for s in truth.shards)
        b["logprob"].values[0, 1] = a["logprob"].values[0, 1] / 2
        got = METRICS["direction"].function(align(a, b))
        assert (got.where(got.notnull(), 1) > 0).all()


def test_a_dense_model_has_no_router(synthetic):
    pair = align(*synthetic.shards[:2])
    assert METRICS["router_agreement"].function(pair).isnull().all()


def test_router_agreement_by_hand(truth):
    a, b = (s.copy(deep=True) for s in truth.shards)
    for s in (a, b):
        s["expert_id"].values[0, 1, 0, 0] = [[0, 1], [2, 3], [4, 5]]
    b["expert_id"].values[0, 1, 0, 0] = [[1, 0], [2, 4], [-1, -1]]  # a set has no order; a layer that is not known
    got = METRICS["router_agreement"].function(align(a, b)).values
    assert got[0, 0] == 1 / 2
    a["expert_id"].values[0, 1] = -1
    assert np.isnan(METRICS["router_agreement"].function(align(a, b)).values).all()
