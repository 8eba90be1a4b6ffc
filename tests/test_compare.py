import json
import math

import numpy as np
import pytest

from ruitong_lib import compare, schema
from ruitong_lib.errors import RefusedError
from ruitong_lib.measure.align import align, axis_name, differs_in
from ruitong_lib.measure.compare import divergence_events, jsonable
from ruitong_lib.testing import DEFAULTS, synthetic_shards

DECODE, REPLAY = 0, 1
EOS, LENGTH = schema.FINISH.index("eos"), schema.FINISH.index("length")


def edit_provenance(shard, **changes):
    shard["provenance"].values[0] = json.dumps(schema.provenance(shard) | changes)


def written(texts, finish, name="a", *, limit=8):
    """A shard that decoded these token ids, each sure with p = 0.9 against one alternative."""
    coords = DEFAULTS | {"max_new_tokens": limit, "anchor": "", "hardware": name}
    prompts = {n: [f"{n}{i}" for i in range(len(texts))] for n in ("prompt", "category", "language")}
    ds = schema.new_shard(coords, f"hand.{name}.00000000", prompts, n_positions=limit, k=2)
    ds["prompt_sha256"].values[0] = prompts["prompt"]
    for i, ids in enumerate(texts):
        n = len(ids)
        ds["n_tokens"].values[0, DECODE, i] = n
        ds["token_id"].values[0, DECODE, i, :n] = ids
        ds["position_state"].values[0, DECODE, i, :n] = 0
        ds["top_token_id"].values[0, DECODE, i, :n] = [[t, 1000] for t in ids]
        ds["top_logprob"].values[0, DECODE, i, :n] = np.log([0.9, 0.05])
        ds["logprob"].values[0, DECODE, i, :n] = math.log(0.9)
        ds["finish_reason"].values[0, DECODE, i] = finish[i]
        ds["state"].values[0, DECODE, i] = 0
    return schema.validate(ds)


class TestRefusals:
    """Each cause is refused before any number, and the message names it."""

    def refused(self, synthetic, match, scoring="replay"):
        a, b = synthetic.shards[:2]
        for pair in ((a, b), (b, a)):
            with pytest.raises(RefusedError, match=match):
                compare(*pair, scoring=scoring)

    def test_other_prompts(self, synthetic):
        synthetic.shards[1] = synthetic.shards[1].isel(prompt=slice(1, None))
        self.refused(synthetic, r"different prompts: .* 1 are on one side only \(e\.g\. 'p0000'\)")

    def test_other_prompt_ids(self, synthetic):
        synthetic.shards[1]["prompt_sha256"].values[0, 3] = "f" * 64
        self.refused(synthetic, r"different prompt ids for 1 of 12 prompts \(e\.g\. 'p0003'\).*double BOS")

    def test_other_weights(self, synthetic):
        edit_provenance(synthetic.shards[1], weights_sha256="0" * 64)
        self.refused(synthetic, "different weights: .*000000000000")

    def test_raw_and_processed_logprobs(self, synthetic):
        edit_provenance(synthetic.shards[1], logprob_mode="processed")
        self.refused(synthetic, "different logprob modes: .*(raw and processed|processed and raw)")

    @pytest.mark.parametrize("value", [None, ""])
    def test_unknown_weights_are_not_other_weights(self, synthetic, value):
        edit_provenance(synthetic.shards[1], weights_sha256=value)
        assert compare(*synthetic.shards[:2]).n_positions > 0

    def test_other_anchor_tokens(self, synthetic):
        synthetic.shards[1]["token_id"].values[0, REPLAY, 2, 4] += 1
        self.refused(synthetic, "different anchors")

    def test_other_anchor_ids(self, synthetic):
        synthetic.shards[1]["anchor_token_id"].values[0, 2, 4, 7] += 1
        self.refused(synthetic, "different anchors")

    def test_other_anchor_length(self, synthetic):
        shard = synthetic.shards[1]
        n = shard["n_tokens"].values[0, REPLAY, 2]
        shard["n_tokens"].values[0, REPLAY, 2] = n - 1
        shard["token_id"].values[0, REPLAY, 2, n - 1] = -1
        self.refused(synthetic, "different anchors")

    def test_anchors_matter_to_replay_alone(self, synthetic):
        synthetic.shards[1]["anchor_token_id"].values[0, 2, 4, 7] += 1
        assert compare(*synthetic.shards[:2], scoring="decode").n_positions > 0

    def test_same_arrays_under_another_label_are_the_same_anchor(self, synthetic):
        a, b = synthetic.shards[:2]
        b = b.assign_coords(anchor=("cell", ["copied.00000000"]))
        assert compare(a, b).differs_in == ("hardware",)

    @pytest.mark.parametrize(("scoring", "other"), [("decode", "replay"), ("replay", "decode")])
    def test_missing_scoring(self, synthetic, scoring, other):
        state = synthetic.shards[1]["state"]
        state.values[0, schema.SCORINGS.index(scoring)] = schema.STATES.index("missing")
        self.refused(synthetic, f"has no {scoring} for 12 of 12 prompts.*scoring='{other}'", scoring)
        assert compare(*synthetic.shards[:2], scoring=other).n_positions > 0

    @pytest.mark.parametrize("state", ["nan_logits", "masked", "degenerate"])
    def test_state_that_makes_numbers_meaningless(self, synthetic, state):
        synthetic.shards[1]["state"].values[0, REPLAY, 5] = schema.STATES.index(state)
        self.refused(synthetic, f"card-b.* is in state {state} for 1 of 12 prompts \\(e\\.g\\. 'p0005'\\)")

    def test_unknown_scoring(self, synthetic):
        self.refused(synthetic, "scoring must be one of decode, replay, got 'both'", scoring="both")

    def test_an_aggregate(self, synthetic):
        ds = schema.combine(synthetic.shards[:2])
        with pytest.raises(RefusedError, match=r"the reference holds 2 cells; pick one: schema\.select"):
            compare(ds, synthetic.shards[2])
        with pytest.raises(RefusedError, match="the candidate holds 2 cells"):
            compare(synthetic.shards[2], ds)


class TestReplay:
    def test_every_anchor_position_counts(self, synthetic):
        c = compare(*synthetic.shards[:2])
        assert c.n_positions == synthetic.n_tokens.sum() == c.metrics["kl"].n
        assert c.n_prompts == 12
        assert c.scoring == "replay"
        assert c.differs_in == ("hardware",)
        assert c.axis == "hardware"

    def test_summaries_are_sums_over_positions(self, synthetic):
        c = compare(*synthetic.shards[:2])
        for name in ("kl", "top5_jaccard"):
            flat = c.positions[name].values[c.positions["valid"].values]
            v = c.metrics[name]
            assert v.value == pytest.approx(flat.mean())
            assert (v.p50, v.p99, v.max) == pytest.approx((np.median(flat), np.quantile(flat, 0.99), flat.max()))
            assert v.lo < v.value < v.hi
        assert c.metrics["max_delta_logprob"].value == c.positions["max_delta_logprob"].max()
        assert math.isnan(c.metrics["max_delta_logprob"].lo)
        kl = np.sort(c.positions["kl"].values[c.positions["valid"].values])
        worst = math.ceil(len(kl) / 100)
        assert c.metrics["kl"].top_share == pytest.approx(kl[-worst:].sum() / kl.sum())

    def test_bootstrap_draws_prompts_not_positions(self):
        # all the noise in one prompt: a resample without it is 0, which no resample of positions would be
        s = synthetic_shards([{}, {}], n_prompts=4, n_positions=30, seed=5)
        s.shards[1]["anchor_logprob"].values[0, 0] -= 0.1
        v = compare(*s.shards).metrics["kl"]
        assert v.value > 0
        assert v.lo == 0  # (3/4)^4 = 32 % of the resamples miss that prompt

    def test_interval_is_seeded(self, synthetic):
        one, two, other = (compare(*synthetic.shards[:2], seed=s).metrics["kl"] for s in (0, 0, 1))
        assert one == two
        assert one.lo != other.lo
        assert one.value == other.value

    def test_a_cell_against_itself_is_identical(self, synthetic):
        c = compare(synthetic.shards[1], synthetic.shards[1])
        assert c.notes["identical"] is True
        assert c.axis == "none"
        assert c.metrics["kl"].value == 0
        assert c.metrics["top1_agreement"].value == 1
        assert compare(*synthetic.shards[:2]).notes["identical"] is False

    def test_identical_looks_at_every_stored_number(self, synthetic):
        a, b = synthetic.shards[0], synthetic.shards[0].copy(deep=True)
        b["anchor_tail_logprob"].values[0, 1, 2] = np.nextafter(b["anchor_tail_logprob"].values[0, 1, 2], np.float32(0))
        assert compare(a, b).notes["identical"] is False

    def test_flips_and_perplexity(self, synthetic):
        a, b = synthetic.shards[:2]
        c = compare(a, b)
        best = [s["top_token_id"].values[0, REPLAY, ..., 0] for s in (a, b)]
        assert c.notes["flips"] == (best[0] != best[1]).sum() > 0
        p, q = (s["logprob"].values[0, REPLAY].astype(np.float64) for s in (a, b))
        assert c.notes["perplexity_ratio"] == pytest.approx(np.exp(-np.nanmean(q)) / np.exp(-np.nanmean(p)))
        assert c.notes["third_party_anchor"] is True

    def test_order_of_prompts_changes_no_value(self, synthetic):
        a, b = synthetic.shards[:2]
        order = np.random.default_rng(0).permutation(12)
        plain, shuffled = compare(a, b), compare(a.isel(prompt=order), b)
        for name, v in plain.metrics.items():
            assert shuffled.metrics[name].value == pytest.approx(v.value, nan_ok=True)
            assert shuffled.metrics[name].n == v.n
        assert list(shuffled.positions["prompt"].values) == list(a["prompt"].values[order])

    def test_gap_is_the_references(self, synthetic):
        a, b = synthetic.shards[:2]
        lp = a["top_logprob"].values[0, REPLAY].astype(np.float64)
        gap = compare(a, b).positions["gap"].values
        np.testing.assert_array_equal(gap, (lp[..., 0] - lp[..., 1])[:, : gap.shape[1]])


class TestDecode:
    def test_positions_at_risk_include_the_flip(self, synthetic):
        a, b = synthetic.shards[:2]
        c = compare(a, b, scoring="decode")
        x, y = (s["token_id"].values[0, DECODE] for s in (a, b))
        at_risk = flips = 0
        for one, two in zip(x, y, strict=True):
            for s, t in zip(one, two, strict=True):
                if s < 0:
                    break
                at_risk += 1
                if s != t:
                    flips += 1
                    break
        assert flips > 0
        assert c.n_positions == at_risk
        assert c.notes["flips"] == c.notes["diverged"] == flips
        assert c.notes["hazard"] == pytest.approx(flips / at_risk)
        assert c.metrics["top1_agreement"].value == pytest.approx(1 - flips / at_risk)

    def test_nothing_after_the_flip_is_read(self, synthetic):
        a, b = (s.copy(deep=True) for s in synthetic.shards[:2])
        before = compare(a, b, scoring="decode")
        first = align(a, b, scoring="decode")["first_difference"].values
        for s in (a, b):
            for p, t in enumerate(first):
                if t >= 0:
                    s["top_logprob"].values[0, DECODE, p, t + 1 :] -= 7
        assert compare(a, b, scoring="decode").metrics["kl"] == before.metrics["kl"]

    def test_swapping_the_sides(self, synthetic):
        a, b = synthetic.shards[:2]
        there, back = compare(a, b, scoring="decode"), compare(b, a, scoring="decode")
        assert there.n_positions == back.n_positions
        for name in ("kl", "prob_mass_shift", "max_delta_logprob", "top1_agreement", "identical_texts"):
            assert back.metrics[name].value == pytest.approx(there.metrics[name].value, rel=1e-12)
        assert there.metrics["length_ratio"].value == pytest.approx(1 / back.metrics["length_ratio"].value)
        assert there.notes["diverged"] == back.notes["diverged"]

    def test_only_ids_that_both_list_count(self, synthetic):
        a, b = (s.copy(deep=True) for s in synthetic.shards[:2])
        plain = align(a, b, scoring="decode")
        ids = b["top_token_id"].values[0, DECODE, 0, 0]
        ids[-1] = 119 if 119 not in ids else 118
        got = align(a, b, scoring="decode")
        counts = [np.isfinite(p["reference_logprob"].values[0, 0]).sum() for p in (plain, got)]
        assert counts[1] in {counts[0], counts[0] - 1}
        for p in (plain, got):
            one, two = (np.isfinite(p[f"{side}_logprob"].values) for side in ("reference", "candidate"))
            np.testing.assert_array_equal(one, two)
            rest = 1 - np.nansum(np.exp(p["candidate_logprob"].values), axis=-1)
            np.testing.assert_allclose(p["candidate_rest"].values, rest)

    def test_another_k_is_cut_to_the_smaller(self, synthetic):
        a, b = synthetic.shards[:2]
        assert align(a, b.isel(k=slice(7)), scoring="decode").sizes["k"] == 7

    def test_text_metrics_by_hand(self):
        a = written([[1, 2, 3, 0], [1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 0], [7, 0]], [EOS, LENGTH, EOS, EOS])
        b = written([[1, 2, 3, 0], [1, 2, 3, 4, 5, 6, 7, 8], [5, 9, 9, 9, 0], [8, 0]], [EOS, LENGTH, EOS, EOS], "b")
        c = compare(a, b, scoring="decode")
        assert c.metrics["identical_texts"].value == 0.5
        assert c.metrics["identical_texts"].n == 4
        assert c.metrics["length_ratio"].value == pytest.approx(19 / 17)
        # diverged at 0 (1 of 4 at risk) and at 1 (1 of 3): incidence 1/4, then 1/4 + 3/4 · 1/3 = 1/2 to the horizon 8
        assert c.metrics["mean_tokens_lost"].value == pytest.approx(1 / 4 + 7 / 2)
        assert c.notes["diverged"] == 2
        assert c.notes["horizon"] == 8
        assert c.n_positions == 4 + 8 + 2 + 1
        time, event = divergence_events(align(a, b, scoring="decode"))
        assert time.tolist() == [3, 7, 1, 0]
        assert event.tolist() == [2, 0, 1, 1]

    def test_a_lower_limit_is_censoring_not_divergence(self):
        a = written([[1, 2, 3, 0], [1, 2, 3, 4, 5]], [EOS, LENGTH], limit=8)
        b = written([[1, 2, 3], [1, 9, 3]], [LENGTH, LENGTH], "b", limit=3)
        for pair, position in (((a, b), 2), ((b, a), 2)):
            time, event = divergence_events(align(*pair, scoring="decode"))
            assert event.tolist() == [0, 1]
            assert time.tolist() == [position, 1]
            assert compare(*pair, scoring="decode").notes["diverged"] == 1

    def test_an_end_that_is_not_in_the_ids_still_diverges(self):
        # some servers leave the end of text out of the ids: a prefix that ended by itself is another text
        a, b = written([[1, 2]], [EOS]), written([[1, 2, 3]], [EOS], "b")
        time, event = divergence_events(align(a, b, scoring="decode"))
        assert (time.tolist(), event.tolist()) == ([2], [1])

    def test_replay_has_no_text_metrics(self, synthetic):
        assert "identical_texts" not in compare(*synthetic.shards[:2]).metrics


class TestUndefined:
    def test_masked_positions_are_counted_and_left_out(self, synthetic):
        a, b = synthetic.shards[:2]
        b["position_state"].values[0, REPLAY, 0, :3] = schema.POSITION_STATES.index("masked")
        a["position_state"].values[0, REPLAY, 0, 2:5] = schema.POSITION_STATES.index("nan")
        c = compare(a, b)
        assert c.notes["not_ok_positions"] == 5
        assert c.n_positions == c.metrics["kl"].n == synthetic.n_tokens.sum() - 5

    def test_a_metric_without_values_is_nan_with_n_0(self, synthetic):
        a, b = synthetic.shards[:2]
        b = b.assign_coords(anchor=("cell", b["cell"].values))  # as if the candidate had written the text
        c = compare(a, b)
        assert c.notes["third_party_anchor"] is False
        assert math.isnan(c.metrics["direction"].value)
        assert c.metrics["direction"].n == 0
        assert math.isnan(c.notes["perplexity_ratio"])

    def test_all_positions_masked(self, synthetic):
        a, b = synthetic.shards[:2]
        b["position_state"].values[0, REPLAY] = schema.POSITION_STATES.index("masked")
        c = compare(a, b)
        assert c.n_positions == 0
        assert math.isnan(c.metrics["kl"].value)

    def test_jsonable_at_any_depth(self):
        found = jsonable({"a": (np.float64("nan"), np.int32(3)), 1: [math.inf, {"b": np.bool_(True)}], "c": -0.5})
        assert found == {"a": [None, 3], "1": [None, {"b": True}], "c": -0.5}
        assert type(found["a"][1]) is int

    @pytest.mark.parametrize("scoring", ["replay", "decode"])
    def test_a_comparison_is_strict_json(self, synthetic, scoring):
        c = compare(*synthetic.shards[:2], scoring=scoring)
        back = json.loads(json.dumps(c.to_dict(), allow_nan=False))
        assert back["metrics"]["kl"]["value"] == c.metrics["kl"].value
        assert back["metrics"]["kl"]["unit"] == "nat"
        assert back["differs_in"] == ["hardware"]
        assert "positions" not in back
        assert back["metrics"]["max_delta_logprob"]["lo"] is None  # NaN in the comparison


class TestAlign:
    def test_inputs_are_not_changed(self, synthetic):
        a, b = synthetic.shards[:2]
        before = a.copy(deep=True), b.copy(deep=True)
        for scoring in schema.SCORINGS:
            compare(a, b, scoring=scoring)
        assert a.identical(before[0])
        assert b.identical(before[1])

    def test_from_an_aggregate_it_is_the_same_comparison(self, synthetic, pad_positions):
        a, b = synthetic.shards[:2]
        plain = compare(a, b)
        ds = schema.combine([a, pad_positions(b, 9)])
        sides = [schema.select(ds, str(s["cell"].values[0])) for s in (a, b)]
        assert compare(*sides).to_dict() == plain.to_dict()

    def test_categories_and_languages_come_along(self, synthetic):
        pair = align(*synthetic.shards[:2])
        assert pair["category"].values[:3].tolist() == ["list", "code", "open"]
        assert pair["language"].values[1] == "zh"

    @pytest.mark.parametrize("wide", [0, 1])
    def test_anchor_ids_padded_to_a_wider_k_are_the_same_anchor(self, synthetic, wide):
        # as in an aggregate with a cell that stores more alternatives
        shards = synthetic.shards[:2]
        fill = {v.name: v.fill for v in schema.VARIABLES if v.name in shards[wide]}
        plain = compare(*shards)
        shards[wide] = shards[wide].drop_vars("k").pad(k=(0, 4), constant_values=fill)
        shards[wide] = shards[wide].assign_coords(k=np.arange(24, dtype=np.int32))
        assert compare(*shards).metrics["kl"] == plain.metrics["kl"]


class TestAxis:
    def test_differs_in_follows_the_schema(self, synthetic):
        a, b, c = (s.isel(cell=0) for s in synthetic.shards)
        assert differs_in(a, a) == ()
        assert differs_in(a, c) == ("batch_size",)
        assert differs_in(b, c) == ("hardware", "batch_size")

    def test_device_and_anchor_are_no_axes(self):
        s = synthetic_shards([{}, {"device": "cuda", "anchor": "else"}], n_prompts=2, decode=False)
        assert differs_in(*(x.isel(cell=0) for x in s.shards)) == ()

    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ((), "none"),
            (("precision",), "precision"),
            (("onednn_isa",), "kernels"),
            (("batch_size",), "batch size"),
            (("composition",), "batch composition"),
            (("repeat",), "rerun"),
            (("hardware", "batch_size"), "mixed: hardware, batch size"),
        ],
    )
    def test_axis_name(self, fields, name):
        assert axis_name(fields) == name
