"""Shards made elsewhere: what is refused, and the row that the others would add."""

import json

import pytest

from ruitong_lib import schema
from ruitong_lib.errors import RuitongError
from ruitong_lib.submission import preview, problems
from ruitong_lib.testing import synthetic_shards


def good():
    shards = synthetic_shards().shards
    for s in shards:
        found = schema.provenance(s) | {
            "weights_sha256": "a" * 64,
            "tokenizer_sha256": "b" * 64,
            "logprob_mode": "raw",
            "hardware": "NVIDIA A100 80GB PCIe",
            "precision": {"weights": "torch.bfloat16"},
            "prompts": {"name": "core-16"},
            "content_key": "c" * 64,
            "torch": "2.13.0+cu126",
        }
        s["provenance"].values[0] = json.dumps(found)
    return shards


def test_a_complete_shard_has_no_problems():
    assert [problems(s) for s in good()] == [[]] * len(good())


@pytest.mark.parametrize("key", ["weights_sha256", "tokenizer_sha256", "hardware", "content_key"])
def test_missing_provenance_is_named(key):
    shard = good()[0]
    found = schema.provenance(shard)
    del found[key]
    shard["provenance"].values[0] = json.dumps(found)
    assert any(key in p for p in problems(shard))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("/home/anna/models/qwen", "path"),
        ("loaded from C:\\Users\\anna", "path"),
        ("http://10.0.3.7:8000/v1", "address"),
        ("served by 192.168.0.12", "address"),
        ("anna@example.org", "e-mail"),
        ("sk-abcdefghijklmnopqrstuv", "key"),
        ("Authorization: Bearer abc.def", "key"),
        ({"hostname": "gpu-node-17"}, "host name"),
    ],
)
def test_private_words_are_found_and_not_repeated_in_full(value, what):
    shard = good()[0]
    shard["provenance"].values[0] = json.dumps(schema.provenance(shard) | {"note": value})
    found = problems(shard)
    assert any(what in p for p in found)
    assert str(value) not in " ".join(found)


def test_public_words_are_left_alone():
    shard = good()[0]
    more = {
        "model": "Qwen/Qwen3-8B",
        "source": "https://huggingface.co/Qwen/Qwen3-8B",
        "device": "cuda:0",
        "v": "2.13.0",
    }
    shard["provenance"].values[0] = json.dumps(schema.provenance(shard) | more)
    assert problems(shard) == []


def test_a_run_that_broke_is_no_row():
    shard = good()[0]
    shard["state"].values[0, :, 0] = schema.STATES.index("nan_logits")
    assert any("nan_logits" in p for p in problems(shard))


def test_processed_logprobs_are_named():
    shard = good()[0]
    shard["provenance"].values[0] = json.dumps(schema.provenance(shard) | {"logprob_mode": "processed"})
    assert any("processed" in p for p in problems(shard))


def test_the_rows_that_it_would_add():
    shards = good()
    rows = preview(shards, reference=str(shards[0]["cell"].values[0]))
    assert {r["candidate"] for r in rows} == {str(s["cell"].values[0]) for s in shards[1:]}
    with pytest.raises(RuitongError, match="floor"):
        preview(shards[:1])
