import numpy as np
import pytest
import torch

from ruitong_lib.collect.epilogue import ROWS, exact_top_k, score

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_logits(rows, vocab, dtype=torch.float32, *, scale=4.0, seed=0):
    return (scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


def stable_sort(logits, k):
    """The k best by value, ties by lowest id (−0.0 and 0.0 tie): numpy's stable sort."""
    values = logits.float().numpy()
    ids = np.argsort(-values, axis=-1, kind="stable")[:, :k]
    return np.take_along_axis(values, ids, -1), ids


def check_top_k(logits, k):
    values, ids = exact_top_k(logits, k)
    expected, expected_ids = stable_sort(logits, k)
    assert (values.dtype, ids.dtype) == (torch.float32, torch.int64)
    np.testing.assert_array_equal(ids.numpy(), expected_ids)
    np.testing.assert_array_equal(values.numpy(), expected)


class TestTopK:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("vocab", [1, 7, 127, 128, 129, 300, 4096, 5003])
    @pytest.mark.parametrize("k", [1, 2, 20, 130])
    def test_against_a_stable_sort(self, dtype, vocab, k):
        if k <= vocab:
            check_top_k(random_logits(5, vocab, dtype), k)

    @pytest.mark.parametrize("vocab", [130, 1000, 2560])
    def test_many_ties(self, vocab):
        # a handful of values only: nearly every place is decided by the lowest id, across blocks of 128
        for seed in range(20):
            logits = torch.randint(-2, 3, (4, vocab), generator=torch.Generator().manual_seed(seed)).float()
            check_top_k(logits, 40)

    def test_all_equal(self):
        check_top_k(torch.full((2, 700), -3.5, dtype=torch.bfloat16), 300)

    def test_bf16_logits_tie_where_torch_picks_any(self):
        logits = random_logits(40, 50_000, torch.bfloat16, scale=2.0)
        top = stable_sort(logits, 20)[0]
        assert (np.diff(top) == 0).any(1).mean() > 0.9  # the case is real: nearly every row has a tie in its top 20
        check_top_k(logits, 20)

    def test_the_two_zeros_tie(self):
        logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -0.0], [0.0, -0.0, 1.0, -0.0, 0.0]])
        assert exact_top_k(logits, 5)[1].tolist() == [[0, 1, 3, 4, 2], [2, 0, 1, 3, 4]]

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_extreme_values(self, dtype):
        info = torch.finfo(dtype)
        values = [
            info.max,
            info.min,
            info.tiny,
            -info.tiny,
            info.smallest_normal,
            0.0,
            -torch.inf,
            1.0,
            -1.0,
            -torch.inf,
        ]
        check_top_k(torch.tensor([values], dtype=dtype), 10)

    def test_minus_infinity_of_the_vocabulary_comes_before_the_padding(self):
        logits = torch.full((1, 130), -torch.inf)
        logits[0, 129] = 1.0
        values, ids = exact_top_k(logits, 130)
        assert ids[0].tolist() == [129, *range(129)]
        assert values[0, 1:].isneginf().all()

    def test_k_is_the_whole_vocabulary(self):
        check_top_k(random_logits(3, 200, torch.bfloat16), 200)

    def test_logits_are_not_changed(self):
        logits = random_logits(3, 200)
        before = logits.clone()
        exact_top_k(logits, 20)
        score(logits, 20, torch.tensor([[1, 2]] * 3))
        assert torch.equal(logits, before)


def exact(logits):
    return logits.double().log_softmax(-1)


def outside(lp, ids):
    """ln of the mass outside these ids, in float64, with the ids masked."""
    masked = lp.clone()
    for row, some in zip(masked, ids, strict=True):
        row[[i for i in some.tolist() if i >= 0]] = -torch.inf
    return masked.logsumexp(-1)


class TestScore:
    # float32 logprobs near −20 are 2e-6 apart, so that is where rounding of the stored value ends
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("vocab", "scale"), [(300, 1.0), (1001, 4.0), (32_000, 3.0), (151_936, 2.0)])
    def test_against_float64(self, dtype, vocab, scale):
        logits = random_logits(3, vocab, dtype, scale=scale)
        wanted = torch.randint(0, vocab, (3, 6), generator=torch.Generator().manual_seed(1))
        wanted[:, 0] = torch.arange(3)
        got, lp = score(logits, 20, wanted), exact(logits)
        ids = stable_sort(logits, 20)[1]
        assert got.top_token_id.dtype == torch.int32
        np.testing.assert_array_equal(got.top_token_id.numpy(), ids)
        near = {"rtol": 0, "atol": 2e-6}
        np.testing.assert_allclose(got.top_logprob.numpy(), np.take_along_axis(lp.numpy(), ids, -1), **near)
        np.testing.assert_allclose(got.logprob.numpy(), lp.gather(1, wanted).numpy(), **near)
        np.testing.assert_allclose(got.tail_logprob.numpy(), outside(lp, got.top_token_id).numpy(), **near)
        np.testing.assert_allclose(got.rest_logprob.numpy(), outside(lp, wanted).numpy(), **near)
        entropy = -(lp.exp() * lp).sum(-1)
        np.testing.assert_allclose(got.entropy.numpy(), entropy.numpy(), rtol=2e-6, atol=2e-6)
        assert not got.bad.any()
        assert all(x.dtype == torch.float32 for x in got[1:6])

    def test_the_best_is_exact_however_close_the_second(self):
        # the logits are shifted by the maximum in float32, which must not turn a near-tie into a tie
        for best in (1e-3, 1.0, 30.0, 1e4):
            second = np.nextafter(np.float32(best), np.float32(0))
            logits = torch.tensor([[0.0, float(second), -5.0, float(np.float32(best))]])
            assert score(logits, 2).top_token_id[0].tolist() == [3, 1]

    def test_float64_logits_keep_what_float32_would_lose(self):
        logits = random_logits(3, 5000, torch.float64)
        logits[:, 7] = logits.amax(-1) + 1e-9  # below float32's step there, and above the first best
        got, lp = score(logits, 20, torch.tensor([[7, 1]] * 3)), exact(logits)
        assert (got.top_token_id[:, 0] == 7).all()
        assert torch.equal(got.top_token_id[:, :2], lp.topk(2)[1].int())
        np.testing.assert_allclose(got.top_logprob.numpy(), lp.topk(20)[0].numpy(), rtol=0, atol=2e-6)
        np.testing.assert_allclose(got.rest_logprob.numpy(), outside(lp, torch.tensor([[7, 1]] * 3)), rtol=0, atol=2e-6)

    def test_one_row_by_hand(self):
        got = score(torch.tensor([[0.0, 1.0, 2.0, 2.0]]).log_softmax(-1) + 5, 2, torch.tensor([[0, 3]]))
        z = np.log(1 + np.e + 2 * np.e**2)
        np.testing.assert_allclose(got.top_logprob[0], [2 - z, 2 - z], atol=1e-6)
        assert got.top_token_id[0].tolist() == [2, 3]
        np.testing.assert_allclose(got.tail_logprob[0], np.log(1 + np.e) - z, atol=1e-6)
        np.testing.assert_allclose(got.logprob[0], [-z, 2 - z], atol=1e-6)
        np.testing.assert_allclose(got.rest_logprob[0], np.log(np.e + np.e**2) - z, atol=1e-6)

    def test_a_tail_far_below_float32s_resolution_of_one(self):
        # 1 − Σp would be 0 or negative here; the masked sum is exact
        logits = random_logits(4, 2000, scale=1.0)
        logits[:, :20] += 60
        lp = exact(logits)
        got = score(logits, 20)
        assert got.tail_logprob.max() < -40
        np.testing.assert_allclose(got.tail_logprob.numpy(), outside(lp, got.top_token_id).numpy(), rtol=0, atol=1e-5)

    def test_nothing_outside_is_minus_infinity(self):
        got = score(random_logits(2, 10), 10, torch.arange(10).expand(2, -1))
        assert got.tail_logprob.isneginf().all()
        assert got.rest_logprob.isneginf().all()
        assert got.entropy.isfinite().all()

    def test_anchor_ids_that_are_the_top_k_have_its_numbers(self):
        logits = random_logits(5, 700, torch.bfloat16)
        first = score(logits, 20)
        again = score(logits, 20, first.top_token_id)
        assert torch.equal(again.logprob, first.top_logprob)
        assert torch.equal(again.rest_logprob, first.tail_logprob)

    def test_skipped_ids(self):
        logits = random_logits(3, 500)
        logits[:, 0] = 20.0  # the mass that is lost if a skipped id masks id 0
        ids = torch.tensor([[7, -1, 9, -1], [0, -1, -1, -1], [499, 3, 2, 1]])
        got, lp = score(logits, 20, ids), exact(logits)
        assert torch.equal(got.logprob.isnan(), ids < 0)
        kept = score(logits[:1], 20, torch.tensor([[7, 9]]))
        assert torch.equal(got.logprob[0, [0, 2]], kept.logprob[0])
        np.testing.assert_allclose(got.rest_logprob.numpy(), outside(lp, ids).numpy(), rtol=0, atol=2e-6)

    def test_without_ids(self):
        got = score(random_logits(3, 500), 20)
        assert got.logprob.shape == (3, 0)
        assert got.rest_logprob.isnan().all()

    def test_a_shift_of_all_logits_changes_nothing(self):
        logits = torch.round(16 * random_logits(4, 600)) / 16
        one, two = score(logits, 20), score(logits + 64, 20)
        for a, b in zip(one, two, strict=True):
            assert torch.equal(a, b) or (a.isnan() & b.isnan()).all()

    @pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5])
    def test_a_row_does_not_depend_on_its_neighbours(self, rows):
        logits = random_logits(rows, 900, torch.bfloat16)
        ids = torch.randint(0, 900, (rows, 1), generator=torch.Generator().manual_seed(2))
        together = score(logits, 10, ids)
        for i in (0, rows // 2, rows - 1):
            alone = score(logits[i : i + 1], 10, ids[i : i + 1])
            for a, b in zip(together, alone, strict=True):
                assert torch.equal(a[i : i + 1], b)

    def test_suppressed_tokens_weigh_nothing(self):
        logits = random_logits(2, 300)
        masked = torch.cat([logits, torch.full((2, 77), -torch.inf)], 1)
        one, two = score(logits, 20), score(masked, 20)
        assert torch.equal(one.top_token_id, two.top_token_id)
        np.testing.assert_allclose(two.top_logprob, one.top_logprob, rtol=0, atol=1e-6)
        np.testing.assert_allclose(two.entropy, one.entropy, rtol=1e-6)
        assert two.entropy.isfinite().all()


class TestBadRows:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, "all -inf"])
    def test_is_flagged_and_no_other_row_changes(self, dtype, value):
        rows = 2 * ROWS + 3
        logits = random_logits(rows, 400, dtype)
        ids = torch.randint(0, 400, (rows, 2), generator=torch.Generator().manual_seed(3))
        clean = score(logits, 10, ids)
        bad = torch.zeros(rows, dtype=torch.bool)
        bad[[0, 5, ROWS, rows - 1]] = True
        for i in bad.nonzero()[:, 0]:
            if value == "all -inf":
                logits[i] = -torch.inf
            else:
                logits[i, (37 * int(i)) % 400] = value
        got = score(logits, 10, ids)
        assert torch.equal(got.bad, bad)
        for name in ("top_logprob", "tail_logprob", "entropy", "logprob", "rest_logprob"):
            assert getattr(got, name)[bad].isnan().all(), name
        assert (got.top_token_id[bad] == -1).all()
        for a, b in zip(got[:-1], clean[:-1], strict=True):
            assert torch.equal(a[~bad], b[~bad])

    def test_every_row(self):
        got = score(torch.full((3, 50), torch.nan), 5, torch.zeros(3, 1, dtype=torch.long))
        assert got.bad.all()
        assert (got.top_token_id == -1).all()
        assert got.logprob.isnan().all()
