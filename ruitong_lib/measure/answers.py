"""Read the answer out of a text: one canonical form a parser, or None where the text gives no answer.

Nothing is ever evaluated. A parser takes what a text clearly says (alone, first, or after "the answer is"), and a text
that names several answers, or stops at the token limit before its answer is whole, gives none.
"""

import ast
import functools
import itertools
import json
import re
import warnings
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from ruitong_lib.errors import RuitongError, did_you_mean
from ruitong_lib.measure import numerals
from ruitong_lib.prompts import Prompt

# Full-width forms to ASCII; the full-width comma gets a space, because it separates clauses and never thousands.
_HALF = {c: c - 0xFEE0 for c in range(0xFF01, 0xFF5F)} | {0xFF0C: ", ", 0x3000: " ", 0x2212: "-", 0x00A0: " "}
_STATED = (  # "the answer is", "Answer:", "答案是"; what follows it is the answer
    r"(?:\b(?:answer|result|total|category|label|topic|sentiment|group|message|review|sentence)\b"
    r"(?:\s+(?:of|for|in)\s+(?:this|the|your)(?:\s+\w+){1,2}?)?(?:\s+(?:is|was|would\s+be)(?:\s+an?\b|\s+the\b)?)?"
    r"|\bequals\b|\bchoose\b|\boption\b(?:\s+is)?"
    r"|(?:答案|结果|类别|情感|主题|选项|总数)(?:应该|应当|应)?(?:是|为|选)?|等于|总共|一共(?:是|有)?|应选|选择?)\s*[:=]?\s*"
)
# Other words for an option that says yes or no; only where that option is on the list.
_ALIASES = {
    "对": ("正确", "是的", "是"), "错": ("错误", "不正确", "不对", "不是", "否"),
    "是": ("对", "正确"), "否": ("不是", "不对", "错误", "错"),
}  # fmt: skip
_NEGATED = re.compile(r"(?:\bnot|\bnon|\bneither|\bnor|n't|n’t|不是|并非|不)[\s-]*(?:an?\s+|the\s+|very\s+)?$", re.I)


def parse(text: str, item: Prompt, *, cut: bool = False) -> str | None:
    """Return the canonical answer that a text gives to an item, or None where it gives none.

    Parameters
    ----------
    text
        What the model wrote. A block ``<think>…</think>`` before the answer is left out.
    item
        A gate item; its ``parser`` is a key of ``PARSERS``.
    cut
        The text stopped at the token limit: an answer that may go on beyond it does not count.
    """
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    elif "<think>" in text:
        return None
    return PARSERS[item.parser](text.strip(), item, cut) if text.strip() else None


@functools.cache
def key_answer(item: Prompt) -> str | None:
    """Return the item's key in the canonical form of its parser; None without a key."""
    return (item.key if item.parser == "python" else parse(item.key, item)) if item.key else None


@functools.cache
def check(item: Prompt) -> None:
    """Refuse an item that its parser cannot read, before any text is.

    Raises
    ------
    RuitongError
        Naming the item, what is wrong, and what the parser needs.
    """
    if item.parser not in PARSERS:
        raise RuitongError(
            f"item {item.id!r}: parser must be one of {', '.join(PARSERS)}, got {item.parser!r}."
            + did_you_mean(item.parser, PARSERS)
        )
    wrong = ""
    if item.parser == "choice" and not (item.options and all(re.fullmatch("[A-Z]", o) for o in item.options)):
        wrong = f"parser choice needs options that are single capital letters, got {list(item.options)}"
    elif item.parser == "label" and not item.options:
        wrong = "parser label needs options"
    elif item.parser == "pattern":
        try:
            wrong = "" if item.pattern and not re.fullmatch(item.pattern, "") else "parser pattern needs a pattern"
        except re.error as e:
            wrong = f"the pattern {item.pattern!r} is no regular expression ({e})"
    elif item.parser == "json":
        try:
            wrong = "" if isinstance(json.loads(item.key), dict) else "not an object"
        except (ValueError, RecursionError) as e:
            wrong = str(e)
        wrong = wrong and f"parser json needs a key that is a JSON object, got {item.key!r} ({wrong})"
    elif item.parser == "python" and not re.fullmatch(r"[^\W\d]\w*\(.*\)", item.key):
        wrong = f"parser python needs a key such as 'add(a, b)', got {item.key!r}"
    if not wrong and item.key and (answer := key_answer(item)) is None:
        wrong = f"its own parser finds no answer in the key {item.key!r}"
    elif not wrong and item.key and item.options and answer not in item.options:
        wrong = f"the key {item.key!r} must be one of the options {list(item.options)}"
    if wrong:
        raise RuitongError(f"item {item.id!r}: {wrong}")


def same(a: str | None, b: str | None, item: Prompt) -> bool:
    """Whether two canonical answers are the same; numbers may differ by the tolerance. No answer equals no answer."""
    if a is None or b is None or item.parser != "number":
        return a == b
    return abs(Decimal(a) - Decimal(b)) <= Decimal(repr(item.tolerance))


def _half(text: str) -> str:
    """Turn full-width forms into ASCII and drop the marks of Markdown and LaTeX around an answer."""
    text = re.sub(r"\\boxed\{([^{}]*)\}", r"\1", text.translate(_HALF))
    text = re.sub(r"(?<= )\*(?= )", "×", text)  # 3 * 4 is a product, *3* is an emphasis
    return re.sub(r"[*`$]|\\[()\[\]]|^#+\s*|(?<!\w)_+|_+(?!\w)", "", text, flags=re.M).strip()


def _one(found: Sequence[str]) -> str | None:
    return found[0] if len(set(found)) == 1 else None


def _choice(text: str, item: Prompt, cut: bool) -> str | None:
    text = _half(text)
    letters = "".join(item.options)
    either = letters + letters.lower()
    # An A before a small word is the article, unless that word says something about it: "A is right".
    alone = rf"(?:[(\[]\s*([{either}])\s*[)\]]|(?!A\s+(?!(?:is|because|or|and)\b)[a-z])([{letters}])(?![A-Za-z0-9_'’]))"
    stated = ["".join(groups).upper() for groups in re.findall(rf"(?i:{_STATED}){alone}", text)]
    if stated:
        return _one(stated)
    listed = re.findall(rf"^\s*[(\[]?([{letters}])[.):、\]]", text, re.M)
    if len(set(listed)) > 1:
        return None  # the options over again
    first = re.match(rf"{alone}|([{either}])(?:[.):,、]|\W*$)", text)
    if first:
        another = rf"\s*(?:or|and|[/,、或和])\s*[(\[]?[{letters}](?![A-Za-z0-9_])"
        return None if re.match(another, text[first.end() :]) else next(g for g in first.groups() if g).upper()
    marked = listed + re.findall(rf"[(\[]([{letters}])[)\]]", text)
    if marked:
        return _one(marked)
    contents = re.findall(rf"^\s*\(?([{letters}])[.):、]\s*(.+?)\s*$", item.text.translate(_HALF), re.M)
    return _mention(text, {letter: (words,) for letter, words in contents}, cut)


def _label(text: str, item: Prompt, cut: bool) -> str | None:
    text = _half(text)
    words = {o: (o, *(a for a in _ALIASES.get(o, ()) if a not in item.options)) for o in item.options}
    forms = {w.casefold(): o for o, ws in words.items() for w in ws}
    any_word = "|".join(re.escape(w) + _end(w) for w in sorted(forms, key=len, reverse=True))
    stated = re.findall(rf"{_STATED}[\"'“‘「]?({any_word})", text, re.I)
    if stated:
        return _one([forms[s.casefold()] for s in stated])
    first = re.match(rf"[\"'“‘「(\[]*({any_word})", text, re.I)
    # "positive or negative" is the question over again
    another = rf"\s*(?:(?:[,、/]|or\b|and\b|或者?|和|还是)\s*)+(?:{any_word})|\s*(?:or\b|、|/|或|还是)"
    if first and not re.match(another, text[first.end() :], re.I):
        return forms[first[1].casefold()]
    return _mention(text, words, cut)


def _end(word: str) -> str:
    """Return what may follow a word: an s, and no more. One Chinese character stands alone (对, but not 对不起)."""
    return r"(?=s?(?![A-Za-z0-9_]))" if word.isascii() else r"(?:(?![^\W_])|(?=的))" if len(word) == 1 else ""


def _mention(text: str, words: dict[str, tuple[str, ...]], cut: bool) -> str | None:
    """Return the one answer that a text mentions; none where it names two, denies it, or was cut on its way to one."""
    if cut:
        return None
    found: set[str | None] = set()
    for answer, forms in words.items():
        for w in forms:
            if len(w) == 1 and not w.isascii():
                continue  # one Chinese character inside a sentence says nothing
            # "the answer to this question" speaks of the task; "this is a question" answers it
            start = r"(?<![A-Za-z0-9_])(?<!this )(?<!that )(?<!your )" if w.isascii() else ""
            for m in re.finditer(start + re.escape(w) + _end(w), text, re.I):
                found.add(None if _NEGATED.search(text[: m.start()]) else answer)
    return found.pop() if len(found) == 1 else None


def _number(text: str, item: Prompt, cut: bool) -> str | None:
    text = re.sub(r"\d{4}-\d\d-\d\d", "", _half(re.sub(r"(?<=\d)，(?=\d{3}(?!\d))", ",", text)))  # no dates
    found = [
        (m.start(), m.start() + len(m[0].rstrip(".,")), v)
        for m in numerals.NUMBER.finditer(text)
        if (v := numerals.decimal(m[0])) is not None
    ]
    if cut:
        found = [f for f in found if f[1] < len(text)]
    by_start = {start: v for start, _, v in found}
    stated = rf"{_STATED}(?:[^\W\d]+\s)?[¥€£]?\s*"
    # A text that was cut may have been in the middle of its steps: "3 × 12 = 36" is not its answer.
    for lead in (stated,) if cut else (stated, r"=\s*[¥€£]?\s*"):
        said = [by_start[m.end()] for m in re.finditer(lead, text, re.I) if m.end() in by_start]
        if said:
            return numerals.canonical(said[-1])
    if found and re.fullmatch(r"[¥€£(\[\"'约大]*", text[: found[0][0]]):
        # First and by itself: "12 apples, because", and no "12 × 3", "12 apples are shared" or "1. First we".
        _, end, value = found[0]
        closed = r"(?:%|°C?|\s?[^\W\d]+)?[\"')\]]*\s*(?:[.,;:!?。;)\n]|$)"
        if re.match(closed, text[end:]) and not (value == 1 and re.match(r"[.)]\s+\S", text[end:])):
            return numerals.canonical(value)
    if found:
        return None if cut else numerals.canonical(found[-1][2])
    return _in_words(text, item, cut)


def _in_words(text: str, item: Prompt, cut: bool) -> str | None:
    """Read a number written in words, Chinese or English: only alone, first or stated, since prose has many."""
    if item.language == "zh":
        where = rf"(?:{_STATED}|^[\"'“(]*)(?:约|大约)?({numerals.ZH_NUMBER})"
    else:
        where = (
            rf"(?:{_STATED}|^[\"'(]*)\b((?:{'|'.join(numerals.WORDS)})(?:[- ](?:{'|'.join(numerals.SMALL[1:10])}))?)\b"
        )
    said = [m for m in re.finditer(where, text, re.I) if not (cut and m.end() == len(text))]
    if not said:
        return None
    words = said[-1][1].casefold()
    number = numerals.chinese(words) if item.language == "zh" else numerals.english(words)
    return None if number is None else str(number)


def _pattern(text: str, item: Prompt, cut: bool) -> str | None:
    text = text.translate(_HALF)  # the pattern's first group, where it has one
    found = [m for m in re.finditer(item.pattern, text) if not (cut and m.end() == len(text))]
    return _one([(m[1] if m.re.groups else m[0]).casefold() for m in found]) if found else None


def _exact(text: str, item: Prompt, cut: bool) -> str | None:
    line, *more = (x for x in _half(text).splitlines() if x.strip())
    if cut and not more:
        return None
    line = re.sub(rf"^(?:the\s+)?{_STATED}", "", line, flags=re.I)
    line = " ".join(line.strip(" \t\"'“”‘’「」《》.,;:!?。；！？").split())
    return line.casefold() or None


def _json(text: str, item: Prompt, cut: bool) -> str | None:
    wanted = json.loads(item.key)
    decoder = json.JSONDecoder(object_pairs_hook=_no_twice, parse_constant=_refuse)
    for m in itertools.islice(re.finditer(r"\{", text), 50):  # an endless row of brackets would take its square
        try:
            value, _ = decoder.raw_decode(text, m.start())
        except (ValueError, RecursionError):
            continue
        if set(wanted) <= set(value):
            return json.dumps(
                {k: _tidy(value[k], wanted[k]) for k in sorted(wanted)}, ensure_ascii=False, sort_keys=True
            )
    return None


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({k for k, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _tidy(value: Any, wanted: Any) -> Any:
    """Make equal what means the same: spaces, case, full-width forms, and "30" where the key is a number."""
    if isinstance(value, list):
        wanted = wanted if isinstance(wanted, list) else []
        return [_tidy(v, w) for v, w in zip(value, [*wanted, *[None] * len(value)], strict=False)]
    if isinstance(value, dict):
        wanted = wanted if isinstance(wanted, dict) else {}
        return {k: _tidy(v, wanted.get(k)) for k, v in value.items()}
    if isinstance(value, str):
        number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
        as_number = numerals.decimal(value.translate(_HALF).strip()) if number else None
        return (
            " ".join(value.translate(_HALF).split()).casefold() if as_number is None else numerals.canonical(as_number)
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        return numerals.canonical(Decimal(str(value))) if abs(value) < 1e40 else str(value)
    return value


def _python(text: str, item: Prompt, cut: bool) -> str | None:
    """Return the signature of the function asked for, where the code that holds it parses."""
    name = item.key.partition("(")[0]
    fence = re.search(r"```[^\n`]*\n(.*?)(```|\Z)", text, re.S)
    code = fence[1] if fence else text
    if not (fence and fence[2]):  # the end of the code is not marked: it ends where the function does
        block = re.search(rf"^(?:async )?def {re.escape(name)}\b.*?(?=^[^\s)#]|\Z)", code, re.M | re.S)
        if block is None or (cut and block.end() == len(code)):
            return None
        code = block[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape is a warning
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name]
    if not functions:
        return None
    a = functions[0].args
    named = [*a.posonlyargs, *a.args, *([a.vararg] if a.vararg else []), *a.kwonlyargs, *([a.kwarg] if a.kwarg else [])]
    return f"{name}({', '.join(x.arg for x in named)})"


PARSERS: dict[str, Callable[[str, Prompt, bool], str | None]] = {
    "choice": _choice,
    "label": _label,
    "number": _number,
    "pattern": _pattern,
    "exact": _exact,
    "json": _json,
    "python": _python,
}
