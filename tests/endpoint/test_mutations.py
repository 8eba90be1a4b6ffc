"""Property tests: whatever a server sends, no traceback from inside, and never a number that it did not send.

The invariant. Let F be every number in the response (parsed as floats, and for llama.cpp's probabilities their
logarithms). In the arrays of the shard each finite logprob is at most 0 and the float32 of a member of F (a positive
member up to 1e-6 counts as 0: rounding of a probability of 1). Everything else is NaN, and a position or row whose
numbers are not all there has a state that says so.
"""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from conftest import EOS, PROMPTS, Fake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_sanity import PROMPT, chat, healthy

from ruitong_lib import RuitongError, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import endpoint
from ruitong_lib.collect.served import rows
from ruitong_lib.collect.served.lenient import read_json
from ruitong_lib.collect.served.responses import parse, parse_prompt
from ruitong_lib.collect.served.rows import Row
from ruitong_lib.collect.served.sanity import examine, text_differs
from ruitong_lib.collect.served.vocabulary import Vocabulary

K = 8
Make = Callable[..., Cell]

ODD: list[Any] = [
    None, True, False, 0, 0.0, -0.0, 1, 17, -1, 10**20, -(10**20), 10**400, 1e-7, -1e-9, 0.5, 1.0, -100, -100.0,
    -9999.0, -3.4028234663852886e38, 5e-324, math.inf, -math.inf, math.nan, "", "x", "NaN", "-inf", "-1.5", "\ud800",
    "\0", "\ufffd", "token_id:5", "token_id:99999999999", [], {}, [1, 2], [None], {"logprob": -1.0},
    {"token": "a", "logprob": -0.5},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document: its path."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def scramble(body: dict[str, Any], rng: random.Random) -> str:
    """Return the text of a response after some accidents: dropped, replaced, doubled, swapped, cut."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(0, 4)):
        every = [p for p in places(body) if p]
        if not every:
            break
        path = rng.choice(every)
        parent: Any = body
        for key in path[:-1]:
            parent = parent[key]
        how = rng.choice(["drop", "replace", "number", "double", "swap", "all"])
        if how == "drop":
            del parent[path[-1]]
        elif how == "replace":
            parent[path[-1]] = copy.deepcopy(rng.choice(ODD))
        elif how == "number":
            parent[path[-1]] = rng.uniform(-30, 1)
        elif how == "double" and isinstance(parent, list):
            parent.insert(path[-1], copy.deepcopy(parent[path[-1]]))
        elif how == "swap" and isinstance(parent, list):
            parent.reverse()
        elif how == "all":
            odd = rng.choice(ODD)
            for key in list(parent) if isinstance(parent, dict) else range(len(parent)):
                parent[key] = copy.deepcopy(odd)
    text = json.dumps(body)
    return text[: rng.randint(0, len(text))] if rng.random() < 0.15 else text


def numbers(value: Any) -> Iterator[float]:
    """Every number of a document, as the parser may read it."""
    if isinstance(value, dict):
        pairs = value.pairs if hasattr(value, "pairs") else value.items()
        for _, v in pairs:
            yield from numbers(v)
    elif isinstance(value, list):
        for v in value:
            yield from numbers(v)
    elif isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            found = float(value)
        except (ValueError, OverflowError):
            return
        yield found
        if found > 0:
            yield math.log(found)


def check(row: Row, document: Any, *, k: int = K) -> None:
    sent = list(numbers(document))
    with np.errstate(over="ignore"):
        allowed = set(np.array([x for x in sent if x <= 0] or [0.5], np.float32).tolist())
    if any(0 <= x <= rows.ROUNDING for x in sent):
        allowed.add(0.0)
    a = rows.arrays([row], k)
    for name in ("logprob", "top_logprob"):
        finite = a[name][np.isfinite(a[name])]
        assert (finite <= 0).all()
        assert set(finite.tolist()) <= allowed, (name, set(finite.tolist()) - allowed)
        assert not np.isinf(a[name]).any()
    for listed in row.known:
        assert set(np.array([*listed.values()], np.float32).tolist()) <= allowed
    n = int(a["n_tokens"][0])
    assert np.isnan(a["logprob"][0, n:]).all()
    ok = (a["position_state"][0, :n] == 0) & (a["state"][0] == 0)
    # a position that is to be compared has a chosen token with a number, or one that is known to be below the best
    finite = np.isfinite(a["top_logprob"][0, :n]).any(-1) | np.isfinite(a["logprob"][0, :n])
    noted = {f.name for f in row.findings}
    assert (finite | ~ok).all() or noted & {"short_rows", "no_logprobs"}
    assert row.state in schema.STATES
    assert row.state == "ok" or any(f.spoils == row.state for f in row.findings)


def bodies(words: Vocabulary) -> list[dict[str, Any]]:
    native = {
        "content": "abc", "stop_type": "limit", "tokens_evaluated": 3, "tokens_predicted": 3,
        "completion_probabilities": [
            {"content": "a", "probs": [{"tok_str": t, "prob": p} for t, p in (("a", 0.5), ("b", 0.2), ("c", 0.0))]},
            {"id": 50, "token": "b", "logprob": -0.5, "top_logprobs": [{"id": 50, "token": "b", "logprob": -0.5}]},
            {"id": 51, "token": "c", "prob": 0.5, "top_probs": [{"id": 51, "token": "c", "prob": 0.5}]},
        ],
    }  # fmt: skip
    return [healthy(words, 4, k=4), healthy(words, 4, k=4, ids=False), chat(words, 4, k=4), native]


def read(document: Any, problem: str, words: Vocabulary) -> Row:
    """The row of an answer, as a run reads it."""
    row = rows.decoded(parse(document), words, k=K, eos={EOS}, status=problem)
    row = examine(row, words, k=K, greedy=True)
    text_differs(row, words)
    return row


@pytest.mark.parametrize("shape", range(4))
def test_an_answer_that_nothing_happened_to_keeps_its_numbers(shape: int, words: Vocabulary) -> None:
    """Rows without numbers would hold the invariant too."""
    document, problem = read_json(json.dumps(bodies(words)[shape]))
    row = read(document, problem, words)
    check(row, document)
    assert row.n == (3 if shape == 3 else 4)
    assert np.isfinite(rows.arrays([row], K)["logprob"][0, : row.n]).all()


@settings(max_examples=300)
@given(data=st.data())
def test_a_mutated_answer_is_never_a_silent_number(data: Any, words: Vocabulary) -> None:
    body = data.draw(st.sampled_from(bodies(words)))
    document, problem = read_json(scramble(body, data.draw(st.randoms(use_true_random=False))))
    row = read(document, problem, words)
    check(row, document)
    assert row.state != "ok" or not problem


HOW: list[dict[str, Any]] = [{"prompt_logprobs": 4}, {"echo": True}]
TOKENS = [100, 101, 102]


def scored_by(words: Vocabulary, how: dict[str, Any]) -> dict[str, Any]:
    """A server's answer to a request that scores ``TOKENS``."""
    ask = {"prompt": [*PROMPT, *TOKENS], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    return Fake(words, echo=True).respond({**ask, **how}, chat=False, k=4 if "echo" in how else None)


def read_replay(document: Any, problem: str, words: Vocabulary) -> Row:
    """The row of a scored text, as a run reads it."""
    scored = parse_prompt(document, [*PROMPT, *TOKENS], 4, len(PROMPT))
    row = rows.replayed(scored, words, start=len(PROMPT), tokens=TOKENS, k=4, status=problem)
    return examine(row, words, k=4, greedy=False)


@pytest.mark.parametrize("how", HOW, ids=lambda how: next(iter(how)))
def test_a_replay_that_nothing_happened_to_keeps_its_numbers(how: dict[str, Any], words: Vocabulary) -> None:
    document, problem = read_json(json.dumps(scored_by(words, how)))
    row = read_replay(document, problem, words)
    check(row, document, k=4)
    assert [e.id for e in row.token] == TOKENS
    assert np.isfinite(rows.arrays([row], 4)["top_logprob"][0, :3, 0]).all()


@settings(max_examples=150)
@given(data=st.data())
def test_a_mutated_replay_is_never_a_silent_number(data: Any, words: Vocabulary) -> None:
    body = scored_by(words, data.draw(st.sampled_from(HOW)))
    document, problem = read_json(scramble(body, data.draw(st.randoms(use_true_random=False))))
    row = read_replay(document, problem, words)
    check(row, document, k=4)
    assert row.state != "ok" or not problem
    assert [e.id for e in row.token] in ([], TOKENS)  # the anchor's tokens, or nothing


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), sane=st.integers(0, 40))
def test_a_run_against_a_mad_server_ends_in_a_shard_or_a_clear_error(
    seed: int, sane: int, cell: Make, words: Vocabulary, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fake = Fake(words, max_k=20)
    rng = random.Random(seed)  # drawn from in the client's thread

    def mend(body: dict[str, Any], _: dict[str, Any]) -> Any:
        if len(fake.asked) <= sane:  # so that the probe comes through now and then
            return body
        return httpx.Response(rng.choice([200] * 20 + [500, 404]), text=scramble(body, rng))

    fake.mend = mend
    c = cell(outputs=str(tmp_path_factory.mktemp("mad")), max_new_tokens=4)
    try:
        ds = endpoint.collect(c, transport=httpx.MockTransport(fake))
    except RuitongError as e:
        assert str(e)
        return
    assert ds.sizes["prompt"] == len(PROMPTS)
    for name in ("logprob", "top_logprob", "anchor_logprob"):
        values = ds[name].values
        assert (values[np.isfinite(values)] <= 0).all()
    bad = ds["state"].values != 0
    assert (bad.sum() == 0) or schema.provenance(ds)["findings"] or (ds["state"].values[bad] == 1).all()
