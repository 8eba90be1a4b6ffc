"""The parsers: what counts as an answer, what does not, and that nothing is ever run."""

import ast
import re
from pathlib import Path

import pytest

from ruitong_lib.errors import RuitongError
from ruitong_lib.measure import answers
from ruitong_lib.prompts import Prompt

CHOICE = Prompt("c", "", "en", "Which?\nA. lantern\nB. river\nC. stone\nD. cloud\nAnswer with the letter only.",
                parser="choice", options=("A", "B", "C", "D"), key="B")  # fmt: skip
LABEL = Prompt("l", "", "en", "x", parser="label", options=("positive", "negative"), key="positive")
INTENT = LABEL._replace(options=("question", "order"), key="order")
TRUTH = Prompt("t", "", "zh", "x", parser="label", options=("对", "错"), key="对")
LABEL_ZH = Prompt("z", "", "zh", "x", parser="label", options=("正面", "负面"), key="正面")
NUMBER = Prompt("n", "", "en", "x", parser="number", key="1234")
NUMBER_ZH = Prompt("m", "", "zh", "x", parser="number", key="17")
CODE = Prompt("o", "", "en", "x", parser="pattern", pattern=r"\b[A-Z]{2}-\d{4}\b", key="ZX-4471")
EXACT = Prompt("e", "", "en", "x", parser="exact", key="Quito")
JSON = Prompt("j", "", "en", "x", parser="json", key='{"name": "Ana", "age": 30}')
PYTHON = Prompt("p", "", "en", "x", parser="python", key="add(a, b)")
FENCE = "```python\ndef add(a, b):\n    return a + b\n```"


@pytest.mark.parametrize(
    ("item", "text", "answer"),
    [
        *[
            (CHOICE, t, "B")
            for t in (
                "B",
                "B.",
                "(B)",
                "b)",
                "b",
                " b. ",
                "**B**",
                "`B`",
                "B) river",
                "B: river",
                "B river",
                "答案：B",
                "答案是（Ｂ）",
                "答案是B选项",
                "应选B",
                "The answer is (b).",
                "Answer: B. river",
                "The correct answer is B because it flows.",
                "River.",
                "Because a river flows",
                "I would choose B",
                "\\boxed{B}",
                "It must be (B), not something else",
                "<think>A or C? C.</think>\nB",
            )
        ],
        *[(CHOICE, t, "A") for t in ("A", "A is right", "A.", "A because", "A lantern is a thing", "The answer is A.")],
        *[
            (CHOICE, t, None)
            for t in (
                "",
                " ",
                "A thing that shines",
                "I think a friend knows",
                "Be careful",
                "BCD",
                "A. lantern\nB. river",
                "Option A or option B",
                "The answer is A. No, the answer is B.",
                "It is the river, not the cloud",
                "E",
                "(E)",
                "Both A and B? A friend said so",
                "<think>B",
                "not the river",
                "Bay",
            )
        ],
        *[
            (LABEL, t, "positive")
            for t in (
                "Positive",
                "positive.",
                "'positive'",
                "Sentiment: **Positive**",
                "The review is positive overall.",
                "The sentiment of the review is positive, because",
                "Label: positive\nReason: not negative at all",
            )
        ],
        *[
            (LABEL, t, None)
            for t in (
                "It is not positive",
                "Is it positive or negative?",
                "positive or negative",
                "positively",
                "good",
                "It isn't positive.",
                "neither positive nor negative",
                "nonpositive",
            )
        ],
        *[(TRUTH, t, "对") for t in ("对", "对。", "对的", "正确", "答案：对", "是的", "说法正确", "“对”")],
        *[(TRUTH, t, "错") for t in ("错", "错误", "不对", "不正确。", "答案是错误的")],
        *[(TRUTH, t, None) for t in ("对不起，我不知道", "这句话是对的吗", "面对问题", "天气")],
        *[(LABEL_ZH, t, "正面") for t in ("正面", "正面评价", "这是正面的评价", "情感：正面", "情感是正面")],
        *[(LABEL_ZH, t, None) for t in ("不是正面", "正面或负面", "并非正面", "好")],
    ],
)
def test_choices_and_labels(item, text, answer):
    assert answers.parse(text, item) == answer


@pytest.mark.parametrize(
    ("item", "text", "answer"),
    [
        *[
            (NUMBER, t, "1234")
            for t in (
                "1,234",
                "1234.",
                "1234.0",
                "１２３４",
                "1，234",
                "$1,234",
                "The answer is 1,234 apples.",
                "= 1234",
                "1234 km",
                "12 + 5 is a start; the total is 1,234.",
                "\\boxed{1234}",
                "**1234**",
                "Answer: about 1234",
                "1234, because 7",
            )
        ],
        (NUMBER, "Tom has 3 apples. He has 8.", "8"),
        (NUMBER, "12 + 5 = 17. So 17", "17"),
        (NUMBER, "3-4 = -1", "-1"),
        (NUMBER, "-3", "-3"),
        (NUMBER, "−3", "-3"),
        (NUMBER, "3.50", "3.5"),
        (NUMBER, "25%", "25"),
        (NUMBER, "-0.0", "0"),
        (NUMBER, "seventeen", "17"),
        (NUMBER, "The total is forty-two", "42"),
        (NUMBER, "Ninety nine.", "99"),
        *[
            (NUMBER, t, None)
            for t in (
                "2024-05-01",
                "H2O",
                "3/4",
                "5x3",
                "1,23",
                "12,34,567",
                "1.2.3",
                "no idea",
                "Someone said so",
                "one of them is",
            )[:-1]
        ],
        (NUMBER_ZH, "十七", "17"),
        (NUMBER_ZH, "答案是一百零五。", "105"),
        (NUMBER_ZH, "一共二十三个", "23"),
        (NUMBER_ZH, "三万两千", "32000"),
        (NUMBER_ZH, "二〇二四", "2024"),
        (NUMBER_ZH, "约三百五", "350"),
        (NUMBER_ZH, "一万五", "15000"),
        (NUMBER_ZH, "三百零五", "305"),
        (NUMBER_ZH, "十", "10"),
        (NUMBER_ZH, "共12只", "12"),
        (NUMBER_ZH, "结果：１２", "12"),
        (NUMBER_ZH, "十十", None),
        (NUMBER_ZH, "我们一起去", None),
        (NUMBER, "十七", None),
        (CODE, "Order ZX-4471.", "zx-4471"),
        (CODE, "ZX-4471 and again ZX-4471", "zx-4471"),
        (CODE, "ＺＸ－４４７１", "zx-4471"),
        (CODE, "ZX-4471 or AB-1234", None),
        (CODE, "zx-4471", None),
        (CODE, "ZX-44711", None),
        *[
            (EXACT, t, "quito")
            for t in ("Quito", "Quito.", '"Quito"', "Answer: Quito", "**Quito**", "《Quito》", "Quito\nIt is.")
        ],
        (EXACT, "The city is Quito", "the city is quito"),
        (EXACT, "...", None),
    ],
)
def test_numbers_and_strings(item, text, answer):
    assert answers.parse(text, item) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('{"name": "Ana", "age": 30}', True),
        ('```json\n{"name": "ana ", "age": "30"}\n```', True),
        ('Here it is: {"age": 30.0, "name": "Ana", "more": [1]} as you asked', True),
        ('{"name": "Ana", "age": 31}', False),
        ('{"name": "Ana"}', None),
        ("{'name': 'Ana', 'age': 30}", None),
        ('{"name": "Ana", "age": NaN}', None),
        ('{"name": "Ana", "age": 30, "age": 31}', None),
        ('{"name": "Ana", "age": 3', None),
        ('["name", "age"]', None),
        ("{" * 3000, None),
        ('{"a":' * 3000, None),
        ('{"name": "Ana", "age": 1e999}', False),
        (f'{{"name": "Ana", "age": {"9" * 5000}}}', None),
    ],
)
def test_json(text, answer):
    found = answers.parse(text, JSON)
    assert (found is None) == (answer is None)
    assert (found == answers.key_answer(JSON)) == (answer is True)


@pytest.mark.parametrize(
    ("text", "cut", "answer"),
    [
        (FENCE, False, "add(a, b)"),
        (FENCE, True, "add(a, b)"),
        ("Sure!\n```\ndef add(a: int, b: int = 1) -> int:\n    return a + b\n```\nIt adds.", False, "add(a, b)"),
        ("def add(a, b):\n    return a + b", False, "add(a, b)"),
        ("def add(a, b):\n    return a + b", True, None),  # it may have gone on
        ("def add(a, b):\n    return a + b\n\nThis adds.", True, "add(a, b)"),
        ("def add(\n    a,\n    b,\n):\n    return a + b\n", False, "add(a, b)"),
        ("def add(*a, b, **c):\n    return a", False, "add(a, b, c)"),
        ('```python\ndef add(a, b):\n    """a \\d"""\n    return a\n```', False, "add(a, b)"),
        ("```python\ndef add(a, b)\n    return a\n```", False, None),
        ("def add(a, b):\n    return a +\nprint(1)", False, None),
        ("```python\ndef sub(a, b):\n    return a\n```", False, None),
        ("lambda a, b: a + b", False, None),
        ("```python\ndef add(a, b):\n    return a\n", True, None),
        ("```python\nx = '\0'\ndef add(a, b): return 1\n```", False, None),
        ("def add(a, b):\n    return " + "(" * 5000, False, None),
    ],
)
def test_python(text, cut, answer):
    assert answers.parse(text, PYTHON, cut=cut) == answer


def test_code_is_parsed_and_never_run(tmp_path):
    mark = tmp_path / "ran"
    text = f"```python\nopen({str(mark)!r}, 'w')\ndef add(a, b):\n    return a\n```"
    assert answers.parse(text, PYTHON) == "add(a, b)"
    assert not mark.exists()
    tree = ast.parse(Path(answers.__file__).read_text(encoding="utf-8"))
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize(
    ("item", "text", "whole"),
    [
        (NUMBER, "The total is 12", "12"),  # 12 or 1,234?
        (NUMBER, "3 × 12 = 36 eggs in", "36"),  # one of the steps
        (NUMBER, "12 * 3 = 36 and", "36"),
        (NUMBER, "21 stamps are shared by", "21"),  # the question over again
        (NUMBER_ZH, "21个邮票平均分给3个人，每人7", "7"),
        (LABEL_ZH, "正面、", "正面"),
        (NUMBER, "We take 12 and add 5 to", "5"),
        (CODE, "Order ZX-4471", "zx-4471"),
        (EXACT, "Quito", "quito"),
        (LABEL, "Since the tone is warm, it seems positive to", "positive"),
        (NUMBER_ZH, "二十", "20"),
    ],
)
def test_a_text_that_was_cut_has_not_answered_yet(item, text, whole):
    assert answers.parse(text, item) == whole
    assert answers.parse(text, item, cut=True) is None


@pytest.mark.parametrize(
    ("item", "text", "answer"),
    [
        (NUMBER, "12, because we", "12"),
        (NUMBER, "12 apples. Then", "12"),
        (NUMBER, "The total is 12 and", "12"),
        (LABEL, "Positive. The tone", "positive"),
        (CHOICE, "B. The river", "B"),
        (EXACT, "Quito\n\nThe", "quito"),
        (CODE, "ZX-4471 is the", "zx-4471"),
    ],
)
def test_a_cut_text_that_answered_before(item, text, answer):
    assert answers.parse(text, item, cut=True) == answer


def test_tolerance():
    item = NUMBER._replace(tolerance=0.1)
    assert answers.same("2.5", "2.6", item)  # in decimals: 2.6 - 2.5 is more than 0.1 in floats
    assert not answers.same("2.5", "2.61", item)
    assert not answers.same("2.5", "2.6", NUMBER)
    assert answers.same(None, None, item)
    assert not answers.same(None, "2.5", item)
    assert not answers.same("positive", "negative", LABEL._replace(tolerance=9.0))


@pytest.mark.parametrize("item", [CHOICE, LABEL, TRUTH, NUMBER, CODE, EXACT, JSON, PYTHON])
def test_good_items_pass(item):
    answers.check(item)
    assert answers.key_answer(item) is not None
    assert answers.key_answer(item._replace(key="") if item.parser not in {"json", "python"} else item) != ""


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (LABEL._replace(parser="lable"), "parser must be one of choice, label, .*got 'lable'. Did you mean 'label'?"),
        (CHOICE._replace(options=("A", "yes")), "needs options that are single capital letters, got ['A', 'yes']"),
        (CHOICE._replace(options=()), "single capital letters"),
        (CHOICE._replace(key="E"), "its own parser finds no answer in the key 'E'"),
        (LABEL._replace(options=()), "parser label needs options"),
        (LABEL._replace(key="positive or negative"), "finds no answer in the key"),
        (CODE._replace(pattern=""), "needs a pattern"),
        (CODE._replace(pattern="x*"), "needs a pattern"),
        (CODE._replace(pattern="("), "is no regular expression"),
        (JSON._replace(key="[1]"), "a key that is a JSON object, got '[1]' (not an object)"),
        (JSON._replace(key="{"), "a key that is a JSON object"),
        (PYTHON._replace(key="add"), "needs a key such as 'add(a, b)', got 'add'"),
        (NUMBER._replace(key="many"), "finds no answer in the key 'many'"),
        (NUMBER._replace(key="7", options=("1", "2")), "the key '7' must be one of the options ['1', '2']"),
    ],
)
def test_bad_items_are_refused_by_name(item, message):
    pattern = message if ".*" in message else re.escape(message)
    with pytest.raises(RuitongError, match=pattern) as e:
        answers.check(item)
    assert str(e.value).startswith(f"item {item.id!r}: ")


@pytest.mark.parametrize(
    ("item", "text", "answer"),
    [
        (LABEL, "Positives", "positive"),
        (LABEL, "positive, negative", None),
        (LABEL, "positive/negative", None),
        (LABEL_ZH, "正面、负面", None),
        (NUMBER, "1. Five apples\n2. Six", "2"),
        (NUMBER, "1.", "1"),
        (NUMBER, "1. 5", "5"),
        (NUMBER, "12 apples", "12"),
        (NUMBER, "12 kg (because 3 are gone)", "3"),
        (NUMBER, "2 * 3 = 6", "6"),
        (NUMBER, "*12*", "12"),
        (CHOICE, "A or B", None),
        (INTENT, 'The answer to this question is "How long?"', None),
        (INTENT, "This is a question.", "question"),
        (INTENT, "This message is a question", "question"),
    ],
)
def test_what_the_embedded_model_wrote(item, text, answer):
    assert answers.parse(text, item) == answer
