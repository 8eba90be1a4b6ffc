"""Every kind of odd answer that the field reports, made by hand: named, with its evidence, and never a number."""

import copy
import functools
import json
import math
from typing import Any

import numpy as np
import pytest
from conftest import EOS, Fake, log_softmax, logits

from ruitong_lib import schema
from ruitong_lib.collect.served import rows
from ruitong_lib.collect.served.lenient import read_json
from ruitong_lib.collect.served.responses import parse, parse_prompt
from ruitong_lib.collect.served.rows import Row
from ruitong_lib.collect.served.sanity import examine, text_differs
from ruitong_lib.collect.served.vocabulary import REPLACEMENT, Vocabulary

K = 8
N = 6
PROMPT = [40, 41, 42]


@functools.cache
def plain(words: Vocabulary) -> np.ndarray[Any, Any]:
    """Ids whose text is whole and no other id's, as a mask over the vocabulary."""
    texts = [words.tokenizer.decode([i]) for i in range(words.size)]
    return np.array([texts.count(t) == 1 and bool(t) and REPLACEMENT not in t for t in texts])


def healthy(words: Vocabulary, n: int = N, *, k: int = K, ids: bool = True) -> dict[str, Any]:
    """A sound answer of ``n`` tokens in the completions shape, by id or by text."""
    new: list[int] = []
    tokens, own, top = [], [], []
    for _ in range(n):
        x = logits([*PROMPT, *new])
        x[~plain(words)] = -30
        x[EOS] = -30
        lp = log_softmax(x)
        best = [int(i) for i in np.argsort(-lp, kind="stable")[:k]]
        new.append(best[0])

        def name(i: int) -> str:
            return f"token_id:{i}" if ids else words.tokenizer.decode([i])

        tokens.append(name(best[0]))
        own.append(float(lp[best[0]]))
        top.append({name(i): float(lp[i]) for i in best})
    choice: dict[str, Any] = {
        "text": words.decode(new), "finish_reason": "length",
        "logprobs": {"tokens": tokens, "token_logprobs": own, "top_logprobs": top},
    }  # fmt: skip
    if ids:
        choice |= {"token_ids": new}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": n}}


def chat(words: Vocabulary, n: int = N, *, k: int = K) -> dict[str, Any]:
    """The same as a chat: a list of alternatives with bytes, and no ids."""
    body = healthy(words, n, k=k)
    choice = body["choices"][0]

    def entry(name: str, logprob: float) -> dict[str, Any]:
        text = words.tokenizer.decode([int(name.split(":")[1])])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    lps = choice["logprobs"]
    content = [
        {**entry(t, lp), "top_logprobs": [entry(a, v) for a, v in top.items()]}
        for t, lp, top in zip(lps["tokens"], lps["token_logprobs"], lps["top_logprobs"], strict=True)
    ]
    message = {"role": "assistant", "content": choice["text"]}
    return {"choices": [{"message": message, "finish_reason": "length", "logprobs": {"content": content}}],
            "usage": body["usage"]}  # fmt: skip


def judged(body: Any, words: Vocabulary, *, k: int = K, eos: tuple[int, ...] = (EOS,)) -> Row:
    """Through the text, as from a server."""
    document = body if isinstance(body, str) else json.dumps(body)
    parsed, problem = read_json(document)
    row = rows.decoded(parse(parsed), words, k=k, eos=set(eos), status=problem)
    return examine(row, words, k=k, greedy=True)


def finding(row: Row, name: str) -> rows.Finding:
    found = [f for f in row.findings if f.name == name]
    assert found, [f.to_dict() for f in row.findings]
    return found[0]


def lps(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["choices"][0]["logprobs"]
    return found


def test_a_sound_answer_has_no_finding(words: Vocabulary) -> None:
    for body in (healthy(words), chat(words), healthy(words, 40)):
        row = judged(body, words)
        assert row.state == "ok"
        assert row.findings == []
        assert set(row.flag) == {"ok"}
    assert text_differs(judged(healthy(words), words), words) is None


class TestMasked:
    SENTINELS = (
        "null",
        "-Infinity",
        "NaN",
        "-inf",
        "nan",
        "None",
        "-9999.0",
        "-100.0",
        "-3.4028234663852886e+38",
        '"-inf"',
    )

    @pytest.mark.parametrize("sentinel", SENTINELS)
    def test_every_spelling_in_the_alternatives_spoils_the_row(self, words: Vocabulary, sentinel: str) -> None:
        body = healthy(words)
        for top in lps(body)["top_logprobs"]:
            for name in list(top)[4:]:
                top[name] = -777.25
        row = judged(json.dumps(body).replace("-777.25", sentinel), words)
        assert row.state == "masked"
        assert set(row.flag) == {"masked"}
        f = finding(row, "masked")
        assert (f.count, f.position) == (N, 0)
        assert f"{4 * N} × " in f.value
        for top in row.top:
            assert [math.isnan(e.logprob) for e in top] == [False] * 4 + [True] * 4

    def test_fillers_in_id_order_are_a_fingerprint(self, words: Vocabulary) -> None:
        body = healthy(words, k=4)
        for top in lps(body)["top_logprobs"]:
            top |= {f"token_id:{i}": -9999.0 for i in range(10, 14)}
        assert "ascending order" in finding(judged(body, words), "masked").value

    def test_one_of_many_positions_is_left_out_and_noted(self, words: Vocabulary) -> None:
        body = healthy(words, 20)
        lps(body)["top_logprobs"][7]["token_id:40"] = None
        row = judged(body, words, k=K + 1)
        assert row.state == "ok"
        assert [t for t, f in enumerate(row.flag) if f == "masked"] == [7]
        assert finding(row, "masked").position == 7

    def test_the_last_position_without_alternatives_is_a_known_habit(self, words: Vocabulary) -> None:
        body = chat(words, 4)
        body["choices"][0]["logprobs"]["content"][-1] = {
            "token": "",
            "logprob": -9999.0,
            "bytes": [],
            "top_logprobs": [],
        }
        row = judged(body, words)
        assert row.state == "ok"
        assert row.flag[-1] == "masked"
        assert "the last position only" in finding(row, "masked").value

    def test_nothing_masked_is_ever_a_number(self, words: Vocabulary) -> None:
        body = healthy(words)
        lps(body)["top_logprobs"] = [dict.fromkeys(top, -9999.0) for top in lps(body)["top_logprobs"]]
        lps(body)["token_logprobs"] = [None] * N
        a = rows.arrays([judged(body, words)], K)
        assert np.isnan(a["top_logprob"]).all()
        assert np.isnan(a["logprob"]).all()


class TestNan:
    def test_a_loop_of_token_zero_is_nan_logits(self, words: Vocabulary) -> None:
        body = healthy(words)
        c = body["choices"][0]
        c |= {"text": "!" * N, "token_ids": [0] * N}
        c["logprobs"] = {"tokens": ["token_id:0"] * N, "token_logprobs": [None] * N, "top_logprobs": [None] * N}
        row = judged(body, words)
        assert row.state == "nan_logits"
        assert finding(row, "nan_loop").count == N

    def test_with_flat_numbers_too(self, words: Vocabulary) -> None:
        body = healthy(words)
        c = body["choices"][0]
        c |= {"text": "!" * N, "token_ids": [0] * N}
        flat = {f"token_id:{i}": -math.log(400) for i in range(K)}
        c["logprobs"] = {
            "tokens": ["token_id:0"] * N,
            "token_logprobs": [-math.log(400)] * N,
            "top_logprobs": [flat] * N,
        }
        assert judged(body, words).state == "nan_logits"

    @pytest.mark.parametrize("logprobs", ["null", "absent"])
    def test_without_logprobs_the_exclamation_marks_tell(self, words: Vocabulary, logprobs: str) -> None:
        choice: dict[str, Any] = {"text": "!" * 12, "finish_reason": "length", "logprobs": None}
        if logprobs == "absent":
            del choice["logprobs"]
        assert judged({"choices": [choice]}, words).state == "nan_logits"

    def test_nan_here_and_there_is_named(self, words: Vocabulary) -> None:
        body = healthy(words, 20)
        lps(body)["token_logprobs"][3] = math.nan
        row = judged(body, words)
        assert row.flag[3] == "nan"
        assert finding(row, "nan").position == 3
        assert row.state == "ok"

    def test_a_loop_with_sound_numbers_is_a_loop_and_no_nan(self, words: Vocabulary) -> None:
        body = healthy(words, 10)
        for t, top in enumerate(lps(body)["top_logprobs"]):
            values = list(top.values())
            lps(body)["top_logprobs"][t] = dict(
                zip(["token_id:50", *[f"token_id:{60 + i}" for i in range(K - 1)]], values, strict=True)
            )
        lps(body)["tokens"] = ["token_id:50"] * 10
        body["choices"][0] |= {"token_ids": [50] * 10, "text": words.decode([50] * 10)}
        row = judged(body, words)
        assert row.state == "ok"
        assert finding(row, "loop").count == 10


class TestProcessed:
    @pytest.mark.parametrize("other", [-3.4028234663852886e38, None, "-inf"])
    def test_temperature_zero_before_the_softmax(self, words: Vocabulary, other: Any) -> None:
        body = healthy(words)
        lps(body)["token_logprobs"] = [0.0] * N
        lps(body)["top_logprobs"] = [
            {n: 0.0 if i == 0 else other for i, n in enumerate(top)} for top in lps(body)["top_logprobs"]
        ]
        row = judged(body, words)
        assert row.state == "processed"
        assert "before the softmax" in finding(row, "processed").value

    def test_old_llama_cpp_at_temperature_zero(self, words: Vocabulary) -> None:
        probs = [{"tok_str": words.tokenizer.decode([i]), "prob": float(i == 40)} for i in range(40, 48)]
        body = {"content": "x" * 5, "stopped_limit": True, "tokens_evaluated": 3, "completion_probabilities":
                [{"content": words.tokenizer.decode([40]), "probs": probs}] * 5}  # fmt: skip
        assert judged(body, words).state == "processed"

    def test_all_zero(self, words: Vocabulary) -> None:
        body = healthy(words)
        lps(body)["token_logprobs"] = [0.0] * N
        lps(body)["top_logprobs"] = [None] * N
        assert judged(body, words).state == "degenerate"
        assert finding(judged(body, words), "all_zero").count == N

    def test_a_cut_off_distribution_adds_up_to_one(self, words: Vocabulary) -> None:
        body = healthy(words, k=4)
        for t, top in enumerate(lps(body)["top_logprobs"]):
            total = math.log(math.fsum(map(math.exp, top.values())))
            lps(body)["top_logprobs"][t] = {n: v - total for n, v in top.items()}
            lps(body)["token_logprobs"][t] -= total
        row = judged(body, words, k=4)
        assert row.state == "renormalised"
        assert "add up to 1" in finding(row, "renormalised").value

    def test_and_with_a_masked_tail_both_are_said(self, words: Vocabulary) -> None:
        body = healthy(words, k=8)
        for t, top in enumerate(lps(body)["top_logprobs"]):
            best = dict(list(top.items())[:3])
            total = math.log(math.fsum(map(math.exp, best.values())))
            lps(body)["top_logprobs"][t] = {n: best[n] - total if n in best else -math.inf for n in top}
            lps(body)["token_logprobs"][t] -= total
        row = judged(body, words)
        assert row.state == "masked"
        assert finding(row, "renormalised")


class TestImpossible:
    def test_mass_above_one(self, words: Vocabulary) -> None:
        body = healthy(words)
        for t, top in enumerate(lps(body)["top_logprobs"]):
            best = max(top.values())
            lps(body)["top_logprobs"][t] = {n: v - best - 0.1 for n, v in top.items()}
            lps(body)["token_logprobs"][t] = -0.1
        row = judged(body, words)
        assert row.state == "impossible"
        assert "add up to" in finding(row, "mass_above_one").value

    def test_positive_logprobs_are_no_numbers(self, words: Vocabulary) -> None:
        body = healthy(words)
        lps(body)["top_logprobs"] = [{n: math.exp(v) for n, v in top.items()} for top in lps(body)["top_logprobs"]]
        lps(body)["token_logprobs"] = [math.exp(v) for v in lps(body)["token_logprobs"]]
        row = judged(body, words)
        assert row.state == "impossible"
        assert finding(row, "positive_logprob").count == N
        assert np.isnan(rows.arrays([row], K)["top_logprob"]).all()

    def test_a_constant_taken_off(self, words: Vocabulary) -> None:
        body = healthy(words, k=K)
        for t, top in enumerate(lps(body)["top_logprobs"]):
            lps(body)["top_logprobs"][t] = {n: v - 12.0 for n, v in top.items()}
            lps(body)["token_logprobs"][t] -= 12.0
        row = judged(body, words)
        assert row.state == "impossible"
        assert finding(row, "shifted_values").count >= 1

    @pytest.mark.parametrize("by", [1, -1])
    def test_rows_one_position_off(self, words: Vocabulary, by: int) -> None:
        body = healthy(words, 10)
        for name in ("top_logprobs",):
            lps(body)[name] = lps(body)[name][by:] + lps(body)[name][:by]
        row = judged(body, words)
        assert row.state in {"impossible", "not_greedy"}
        assert finding(row, "shifted_rows").count >= 9

    def test_an_id_outside_the_vocabulary(self, words: Vocabulary) -> None:
        body = healthy(words)
        top = lps(body)["top_logprobs"][2]
        top["token_id:2000000"] = top.pop(list(top)[-1])
        row = judged(body, words)
        assert row.state == "impossible"
        assert finding(row, "unknown_id").position == 2


class TestDegenerate:
    def test_one_token_k_times(self, words: Vocabulary) -> None:
        body = chat(words)
        for c in body["choices"][0]["logprobs"]["content"]:
            c["top_logprobs"] = [{**a, "token": "x", "bytes": [120]} for a in c["top_logprobs"]]
        row = judged(body, words)
        assert row.state == "degenerate"
        assert finding(row, "one_token").count == N

    def test_an_id_that_is_listed_twice(self, words: Vocabulary) -> None:
        body = healthy(words)
        text = json.dumps(body)
        names = list(lps(body)["top_logprobs"][1])
        at = text.index('"top_logprobs"')
        second = text.index("{", text.index("{", at) + 1)
        row = judged(text[:second] + text[second:].replace(f'"{names[3]}"', f'"{names[2]}"', 1), words)
        assert row.state == "degenerate"
        assert finding(row, "repeated_id").position == 1

    def test_one_logprob_for_all(self, words: Vocabulary) -> None:
        body = healthy(words)
        lps(body)["top_logprobs"][4] = dict.fromkeys(lps(body)["top_logprobs"][4], -2.5)
        row = judged(body, words)
        assert row.state == "degenerate"
        assert finding(row, "constant_row").position == 4

    def test_the_same_row_at_every_position(self, words: Vocabulary) -> None:
        body = healthy(words)
        first = list(lps(body)["top_logprobs"][0].values())
        for t, top in enumerate(lps(body)["top_logprobs"]):
            lps(body)["top_logprobs"][t] = dict(zip(top, first, strict=True))
            lps(body)["token_logprobs"][t] = first[0]
        row = judged(body, words)
        assert row.state == "degenerate"
        assert finding(row, "constant_rows").count == N


class TestAlternatives:
    def test_two_ids_of_one_text_collapse(self, words: Vocabulary) -> None:
        body = healthy(words, ids=False)
        for top in lps(body)["top_logprobs"]:
            top.pop(list(top)[-1])
        row = judged(body, words)
        assert row.state == "collapsed"
        assert set(row.flag) == {"ambiguous"}

    def test_a_text_that_is_a_key_twice(self, words: Vocabulary) -> None:
        body = healthy(words, 20, ids=False)
        names = list(lps(body)["top_logprobs"][0])
        text = json.dumps(body)
        at = text.index('"top_logprobs"')
        changed = text[:at] + text[at:].replace(json.dumps(names[5]), json.dumps(names[4]), 1)
        row = judged(changed, words)
        assert finding(row, "collapsed").position == 0
        assert row.flag[0] == "ambiguous"
        assert row.state == "ok"  # one of 20

    def test_fewer_than_k_are_noted(self, words: Vocabulary) -> None:
        body = healthy(words)
        top = lps(body)["top_logprobs"][3]
        for name in list(top)[3:]:
            del top[name]
        row = judged(body, words)
        assert row.state == "ok"
        f = finding(row, "short_rows")
        assert (f.count, f.position, f.value) == (1, 3, f"down to 3 of {K} alternatives")

    def test_no_alternatives_at_all_are_no_logprobs(self, words: Vocabulary) -> None:
        body = healthy(words)
        lps(body)["top_logprobs"] = None
        assert judged(body, words).state == "no_logprobs"

    def test_lost_spaces_make_texts_ambiguous(self, words: Vocabulary) -> None:
        # " Deep" was chosen; the list says "Deep" twice
        body = chat(words)
        for c in body["choices"][0]["logprobs"]["content"]:
            c |= {"token": " Deep", "bytes": None}
            for a, text in zip(c["top_logprobs"], ("Deep", "Deep", "deep", "a", "b", "c", "d", "e"), strict=True):
                a |= {"token": text, "bytes": None}
        row = judged(body, words)
        assert set(row.flag) == {"ambiguous"}
        assert {e.id for top in row.top for e in top} == {-1}
        assert "' Deep'" in finding(row, "ambiguous_text").value

    def test_a_chosen_token_that_is_not_listed(self, words: Vocabulary) -> None:
        body = healthy(words)
        lps(body)["top_logprobs"][2].pop(lps(body)["tokens"][2])
        lps(body)["token_logprobs"][2] = None
        row = judged(body, words)
        assert row.flag[2] == "masked"


class TestChoice:
    def test_a_chosen_token_far_below_the_best(self, words: Vocabulary) -> None:
        body = healthy(words)
        top = lps(body)["top_logprobs"][2]
        worst = list(top)[-1]
        lps(body)["tokens"][2], lps(body)["token_logprobs"][2] = worst, top[worst]
        body["choices"][0]["token_ids"][2] = int(worst.split(":")[1])
        row = judged(body, words)
        assert row.state == "not_greedy"
        assert finding(row, "not_greedy").position == 2

    def test_a_near_tie_is_only_noted(self, words: Vocabulary) -> None:
        body = healthy(words)
        top = lps(body)["top_logprobs"][2]
        names = list(top)
        top[names[1]] = top[names[0]] - 0.125
        lps(body)["tokens"][2], lps(body)["token_logprobs"][2] = names[1], top[names[1]]
        body["choices"][0]["token_ids"][2] = int(names[1].split(":")[1])
        row = judged(body, words)
        assert row.state == "ok"
        assert finding(row, "not_greedy").count == 1

    def test_an_exact_tie_is_no_finding(self, words: Vocabulary) -> None:
        body = healthy(words)
        top = lps(body)["top_logprobs"][2]
        names = list(top)
        top[names[1]] = top[names[0]]
        body["choices"][0]["token_ids"][2] = int(names[1].split(":")[1])
        lps(body)["tokens"][2] = names[1]
        assert judged(body, words).findings == []

    def test_noise_from_the_first_token_on_is_noted(self, words: Vocabulary) -> None:
        body = healthy(words)
        for t, top in enumerate(lps(body)["top_logprobs"]):
            lps(body)["top_logprobs"][t] = {n: -5.0 - 0.01 * i - 0.001 * t for i, n in enumerate(top)}
            lps(body)["token_logprobs"][t] = -5.0 - 0.001 * t
        assert "broken?" in finding(judged(body, words), "unsure").value


class TestText:
    @pytest.mark.parametrize("logprobs", [None, {"content": []}, {"tokens": [], "token_logprobs": []}])
    def test_an_empty_text_with_http_200(self, words: Vocabulary, logprobs: Any) -> None:
        row = judged({"choices": [{"text": "", "finish_reason": "stop", "logprobs": logprobs}]}, words)
        assert row.state == "empty"
        assert "HTTP 200" in finding(row, "empty_text").value

    def test_end_of_text_at_once_is_an_answer(self, words: Vocabulary) -> None:
        body = healthy(words, 1)
        lp = lps(body)
        lp["top_logprobs"][0] = {
            f"token_id:{EOS}": lp["token_logprobs"][0],
            **dict(list(lp["top_logprobs"][0].items())[1:]),
        }
        lp["tokens"] = [f"token_id:{EOS}"]
        body["choices"][0] |= {"token_ids": [EOS], "text": "", "finish_reason": "stop"}
        row = judged(body, words)
        assert row.state == "ok"
        assert row.n == 1
        assert "at once" in finding(row, "empty_text").value

    def test_no_logprobs_keeps_the_text(self, words: Vocabulary) -> None:
        body = healthy(words)
        body["choices"][0]["logprobs"] = None
        row = judged(body, words)
        assert row.state == "no_logprobs"
        assert row.text == healthy(words)["choices"][0]["text"]
        assert np.isnan(rows.arrays([row], K)["logprob"]).all()

    def test_reasoning_apart_from_the_content(self, words: Vocabulary) -> None:
        body = chat(words)
        message = body["choices"][0]["message"]
        whole = message["content"]
        message |= {"content": whole[3:], "reasoning_content": whole[:3]}
        row = judged(body, words)
        assert row.state == "ok"
        assert row.text == whole
        assert finding(row, "reasoning_split")

    def test_logprobs_that_leave_the_reasoning_out(self, words: Vocabulary) -> None:
        body = chat(words)
        body["choices"][0]["message"]["reasoning"] = "so"
        body["usage"]["completion_tokens"] = N + 4
        row = judged(body, words)
        assert row.state == "wrong_length"
        assert "the reasoning has none" in finding(row, "wrong_length").value

    def test_one_logprob_for_a_whole_text(self, words: Vocabulary) -> None:
        body = healthy(words)
        for name in lps(body):
            lps(body)[name] = lps(body)[name][:1]
        assert judged(body, words).state == "wrong_length"

    @pytest.mark.parametrize("reason", [None, "content_filter", "abort", "tool_calls"])
    def test_a_text_that_something_else_cut_off(self, words: Vocabulary, reason: str | None) -> None:
        body = healthy(words)
        body["choices"][0]["finish_reason"] = reason
        row = judged(body, words)
        assert row.state == "cut_off"
        assert repr(reason) in finding(row, "finish_reason").value

    def test_no_answer(self, words: Vocabulary) -> None:
        row = judged("<html>busy</html>", words)
        assert row.state == "failed"
        assert "no JSON" in finding(row, "no_answer").value

    def test_ids_that_read_otherwise_here_are_another_tokenizer(self, words: Vocabulary) -> None:
        body = healthy(words)
        body["choices"][0]["text"] = "quite another text"
        f = text_differs(judged(body, words), words)
        assert f is not None
        assert "quite" in f.value


class TestEnd:
    def test_the_end_of_text_that_the_server_left_out_is_said_without_a_number(self, words: Vocabulary) -> None:
        body = healthy(words)
        body["choices"][0] |= {"finish_reason": "stop"}
        row = judged(body, words)
        assert row.n == N + 1
        assert row.token[-1].id == EOS
        assert math.isnan(row.token[-1].logprob)
        assert row.flag[-1] == "censored"
        assert row.state == "ok"
        assert finding(row, "end_left_out").position == N
        a = rows.arrays([row], K)
        assert a["top_token_id"][0, -1, 0] == EOS  # an anchor's row has an id
        assert np.isnan(a["top_logprob"][0, -1]).all()

    def test_it_may_stand_among_the_ids_alone(self, words: Vocabulary) -> None:
        body = healthy(words)
        body["choices"][0]["token_ids"].append(EOS)
        body["choices"][0]["finish_reason"] = "stop"
        row = judged(body, words)
        assert row.state == "ok"
        assert [e.id for e in row.token][-1] == EOS

    def test_which_of_several_is_not_guessed(self, words: Vocabulary) -> None:
        body = healthy(words)
        body["choices"][0]["finish_reason"] = "stop"
        row = judged(body, words, eos=(2, EOS))
        assert row.n == N
        assert "no end-of-text token" in finding(row, "end_left_out").value

    def test_a_count_that_includes_it(self, words: Vocabulary) -> None:
        body = chat(words)
        body["choices"][0]["finish_reason"] = "stop"
        body["usage"]["completion_tokens"] = N + 1
        assert judged(body, words).state == "ok"


class TestCharacters:
    def test_ids_need_no_text(self, words: Vocabulary) -> None:
        fake = Fake(words)
        text = words.tokenizer.encode("今🧎", add_special_tokens=False)
        assert len(text) > 2
        assert fake.words.decode(text) == "今🧎"
        body = healthy(words, len(text))
        for t, i in enumerate(text):
            top = lps(body)["top_logprobs"][t]
            lps(body)["top_logprobs"][t] = {f"token_id:{i}": next(iter(top.values())), **dict(list(top.items())[1:])}
            lps(body)["tokens"][t] = f"token_id:{i}"
        body["choices"][0] |= {"token_ids": text, "text": "今🧎"}
        row = judged(body, words)
        assert row.state == "ok"
        assert "byte_run" not in row.flag
        assert text_differs(row, words) is None

    @pytest.mark.parametrize(("piece", "raw"), [("\ufffd", [239, 191, 189]), ("", []), ("\ufffd", None)])
    def test_pieces_without_ids_are_a_run(self, words: Vocabulary, piece: str, raw: list[int] | None) -> None:
        body = chat(words)
        content = body["choices"][0]["logprobs"]["content"]
        for t in (2, 3):
            content[t] |= {"token": piece, "bytes": raw}
            content[t]["top_logprobs"][0] |= {"token": piece, "bytes": raw}
        content[4] |= {"token": "🧎", "bytes": list("🧎".encode())}
        content[4]["top_logprobs"][0] |= {"token": "🧎", "bytes": list("🧎".encode())}
        row = judged(body, words)
        assert row.flag[2:4] == ["byte_run", "byte_run"]
        assert finding(row, "byte_run").position == 2
        assert row.token[4].id == -1  # the whole character is no single token
        assert not rows.identified([row])

    def test_true_bytes_give_the_id_of_a_piece(self, words: Vocabulary) -> None:
        ids = words.tokenizer.encode("🧎", add_special_tokens=False)
        body = chat(words, len(ids))
        alphabet = words._by_bytes
        for t, i in enumerate(ids):
            raw = next(b for b, j in alphabet.items() if j == i)
            c = body["choices"][0]["logprobs"]["content"][t]
            c |= {"token": raw.decode("latin-1").encode("unicode_escape").decode(), "bytes": list(raw)}
            c["top_logprobs"][0] |= {"token": c["token"], "bytes": list(raw)}
        row = judged(body, words)
        assert [e.id for e in row.token] == ids
        assert set(row.flag) == {"ok"}

    def test_the_vocabularys_own_spelling(self, words: Vocabulary) -> None:
        word = next(w for w in words.tokenizer.get_vocab() if w.startswith("Ġ") and len(w) > 2)
        body = chat(words)
        c = body["choices"][0]["logprobs"]["content"][0]
        c |= {"token": word, "bytes": None}
        c["top_logprobs"][0] |= {"token": word, "bytes": None}
        assert judged(body, words).token[0].id == words.tokenizer.get_vocab()[word]


class TestReplay:
    def replayed(self, body: dict[str, Any], words: Vocabulary, tokens: list[int]) -> Row:
        scored = parse_prompt(body, [*PROMPT, *tokens], K, len(PROMPT))
        row = rows.replayed(scored, words, start=len(PROMPT), tokens=tokens, k=K)
        return examine(row, words, k=K, greedy=False)

    def body(self, words: Vocabulary, tokens: list[int]) -> dict[str, Any]:
        return Fake(words).respond(
            {"prompt": [*PROMPT, *tokens], "max_tokens": 1, "prompt_logprobs": K, "temperature": 0}, chat=False, k=None
        )

    def test_sound(self, words: Vocabulary) -> None:
        tokens = [100, 101, 102]
        row = self.replayed(self.body(words, tokens), words, tokens)
        assert (row.state, row.flag, row.findings) == ("ok", ["ok"] * 3, [])
        for t, i in enumerate(tokens):
            assert row.known[t][i] == log_softmax(logits([*PROMPT, *tokens[:t]]))[i]

    def test_a_needed_token_that_is_missing_is_censored(self, words: Vocabulary) -> None:
        tokens = [100, 101, 102]
        body = self.body(words, tokens)
        del body["choices"][0]["prompt_logprobs"][4]["101"]
        row = self.replayed(body, words, tokens)
        assert row.flag == ["ok", "censored", "ok"]
        assert math.isnan(row.token[1].logprob)

    def test_a_position_that_is_null_is_masked(self, words: Vocabulary) -> None:
        tokens = [100, 101, 102]
        body = self.body(words, tokens)
        body["choices"][0]["prompt_logprobs"][4] = None
        row = self.replayed(body, words, tokens)
        assert row.flag == ["ok", "masked", "ok"]
        assert row.state == "masked"

    def test_another_length_is_named(self, words: Vocabulary) -> None:
        tokens = [100, 101, 102]
        body = self.body(words, tokens)
        body["choices"][0]["prompt_logprobs"].pop()
        assert self.replayed(body, words, tokens).state == "wrong_length"


def test_every_state_that_a_gate_sets_is_in_the_schema(words: Vocabulary) -> None:
    assert schema.STATES[:5] == ("ok", "missing", "nan_logits", "masked", "degenerate")  # stored numbers
    assert schema.POSITION_STATES[:5] == ("ok", "masked", "censored", "short", "nan")
    body = healthy(words)
    row = copy.deepcopy(judged(body, words))
    for flag in schema.POSITION_STATES:
        row.flag[0] = flag
        rows.arrays([row], K)
