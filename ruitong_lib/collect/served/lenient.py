"""A server's JSON and the numbers in it: read although the form is not strict, and never filled in."""

import json
import math
import re
from typing import Any

NOT_AVAILABLE = -9990.0  # servers write -9999 or -3.4e38 for "not available"; no logprob of float32 is that low
_CLIPPED = -100.0  # exactly: some servers clip -inf to it
INT32 = 2**31 - 1
_WORDS = {
    "nan": "NaN", "-nan": "NaN", "+nan": "NaN", "inf": "Infinity", "+inf": "Infinity", "-inf": "-Infinity",
    "infinity": "Infinity", "+infinity": "Infinity", "-infinity": "-Infinity",
    "none": "null", "true": "true", "false": "false",
}  # fmt: skip
_OUTSIDE = re.compile(r'"(?:[^"\\]|\\.)*"|[-+]?[A-Za-z_]+')


class Pairs(dict[str, Any]):
    """A JSON object that named a key twice; ``pairs`` holds all of them in order."""

    pairs: list[tuple[str, Any]]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) == len(pairs):
        return out
    twice = Pairs(out)
    twice.pairs = pairs
    return twice


def read_json(text: str) -> tuple[Any, str]:
    """Parse a body; ``(document, "")``, or ``(None, problem)``.

    Takes what strict JSON does not: ``NaN``, ``Infinity``, ``nan``, ``-inf``, ``None``, ``True``, a byte-order mark.
    """
    text = text.removeprefix("\ufeff").strip()
    if not text:
        return None, "an empty body"
    first = ""
    for candidate in (text, None):
        try:
            mended = text if candidate is not None else _OUTSIDE.sub(_mend, text)
            return json.loads(mended, object_pairs_hook=_object), ""
        except (ValueError, RecursionError) as e:
            first = first or f"no JSON ({type(e).__name__}: {str(e)[:80]}): cut short?"
    return None, first


def _mend(match: re.Match[str]) -> str:
    word = match.group()
    return word if word.startswith('"') else _WORDS.get(word.lower(), word)


def number(value: Any) -> tuple[float, str]:
    """Read one logprob: ``(value, "")``, or ``(nan, spelling)`` where the server says that it has none.

    A positive value comes back as it is: it is impossible, not missing. ``inf`` counts as positive.
    """
    if value is None:
        return math.nan, "null"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan, type(value).__name__
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return math.nan, "text" if isinstance(value, str) else "too large"
    if math.isnan(found):
        return math.nan, "NaN"
    if found == -math.inf:
        return math.nan, "-inf"
    if found == _CLIPPED:
        return math.nan, "-100"
    if found <= NOT_AVAILABLE:
        return math.nan, "-3.4e38" if found < -1e30 else "-9999" if found > -1e5 else "very low"
    return found, ""


def token_id(value: Any) -> int:
    """Read a token id; −1 for what is none."""
    if isinstance(value, str) and re.fullmatch(r"(token_id:)?\d{1,10}", value):
        value = int(value.removeprefix("token_id:"))
    ok = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32
    return value if ok else -1
