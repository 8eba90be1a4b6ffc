"""What a server sends, in every shape we know, as one record: tolerant of the form, strict about the numbers.

Shapes: *chat* (``choices[0].logprobs.content``), *completions* (``choices[0].logprobs.tokens``), *native* (llama.cpp's
``completion_probabilities``, the old one with ``probs`` and the new one), and ``prompt_logprobs`` for replay. A number
is taken as it stands, or is *masked* under the name of its spelling; nothing is filled in.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ruitong_lib.collect.served.lenient import INT32, Pairs, number, token_id


class Entry(NamedTuple):
    """One token with its logprob, as far as the server names it."""

    id: int  # −1: not given
    text: str | None
    bytes: bytes | None  # None: not given
    logprob: float  # NaN where masked
    mask: str = ""  # the server's spelling of "not available"


class Position(NamedTuple):
    """One position: the token that was chosen and the alternatives, in the server's order."""

    token: Entry
    top: tuple[Entry, ...]
    keyed_by_text: bool = False  # alternatives in an object keyed by text: two ids of one text collapse
    repeated_keys: int = 0


class Answer(NamedTuple):
    """One response as one record."""

    shape: str  # chat, completions, native
    text: str | None  # the content; None where there is none
    reasoning: str | None
    finish: str | None
    stop_reason: Any
    n_prompt: int | None  # tokens that the server says it read
    n_completion: int | None
    cached: int | None  # prompt tokens that came from a cache
    prompt_ids: list[int] | None
    token_ids: list[int] | None
    positions: list[Position] | None  # None: no logprobs at all
    probabilities: bool = False  # the numbers were probabilities, and are their logarithms now


def _ids(value: Any) -> list[int] | None:
    if not isinstance(value, list) or not value:
        return None
    found = [token_id(v) for v in value]
    return found if min(found) >= 0 else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _bytes(value: Any) -> bytes | None:
    if not isinstance(value, list) or not all(isinstance(b, int) and 0 <= b < 256 for b in value):
        return None
    return bytes(value)


def _entry(value: Any, *, probability: bool = False) -> Entry:
    """Read ``{token, logprob, bytes, id}``, ``{tok_str, prob}`` or what is left of them."""
    if not isinstance(value, Mapping):
        return Entry(-1, None, None, math.nan, type(value).__name__)
    text = _text(value.get("token", value.get("tok_str", value.get("content"))))
    name = next((n for n in ("logprob", "prob") if n in value), None)
    found, mask = number(value[name]) if name else (math.nan, "absent")
    if (name == "prob" or probability) and not mask:
        found, mask = (math.log(found), "") if found > 0 else (math.nan, "0" if found == 0 else "negative")
    by_text = token_id(text) if text is not None and text.startswith("token_id:") else -1
    given = token_id(value.get("id"))
    return Entry(
        given if given >= 0 else by_text, None if by_text >= 0 else text, _bytes(value.get("bytes")), found, mask
    )


def parse(body: Any) -> Answer | None:
    """Read a response; None where it is no answer at all."""
    if not isinstance(body, Mapping):
        return None
    choices = body.get("choices")
    if isinstance(choices, list):
        if not choices or not isinstance(choices[0], Mapping):
            return None
        return _choice(choices[0], body)
    if "completion_probabilities" in body or "content" in body:
        return _native(body)
    return None


def _choice(choice: Mapping[str, Any], body: Mapping[str, Any]) -> Answer:
    message = choice.get("message")
    chat = isinstance(message, Mapping)
    said: Mapping[str, Any] = message if isinstance(message, Mapping) else {}
    text = _text(said.get("content")) if chat else _text(choice.get("text"))
    reasoning = _text(said.get("reasoning_content")) or _text(said.get("reasoning"))
    usage = body.get("usage")
    used: Mapping[str, Any] = usage if isinstance(usage, Mapping) else {}
    details = used.get("prompt_tokens_details")
    return Answer(
        shape="chat" if chat else "completions",
        text=text,
        reasoning=reasoning,
        finish=_text(choice.get("finish_reason")),
        stop_reason=choice.get("stop_reason"),
        n_prompt=_count(used.get("prompt_tokens")),
        n_completion=_count(used.get("completion_tokens")),
        cached=_count(details.get("cached_tokens")) if isinstance(details, Mapping) else None,
        prompt_ids=_ids(choice.get("prompt_token_ids")) or _ids(body.get("prompt_token_ids")),
        token_ids=_ids(choice.get("token_ids")),
        positions=_positions(choice.get("logprobs")),
    )


def _positions(found: Any) -> list[Position] | None:
    """Read ``logprobs`` of a choice: the list under ``content``, or the four parallel lists."""
    if not isinstance(found, Mapping):
        return None
    content = found.get("content")
    if isinstance(content, list):
        return [_listed(c) for c in content]
    tokens, own = found.get("tokens"), found.get("token_logprobs")
    if not isinstance(tokens, list) and not isinstance(own, list):
        return None
    tokens = tokens if isinstance(tokens, list) else []
    own = own if isinstance(own, list) else []
    top = found.get("top_logprobs")
    top = top if isinstance(top, list) else []
    out = []
    for t in range(max(len(tokens), len(own))):
        entry = _entry(
            {"token": tokens[t] if t < len(tokens) else None} | ({"logprob": own[t]} if t < len(own) else {})
        )
        alternatives = top[t] if t < len(top) else None
        if isinstance(alternatives, list):  # some servers put the chat's list here
            out.append(Position(entry, tuple(_entry(a) for a in alternatives)))
            continue
        out.append(_keyed(entry, alternatives))
    return out


def _keyed(entry: Entry, alternatives: Any) -> Position:
    """Read an object ``{text: logprob}``; keys ``token_id:N`` name ids and cannot collapse."""
    if not isinstance(alternatives, Mapping):
        return Position(entry, ())
    pairs = alternatives.pairs if isinstance(alternatives, Pairs) else list(alternatives.items())
    entries = tuple(_entry({"token": k, "logprob": v}) for k, v in pairs)
    by_text = any(e.id < 0 for e in entries)
    return Position(entry, entries, by_text, len(pairs) - len(alternatives))


def _listed(content: Any) -> Position:
    top = content.get("top_logprobs") if isinstance(content, Mapping) else None
    return Position(_entry(content), tuple(_entry(a) for a in top) if isinstance(top, list) else ())


def _native(body: Mapping[str, Any]) -> Answer:
    """Read llama.cpp's own shape: ``probs`` (old), ``top_logprobs`` (new) or ``top_probs`` (after sampling)."""
    found = body.get("completion_probabilities")
    positions: list[Position] | None = None
    probabilities = False
    if isinstance(found, list):
        positions = []
        for row in found:
            r: Mapping[str, Any] = row if isinstance(row, Mapping) else {}
            name = next((n for n in ("top_logprobs", "probs", "top_probs") if isinstance(r.get(n), list)), "")
            by_prob = name in {"probs", "top_probs"} or ("prob" in r and "logprob" not in r)
            probabilities |= by_prob
            top = tuple(_entry(a, probability=by_prob and "logprob" not in a) if isinstance(a, Mapping) else _entry(a)
                        for a in r.get(name, ()))  # fmt: skip
            own = _entry(row)
            if own.mask == "absent":  # the old shape says the chosen text, and its probability among `probs` alone
                same = [e for e in top if e.text == own.text]
                own = own._replace(logprob=same[0].logprob, mask=same[0].mask) if len(same) == 1 else own
            positions.append(Position(own, top))
    stopped = body.get("stop_type")
    finish = {"eos": "stop", "limit": "length", "word": "stop"}.get(stopped) if isinstance(stopped, str) else None
    if finish is None:
        finish = "length" if body.get("stopped_limit") is True else "stop" if body.get("stopped_eos") is True else None
    return Answer(
        "native", _text(body.get("content")), None, finish, body.get("stopping_word") or None,
        _count(body.get("tokens_evaluated")), _count(body.get("tokens_predicted")), _count(body.get("tokens_cached")),
        None, _ids(body.get("tokens")), positions, probabilities,
    )  # fmt: skip


class Scored(NamedTuple):
    """Logprobs of a text that was sent: one :class:`Position` a token, None where the server has no context."""

    how: str  # prompt_logprobs or echo
    positions: list[Position | None]


def parse_prompt(body: Any, ids: list[int], k: int, start: int = 0) -> Scored | None:
    """Read the logprobs of the tokens that were sent, from ``prompt_logprobs`` or an echo; None where there are none.

    Parameters
    ----------
    body
        The response.
    ids
        The token ids that were sent; the position of a token is its place among them.
    k
        The number of alternatives asked for.
    start
        Positions before this one are not wanted, and None.

    Returns
    -------
    As many positions as ids, or none where the server sent another number: then nothing can be matched.
    """
    if not isinstance(body, Mapping):
        return None
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if not isinstance(choice, Mapping):
        return None
    rows = choice.get("prompt_logprobs", body.get("prompt_logprobs"))
    if isinstance(rows, list):
        fits = len(rows) == len(ids)
        return Scored(
            "prompt_logprobs",
            [None if t < start else _prompt_row(r, i, k) for t, (r, i) in enumerate(zip(rows, ids, strict=True))]
            if fits
            else [],
        )
    found = _positions(choice.get("logprobs"))
    if found is None:
        return None
    return Scored("echo", _echoed(found, ids))


def _prompt_row(row: Any, own: int, k: int) -> Position | None:
    """Read ``{"id": {logprob, rank, decoded_token}}`` or ``{"id": logprob}``: the k best and the token itself."""
    if not isinstance(row, Mapping) or not row:
        return None
    pairs = row.pairs if isinstance(row, Pairs) else list(row.items())
    entries = []
    for key, value in pairs:
        inner: Mapping[str, Any] = value if isinstance(value, Mapping) else {"logprob": value}
        found, mask = number(inner.get("logprob"))
        entries.append(Entry(token_id(key), _text(inner.get("decoded_token")), None, found, mask))
    itself = next((e for e in entries if e.id == own), Entry(own, None, None, math.nan, "absent"))
    # The token itself is listed in any case: one entry more than asked for means that it is not among the k best.
    top = entries if len(entries) <= k else [e for e in entries if e.id != own]
    return Position(itself, tuple(top), repeated_keys=len(pairs) - len(row))


def _echoed(found: list[Position], ids: list[int]) -> list[Position | None]:
    """Take the prompt's part of an echo. Its strings are never trusted for alignment: the count has to fit."""
    if len(found) < len(ids):
        return []  # echo was ignored: only the generated tokens came back
    out: list[Position | None] = []
    for i, (p, own) in enumerate(zip(found, ids, strict=False)):
        if p.token.id >= 0 and p.token.id != own:
            return []
        out.append(None if i == 0 and p.token.mask else p._replace(token=p.token._replace(id=own)))
    return out


def spellings(positions: Iterable[Position | None]) -> Counter[str]:
    """Count how often each spelling of "not available" stands in the alternatives and tokens."""
    return Counter(e.mask for p in positions if p is not None for e in (p.token, *p.top) if e.mask)
