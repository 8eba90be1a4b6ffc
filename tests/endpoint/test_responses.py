"""Parsers: every response shape we know, hand-made, read into one record."""

import json
import math
from typing import Any

import pytest

from ruitong_lib.collect.served.lenient import Pairs, number, read_json, token_id
from ruitong_lib.collect.served.responses import parse, parse_prompt


class TestJson:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ('{"a": NaN}', math.nan),
            ('{"a": -Infinity}', -math.inf),
            ('{"a": -inf}', -math.inf),
            ('{"a": nan, "b": -nan}', math.nan),
            ('{"a": None}', None),
            ('\ufeff{"a": True}', True),
            ('{"a": 1e999}', math.inf),
        ],
    )
    def test_takes_what_strict_json_does_not(self, text: str, value: Any) -> None:
        document, problem = read_json(text)
        assert not problem
        found = document["a"]
        assert found == value or (math.isnan(found) and math.isnan(value))

    def test_words_inside_texts_stay(self) -> None:
        assert read_json('{"a": nan, "text": "nan and None \\" inf"}')[0]["text"] == 'nan and None " inf'

    @pytest.mark.parametrize("text", ["", "  ", '{"a": 1', "<html>", '{"a": wat}', "[" * 100_000, "9" * 5000])
    def test_says_why_it_cannot(self, text: str) -> None:
        document, problem = read_json(text)
        assert document is None
        assert problem

    def test_a_key_that_comes_twice_is_kept(self) -> None:
        found = read_json('{"\\ufffd": -1.0, "\\ufffd": -2.0}')[0]
        assert isinstance(found, Pairs)
        assert found.pairs == [("\ufffd", -1.0), ("\ufffd", -2.0)]


class TestNumber:
    @pytest.mark.parametrize(
        ("value", "spelling"),
        [
            (None, "null"), (-math.inf, "-inf"), ("-Infinity", "-inf"), (math.nan, "NaN"), ("nan", "NaN"),
            (-9999.0, "-9999"), (-9999, "-9999"), (-100.0, "-100"), (-100, "-100"), (-3.4028234663852886e38, "-3.4e38"),
            (-1e6, "very low"), (True, "bool"), ({}, "dict"), ([1], "list"), ("word", "text"),
        ],
    )  # fmt: skip
    def test_every_spelling_of_not_available_is_masked_under_its_name(self, value: Any, spelling: str) -> None:
        found, mask = number(value)
        assert math.isnan(found)
        assert mask == spelling

    @pytest.mark.parametrize("value", [0.0, -0.0, -1e-12, -99.99, -100.01, -50, "-1.5", 0.2, math.inf])
    def test_anything_else_is_what_it_says(self, value: Any) -> None:
        assert number(value) == (float(value), "")

    @pytest.mark.parametrize(
        ("value", "found"),
        [(5, 5), ("5", 5), ("token_id:5", 5), (-1, -1), (2**40, -1), (True, -1), (1.5, -1), (None, -1), ("a", -1)],
    )
    def test_ids(self, value: Any, found: int) -> None:
        assert token_id(value) == found


COMPLETIONS = {
    "choices": [
        {
            "text": "a b", "finish_reason": "stop", "stop_reason": None, "token_ids": [7, 8],
            "prompt_token_ids": [1, 2],
            "logprobs": {
                "tokens": ["token_id:7", "token_id:8"],
                "token_logprobs": [-0.5, -0.25],
                "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -1.5}, {"token_id:8": -0.25, "token_id:2": None}],
            },
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
}  # fmt: skip
CHAT = {
    "choices": [
        {
            "message": {"content": "é", "reasoning_content": "hm"}, "finish_reason": "length",
            "logprobs": {
                "content": [
                    {
                        "token": "é", "logprob": -0.5, "bytes": [195, 169],
                        "top_logprobs": [
                            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                            {"token": "\ufffd", "logprob": -9999.0, "bytes": None},
                        ],
                    }
                ]
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}  # fmt: skip
NATIVE_OLD = {
    "content": " a", "stopped_eos": False, "stopped_limit": True, "tokens_evaluated": 4, "tokens_predicted": 1,
    "completion_probabilities": [
        {"content": " a", "probs": [{"tok_str": t, "prob": p} for t, p in ((" a", 0.5), (" b", 0.25), ("c", 0.0))]}
    ],
}  # fmt: skip
NATIVE_NEW = {
    "content": " a", "stop_type": "eos", "tokens": [5], "tokens_evaluated": 4, "tokens_predicted": 1,
    "completion_probabilities": [
        {"id": 5, "token": " a", "bytes": [32, 97], "logprob": -0.7,
         "top_logprobs": [{"id": 5, "token": " a", "logprob": -0.7}, {"id": 6, "token": "b", "logprob": -1.0}]}
    ],
}  # fmt: skip


class TestShapes:
    def test_completions(self) -> None:
        a = parse(COMPLETIONS)
        assert a is not None
        assert (a.shape, a.text, a.finish, a.n_prompt, a.n_completion, a.cached) == (
            "completions",
            "a b",
            "stop",
            2,
            2,
            1,
        )
        assert (a.prompt_ids, a.token_ids) == ([1, 2], [7, 8])
        assert a.positions is not None
        assert [(e.id, e.logprob) for e in a.positions[0].top] == [(7, -0.5), (9, -1.5)]
        assert a.positions[1].top[1].mask == "null"
        assert not a.positions[0].keyed_by_text

    def test_completions_keyed_by_text(self) -> None:
        body = {"choices": [{"text": "x", "logprobs": {"tokens": ["x"], "token_logprobs": [-1.0],
                                                       "top_logprobs": [{"x": -1.0, "y": -2.0}]}}]}  # fmt: skip
        a = parse(body)
        assert a is not None
        assert a.positions is not None
        assert a.positions[0].keyed_by_text
        assert [e.text for e in a.positions[0].top] == ["x", "y"]

    def test_chat(self) -> None:
        a = parse(CHAT)
        assert a is not None
        assert (a.shape, a.text, a.reasoning, a.finish) == ("chat", "é", "hm", "length")
        assert a.positions is not None
        assert a.positions[0].token.bytes == "é".encode()
        assert a.positions[0].top[1].mask == "-9999"

    def test_llama_cpp_old_probabilities_become_their_logarithms(self) -> None:
        a = parse(NATIVE_OLD)
        assert a is not None
        assert a.probabilities
        assert (a.shape, a.finish, a.n_prompt) == ("native", "length", 4)
        assert a.positions is not None
        assert [e.logprob for e in a.positions[0].top[:2]] == [math.log(0.5), math.log(0.25)]
        assert a.positions[0].top[2].mask == "0"  # no mass is no logprob, not −inf
        assert a.positions[0].token.logprob == math.log(0.5)

    def test_llama_cpp_new(self) -> None:
        a = parse(NATIVE_NEW)
        assert a is not None
        assert not a.probabilities
        assert (a.finish, a.token_ids) == ("stop", [5])
        assert a.positions is not None
        assert [(e.id, e.logprob) for e in a.positions[0].top] == [(5, -0.7), (6, -1.0)]

    def test_llama_cpp_after_sampling(self) -> None:
        body = {"content": "a", "completion_probabilities": [
            {"id": 5, "token": "a", "prob": 1.0, "top_probs": [{"id": 5, "token": "a", "prob": 1.0}]}]}  # fmt: skip
        a = parse(body)
        assert a is not None
        assert a.probabilities

    @pytest.mark.parametrize("body", [None, [], "x", {}, {"choices": []}, {"choices": [None]}, {"choices": "x"}, 5])
    def test_what_is_no_answer(self, body: Any) -> None:
        assert parse(body) is None

    @pytest.mark.parametrize("logprobs", [None, [], {}, {"content": None}, {"tokens": None, "token_logprobs": None}, 5])
    def test_no_logprobs_is_none_and_not_zero(self, logprobs: Any) -> None:
        a = parse({"choices": [{"text": "x", "logprobs": logprobs}]})
        assert a is not None
        assert a.positions is None


class TestPrompt:
    def test_prompt_logprobs_list_k_and_the_token_itself(self) -> None:
        rows = [None, {"8": {"logprob": -5.0, "rank": 90}, "1": {"logprob": -0.5}, "2": {"logprob": -1.0}},
                {"9": {"logprob": -0.1, "rank": 1}, "3": {"logprob": -3.0, "rank": 2}}]  # fmt: skip
        scored = parse_prompt({"choices": [{"prompt_logprobs": rows}]}, [7, 8, 9], 2)
        assert scored is not None
        assert scored.positions[0] is None  # no context, not missing
        one, two = scored.positions[1], scored.positions[2]
        assert one is not None
        assert two is not None
        assert (one.token.id, one.token.logprob) == (8, -5.0)
        assert [e.id for e in one.top] == [1, 2]  # 8 is the extra one
        assert [e.id for e in two.top] == [9, 3]  # here the token is among the best

    def test_bare_numbers(self) -> None:
        scored = parse_prompt({"choices": [{"prompt_logprobs": [None, {"8": -1.0, "5": -0.5}]}]}, [7, 8], 2)
        assert scored is not None
        assert scored.positions[1] is not None
        assert scored.positions[1].token.logprob == -1.0

    def test_another_length_gives_nothing(self) -> None:
        scored = parse_prompt({"choices": [{"prompt_logprobs": [None, {"8": -1.0}]}]}, [7, 8, 9], 2)
        assert scored is not None
        assert scored.positions == []

    def test_an_ignored_echo_gives_nothing(self) -> None:
        body = {"choices": [{"logprobs": {"tokens": ["x"], "token_logprobs": [-1.0], "top_logprobs": [{"x": -1.0}]}}]}
        scored = parse_prompt(body, [7, 8, 9], 2)
        assert scored is not None
        assert scored.positions == []

    def test_an_echo_is_aligned_by_count_and_never_by_its_strings(self) -> None:
        # some servers accumulate garbage in the echoed strings
        own = {"tokens": ["<s>", "", "\n", "1"], "token_logprobs": [None, -1.0, -2.0, -0.5],
               "top_logprobs": [None, {"a": -1.0}, {"b": -0.5}, {"1": -0.5}]}  # fmt: skip
        scored = parse_prompt({"choices": [{"logprobs": own}]}, [7, 8, 9], 1)
        assert scored is not None
        assert [p and p.token.id for p in scored.positions] == [None, 8, 9]
        assert [p and p.token.logprob for p in scored.positions] == [None, -1.0, -2.0]

    def test_an_echo_of_other_ids_gives_nothing(self) -> None:
        own = {"tokens": ["token_id:7", "token_id:99"], "token_logprobs": [None, -1.0], "top_logprobs": [None, {}]}
        scored = parse_prompt({"choices": [{"logprobs": own}]}, [7, 8], 1)
        assert scored is not None
        assert scored.positions == []


def test_hand_made_bodies_survive_json() -> None:
    for body in (COMPLETIONS, CHAT, NATIVE_OLD, NATIVE_NEW):
        assert parse(read_json(json.dumps(body))[0]) == parse(body)
