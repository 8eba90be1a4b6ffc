import math

import numpy as np
import pytest
import xarray as xr

from ruitong_lib.measure.align import align
from ruitong_lib.measure.flips import GAP_EDGES, flips_beyond_floor, largest_gap_change
from ruitong_lib.testing import synthetic_shards

SIZES: dict = {"n_prompts": 8, "n_positions": 12, "k": 10, "vocab": 60, "decode": False}


def flip_pair(gaps, flipped, change=0.0):
    """A pair with these reference gaps per position; `change` is the candidate's change of each gap."""
    gaps, flipped = np.atleast_2d(gaps).astype(float), np.atleast_2d(flipped).astype(bool)
    top_id = np.broadcast_to([1, 2], (*gaps.shape, 2))
    lp = np.stack([np.full(gaps.shape, -0.1), -0.1 - gaps], -1)
    theirs = np.where(flipped[..., None], lp[..., ::-1], lp) - np.array([0, change])
    dims = ("prompt", "position")
    return xr.Dataset(
        {
            "reference_top_id": ((*dims, "k"), top_id),
            "reference_top_logprob": ((*dims, "k"), lp),
            "candidate_top_id": ((*dims, "k"), np.where(flipped[..., None], [2, 1], [1, 2])),
            "candidate_top_logprob": ((*dims, "k"), -np.sort(-theirs, -1)),
            "valid": (dims, np.isfinite(gaps)),
        }
    )


class TestFlips:
    def test_by_hand(self):
        # floor: bin [0, 1/16) 4 positions and 2 flips, bin [1/16, 3/16) 4 positions and 1 flip
        under = flip_pair([[0.01] * 4 + [0.1] * 4], [[1, 1, 0, 0, 1, 0, 0, 0]])
        # delta: 6 and 2 positions there, all flipped but two; one in a bin that the floor never visited
        delta = flip_pair([[0.02] * 6 + [0.15] * 2 + [2.0]], [[1, 1, 1, 1, 0, 0, 1, 1, 1]])
        found = flips_beyond_floor(delta, under)
        assert found["observed"] == 7
        assert found["expected"] == pytest.approx(6 * 2 / 4 + 2 * 1 / 4)
        assert found["beyond"] == pytest.approx(3.5)
        assert found["positions_without_floor"] == 1

    def test_a_floor_against_itself_is_expected(self):
        rng = np.random.default_rng(3)
        gaps = rng.exponential(0.4, (6, 30))
        pair = flip_pair(gaps, rng.random((6, 30)) < np.exp(-4 * gaps))
        found = flips_beyond_floor(pair, pair)
        assert found["observed"] > 0
        assert found["beyond"] == pytest.approx(0)
        assert found["lo"] < 0 < found["hi"]

    @pytest.mark.parametrize("edge", GAP_EDGES[1:-1])
    def test_a_gap_at_an_edge_belongs_to_the_bin_above(self, edge):
        lp = np.array([0.0, -edge])
        below, above = (flip_pair([[0.0]], [[1]]) for _ in range(2))
        below["reference_top_logprob"].values[0, 0] = [0.0, -np.nextafter(edge, 0)]
        above["reference_top_logprob"].values[0, 0] = [0.0, -np.nextafter(edge, 9)]
        at = flip_pair([[0.0]], [[0]])
        at["reference_top_logprob"].values[0, 0] = lp
        assert flips_beyond_floor(at, above)["expected"] == 1
        assert flips_beyond_floor(at, below)["expected"] == 0

    def test_unambiguous_flips_lie_beyond_twice_the_floors_largest_change(self):
        under = flip_pair([[0.5, 1.0]], [[0, 0]], change=0.1)
        assert largest_gap_change(under) == pytest.approx(0.1)
        found = flips_beyond_floor(flip_pair([[0.19, 0.21, 0.5]], [[1, 1, 0]]), under)
        assert found["unambiguous_gap"] == pytest.approx(0.2)
        assert found["unambiguous"] == 1

    def test_largest_change_follows_ids_not_ranks(self):
        # the two best change places: the difference of their logprobs goes from 0.3 to −0.3
        assert largest_gap_change(flip_pair([[0.3]], [[1]])) == pytest.approx(0.6)

    def test_unknown_without_common_ids(self):
        under = flip_pair([[0.3]], [[0]])
        under["candidate_top_id"].values[:] = [7, 8]
        assert math.isnan(largest_gap_change(under))
        assert math.isnan(flips_beyond_floor(flip_pair([[3.0]], [[1]]), under)["unambiguous"])

    def test_invalid_positions_count_nothing(self):
        delta, under = flip_pair([[0.02, np.nan]], [[1, 1]]), flip_pair([[0.02, np.nan]], [[1, 1]])
        found = flips_beyond_floor(delta, under)
        assert (found["observed"], found["expected"]) == (1, 1)

    def test_on_shards_it_counts_the_flips_of_the_comparison(self):
        s = synthetic_shards([{}, {"noise": 0.1, "hardware": "b"}, {"noise": 0.1, "batch_size": 8}], **SIZES)
        delta, under = (align(s.shards[0], x) for x in s.shards[1:])
        best = [x["top_token_id"].values[0, 1, ..., 0] for x in s.shards[:2]]
        found = flips_beyond_floor(delta, under)
        assert found["observed"] == (best[0] != best[1]).sum() > 0
        assert found["lo"] <= found["beyond"] <= found["hi"]
        assert flips_beyond_floor(delta, under) == found
