"""One response as one row of a shard: ids, the best alternatives in order, what is not known left as not known."""

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np

from ruitong_lib import schema
from ruitong_lib.collect.served.responses import Answer, Entry, Position, Scored
from ruitong_lib.collect.served.vocabulary import REPLACEMENT, Vocabulary

# Above 0 by less than this is rounding of a probability of 1.
ROUNDING = 1e-6
_FINISH = {"stop": "eos", "eos": "eos", "eos_token": "eos", "stop_sequence": "eos", "end_turn": "eos",
           "length": "length", "max_tokens": "length"}  # fmt: skip


@dataclasses.dataclass
class Finding:
    """One thing that is odd about a row: what, how often, where it was seen first, and whether it spoils the row."""

    name: str
    count: int
    position: int  # of the first one; −1: the row as a whole
    value: str  # what stood there
    spoils: str = ""  # the row's state; empty: only noted

    def to_dict(self) -> dict[str, Any]:
        """Return the facts for the manifest."""
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Row:
    """One prompt under one scoring. Lists run over positions; a NaN or −1 is what the server did not say."""

    token: list[Entry] = dataclasses.field(default_factory=list)  # ids resolved as far as possible
    top: list[list[Entry]] = dataclasses.field(default_factory=list)  # best first, masked ones last, at most k
    flag: list[str] = dataclasses.field(default_factory=list)  # POSITION_STATES
    short: list[bool] = dataclasses.field(default_factory=list)  # fewer alternatives than asked for
    known: list[dict[int, float]] = dataclasses.field(default_factory=list)  # every listed id, beyond k too
    repeated: list[int] = dataclasses.field(default_factory=list)  # alternatives that say a token again
    keyed: list[bool] = dataclasses.field(default_factory=list)  # alternatives keyed by text
    state: str = "ok"
    finish: str = "not_applicable"
    text: str = ""
    implied_end: bool = False  # the last position is the end-of-text token that the server left out
    findings: list[Finding] = dataclasses.field(default_factory=list)

    @property
    def n(self) -> int:
        """Number of positions."""
        return len(self.token)

    def spoil(self, finding: Finding) -> None:
        """Add a finding; the first that spoils gives the row its state."""
        self.findings.append(finding)
        if finding.spoils and self.state == "ok":
            self.state = finding.spoils


def decoded(answer: Answer | None, words: Vocabulary, *, k: int, eos: set[int], status: str = "") -> Row:
    """Build the decode of one prompt.

    Parameters
    ----------
    answer
        The parsed response; None where there is none.
    words
        The local tokenizer.
    k
        Alternatives asked for.
    eos
        Ids that end a text.
    status
        Why there is no answer.
    """
    row = Row()
    if answer is None:
        row.spoil(Finding("no_answer", 1, -1, status or "not a response of a known shape", "failed"))
        return row
    row.text = (answer.reasoning or "") + (answer.text or "")
    row.finish = _FINISH.get(answer.finish or "", "not_applicable")
    positions = answer.positions or []
    if answer.reasoning:
        row.spoil(Finding("reasoning_split", 1, -1, f"{len(answer.reasoning)} characters apart from the content"))
    if answer.finish not in _FINISH:
        row.spoil(Finding("finish_reason", 1, -1, repr(answer.finish), "cut_off"))
    ids = answer.token_ids
    if answer.positions is None or not positions:
        for i in ids or []:
            _add(row, Position(Entry(i, None, None, math.nan, "absent"), ()), words, k)
        if _only_one(ids, row.text):
            row.spoil(Finding("nan_loop", row.n, -1, f"{row.text[:8]!r} again and again, no logprobs", "nan_logits"))
        elif row.text or ids:
            row.spoil(Finding("no_logprobs", 1, -1, "logprobs are null or absent", "no_logprobs"))
        else:
            row.spoil(Finding("empty_text", 1, -1, f"HTTP 200, finish_reason {answer.finish!r}", "empty"))
        return row
    length = _length(answer, eos)
    if length is not None:
        row.spoil(length)
        ids = None if ids is not None and len(ids) != len(positions) else ids
    for t, p in enumerate(positions):
        own = p.token if ids is None or t >= len(ids) else p.token._replace(id=ids[t])
        _add(row, p._replace(token=own), words, k)
    _end(row, ids, eos)
    if not row.text.strip():
        lone = row.n == 1 and row.token[0].id in eos
        spoils = "" if lone or row.token[0].id >= 0 else "empty"
        row.spoil(Finding("empty_text", 1, -1, "the text is empty" + (": end of text at once" if lone else ""), spoils))
    _fragments(row)
    return row


def _only_one(ids: list[int] | None, text: str) -> bool:
    """Whether an answer without logprobs is what NaN logits leave: token 0 alone, or exclamation marks alone."""
    if ids is not None:
        return len(ids) >= 4 and set(ids) == {0}
    return len(text) >= 8 and set(text) == {"!"}


def _length(answer: Answer, eos: set[int]) -> Finding | None:
    """Hold the number of logprobs against the number of tokens: one less is an end of text that was left out."""
    have = len(answer.positions or [])
    ids = answer.token_ids
    wanted = len(ids) if ids is not None else answer.n_completion
    if wanted is None or wanted == have:
        return None
    ended = answer.finish in _FINISH and _FINISH[answer.finish or ""] == "eos"
    if wanted == have + 1 and ended and (ids is None or ids[-1] in eos):
        return None
    if ids is None and have == wanted + 1 and ended:
        return None  # the end of text has a logprob and is not counted
    why = "; the reasoning has none" if answer.reasoning else ""
    return Finding("wrong_length", 1, -1, f"{have} logprobs for {wanted} tokens{why}", "wrong_length")


def _end(row: Row, ids: list[int] | None, eos: set[int]) -> None:
    """Say the end-of-text token where the server ended by itself and left it out, so that lengths can be compared.

    Its logprob stays unknown: the position is censored.
    """
    if row.finish != "eos" or not row.n or row.token[-1].id in eos or row.state == "wrong_length":
        return
    last = ids[row.n] if ids is not None and len(ids) == row.n + 1 else next(iter(eos)) if len(eos) == 1 else -1
    if last < 0 or any(e.id < 0 for e in row.token):
        row.spoil(Finding("end_left_out", 1, row.n - 1, "finish_reason stop, and no end-of-text token"))
        return
    _append(row, Entry(last, None, None, math.nan, "left out"), [], "censored", short=False)
    row.implied_end = True
    row.spoil(Finding("end_left_out", 1, row.n - 1, f"token {last}, implied by finish_reason stop"))


def replayed(
    scored: Scored | None, words: Vocabulary, *, start: int, tokens: list[int], k: int, status: str = ""
) -> Row:
    """Build the replay of one prompt from the logprobs of the text that was sent.

    Parameters
    ----------
    scored
        Logprobs of prompt and anchor.
    words
        The local tokenizer.
    start
        Length of the prompt.
    tokens
        The anchor's tokens.
    k
        Alternatives to keep; the server may have listed more.
    status
        Why there is no answer.
    """
    row = Row()
    if scored is None:
        row.spoil(Finding("no_answer" if status else "no_logprobs", 1, -1, status or "no logprobs of the prompt",
                          "failed" if status else "no_logprobs"))  # fmt: skip
        return row
    if len(scored.positions) < start + len(tokens):
        what = "echo was ignored" if scored.how == "echo" else "prompt_logprobs has another length"
        row.spoil(Finding("wrong_length", 1, -1, what + " or the ids differ", "wrong_length"))
        return row
    for i, token in enumerate(tokens):
        p = scored.positions[start + i]
        if p is None:
            _append(row, Entry(token, None, None, math.nan, "null"), [], "masked", short=True)
            continue
        _add(row, p._replace(token=p.token._replace(id=token)), words, k)
        if math.isnan(row.token[-1].logprob) and row.flag[-1] == "ok":
            row.flag[-1] = "censored"
    return row


def _append(row: Row, token: Entry, top: list[Entry], flag: str, *, short: bool, repeated: int = 0) -> None:
    row.token.append(token)
    row.top.append(top)
    row.flag.append(flag)
    row.short.append(short)
    row.repeated.append(repeated)
    row.keyed.append(False)
    row.known.append({e.id: e.logprob for e in [*top, token] if e.id >= 0 and not math.isnan(e.logprob)})


def _add(row: Row, p: Position, words: Vocabulary, k: int) -> None:
    """Resolve the ids of a position, put its alternatives in order, and flag what cannot be used."""
    flag = "ok"
    entries = []
    # After a piece of a character a server may show the whole one: its text and bytes are then no single token's.
    after_piece = bool(row.n) and row.token[-1].text is not None and _piece(row.token[-1])
    for e in (p.token, *p.top):
        i = e.id if e.id >= 0 or after_piece else words.id_of(e)
        if i >= words.bound:
            flag, i = "impossible", -1
        e = e._replace(id=i)  # noqa: PLW2901
        if e.logprob > ROUNDING:
            flag, e = "impossible", e._replace(logprob=math.nan, mask="positive")  # noqa: PLW2901
        elif e.logprob > 0:
            e = e._replace(logprob=0.0)  # noqa: PLW2901
        entries.append(e)
    token, top = entries[0], entries[1:]
    same = [e for e in top if e.id == token.id >= 0]
    if token.mask == "absent" and len(same) == 1:
        token = same[0]._replace(text=token.text)
    ids = Counter(e.id for e in p.top if e.id >= 0)
    repeated = sum(ids.values()) - len(ids)
    if flag == "ok" and repeated:
        flag = "impossible"  # the server's own ids, one of them twice
    texts = Counter((e.text, e.bytes) for e in p.top if e.id < 0 and e.text and REPLACEMENT not in e.text)
    twice = {name for name, n in texts.items() if n > 1}
    # Of two equal texts, or where the chosen one is not among the texts, an id found by text may be another token's.
    lost = bool(texts) and bool(top) and not same and not after_piece and p.token.text not in {e.text for e in p.top}
    if twice or lost:
        top = [e._replace(id=-1) if o.id < 0 and (lost or (o.text, o.bytes) in twice) else e
               for e, o in zip(top, p.top, strict=True)]  # fmt: skip
        flag = "ambiguous" if flag == "ok" else flag
    top = [e for _, e in sorted(enumerate(top), key=lambda x: _rank(x[1], x[0]))]
    masked = [e for e in (token, *top) if e.mask and e.mask not in {"absent", "positive"}]
    if masked and flag in {"ok", "ambiguous"}:
        flag = "nan" if token.mask == "NaN" else "masked"
    finite = sum(not math.isnan(e.logprob) for e in top)
    _append(row, token, top[:k], flag, short=finite < k, repeated=repeated + p.repeated_keys)
    row.keyed[-1] = p.keyed_by_text
    row.known[-1] = {e.id: e.logprob for e in [*top, token] if e.id >= 0 and not math.isnan(e.logprob)}


def _piece(e: Entry) -> bool:
    """Whether a text is a piece of a character, or nothing."""
    return not e.text or REPLACEMENT in e.text


def _rank(e: Entry, order: int) -> tuple[float, int, int]:
    masked = math.isnan(e.logprob)
    return (math.inf if masked else -e.logprob, e.id if e.id >= 0 else 2**31, order)


def _fragments(row: Row) -> None:
    """Name what only texts identify: pieces of characters in a row, and texts that several tokens share."""
    runs = [t for t, e in enumerate(row.token) if e.id < 0 and row.flag[t] == "ok" and _piece(e)]
    for t in runs:
        row.flag[t] = "byte_run"
    if runs:
        row.spoil(Finding("byte_run", len(runs), runs[0], f"text {row.token[runs[0]].text!r}, no id"))
    ambiguous = [t for t, f in enumerate(row.flag) if f == "ambiguous"]
    if ambiguous:
        t = ambiguous[0]
        shown = f"token {row.token[t].text!r}, alternatives {[e.text for e in row.top[t][:4]]}"
        row.spoil(Finding("ambiguous_text", len(ambiguous), t, shown))


def known_first(top: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Put the alternatives (…, k) without an id (−1) last: an anchor's ids start with one."""
    return np.take_along_axis(top, np.argsort(top < 0, axis=-1, kind="stable"), -1)


def identified(rows: list[Row]) -> bool:
    """Whether every token of every row has an id."""
    return all(e.id >= 0 for r in rows for e in r.token)


def arrays(rows: list[Row], k: int) -> dict[str, np.ndarray[Any, Any]]:
    """Put rows into the arrays of a shard, dims (prompt, position[, k])."""
    p, width = len(rows), max([1, *(r.n for r in rows)])
    out: dict[str, np.ndarray[Any, Any]] = {
        "token_id": np.full((p, width), -1, np.int32),
        "logprob": np.full((p, width), np.nan, np.float32),
        "top_token_id": np.full((p, width, k), -1, np.int32),
        "top_logprob": np.full((p, width, k), np.nan, np.float32),
        "position_state": np.full((p, width), schema.POSITION_STATES.index("short"), np.int8),
        "token_text": np.full((p, width), "", object),
        "top_token_text": np.full((p, width, k), "", object),
    }
    for i, r in enumerate(rows):
        for t in range(r.n):
            e = r.token[t]
            out["token_id"][i, t], out["logprob"][i, t] = e.id, e.logprob
            out["token_text"][i, t] = e.text or ""
            out["position_state"][i, t] = schema.POSITION_STATES.index(r.flag[t])
            # Where nothing is listed, the chosen token is: it is what the row says.
            for j, a in enumerate(r.top[t][:k] or [e]):
                out["top_token_id"][i, t, j], out["top_logprob"][i, t, j] = a.id, a.logprob
                out["top_token_text"][i, t, j] = a.text or ""
    out["n_tokens"] = np.array([r.n for r in rows], np.int32)
    out["finish_reason"] = np.array([schema.FINISH.index(r.finish) for r in rows], np.int8)
    out["state"] = np.array([schema.STATES.index(r.state) for r in rows], np.int8)
    return out
