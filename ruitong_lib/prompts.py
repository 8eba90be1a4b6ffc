"""Prompt sets: reading them, naming subsets, rendering them to token ids, and hashing those."""

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ruitong_lib.errors import RuitongError, did_you_mean
from ruitong_lib.paths import PROMPTS, found


class Prompt(NamedTuple):
    """One prompt: what the user says, the system message before it, and for a gate item how its answer is read.

    An item has a ``gate`` (the kind of task) and a ``parser`` (:mod:`ruitong_lib.measure.answers`).
    """

    id: str
    category: str
    language: str
    text: str
    system: str = ""
    gate: str = ""
    parser: str = ""
    options: tuple[str, ...] = ()  #: the answers allowed; with them the item has a constrained form
    key: str = ""  #: the right answer; used for direction, never for "changed"
    tolerance: float = 0.0  #: numbers at most this far apart are the same answer
    pattern: str = ""  #: regular expression of the answer (parser "pattern")


class PromptSet(NamedTuple):
    """A named, ordered set of prompts with unique ids."""

    name: str
    version: str
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        """SHA-256 of all that changes a shard: ids, texts, system messages and options, in order."""
        rows = [[p.id, p.text, p.system, *([list(p.options)] if p.options else [])] for p in self.prompts]
        return hashlib.sha256(json.dumps(rows, ensure_ascii=True).encode()).hexdigest()


def load_prompts(spec: str) -> PromptSet:
    """Load a prompt set.

    Parameters
    ----------
    spec
        The name of a set or subset of ``params/prompts/*.yml`` (``core``, ``core-61``), or the path of a YAML or
        JSONL file of your own, with ``#subset`` where the file names subsets. Each prompt has ``text`` (or
        ``prompt``), and may have ``id``, ``category``, ``language``, ``system``, and for a gate item ``gate``,
        ``parser``, ``options``, ``key``, ``tolerance``, ``pattern``.

    Raises
    ------
    RuitongError
        For an unknown name, an unreadable file, a duplicate id, an empty prompt; the message says what is allowed.
    """
    path_part, _, subset = spec.partition("#")
    if path_part.endswith((".yml", ".yaml", ".jsonl")):
        document = _read(found(path_part))
        document.setdefault("name", Path(path_part).stem)
        return _build(document, subset, path_part)
    known: dict[str, tuple[Path, str]] = {}
    for path in sorted(PROMPTS.glob("*.yml")):
        document = _read(path)
        known[str(document.get("name", path.stem))] = (path, "")
        known |= {str(name): (path, str(name)) for name in document.get("subsets") or {}}
    if spec not in known:
        raise RuitongError(
            f"prompts must be one of {', '.join(known)}, or the path of a .yml, .yaml or .jsonl file, got {spec!r}."
            + did_you_mean(spec, known)
        )
    path, subset = known[spec]
    return _build(_read(path), subset, str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(_parse(path, path.stat().st_mtime_ns))
    except (OSError, UnicodeDecodeError) as e:
        raise RuitongError(f"cannot read the prompts in {path}: {e}") from e


@functools.lru_cache(maxsize=16)  # a grid asks for the same file once a cell, and YAML is slow
def _parse(path: Path, _changed: int) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            return {"prompts": [json.loads(line) for line in text.split("\n") if line.strip()]}
        document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # C: ten times as fast
    except (ValueError, yaml.YAMLError) as e:
        raise RuitongError(f"{path} is not valid {path.suffix[1:]}: {e}") from e
    if isinstance(document, list):
        return {"prompts": document}
    if not isinstance(document, dict) or not isinstance(document.get("prompts"), list):
        raise RuitongError(f"{path} must hold a list of prompts, or a mapping with the key 'prompts'")
    return document


def _build(document: dict[str, Any], subset: str, where: str) -> PromptSet:
    name = str(document.get("name", "prompts"))
    prompts = [_prompt(row, i, where) for i, row in enumerate(document["prompts"])]
    by_id = {p.id: p for p in prompts}
    if len(by_id) < len(prompts):
        twice = next(p.id for i, p in enumerate(prompts) if p.id in {q.id for q in prompts[:i]})
        raise RuitongError(f"{where}: two prompts have the id {twice!r}; ids must be unique")
    if subset:
        subsets = document.get("subsets") or {}
        if subset not in subsets:
            raise RuitongError(
                f"{where}: no subset {subset!r}; it names {', '.join(subsets) or 'none'}."
                + did_you_mean(subset, subsets)
            )
        ids = [str(i) for i in subsets[subset]]
        unknown = [i for i in ids if i not in by_id]
        if unknown:
            raise RuitongError(f"{where}: subset {subset} names unknown prompts: {', '.join(unknown)}")
        name, prompts = subset, [by_id[i] for i in ids]
    if not prompts:
        raise RuitongError(f"{where}: no prompts")
    return PromptSet(name, str(document.get("version", "")), tuple(prompts))


def _prompt(row: Any, index: int, where: str) -> Prompt:
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, dict):
        raise RuitongError(f"{where}: prompt {index + 1} must be a text or a mapping, got {type(row).__name__}")
    row = {k: v for k, v in row.items() if v is not None}
    text = row.get("text", row.get("prompt"))
    if not isinstance(text, str) or not text.strip():
        raise RuitongError(f"{where}: prompt {index + 1} ({row.get('id', 'no id')}) has no text")
    where = f"{where}: prompt {index + 1} ({row.get('id', 'no id')})"
    return Prompt(
        id=str(row.get("id", f"p{index:04d}")),
        category=str(row.get("category", row.get("gate", ""))),
        language=str(row.get("language", "")),
        text=text,
        system=str(row.get("system", "")),
        gate=str(row.get("gate", "")),
        parser=str(row.get("parser", "")),
        options=_options(row.get("options", ()), where),
        key=str(row.get("key", "")),
        tolerance=_tolerance(row.get("tolerance", 0.0), where),
        pattern=str(row.get("pattern", "")),
    )


def _options(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(o, str) and o.strip() for o in value):
        raise RuitongError(f"{where}: options must be a list of texts (quote yes, no and numbers), got {value!r}")
    if len(set(value)) < len(value) or len(value) == 1:
        raise RuitongError(f"{where}: options must be two or more different texts, got {value!r}")
    return tuple(value)


def _tolerance(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise RuitongError(f"{where}: tolerance must be a number from 0, got {value!r}")
    return float(value)


def render(prompts: Sequence[Prompt], tokenizer: Any, *, thinking: bool = False) -> list[list[int]]:
    """Render prompts to token ids with the tokenizer's chat template, or as plain text where it has none.

    ``enable_thinking`` is always passed, so that no template's own default decides. The template is rendered to text
    and encoded without special tokens: the template writes those itself, and a second BOS would change every number.
    """
    return [_encode(text, tokenizer) for text in _texts(prompts, tokenizer, thinking)]


def _texts(prompts: Sequence[Prompt], tokenizer: Any, thinking: bool) -> list[str]:
    if not tokenizer.chat_template:
        return [f"{p.system}\n{p.text}" if p.system else p.text for p in prompts]
    rendered = []
    for p in prompts:
        messages = [{"role": "system", "content": p.system}] if p.system else []
        messages.append({"role": "user", "content": p.text})
        rendered.append(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
            )
        )
    return rendered


def _encode(text: str, tokenizer: Any) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False) if tokenizer.chat_template else tokenizer.encode(text)
    return [int(i) for i in ids]


def option_ids(prompts: Sequence[Prompt], tokenizer: Any, *, thinking: bool = False) -> dict[str, dict[str, int]]:
    """Return the first token of each answer option, as the tokenizer writes it after the rendered prompt.

    Without a chat template the option follows a space, as an answer would in plain text.

    Returns
    -------
    Prompt id → option → token id. A prompt is left out where two options begin with one token, or where an option
    merges with the prompt's end: it has no constrained form under this tokenizer.
    """
    found = {}
    items = [p for p in prompts if p.options]
    for p, text in zip(items, _texts(items, tokenizer, thinking), strict=True):
        ids = _encode(text, tokenizer)
        gap = "" if tokenizer.chat_template or text[-1:].isspace() or not text.isascii() else " "
        answered = [_encode(text + gap + o, tokenizer) for o in p.options]
        first = [a[len(ids)] if a[: len(ids)] == ids and len(a) > len(ids) else -1 for a in answered]
        if -1 not in first and len(set(first)) == len(first):
            found[p.id] = dict(zip(p.options, first, strict=True))
    return found


def ids_sha256(ids: Sequence[int]) -> str:
    """Hash one prompt's token ids: what a comparison checks, whatever the text was."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
