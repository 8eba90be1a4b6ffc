"""Numbers in text: digits with their separators, Chinese numerals, English number words."""

import re
from decimal import Decimal

_ZH_DIGITS = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_ZH_UNITS = {"十": 10, "百": 100, "千": 1000, "万": 10_000, "亿": 100_000_000}
ZH_NUMBER = f"[{''.join(_ZH_DIGITS)}{''.join(_ZH_UNITS)}]+"
SMALL = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
WORDS = {w: i for i, w in enumerate(SMALL)} | {w: 10 * i for i, w in enumerate(_TENS, 2)}

# A run of digits that is no part of a word (H2O, 4x4) or of a fraction. ASCII letters alone: 共12个 holds a 12.
NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])(?<!\d/)(?:(?<![0-9)] )(?<![A-Za-z0-9)])[-+])?[0-9][0-9,.]*(?![A-Za-z_/]*[0-9])"
)


def decimal(token: str) -> Decimal | None:
    """Read digits with or without thousands separators (1,234.5); None for what is neither (1,23)."""
    token = token.rstrip(".,")
    if not re.fullmatch(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?", token):
        return None
    return Decimal(token.replace(",", ""))


def canonical(value: Decimal) -> str:
    """Write a number in one way: no exponent, no trailing zeros, no -0."""
    shown = f"{value:f}"
    shown = shown.rstrip("0").rstrip(".") if "." in shown else shown
    return "0" if shown in {"-0", ""} else shown


def english(words: str) -> int | None:
    """Read a number word below 100 (seventeen, forty-two); None for two that do not fit (twelve three)."""
    tens, _, ones = words.replace("-", " ").partition(" ")
    if ones and WORDS[tens] < 20:
        return None
    return WORDS[tens] + (WORDS[ones] if ones else 0)


def chinese(numeral: str) -> int | None:
    """Read a Chinese numeral (一百零五, 三百五 for 350, 三万两千, 二〇二四); None where it is none."""
    if len(numeral) > 1 and all(c in _ZH_DIGITS for c in numeral):
        return int("".join(str(_ZH_DIGITS[c]) for c in numeral))
    total = section = digit = 0
    last = unit = 10**12
    for c in numeral:
        if c in _ZH_DIGITS:
            digit = _ZH_DIGITS[c]
            unit = 0 if digit == 0 else unit
        elif (unit := _ZH_UNITS[c]) < 10_000:
            if unit >= last:
                return None
            section += (digit or (1 if unit == 10 and not section else 0)) * unit
            digit, last = 0, unit
        else:
            total, section, digit, last = (total + section + digit) * unit, 0, 0, 10**12
    if digit and 100 <= unit < 10**12:
        digit *= unit // 10  # 三百五 leaves out its last unit; 三百零五 does not
    return total + section + digit
