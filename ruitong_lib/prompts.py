"""Prompt sets: reading them, naming subsets, rendering them to token ids, and hashing those."""

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ruitong_lib.errors import RuitongError, did_you_mean
from ruitong_lib.paths import PROMPTS, found


class Prompt(NamedTuple):
    """One prompt: what the user says, and the system message before it, if any."""

    id: str
    category: str
    language: str
    text: str
    system: str = ""


class PromptSet(NamedTuple):
    """A named, ordered set of prompts with unique ids."""

    name: str
    version: str
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        """SHA-256 of everything that reaches the model: ids, texts and system messages, in order."""
        rows = [[p.id, p.text, p.system] for p in self.prompts]
        return hashlib.sha256(json.dumps(rows, ensure_ascii=True).encode()).hexdigest()


def load_prompts(spec: str) -> PromptSet:
    """Load a prompt set.

    Parameters
    ----------
    spec
        The name of a set or subset of ``params/prompts/*.yml`` (``core``, ``core-61``), or the path of a YAML or
        JSONL file of your own, with ``#subset`` where the file names subsets. Each prompt has ``text`` (or
        ``prompt``), and may have ``id``, ``category``, ``language``, ``system``.

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
        document = yaml.safe_load(text)
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
    return Prompt(
        id=str(row.get("id", f"p{index:04d}")),
        category=str(row.get("category", "")),
        language=str(row.get("language", "")),
        text=text,
        system=str(row.get("system", "")),
    )


def render(prompts: Sequence[Prompt], tokenizer: Any, *, thinking: bool = False) -> list[list[int]]:
    """Render prompts to token ids with the tokenizer's chat template, or as plain text where it has none.

    ``enable_thinking`` is always passed, so that no template's own default decides. The template is rendered to text
    and encoded without special tokens: the template writes those itself, and a second BOS would change every number.
    """
    rendered = []
    for p in prompts:
        if tokenizer.chat_template:
            messages = [{"role": "system", "content": p.system}] if p.system else []
            messages.append({"role": "user", "content": p.text})
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
            )
            rendered.append(tokenizer.encode(text, add_special_tokens=False))
        else:
            rendered.append(tokenizer.encode(f"{p.system}\n{p.text}" if p.system else p.text))
    return [[int(i) for i in ids] for ids in rendered]


def ids_sha256(ids: Sequence[int]) -> str:
    """Hash one prompt's token ids: what a comparison checks, whatever the text was."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
