"""Gates before any delta: what a server's numbers cannot be, each with its evidence and what follows from it.

A finding that *spoils* gives the row a state, and a comparison with such a row is refused under that name
(:func:`ruitong_lib.measure.align.check`); the texts can still be compared. A finding without one is only noted.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator

from ruitong_lib.collect.served.responses import Entry
from ruitong_lib.collect.served.rows import Finding, Row
from ruitong_lib.collect.served.vocabulary import REPLACEMENT, Vocabulary

# Positions that cannot be used are left out of a comparison and counted. With more than this share of them, what is
# left speaks for other positions than those that were asked for.
TOO_MANY = 0.1
MASS = 1e-3  # above 1 by more than this is no rounding
_SHARE = 0.9  # of a text that repeats one token
_NEAR = 0.5  # nat: speculation and changing batches choose among near-ties; a gap above this is a setting
_LIKELY = 1e-3  # the last alternative's probability, above which the rest cannot be empty
_UNSURE = -3.0  # nat: a healthy model's mean logprob of its own greedy text lies far above
_SILENT = ("absent", "left out", "positive")  # spellings that are no word of the server for "not available"

Gate = Callable[[Row], Iterator[Finding]]


def examine(row: Row, words: Vocabulary, *, k: int, greedy: bool) -> Row:
    """Run every gate over a row and return it with its findings and state.

    Parameters
    ----------
    row
        From :mod:`ruitong_lib.collect.served.rows`.
    words
        The local tokenizer: the size of its vocabulary bounds the mass that the alternatives can leave out.
    k
        Alternatives asked for.
    greedy
        Whether the tokens were chosen at temperature 0 (decode), so that each must be the best of its row.
    """
    if row.state in {"failed", "empty", "wrong_length"} or not row.n:
        return row
    gates: list[Gate] = [_nan_loop, _tempered, _zeros, _masked, _impossible, _mass(words.bound), _degenerate, _stuck]
    gates += [_collapsed, _renormalised]
    gates += [_not_greedy, _shifted, _loop, _unsure] if greedy else []
    for gate in [*gates, _short(k)]:
        for finding in gate(row):
            row.spoil(finding)
    return row


def _values(entries: list[Entry]) -> list[float]:
    return [e.logprob for e in entries if not math.isnan(e.logprob)]


def _name(e: Entry) -> int | str | None:
    return e.id if e.id >= 0 else e.text


def _commonest(row: Row) -> tuple[str, int, int]:
    """Return the commonest token for people, its id and how often it comes."""
    (token, text), count = Counter((e.id, e.text) for e in row.token).most_common(1)[0]
    return f"token {token} ({text if text else row.text[:8]!r})", token, count


def _nan_loop(row: Row) -> Iterator[Finding]:
    """NaN logits: the arg-max of NaN is id 0, again and again, with logprobs that are no numbers."""
    shown, token, count = _commonest(row)
    unknown = [t for t, e in enumerate(row.token) if math.isnan(e.logprob) and e.mask not in _SILENT]
    spelled = [t for t in unknown if row.token[t].mask == "NaN"]
    flat = token == 0 and all(len(top) > 1 and len(set(_values(top))) <= 1 for top in row.top)
    if count >= max(4, _SHARE * row.n) and (len(unknown) >= _SHARE * count or flat):
        form = row.token[0].mask or "all alike"
        yield Finding("nan_loop", count, 0, f"{shown} again and again, logprobs {form}", "nan_logits")
    elif spelled:
        spoils = "nan_logits" if len(spelled) > TOO_MANY * row.n else ""
        yield Finding("nan", len(spelled), spelled[0], "logprob NaN", spoils)


def _tempered(row: Row) -> Iterator[Finding]:
    """Temperature 0 applied before the softmax: the chosen token has all the mass, the others none."""
    at = []
    for t, top in enumerate(row.top):
        others = [e for e in top if e.logprob != 0.0]
        gone = bool(others) and all(e.mask and e.mask not in _SILENT for e in others)
        if row.token[t].logprob == 0.0 and gone:
            at.append(t)
    if len(at) > TOO_MANY * row.n:
        shown = f"chosen 0.0, the others {row.top[at[0]][-1].mask}: temperature 0 before the softmax"
        yield Finding("processed", len(at), at[0], shown, "processed")


def _zeros(row: Row) -> Iterator[Finding]:
    """All logprobs exactly 0: filled in, or taken after sampling."""
    own = _values(row.token)
    if len(own) >= 3 and all(x == 0.0 for x in own):
        yield Finding("all_zero", len(own), 0, "every chosen token has logprob 0.0", "degenerate")


def _masked(row: Row) -> Iterator[Finding]:
    """Entries that say "not available". One at the end of a text is a known habit and only noted."""
    at = [t for t, f in enumerate(row.flag) if f == "masked"]
    if not at:
        return
    forms = Counter(e.mask for t in at for e in (row.token[t], *row.top[t]) if e.mask)
    shown = ", ".join(f"{n} × {m}" for m, n in forms.most_common())
    ids = sorted(e.id for e in row.top[at[0]] if e.mask and e.id >= 0)
    if len(ids) >= 4 and ids == list(range(ids[0], ids[0] + len(ids))):
        shown += "; ids in ascending order fill the row"
    final = at == [row.n - 1] and not _values(row.top[-1])
    shown += "; the last position only" if final else ""
    yield Finding("masked", len(at), at[0], shown, "masked" if len(at) > TOO_MANY * row.n and not final else "")


def _impossible(row: Row) -> Iterator[Finding]:
    """Positive logprobs, one id twice, ids outside the vocabulary."""
    positive = [t for t in range(row.n) if any(e.mask == "positive" for e in (row.token[t], *row.top[t]))]
    if positive:
        shown = "a logprob above 0: probabilities, or logits?"
        yield Finding("positive_logprob", len(positive), positive[0], shown, "impossible")
    odd = [t for t, f in enumerate(row.flag) if f == "impossible" and t not in positive]
    twice = [t for t in odd if row.repeated[t]]
    if twice:
        yield Finding("repeated_id", len(twice), twice[0], "one token is listed twice", "degenerate")
    rest = [t for t in odd if not row.repeated[t]]
    if rest:
        yield Finding("unknown_id", len(rest), rest[0], "an id outside the vocabulary", "impossible")


def _mass(vocabulary: int) -> Gate:
    def gate(row: Row) -> Iterator[Finding]:
        """Hold the mass of the k best against its bounds.

        Σ ≤ 1, and Σ + (V − k)·p_k ≥ 1: nothing outside is likelier than p_k.
        """
        above, below = [], []
        for t, top in enumerate(row.top):
            lp = _values(top)
            if len(lp) < 2 or row.flag[t] != "ok":
                continue
            total = math.fsum(map(math.exp, lp))
            most = total + max(0, vocabulary - len(lp)) * math.exp(min(lp))
            if total > 1 + MASS:
                above.append((t, total))
            elif most < 1 - MASS and not row.short[t]:
                below.append((t, most))
        if above:
            shown = f"the alternatives add up to {above[0][1]:.4g}"
            yield Finding("mass_above_one", len(above), above[0][0], shown, "impossible")
        if below:
            shown = (
                f"all tokens together have at most {below[0][1]:.4g}: a constant was taken off, or ranks are missing"
            )
            yield Finding("shifted_values", len(below), below[0][0], shown, "impossible")

    return gate


def _degenerate(row: Row) -> Iterator[Finding]:
    """One token in place of k, or one logprob for all of them."""
    one, flat = [], []
    for t, top in enumerate(row.top):
        lp = _values(top)
        fragments = all(e.id < 0 and (not e.text or REPLACEMENT in e.text) for e in top)
        if len(top) >= 3 and len({_name(e) for e in top}) == 1 and not fragments:
            one.append(t)
        elif len(lp) >= 3 and len(set(lp)) == 1:
            flat.append(t)
    if one:
        yield Finding("one_token", len(one), one[0], f"{len(row.top[one[0]])} alternatives, one token", "degenerate")
    if flat:
        value = _values(row.top[flat[0]])[0]
        yield Finding("constant_row", len(flat), flat[0], f"every alternative has {value:.6g}", "degenerate")


def _stuck(row: Row) -> Iterator[Finding]:
    """Find the same numbers position after position: another text would round differently even in a loop."""
    longest, length, at = 0, 1, 0
    for t in range(1, row.n):
        now, before = _values(row.top[t]), _values(row.top[t - 1])
        length = length + 1 if len(now) >= 3 and now == before else 1
        if length > longest:
            longest, at = length, t - length + 1
    if longest >= 3:
        yield Finding("constant_rows", longest, at, "the same logprobs at each of these positions", "degenerate")


def _collapsed(row: Row) -> Iterator[Finding]:
    """Alternatives keyed by text: two ids of one text become one, and the value may be the other's."""
    at = [t for t in range(row.n) if row.keyed[t] and row.top[t] and (row.repeated[t] or row.short[t])]
    if not at:
        return
    for t in at:
        row.flag[t] = "ambiguous" if row.flag[t] == "ok" else row.flag[t]
    shown = f"{len(row.top[at[0]])} alternatives under distinct texts, more were asked for"
    yield Finding("collapsed", len(at), at[0], shown, "collapsed" if len(at) > TOO_MANY * row.n else "")


def _renormalised(row: Row) -> Iterator[Finding]:
    """Find alternatives that add up to exactly 1 although the last one is likely: the rest was cut off before."""
    at = []
    for t, top in enumerate(row.top):
        lp = _values(top)
        likely = len(lp) >= 2 and math.exp(min(lp)) > _LIKELY
        if likely and row.flag[t] in {"ok", "masked"} and abs(math.fsum(map(math.exp, lp)) - 1) < 1e-5:
            at.append(t)
    if at:
        shown = f"{len(_values(row.top[at[0]]))} alternatives add up to 1"
        yield Finding("renormalised", len(at), at[0], shown, "renormalised")


def _not_greedy(row: Row) -> Iterator[Finding]:
    """At temperature 0 the chosen token is the best. Speculation and batching leave near-ties; more is a setting."""
    worse = []
    for t, top in enumerate(row.top):
        lp, own = _values(top), row.token[t].logprob
        if lp and row.flag[t] == "ok" and (math.isnan(own) or own < lp[0]):
            worse.append((t, lp[0] - (lp[-1] if math.isnan(own) else own)))
    if worse:
        gap = max(g for _, g in worse)
        shown = f"the chosen token lies up to {gap:.3g} nat below the best"
        yield Finding("not_greedy", len(worse), worse[0][0], shown, "not_greedy" if gap > _NEAR else "")


def _shifted(row: Row) -> Iterator[Finding]:
    """Rows one position early or late: the chosen token is the best of its neighbour and not of its own row."""
    own = [_name(e) for e in row.token]
    best = [_name(top[0]) if top else None for top in row.top]
    hits = {d: sum(own[t] == best[t + d] for t in range(row.n) if 0 <= t + d < row.n) for d in (-1, 0, 1)}
    for d, side in ((-1, "before"), (1, "after")):
        if row.n >= 4 and hits[d] >= _SHARE * (row.n - 1) and hits[0] < row.n / 2:
            yield Finding(
                "shifted_rows", hits[d], 0, f"alternatives stand one position {side} their token", "impossible"
            )


def _loop(row: Row) -> Iterator[Finding]:
    shown, _, count = _commonest(row)
    if row.n >= 8 and count >= _SHARE * row.n and row.state == "ok":
        yield Finding("loop", count, 0, f"{shown} makes up the text")


def _unsure(row: Row) -> Iterator[Finding]:
    own = _values(row.token)
    if len(own) >= 4 and (mean := math.fsum(own) / len(own)) < _UNSURE:
        yield Finding("unsure", len(own), 0, f"its own greedy text has a mean logprob of {mean:.2f}: broken?")


def _short(k: int) -> Gate:
    def gate(row: Row) -> Iterator[Finding]:
        """Count rows with fewer alternatives than asked for: what is listed counts, the rest is unknown."""
        at = [t for t in range(row.n) if row.short[t] and not row.keyed[t] and row.flag[t] == "ok"]
        if at:
            fewest = min(len(_values(row.top[t])) for t in at)
            none = sum(not _values(row.top[t]) for t in at)
            spoils = "no_logprobs" if none > TOO_MANY * row.n else ""
            yield Finding("short_rows", len(at), at[0], f"down to {fewest} of {k} alternatives", spoils)

    return gate


def text_differs(row: Row, words: Vocabulary) -> Finding | None:
    """Hold the server's text against its ids: other words mean another tokenizer. Spaces may differ."""
    ids = [e.id for e in row.token]
    if not ids or min(ids) < 0 or not row.text:
        return None
    ours, theirs = (re.sub(rf"[\s{REPLACEMENT}]", "", x) for x in (words.decode(ids), row.text))
    if ours.startswith(theirs) or theirs.startswith(ours):
        return None
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    ours, theirs = ours[at : at + 20], theirs[at : at + 20]
    return Finding("other_text", 1, -1, f"the ids read {ours!r} here, the server wrote {theirs!r}")
