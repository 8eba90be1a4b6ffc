"""What a served cell changes in the measures: the axis, censored anchor ids, scaled logprobs, texts alone, anchors."""

import json
import math
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ruitong_lib import RefusedError, RuitongError, compare, schema
from ruitong_lib.measure import scaling
from ruitong_lib.measure.align import align, differs_in
from ruitong_lib.measure.texts import compare_texts
from ruitong_lib.testing import Synthetic, synthetic_shards

SERVED = {"engine": "endpoint", "device": "", "attention": "", "threads": 0}


@pytest.fixture
def pair() -> Synthetic:
    """A transformers cell and a served one of the same machine."""
    return synthetic_shards(
        [{"engine": "transformers"}, {"noise": 0.05, **SERVED}], n_prompts=6, n_positions=12, vocab=60
    )


def cell_of(shard: xr.Dataset) -> xr.Dataset:
    return shard.isel(cell=0)


class TestAxis:
    def test_what_follows_from_the_engine_is_no_axis_of_its_own(self, pair: Synthetic) -> None:
        a, b = map(cell_of, pair.shards)
        assert a["attention"].item() != b["attention"].item()
        assert a["threads"].item() != b["threads"].item()
        assert differs_in(a, b) == ("engine",)
        assert compare(*pair.shards).axis == "engine"

    def test_other_differences_stay(self) -> None:
        a, b, c = synthetic_shards(
            [
                {"engine": "transformers"},
                {**SERVED, "hardware": "card-b", "batch_size": 8},
                {**SERVED, "precision": "fp16"},
            ],
            n_prompts=2,
            decode=False,
        ).shards
        assert differs_in(cell_of(a), cell_of(b)) == ("engine", "hardware", "batch_size")
        assert differs_in(cell_of(a), cell_of(c)) == ("engine", "precision")
        assert differs_in(cell_of(b), cell_of(c)) == ("hardware", "precision", "batch_size")

    def test_between_two_other_engines_they_are_axes(self) -> None:
        a, b = synthetic_shards([{"attention": "eager"}, {"engine": "other"}], n_prompts=2, decode=False).shards
        assert differs_in(cell_of(a), cell_of(b)) == ("engine", "attention")


class TestCensored:
    def test_by_hand(self) -> None:
        """Three anchor ids, one of them not listed by the server: S is the other two, the rest 1 − Σ on both sides."""
        a, b = synthetic_shards([{}, {**SERVED, "noise": 0.1}], n_prompts=1, n_positions=2, k=3, vocab=50).shards
        p, q = np.array([[0.5, 0.25, 0.125], [0.5, 0.25, 0.2]]), np.array([[0.25, 0.5, np.nan], [0.5, 0.25, 0.2]])
        for s, x in ((a, p), (b, q)):
            s["n_tokens"].values[0, 1] = 2
            s["anchor_token_id"].values[0, 0] = [[1, 2, 3], [4, 5, 6]]
            s["token_id"].values[0, 1, 0] = [1, 4]
            s["position_state"].values[0, 1, 0] = 0
            s["anchor_logprob"].values[0, 0] = np.log(x)
        a["anchor_tail_logprob"].values[0, 0] = np.log([0.125, 0.05])
        b["anchor_tail_logprob"].values[0, 0] = np.nan
        got = align(a, b)
        np.testing.assert_allclose(got["reference_rest"].values[0], [0.25, 0.05], rtol=1e-6)
        np.testing.assert_allclose(got["candidate_rest"].values[0], [0.25, 0.05], rtol=1e-6)
        assert np.isnan(got["reference_logprob"].values[0, 0, 2])
        # both directions: ½ Σ (p − q) ln(p/q) over {1, 2} and the rest: ½ (0.25 ln 2 + 0.25 ln 2 + 0)
        kl = compare(a, b, draws=10).positions["kl"].values[0]
        assert kl[0] == pytest.approx(0.25 * math.log(2), rel=1e-5)
        assert kl[1] == pytest.approx(0, abs=1e-9)

    def test_more_known_ids_never_lower_the_bound_and_none_passes_the_truth(self, pair: Synthetic) -> None:
        a, b = pair.shards
        exact = pair.exact_kl(0, 1).values
        b["anchor_tail_logprob"].values[:] = np.nan
        before = None
        for known in (20, 10, 5, 2):
            b["anchor_logprob"].values[..., known:] = np.nan
            kl = compare(a, b, draws=10).positions["kl"].values
            there = np.isfinite(kl)
            assert (kl[there] <= exact[there] * (1 + 1e-3) + 1e-6).all()
            if before is not None:
                assert (kl[there] <= before[there] * (1 + 1e-3) + 1e-6).all()
            before = kl

    def test_sides_that_know_everything_are_not_touched(self, pair: Synthetic) -> None:
        a, b = pair.shards
        got = align(a, b)
        valid = got["valid"].values
        for side, s in (("reference", a), ("candidate", b)):
            tail = np.exp(s["anchor_tail_logprob"].values[0].astype(np.float64))
            np.testing.assert_array_equal(got[f"{side}_rest"].values[valid], tail[:, : valid.shape[1]][valid])

    def test_swapping_the_sides_changes_nothing(self, pair: Synthetic) -> None:
        a, b = pair.shards
        b["anchor_logprob"].values[..., 4:] = np.nan
        b["anchor_tail_logprob"].values[:] = np.nan
        one, two = (compare(x, y, draws=10).metrics["kl"].value for x, y in ((a, b), (b, a)))
        assert one == pytest.approx(two, rel=1e-12)


class TestScaled:
    def served(self, shard: xr.Dataset, change: Any) -> xr.Dataset:
        out = shard.copy(deep=True)
        for name in ("anchor_logprob", "top_logprob", "logprob"):
            out[name].values[:] = change(out[name].values)
        out["anchor_tail_logprob"].values[:] = np.nan
        return out

    @pytest.mark.parametrize("temperature", [0.6, 1.5])
    def test_a_temperature_is_named(self, pair: Synthetic, temperature: float) -> None:
        a, b = pair.shards
        hot = self.served(b, lambda x: x / temperature - 0.5)
        with pytest.raises(RefusedError, match=rf"temperature-scaled.*times {1 / temperature:.2f}"):
            compare(a, hot)

    def test_a_cut_off_distribution_is_named(self, pair: Synthetic) -> None:
        a, b = pair.shards
        cut = b.copy(deep=True)
        best = b["anchor_logprob"].values[..., :6].astype(np.float64)
        mass = np.nansum(np.exp(best), -1, keepdims=True)
        cut["anchor_logprob"].values[..., :6] = best - np.log(np.where(mass > 0, mass, 1)).clip(max=-0.1)
        cut["anchor_logprob"].values[..., 6:] = np.nan
        cut["anchor_tail_logprob"].values[:] = np.nan
        with pytest.raises(RefusedError, match=r"renormalised: the candidate's"):
            compare(a, cut)
        with pytest.raises(RefusedError, match=r"renormalised: the reference's"):
            compare(cut, a)

    def test_noise_is_not_taken_for_it(self) -> None:
        for noise in (0.0, 0.02, 0.3):
            a, b = synthetic_shards([{}, {**SERVED, "noise": noise}], n_prompts=8, vocab=80).shards
            for scoring in schema.SCORINGS:
                compare(a, b, scoring=scoring, draws=10)

    def test_lines_of_known_rows(self) -> None:
        lp = np.array([[-1.0, -2.0, -3.0, np.nan]])
        s, offset, scatter = scaling.lines(lp, 2 * lp + 1, np.isfinite(lp))
        assert (s[0], offset[0]) == (pytest.approx(2), pytest.approx(-1))
        assert scatter[0] == pytest.approx(np.std([-1, -2, -3]))


class TestStates:
    @pytest.mark.parametrize("state", [s for s in schema.STATES if s not in {"ok", "missing"}])
    def test_each_refuses_under_its_name_and_leaves_the_texts(self, pair: Synthetic, state: str) -> None:
        a, b = pair.shards
        b["state"].values[0, 0, 2] = schema.STATES.index(state)
        with pytest.raises(RefusedError, match=rf"in state {state}.*scoring='text'"):
            compare(a, b, scoring="decode")
        c = compare(a, b, scoring="text")
        assert c.scoring == "text"
        assert c.n_prompts == 6 - (state == "failed")

    def test_processed_logprobs_are_refused_on_either_side_and_on_both(self, pair: Synthetic) -> None:
        a, b = pair.shards
        for sides in ((b,), (a, b)):
            for s in sides:
                found = schema.provenance(s) | {"logprob_mode": "processed"}
                s["provenance"].values[0] = json.dumps(found)
            with pytest.raises(RefusedError, match="processed"):
                compare(a, b)


class TestTexts:
    def test_by_ids_where_both_have_them(self, pair: Synthetic) -> None:
        a, b = pair.shards
        c = compare_texts(a, b)
        ids = [s["token_id"].sel(scoring="decode").values[0] for s in (a, b)]
        n = [s["n_tokens"].sel(scoring="decode").values[0] for s in (a, b)]
        same = [(x[:i] == y[:j]).all() if i == j else False for x, y, i, j in zip(*ids, *n, strict=True)]
        assert c.notes["compared_by"] == "token ids"
        assert c.metrics["identical_texts"].value == np.mean(same)
        assert c.metrics["length_ratio"].value == n[1].sum() / n[0].sum()
        assert c.n_positions == 0
        assert set(c.metrics) == {"identical_texts", "length_ratio", "common_prefix"}
        json.dumps(c.to_dict(), allow_nan=False)

    def test_by_characters_else(self, pair: Synthetic) -> None:
        a, b = pair.shards
        for s, texts in ((a, ["abcd", "x", "", "same", "same", "q"]), (b, ["abxy", "", "", "same", "same", "qr"])):
            s["text"].values[0] = texts
            s["token_id"].values[:] = -1
            s["n_tokens"].values[:] = 0
        c = compare_texts(a, b)
        assert c.notes["compared_by"] == "characters"
        assert c.metrics["identical_texts"].value == 3 / 6
        assert c.metrics["length_ratio"].value == (4 + 0 + 0 + 4 + 4 + 2) / (4 + 1 + 0 + 4 + 4 + 1)
        assert c.metrics["common_prefix"].value == pytest.approx((0.5 + 0 + 1 + 1 + 1 + 0.5) / 6)
        assert c.notes["empty"] == {"reference": 1, "candidate": 2}

    def test_identity_and_swap(self, pair: Synthetic) -> None:
        a, b = pair.shards
        same = compare_texts(a, a)
        assert same.metrics["identical_texts"].value == same.metrics["length_ratio"].value == 1
        one, two = compare_texts(a, b), compare_texts(b, a)
        for name in ("identical_texts", "common_prefix"):
            assert one.metrics[name] == two.metrics[name]

    def test_other_prompts_are_refused(self, pair: Synthetic) -> None:
        a, b = pair.shards
        b["prompt_sha256"].values[0, 0] = "other"
        with pytest.raises(RefusedError, match="different prompt ids"):
            compare_texts(a, b)

    def test_nothing_on_both_sides_is_refused(self, pair: Synthetic) -> None:
        a, b = pair.shards
        b["state"].values[0, 0] = schema.STATES.index("failed")
        with pytest.raises(RefusedError, match="no prompt has a text on both sides"):
            compare_texts(a, b)


def test_an_anchor_whose_tokens_have_no_ids_is_refused(pair: Synthetic) -> None:
    from ruitong_lib.collect.transformers import load_anchor

    shard = pair.shards[1]
    hashes = list(shard["prompt_sha256"].values[0])
    shard["top_token_id"].values[0, 0, 0, 0, :2] = [-1, 7]
    anchor = load_anchor(shard, hashes)
    assert anchor.top_token_id[0, 0, 0] == 7  # the one without an id goes last
    assert anchor.top_token_id[0, 0, -1] == -1
    shard["token_id"].values[0, 0, 0, 0] = -1
    with pytest.raises(RuitongError, match="tokens without ids"):
        load_anchor(shard, hashes)
