import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr

from ruitong_lib.measure import kernels


@st.composite
def two_distributions(draw):
    """Log-probabilities of both sides, from logits of any size, near or far, and a subset of the ids."""
    n = draw(st.integers(2, 12))
    logits = np.array(draw(st.lists(st.floats(-40, 40), min_size=n, max_size=n)))
    size = draw(st.sampled_from([0.0, 1e-9, 1e-5, 1e-3, 0.1, 1.0, 30.0]))
    shift = np.array(draw(st.lists(st.floats(-1, 1), min_size=n, max_size=n))) * size
    known = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    known[draw(st.integers(0, n - 1))] = True
    return normalised(logits), normalised(logits + shift), known


def normalised(logits):
    x = logits - logits.max()
    return x - np.log(np.exp(x).sum())


def rests(lp, lq, known):
    return np.exp(lp[~known]).sum(), np.exp(lq[~known]).sum()


@given(two_distributions())
def test_kl_is_a_lower_bound_for_any_known_ids(case):
    lp, lq, known = case
    bound = kernels.kl_bound(lp[known], lq[known], *rests(lp, lq, known))
    # Σp − Σq of a normalised pair is rounding, and that is what the exact sum may be off by
    exact = rel_entr(np.exp(lp), np.exp(lq)).sum()
    assert 0 <= bound <= exact * (1 + 1e-9) + 1e-14
    masked = kernels.kl_bound(np.where(known, lp, np.nan), lq, *rests(lp, lq, known))
    np.testing.assert_allclose(masked, bound, rtol=1e-12)


@given(two_distributions())
def test_every_term_of_kl_is_at_least_zero(case):
    lp, lq, _ = case
    terms = [kernels.kl_bound(lp[i : i + 1], lq[i : i + 1], 0.0, 0.0) for i in range(len(lp))]
    assert min(terms) >= 0
    total = kernels.kl_bound(lp, lq, 0.0, 0.0)
    np.testing.assert_allclose(total, sum(terms), rtol=1e-9)


@given(two_distributions())
def test_kl_and_shift_are_symmetric_and_zero_for_itself(case):
    lp, lq, known = case
    rp, rq = rests(lp, lq, known)
    for kernel in (kernels.kl_symmetric, kernels.prob_mass_shift):
        assert kernel(lp[known], lq[known], rp, rq) == kernel(lq[known], lp[known], rq, rp)
        assert kernel(lp[known], lp[known], rp, rp) == 0
    assert kernels.max_delta(lp, lq) == kernels.max_delta(lq, lp)


@given(two_distributions())
def test_shift_is_a_lower_bound_of_total_variation(case):
    lp, lq, known = case
    exact = np.abs(np.exp(lp) - np.exp(lq)).sum() / 2
    assert 0 <= kernels.prob_mass_shift(lp[known], lq[known], *rests(lp, lq, known)) <= min(1, exact + 1e-14)


@given(two_distributions(), st.randoms(use_true_random=False))
def test_order_of_ids_does_not_matter(case, random):
    lp, lq, _ = case
    order = random.sample(range(len(lp)), len(lp))
    for kernel in (kernels.kl_bound, kernels.prob_mass_shift):
        plain, shuffled = kernel(lp, lq, 0.0, 0.0), kernel(lp[order], lq[order], 0.0, 0.0)
        np.testing.assert_allclose(shuffled, plain, rtol=1e-9, atol=1e-300)


@given(st.sets(st.integers(0, 9), max_size=6), st.sets(st.integers(0, 9), max_size=6), st.integers(0, 3))
def test_jaccard_of_any_sets_and_any_padding(one, two, extra):
    width = max(len(one), len(two)) + extra
    a, b = (np.array([*x, *[-1] * (width - len(x))], dtype=np.int32) for x in (one, two))
    expected = len(one & two) / len(one | two) if one | two else np.nan
    np.testing.assert_array_equal(kernels.jaccard(a, b), expected)


EVENTS = st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0, 1, 2])), min_size=1, max_size=20)


@given(EVENTS)
def test_incidences_grow_and_stay_below_one(rows):
    time, event = np.array(rows).T
    diverged, ended = kernels.cumulative_incidence(time, event, 9)
    for x in (diverged, ended):
        assert (np.diff(x) >= 0).all()
        assert (x >= 0).all()
    assert (diverged + ended <= 1 + 1e-12).all()
    if 0 not in event:
        np.testing.assert_allclose((diverged + ended)[-1], 1)


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)), min_size=2, max_size=12), st.floats(1e-3, 1e3))
def test_log_ratio_scales(rows, factor):
    a, b = np.array(rows).T
    value, error = kernels.log_ratio_jackknife(a, b)
    scaled, same = kernels.log_ratio_jackknife(factor * a, b)
    np.testing.assert_allclose(scaled, value + np.log(factor), atol=1e-9)
    np.testing.assert_allclose(same, error, rtol=1e-6, atol=1e-9)
    assert error >= 0
