import numpy as np
import pytest
from scipy.special import rel_entr, softmax

from ruitong_lib.measure import kernels


def distributions(seed, *shape, scale=2.0, noise=0.1):
    rng = np.random.default_rng(seed)
    logits = scale * rng.standard_normal(shape)
    p, q = softmax(logits, axis=-1), softmax(logits + noise * rng.standard_normal(shape), axis=-1)
    return np.log(p), np.log(q)


class TestKl:
    def test_is_exact_when_every_id_is_known(self):
        lp, lq = distributions(0, 50, 30)
        zero = np.zeros(50)
        exact = rel_entr(np.exp(lp), np.exp(lq)).sum(-1)
        np.testing.assert_allclose(kernels.kl_bound(lp, lq, zero, zero), exact, rtol=1e-9, atol=1e-15)

    def test_is_exact_with_a_rest_bucket_of_one_id(self):
        lp, lq = distributions(1, 50, 30)
        rp, rq = np.exp(lp[:, -1]), np.exp(lq[:, -1])
        exact = rel_entr(np.exp(lp), np.exp(lq)).sum(-1)
        np.testing.assert_allclose(kernels.kl_bound(lp[:, :-1], lq[:, :-1], rp, rq), exact, rtol=1e-9)

    def test_hand_value(self):
        # p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4), and the last id is in the rest: 1/2 ln 2 − 1/4 ln 2
        lp, lq = np.log([0.5, 0.25]), np.log([0.25, 0.5])
        assert kernels.kl_bound(lp, lq, 0.25, 0.25) == pytest.approx(0.25 * np.log(2), rel=1e-12)

    def test_symmetric_is_the_mean_of_both_directions(self):
        lp, lq = distributions(2, 20, 10, noise=1.0)
        zero = np.zeros(20)
        there, back = kernels.kl_bound(lp, lq, zero, zero), kernels.kl_bound(lq, lp, zero, zero)
        assert not np.allclose(there, back, rtol=1e-3)
        np.testing.assert_allclose(kernels.kl_symmetric(lp, lq, zero, zero), (there + back) / 2, rtol=1e-15)
        np.testing.assert_array_equal(
            kernels.kl_symmetric(lp, lq, zero, zero), kernels.kl_symmetric(lq, lp, zero, zero)
        )

    @pytest.mark.parametrize("size", [1e-2, 3e-4, 1.01e-4, 0.99e-4, 1e-5, 1e-7, 1e-10])
    def test_keeps_its_precision_near_zero(self, size):
        # g is added up in extended precision from its power series: no cancellation at any size
        rng = np.random.default_rng(3)
        lp = np.log(softmax(rng.standard_normal(40)))
        d = size * rng.standard_normal(40)
        x = (lp - (lp + d)).astype(np.longdouble)
        term, series = np.longdouble(1), np.zeros(40, dtype=np.longdouble)
        for n in range(1, 25):
            term = term * -x / n
            if n >= 2:
                series += term
        reference = float((np.exp(lp.astype(np.longdouble)) * series).sum())
        assert kernels.kl_bound(lp, lp + d, 0.0, 0.0) == pytest.approx(reference, rel=2e-9, abs=0)

    def test_naive_sum_would_fail_where_the_bound_does_not(self):
        # of the top ids alone Σ p ln(p/q) turns negative; the Bregman form cannot
        lp, lq = np.log([0.4, 0.2]), np.log([0.5, 0.25])
        assert (np.exp(lp) * (lp - lq)).sum() < 0
        assert kernels.kl_bound(lp, lq, 0.0, 0.0) > 0

    def test_rest_is_left_out_below_its_resolution(self):
        lp, lq = np.log([0.7, 0.2]), np.log([0.6, 0.3])
        without = kernels.kl_bound(lp, lq, 0.0, 0.0)
        for rp, rq in ((9e-7, 0.1), (0.1, 9e-7), (-1e-7, 0.1), (np.nan, 0.1), (0.1, np.nan)):
            assert kernels.kl_bound(lp, lq, rp, rq) == without
        assert kernels.kl_bound(lp, lq, 1e-6, 0.1) > without

    def test_nan_where_no_id_is_known_and_skips_single_ones(self):
        lp = np.log(np.array([[0.5, 0.3], [0.5, 0.3], [0.5, 0.3]]))
        lq = np.array([[np.nan, np.nan], [np.log(0.4), np.nan], [np.log(0.4), -np.inf]])
        out = kernels.kl_bound(lp, lq, np.full(3, 0.2), np.full(3, 0.2))
        assert np.isnan(out[0])
        expected = 0.5 * np.log(0.5 / 0.4) - 0.5 + 0.4
        np.testing.assert_allclose(out[1:], expected, rtol=1e-12)

    def test_stays_finite_for_logprobs_of_suppressed_tokens(self):
        # logits masked with a huge negative number: e^−d overflows although p·e^−d is at most 1
        lp, lq = np.array([0.0, -800.0, -65504.0]), np.array([np.log(0.5), np.log(0.25), np.log(0.25)])
        for one, two in ((lp, lq), (lq, lp)):
            value = kernels.kl_bound(one, two, 0.0, 0.0)
            assert np.isfinite(value)
            assert value > 0


class TestMassShift:
    def test_is_total_variation_on_the_full_vocabulary(self):
        lp, lq = distributions(4, 30, 25, noise=1.0)
        zero = np.zeros(30)
        exact = np.abs(np.exp(lp) - np.exp(lq)).sum(-1) / 2
        np.testing.assert_allclose(kernels.prob_mass_shift(lp, lq, zero, zero), exact, rtol=1e-12)

    def test_hand_value_and_the_largest_shift(self):
        assert kernels.prob_mass_shift(np.log([0.5, 0.3]), np.log([0.3, 0.3]), 0.2, 0.4) == pytest.approx(0.2)
        tiny = np.log(1e-300)
        assert kernels.prob_mass_shift(np.array([0.0, tiny]), np.array([tiny, 0.0]), 0.0, 0.0) == 1.0

    def test_nan_rest_counts_nothing_and_no_id_is_nan(self):
        lp, lq = np.log([[0.5], [0.5]]), np.array([[np.log(0.3)], [np.nan]])
        out = kernels.prob_mass_shift(lp, lq, np.array([np.nan, 0.5]), np.array([0.7, 0.7]))
        assert out[0] == pytest.approx(0.1)
        assert np.isnan(out[1])


class TestMaxDelta:
    def test_hand_values(self):
        lp, lq = np.log([0.5, 0.25, 0.1]), np.log([0.4, 0.3, 0.01])
        assert kernels.max_delta(lp, lq) == pytest.approx(np.log(10))
        assert kernels.max_delta(lp, lq, best=2) == pytest.approx(np.log(1.25))
        assert kernels.max_delta(lp, lq, prob=True) == pytest.approx(0.1)

    def test_looks_at_the_ten_best_only(self):
        lp = np.log(np.full(12, 1 / 12))
        lq = lp.copy()
        lq[9] -= 1
        lq[10] -= 5
        assert kernels.max_delta(lp, lq) == pytest.approx(1)

    def test_unknown_ids_are_skipped(self):
        lp = np.array([[np.nan, -2.0, -3.0], [np.nan] * 3, [-np.inf, -1.0, np.nan]])
        lq = np.array([[-1.0, -2.5, np.nan], [-1.0] * 3, [-np.inf, -1.25, -1.0]])
        np.testing.assert_allclose(kernels.max_delta(lp, lq), [0.5, np.nan, 0.25])


class TestSets:
    def test_jaccard(self):
        a = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, -1], [-1, -1, -1]])
        b = np.array([[3, 1, 2], [4, 5, 6], [1, 9, 8], [1, -1, -1], [-1, -1, -1]])
        np.testing.assert_allclose(kernels.jaccard(a, b), [1, 0, 1 / 5, 1 / 2, np.nan])

    def test_jaccard_against_python_sets(self):
        rng = np.random.default_rng(5)
        a, b = (np.array([rng.choice(12, 5, replace=False) for _ in range(200)]) for _ in range(2))
        expected = [len({*x} & {*y}) / len({*x} | {*y}) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        np.testing.assert_allclose(kernels.jaccard(a, b), expected)

    def test_match_against_a_dict(self):
        rng = np.random.default_rng(6)
        ids, theirs = (np.array([rng.choice(30, 7, replace=False) for _ in range(60)]) for _ in range(2))
        ids[::5, 3] = theirs[::7, 2:3].repeat(1)[0]
        values = rng.standard_normal((60, 7))
        got = kernels.match(ids, theirs, values)
        for row, wanted in enumerate(ids.tolist()):
            known = dict(zip(theirs[row].tolist(), values[row].tolist(), strict=True))
            np.testing.assert_array_equal(got[row], [known.get(i, np.nan) for i in wanted])

    def test_match_never_finds_padding(self):
        got = kernels.match(np.array([[5, -1]]), np.array([[-1, -1, 5]]), np.array([[0.1, 0.2, 0.3]]))
        np.testing.assert_array_equal(got, [[0.3, np.nan]])

    def test_top_tied(self):
        lp = np.array([[-1.0, -1.0, -2.0], [-1.0, -2.0, -2.0], [np.nan, np.nan, np.nan]])
        assert kernels.top_tied(lp).tolist() == [True, False, False]
        assert kernels.top_tied(lp, 1).tolist() == [False, True, False]
        assert kernels.top_tied(lp, 2).tolist() == [False, False, False]  # nothing follows the last one


class TestLattice:
    @pytest.mark.parametrize("step", [1 / 8, 1 / 16, 1 / 128])
    def test_finds_the_step_of_rounded_logits(self, step):
        # as a bf16 lm_head leaves them: multiples of a power of two, then a float32 log-softmax
        logits = np.round(6 * np.random.default_rng(7).standard_normal((200, 500)) / step) * step
        lp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        top = -np.sort(-lp, axis=-1)[:, :20].astype(np.float32)
        assert kernels.lattice_step(top) == step

    def test_bf16_logits_of_torch(self):
        torch = pytest.importorskip("torch")
        g = torch.Generator().manual_seed(8)
        logits = (8 + 2 * torch.randn(100, 300, generator=g)).bfloat16().float()
        top = logits.log_softmax(-1).topk(20).values.numpy()
        # the twenty best of 300 lie between 8 and 16, where bf16 steps by 1/16
        assert 8 < logits.topk(20).values.min() < logits.max() < 16
        assert kernels.lattice_step(top) == 1 / 16

    def test_none_for_full_precision_or_nothing(self):
        lp, _ = distributions(9, 100, 50)
        assert np.isnan(kernels.lattice_step(-np.sort(-lp, axis=-1)[:, :20]))
        assert np.isnan(kernels.lattice_step(np.full((3, 4), np.nan)))
        assert np.isnan(kernels.lattice_step(np.zeros((3, 4))))
        assert np.isnan(kernels.lattice_step(-np.array([[0.0, 0.27, 0.6, 0.97]])))  # gaps of about ¼, but no lattice


class TestDivergence:
    def test_first_difference(self):
        a = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, -1, -1], [1, 2, 9, 9], [5, 6, 7, 8]])
        b = np.array([[1, 2, 3, 4], [1, 9, 3, 4], [1, 2, 3, -1], [1, 2, 7, 7], [0, 6, 7, 8]])
        na, nb = np.array([4, 4, 2, 2, 4]), np.array([4, 4, 3, 2, 4])
        # equal; differs; a prefix; equal up to its length (what follows is padding); at once
        assert kernels.first_difference(a, b, na, nb).tolist() == [-1, 1, 2, -1, 0]
        assert kernels.first_difference(b, a, nb, na).tolist() == [-1, 1, 2, -1, 0]

    def test_cumulative_incidence_by_hand(self):
        # 5 prompts: one diverges at 0, one ends at 1, one diverges at 1, one is cut off at 2, one ends at 2
        time, event = np.array([0, 1, 1, 2, 2]), np.array([1, 2, 1, 0, 2])
        diverged, ended = kernels.cumulative_incidence(time, event, 4)
        # at risk 5, 4, 2, 0; survival before each 1, 4/5, 2/5, 1/5
        np.testing.assert_allclose(diverged, [1 / 5, 1 / 5 + 4 / 5 / 4, 2 / 5, 2 / 5])
        np.testing.assert_allclose(ended, [0, 4 / 5 / 4, 1 / 5 + 2 / 5 / 2, 2 / 5])

    def test_equals_kaplan_meier_without_competing_events(self):
        rng = np.random.default_rng(10)
        time, event = rng.integers(0, 12, 80), rng.integers(0, 2, 80)
        survival, expected = 1.0, []
        for n in range(12):
            survival *= 1 - ((time == n) & (event == 1)).sum() / max(1, (time >= n).sum())
            expected.append(1 - survival)
        diverged, ended = kernels.cumulative_incidence(time, event, 12)
        np.testing.assert_allclose(diverged, expected, rtol=1e-12)
        assert not ended.any()

    def test_is_the_plain_share_without_censoring(self):
        rng = np.random.default_rng(11)
        time, event = rng.integers(0, 10, 60), rng.integers(1, 3, 60)
        for e, got in enumerate(kernels.cumulative_incidence(time, event, 10), 1):
            np.testing.assert_allclose(got, [((time <= n) & (event == e)).mean() for n in range(10)], rtol=1e-12)


class TestJackknife:
    def test_against_a_loop(self):
        rng = np.random.default_rng(12)
        a, b = rng.lognormal(size=17), rng.lognormal(size=17)
        value, error = kernels.log_ratio_jackknife(a, b)
        left_out = [np.log(np.delete(a, i).sum() / np.delete(b, i).sum()) for i in range(17)]
        assert value == pytest.approx(np.log(a.sum() / b.sum()), rel=1e-12)
        assert error == pytest.approx(np.sqrt(16 / 17 * sum((x - np.mean(left_out)) ** 2 for x in left_out)), rel=1e-9)

    def test_swap_changes_the_sign_alone(self):
        rng = np.random.default_rng(13)
        a, b = rng.lognormal(size=9), rng.lognormal(size=9)
        there, back = kernels.log_ratio_jackknife(a, b), kernels.log_ratio_jackknife(b, a)
        assert there[0] == pytest.approx(-back[0])
        assert there[1] == pytest.approx(back[1])

    def test_proportional_sums_have_no_error(self):
        value, error = kernels.log_ratio_jackknife(2 * np.arange(1, 9), np.arange(1, 9))
        assert value == pytest.approx(np.log(2))
        assert error == pytest.approx(0, abs=1e-15)

    @pytest.mark.parametrize(
        ("a", "b", "value"),
        [([0.0, 0.0], [1.0, 2.0], np.nan), ([1.0, 0.0], [1.0, 2.0], np.log(1 / 3)), ([3.0], [1.0], np.log(3))],
    )
    def test_undefined_is_nan(self, a, b, value):
        got, error = kernels.log_ratio_jackknife(a, b)
        np.testing.assert_allclose(got, value)
        assert np.isnan(error)

    def test_nothing_is_nan(self):
        assert np.isnan(kernels.log_ratio_jackknife(np.zeros(0), np.zeros(0))).all()


def test_bootstrap_weights_draw_every_prompt_alike():
    w = kernels.bootstrap_weights(8, 4000, 0)
    assert w.shape == (4000, 8)
    assert (w.sum(1) == 8).all()
    np.testing.assert_allclose(w.mean(0), 1, atol=0.08)  # 5 standard errors
    np.testing.assert_array_equal(w, kernels.bootstrap_weights(8, 4000, 0))
    assert (w != kernels.bootstrap_weights(8, 4000, 1)).any()
