"""Every number that is printed anywhere, held against the release: a changed digit is found, wherever it stands.

``params/numbers.txt`` lists, document by document and in their order, all numbers of README, METHOD and the notebooks'
prose, each with its source: a key of the release's result files (``delta_table/<row>/metrics.kl.value``), or ``fixed``
for what is no result (a constant, a version, a date, a citation). A document whose numbers are not exactly these, in
this order, fails. So does a number that its source no longer rounds to. ``ruitong table --check --update`` writes the
file; it is reviewed like code.
"""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import nbformat

from ruitong_lib import paths
from ruitong_lib.errors import RuitongError

LOCK = paths.PARAMS / "numbers.txt"
FIXED = "fixed"
# A sign counts only where it is none of a range's, a name's or a date's.
_NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:\.\d+)*(?:e[-−+]?\d+)?|\d+")
# Where the results stand that a document, or a section of it, cites; elsewhere in the release a number is another one,
# though it reads the same. A document that is not here cites none.
_CORPORA = ("published/", "delta_table/rows/qwen")
_PLACES: dict[str, tuple[str, ...]] = {
    "README.md": ("delta_table/rows/smollm2",),
    "README.md#Published measurements": _CORPORA,
    "METHOD.md": ("delta_table/rows/smollm2",),
    "METHOD.md#Oracle": ("oracle/",),
    "METHOD.md#Gates on answers": ("gates/",),
    "METHOD.md#Calibration": ("calibration/",),
    "METHOD.md#The published corpora": _CORPORA,
    "notebooks/published_corpora.ipynb": _CORPORA,
}
_SCALE = re.compile(r"\*(100|1000|1000000)$")


def documents() -> dict[str, str]:
    """Return the text of each document whose numbers are held: name → text, notebooks by their Markdown cells."""
    found = {n: (paths.ROOT / n).read_text(encoding="utf-8") for n in ("README.md", "METHOD.md", "notebooks/README.md")}
    for path in sorted(paths.NOTEBOOKS.glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        found[f"notebooks/{path.name}"] = "\n\n".join(c.source for c in cells if c.cell_type == "markdown")
    return found


def numbers(text: str) -> list[str]:
    """Return every number of a text, in order; every digit belongs to one of them."""
    return [m.group(0) for m in _NUMBER.finditer(text)]


def results(folder: Path) -> dict[str, float]:
    """Return the numbers of a release's JSON files by key: file, then the row's id, then the path inside.

    Raises
    ------
    RuitongError
        Where the folder holds no release.
    """
    if not (folder / "delta_table.json").is_file():
        raise RuitongError(f"no release at {folder}: nothing to check numbers against. Make one: ruitong table")
    found: dict[str, float] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name != "shards.json":
            found |= _flat(json.loads(path.read_text(encoding="utf-8")), path.stem)
    return found


def _flat(value: Any, key: str) -> dict[str, float]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, int | float):
        return {key: value}
    if isinstance(value, Mapping):
        pairs: Iterator[tuple[Any, Any]] = iter(value.items())
    else:
        pairs = ((v.get("id", i) if isinstance(v, Mapping) else i, v) for i, v in enumerate(value))
    return {k: x for name, v in pairs for k, x in _flat(v, f"{key}/{name}").items()}


def agrees(token: str, value: float) -> bool:
    """Whether a printed number is this value, rounded to the digits that are printed."""
    printed = Decimal(token.replace("−", "-"))
    step = Decimal(1).scaleb(int(printed.as_tuple().exponent))
    return abs(Decimal(repr(float(value))) - printed) <= step / 2


def matches(token: str, source: str, known: Mapping[str, float]) -> bool:
    """Whether a printed number is what its source rounds to; ``*100`` after a key is for percent."""
    if source == FIXED:
        return True
    scale = _SCALE.search(source)
    key, factor = (source[: scale.start()], int(scale.group(1))) if scale else (source, 1)
    return key in known and agrees(token, known[key] * factor)


def read_lock(path: Path = LOCK) -> dict[str, list[tuple[str, str]]]:
    """Return document → (number, source) in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        if line.startswith("# "):
            current = found.setdefault(line[2:], [])
        elif line:
            number, _, source = line.partition(" ")
            current.append((number, source))
    return found


def check(folder: Path, *, site: Path | None = None, lock: Path = LOCK, update: bool = False) -> list[str]:
    """Hold every printed number against a release.

    Parameters
    ----------
    folder
        The release.
    site
        The built site, where there is one: it is made from the release, so it has to be what would be made now.
    lock
        ``params/numbers.txt``.
    update
        Write the lock anew: known sources are kept, a new number gets the one result that it can be, else ``fixed``.

    Returns
    -------
    What is wrong, a line each.
    """
    known, texts, held = results(folder), documents(), read_lock(lock)
    if update:
        held = {name: _updated(name, text, held.get(name, []), known) for name, text in texts.items()}
        lines = [x for name, pairs in held.items() for x in (f"# {name}", *[f"{n} {s}" for n, s in pairs], "")]
        lock.write_text("\n".join(lines), encoding="utf-8")
    wrong = [
        f"{name} has no numbers in {lock.name}; review and run --check --update" for name in texts if name not in held
    ]
    wrong += [f"{lock.name} lists {name}, which is not there" for name in held if name not in texts]
    for name in (n for n in texts if n in held):
        wrong += difference(name, texts[name], held[name])
        wrong += [
            f"{name}: {number} is not what {source} rounds to ({known.get(source.split('*')[0], 'not in the release')})"
            for number, source in held[name]
            if not matches(number, source, known)
        ]
    if site is not None and (site / "index.html").is_file():
        from ruitong_lib.report.site import stale

        wrong += stale(site, folder)
    return wrong


def difference(name: str, text: str, held: Sequence[tuple[str, str]]) -> list[str]:
    """Return where a document's numbers first part from the list, in words; empty where they are the same."""
    found = list(_NUMBER.finditer(text))
    for i, m in enumerate(found):
        was = held[i][0] if i < len(held) else "nothing"
        if m.group(0) != was:
            around = " ".join(text[max(0, m.start() - 40) : m.end() + 40].split())
            return [f"{name}: {m.group(0)} where {was} was (…{around}…)"]
    return [f"{name}: {held[len(found)][0]} is gone"] if len(held) > len(found) else []


def _updated(name: str, text: str, held: list[tuple[str, str]], known: Mapping[str, float]) -> list[tuple[str, str]]:
    """Keep the sources of numbers that stayed, in place; find those of new ones."""
    found, sources = numbers(text), _sources(name, text, known)
    out: list[tuple[str, str]] = []
    matcher = difflib.SequenceMatcher(None, [n for n, _ in held], found, autojunk=False)
    for kind, i, j, a, b in matcher.get_opcodes():
        old = held[i:j] if j - i == b - a else [("", "")] * (b - a)
        for new, source, (_, was) in zip(found[a:b], sources[a:b], old, strict=True):
            stays = was and (kind == "equal" or was != FIXED) and matches(new, was, known)
            out.append((new, was if stays else source))
    return out


def _sources(name: str, text: str, known: Mapping[str, float]) -> list[str]:
    """Return for each number of a document the result that it can be, else ``fixed``.

    Several results may round to one number: the section says which file of the release it is from, and the numbers of
    a line come from one row of the table where they can.
    """
    out: list[str] = []
    of = {places: {k: v for k, v in known.items() if k.startswith(places)} for places in _PLACES.values()}
    own = of.get(_PLACES.get(name, ()), {})
    for line in text.split("\n"):
        if line.startswith("## "):
            own = of.get(_PLACES.get(f"{name}#{line[3:]}", _PLACES.get(name, ())), {})
        keys = [_candidates(token, own, percent="%" in line) for token in numbers(line)]
        rows = Counter(row for found in keys for row in {_row(k) for k in found})
        out += [max(found, key=lambda k: (rows[_row(k)], -len(k)), default=FIXED) for found in keys]
    return out


def _row(key: str) -> str:
    return "/".join(key.split("/")[:3])


def _candidates(token: str, known: Mapping[str, float], *, percent: bool) -> list[str]:
    """Return every result that a number can be: only with three digits or more, which no constant has by chance."""
    digits = re.sub(r"e.*|[^0-9]", "", token).lstrip("0")
    if token.count(".") > 1 or len(digits) < 3 or "." not in token:
        return []
    keys = [k for k, v in known.items() if agrees(token, v)]
    return keys + [f"{k}*100" for k, v in known.items() if percent and agrees(token, v * 100)]
