"""Laws of the parsers, the bounds and the gate table."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ruitong_lib.measure import answers, shares
from ruitong_lib.measure.gates import answer_table, gate_table
from ruitong_lib.prompts import Prompt
from ruitong_lib.testing import synthetic_shards

ITEMS = [
    Prompt("c", "", "en", "x\nA. one\nB. two", parser="choice", options=("A", "B"), key="A"),
    Prompt("l", "", "en", "x", parser="label", options=("yes", "no"), key="no"),
    Prompt("t", "", "zh", "x", parser="label", options=("对", "错"), key="对"),
    Prompt("n", "", "en", "x", parser="number", key="1"),
    Prompt("z", "", "zh", "x", parser="number", key="1"),
    Prompt("p", "", "en", "x", parser="pattern", pattern=r"[A-Z]-\d", key="A-1"),
    Prompt("e", "", "en", "x", parser="exact", key="a"),
    Prompt("j", "", "en", "x", parser="json", key='{"a": 1}'),
    Prompt("y", "", "en", "x", parser="python", key="f(x)"),
]
NUMBER, NUMBER_ZH = ITEMS[3], ITEMS[4]
# Text that looks like answers finds more than text at random.
PIECES = st.sampled_from(
    [
        *(
            "A",
            "B",
            "(b)",
            "yes",
            "No",
            "对",
            "错",
            "答案",
            "是",
            "=",
            "1,234",
            "3/4",
            "十二",
            "{",
            "}",
            "```",
            ":",
            ".",
        ),
        *("not", "<think>", "</think>", "1e9", "-", "A-1", '{"a": 1}', "\\boxed{7}", "\0", " ", "\n", "def f(x):"),
        *("\n    return x", "the answer is ", "The answer is"),
    ]
)
MADE = st.lists(PIECES, max_size=12)
TEXTS = st.one_of(st.text(max_size=60), MADE.map("".join), MADE.map(" ".join))


@given(text=TEXTS, item=st.sampled_from(ITEMS), cut=st.booleans())
def test_any_text_has_one_answer_or_none(text, item, cut):
    answer = answers.parse(text, item, cut=cut)
    assert answer == answers.parse(text, item, cut=cut)
    if answer is not None:
        assert answer
        assert not item.options or answer in item.options
        assert answers.same(answer, answer, item)
        if item.parser in {"choice", "label", "number", "exact", "json"}:
            assert answers.parse(answer, item) == answer  # an answer is its own canonical form


@given(text=TEXTS, item=st.sampled_from([i for i in ITEMS if i.parser in {"choice", "label", "pattern"}]))
def test_a_cut_never_makes_an_answer(text, item):
    cut = answers.parse(text, item, cut=True)
    assert cut is None or cut == answers.parse(text, item) or item.parser == "pattern"


@given(value=st.integers(-(10**12), 10**12), decimals=st.integers(0, 3))
def test_numbers_in_every_dress(value, decimals):
    shown = f"{value:,}" if not decimals else f"{value / 10**decimals:,.{decimals}f}"
    plain = answers.parse(shown, NUMBER)
    assert plain is not None
    assert float(plain) == float(shown.replace(",", ""))
    wide = shown.translate({c: c + 0xFEE0 for c in range(0x21, 0x7F) if chr(c) != ","})
    for dressed in (
        f"The answer is {shown}.",
        f"**{shown}**",
        f"x = {shown}",
        f"答案：{shown}",
        f"${shown}$",
        shown + " km",
        wide,
    ):
        assert answers.parse(dressed, NUMBER) == plain


def chinese(n: int) -> str:
    """Write a number below 10^8 in Chinese, the long way."""
    if n >= 10_000:
        high, low = divmod(n, 10_000)
        return chinese(high) + "万" + ("" if not low else ("零" if low < 1000 else "") + chinese(low))
    out, zero = "", False
    for unit, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit, n = divmod(n, unit)
        if digit:
            out += ("零" if zero and out else "") + "零一二三四五六七八九"[digit] + name
        zero = not digit
    return out or "零"


@given(value=st.integers(0, 10**8 - 1))
def test_chinese_numerals(value):
    assert answers.parse(chinese(value), NUMBER_ZH) == str(value)


@given(n=st.integers(1, 2000), data=st.data(), level=st.floats(0.5, 0.999))
def test_bounds(n, data, level):
    k = data.draw(st.integers(0, n))
    low, high = shares.lower_bound(k, n, level), shares.upper_bound(k, n, level)
    assert 0 <= low <= k / n <= high <= 1
    assert low == pytest.approx(1 - shares.upper_bound(n - k, n, level), abs=1e-9)
    if k < n:
        assert high < shares.upper_bound(k + 1, n, level)
        assert shares.upper_bound(k, n + 1, level) < high
    assert shares.upper_bound(k, n, (1 + level) / 2) >= high


@given(k=st.integers(0, 40), extra=st.integers(0, 400), margin=st.sampled_from([0.02, 0.05, 0.1]))
def test_items_needed_is_enough_and_the_fewest(k, extra, margin):
    n = max(1, k) + extra
    needed = shares.items_needed(k, n, margin, least=1, most=5000)
    if needed is None:
        assert k / n >= margin or shares.upper_bound(math.ceil(k / n * 5000 - 1e-9), 5000) >= margin
        return
    assert shares.upper_bound(math.ceil(k / n * needed - 1e-9), needed) < margin
    for m in {1, needed // 2, needed - 1} - {0, needed}:
        assert shares.upper_bound(math.ceil(k / n * m - 1e-9), m) >= margin


@given(n=st.integers(1, 500), data=st.data())
def test_verdicts(n, data):
    changed, noise = (data.draw(st.integers(0, n)) for _ in range(2))
    both = data.draw(st.integers(max(0, changed + noise - n), min(changed, noise)))
    out = shares.decide(n, changed, changed - both, noise - both)
    if out["verdict"] == "EQUIVALENT":
        assert n >= 300
        assert shares.upper_bound(changed - both, n) < out["margin"]
    if out["verdict"] == "DIFFERENT":
        assert (changed - noise) / n > out["margin"]
    assert shares.decide(n, changed, changed, None)["verdict"] != "DIFFERENT"
    # A change more is never a step towards EQUIVALENT.
    if changed - both < n - noise:
        worse = shares.decide(n, changed + 1, changed + 1 - both, noise - both)["verdict"]
        assert worse != "EQUIVALENT" or out["verdict"] == "EQUIVALENT"


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**16),
    words=st.lists(st.sampled_from(["1", "2", "three", "none", "4 or"]), min_size=16, max_size=16),
)
def test_the_table_is_symmetric_and_blind_to_order(seed, words):
    a, b = (s.copy(deep=True) for s in _PAIR)
    a["text"].values[0], b["text"].values[0] = words[:8], words[8:]
    for s in (a, b):
        s["finish_reason"].values[:] = 0
    items = [Prompt(str(p), "", "en", "x", gate="g", parser="number", key="1") for p in a["prompt"].values]
    forward, back = (gate_table(x, y, items=items)[-1] for x, y in ((a, b), (b, a)))
    order = np.random.default_rng(seed).permutation(8)
    shuffled = gate_table(a, b.isel(prompt=order), items=items[::-1])[-1]
    for other in (back, shuffled):
        assert all(forward[k] == other[k] for k in ("n", "changed", "silent", "verdict"))
    assert (forward["lost"], forward["gained"]) == (back["gained"], back["lost"])
    assert not answer_table(a, a, items=items)["changed"].any()


_PAIR = synthetic_shards([{}, {"noise": 0.01}], n_prompts=8, n_positions=2, k=2, vocab=10).shards
