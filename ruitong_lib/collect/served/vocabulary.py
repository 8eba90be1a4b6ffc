"""The local tokenizer's words: which id a server means by a text or by bytes, where it names no id."""

import functools
import json
import re
from pathlib import Path
from typing import Any

from ruitong_lib.cell import Cell
from ruitong_lib.collect import models
from ruitong_lib.collect.served.responses import Entry
from ruitong_lib.errors import RuitongError

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no whole character
_AMBIGUOUS = -2
_NO_SETTING = {"transformers_version", "_from_model_config", "output_attentions", "output_hidden_states", "use_cache"}


class Vocabulary:
    """A tokenizer, asked for what a response leaves open."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer)
        self.bound = self.size + 4096  # a model pads its vocabulary, but not by more than this

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens left out; unknown ids (−1) are skipped."""
        return str(self.tokenizer.decode([i for i in ids if 0 <= i < self.size], skip_special_tokens=True))

    def id_of(self, entry: Entry) -> int:
        """Return the id that an entry means, or −1 where several could be meant or none.

        The server's own id comes first, then bytes, then a text that only one id decodes to.
        """
        if entry.id >= 0:
            return entry.id
        if (
            entry.bytes
            and entry.bytes != REPLACEMENT.encode()
            and (found := self._by_bytes.get(entry.bytes)) is not None
        ):
            return max(found, -1)
        if not entry.text or REPLACEMENT in entry.text:
            return -1
        found = self._by_text.get(entry.text, -1)
        if found == -1 and re.search("[ĠĊ▁]", entry.text):  # the vocabulary's own spelling, with its markers
            found = self.tokenizer.get_vocab().get(entry.text, -1)
        return max(found, -1)

    @functools.cached_property
    def _texts(self) -> list[str]:
        return list(self.tokenizer.batch_decode([[i] for i in range(self.size)], skip_special_tokens=False))

    @functools.cached_property
    def _by_text(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for i, text in enumerate(self._texts):
            found[text] = _AMBIGUOUS if text in found else i
        return found

    @functools.cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        words = self.tokenizer.convert_ids_to_tokens(list(range(self.size)))
        for i, (word, text) in enumerate(zip(words, self._texts, strict=True)):
            raw = text.encode("utf-8", "surrogatepass") if REPLACEMENT not in text else _bytes_of(word or "")
            if raw:
                found[raw] = _AMBIGUOUS if raw in found else i
        return found


@functools.cache
def _alphabet() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for (the GPT-2 alphabet)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def _bytes_of(word: str) -> bytes:
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", word):
        return bytes([int(match.group(1), 16)])
    table = _alphabet()
    return bytes(table[c] for c in word) if word and all(c in table for c in word) else b""


def load(cell: Cell) -> Vocabulary:
    """Load a cell's tokenizer, and no weights.

    Raises
    ------
    RuitongError
        When it cannot be found: without it neither prompt ids nor tokens can be checked.
    """
    from transformers import AutoTokenizer

    where = {"revision": cell.revision} if cell.revision else {}
    source = str(models.embedded_folder()) if cell.model == models.EMBEDDED else cell.model
    try:
        return Vocabulary(AutoTokenizer.from_pretrained(source, **where))
    except (OSError, ImportError, ValueError, KeyError) as e:
        raise RuitongError(
            f"the tokenizer of {cell.model!r} cannot be loaded ({str(e).splitlines()[0] if str(e) else e!r}). A served "
            f"model needs its tokenizer here: give a hub id, a local folder, or {models.EMBEDDED!r}; `served_model` is "
            "the name that the server knows it by"
        ) from e


def facts(cell: Cell, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return what the local files say about the model: hashes, end-of-text ids, what generation_config would do.

    ``weights_sha256`` is that of the local folder, where there is one: declared, for nobody can see a server's own.
    """
    folder = _folder(cell)
    config = _read(folder, "generation_config.json")
    weights = models.weights_sha256(folder) if folder is not None else ""
    return {
        "weights_sha256": weights or "unknown",
        "weights": "declared: hash of the local folder, the server's own are not visible" if weights else "unknown",
        "tokenizer_sha256": models.tokenizer_sha256(vocabulary.tokenizer),
        "vocab_size": vocabulary.size,
        "chat_template": bool(vocabulary.tokenizer.chat_template),
        "eos_token_ids": eos_ids(cell, vocabulary),
        "generation_config_overridden": {
            k: v for k, v in config.items() if "token_id" not in k and k not in _NO_SETTING
        },
    }


def eos_ids(cell: Cell, vocabulary: Vocabulary) -> list[int]:
    """Return the ids that end a text: the tokenizer's, and the generation config's (a chat model has several)."""
    named = _read(_folder(cell), "generation_config.json").get("eos_token_id", [])
    own = vocabulary.tokenizer.eos_token_id
    return sorted({i for i in [own, *(named if isinstance(named, list) else [named])] if isinstance(i, int)})


def _folder(cell: Cell) -> Path | None:
    folder = models.embedded_folder() if cell.model == models.EMBEDDED else Path(cell.model)
    return folder if folder.is_dir() else None


def _read(folder: Path | None, name: str) -> dict[str, Any]:
    path = folder / name if folder is not None else None
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
