"""Seeded synthetic shards: every distribution is known, so every answer is."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ruitong_lib import schema
from ruitong_lib.errors import RuitongError, did_you_mean
from ruitong_lib.prompts import ids_sha256

DEFAULTS: dict[str, Any] = {
    "model": "synthetic", "revision": "", "engine": "synthetic", "device": "cpu", "hardware": "card-a",
    "precision": "bf16", "batch_size": 1, "composition": 0, "attention": "sdpa", "onednn_isa": "",
    "deterministic": False, "threads": 1, "seed": 0, "repeat": 0, "prompts": "synthetic",
}  # fmt: skip
_BASE, _AFTER, _NOISE, _PHASE = range(4)  # streams of random numbers, so that one more cell changes no other


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Shards made from known distributions; the first is the reference."""

    shards: list[xr.Dataset]
    anchor: str  #: label of the cell whose text all of them replay; it is none of them
    log_probs: NDArray[np.float64]  #: replay: (cell, prompt, position, vocab), normalised
    n_tokens: NDArray[np.int32]  #: (prompt,) length of the anchor

    def exact_kl(self, reference: int = 0, candidate: int = 1) -> xr.DataArray:
        """Return the exact KL over the full vocabulary, mean of both directions (nat); NaN in the padding."""
        p, q = self.log_probs[reference], self.log_probs[candidate]
        # Σ(p − q)(ln p − ln q)/2: both directions in one sum whose terms are all ≥ 0
        kl = ((np.exp(p) - np.exp(q)) * (p - q)).sum(-1) / 2
        position = np.arange(kl.shape[1])
        kl = np.where(position < self.n_tokens[:, None], kl, np.nan)
        coords = {"prompt": self.shards[0]["prompt"].values, "position": position}
        return xr.DataArray(kl, coords, ("prompt", "position"), attrs={"units": "nat"})


def synthetic_shards(
    cells: Sequence[Mapping[str, Any]] = ({}, {"noise": 0.05}),
    *,
    n_prompts: int = 16,
    n_positions: int = 24,
    k: int = 20,
    vocab: int = 200,
    spread: float = 0.7,
    decode: bool = True,
    phase: float = 0.0,
    experts: tuple[int, int, int] | None = None,
    seed: int = 0,
) -> Synthetic:
    """Make shards whose every distribution is known: one base, and each cell is the base with noise on its logits.

    The text that is replayed is the base's own greedy text, so its writer is no side of a comparison. Texts end by
    themselves after half the positions at the earliest. A decode follows its own best token; after it has left the
    anchor's text it continues along another base, which depends on the token that it left with.

    Parameters
    ----------
    cells
        One mapping a cell: ``noise``, the standard deviation of the Gaussian noise on its logits (0, the default, is
        the base itself), and any field of ``schema.CELL_COORDS``. A cell is drawn from its place in the list.
    n_prompts, n_positions, k, vocab
        Sizes.
    spread
        Standard deviation of the logarithm of each prompt's own noise scale: prompts are clusters.
    decode, phase
        Fill the scoring "decode" too, with this extra noise, as a KV cache would add it.
    experts
        A mixture's layers, experts chosen a layer, and experts in all: layer l chooses the likeliest of the
        tokens l · experts to (l + 1) · experts − 1, so its routing moves with the noise.
    seed
        Seed of everything.

    Examples
    --------
    >>> s = synthetic_shards([{}, {"noise": 0.05, "batch_size": 8}], n_prompts=2, decode=False)
    >>> [str(x["precision"].values[0]) for x in s.shards]
    ['bf16', 'bf16']
    >>> bool((s.exact_kl(0, 1) > 0).any())
    True
    """
    if not 2 <= k < vocab:
        raise RuitongError(f"k must be from 2 to vocab - 1 = {vocab - 1}, got {k}")
    size = (n_prompts, n_positions, vocab)
    base, n_tokens = _base(np.random.default_rng([seed, _BASE]), size)
    after, _ = _base(np.random.default_rng([seed, _AFTER]), size)
    anchor_ids, _ = _top(base, k)
    anchor = f"synthetic.anchor.fp32.b1.{_hash(repr((size, k, seed)))[:8]}"
    shards, log_probs = [], []
    for i, fields in enumerate(cells):
        for name in fields:
            if name not in (known := ("noise", *schema.CELL_COORDS)):
                raise RuitongError(f"unknown field {name!r}.{did_you_mean(name, known)} Known are: {', '.join(known)}")
        rng = np.random.default_rng([seed, _NOISE, i])
        sd = float(fields.get("noise", 0.0)) * np.exp(spread * rng.standard_normal((n_prompts, 1, 1)))
        noise = sd * rng.standard_normal(size)
        coords = {**DEFAULTS, "max_new_tokens": n_positions, "anchor": anchor}
        coords |= {name: v for name, v in fields.items() if name != "noise"}
        identity = json.dumps([coords, float(fields.get("noise", 0.0)), size, k, spread, phase, seed, i])
        label = f"synthetic.{coords['hardware']}.{coords['precision']}.b{coords['batch_size']}.{_hash(identity)[:8]}"
        ds = _empty(coords, label, size, k, seed, experts)
        lp = _log_softmax(base + noise)
        token = anchor_ids[..., 0]
        valid = np.arange(n_positions) < n_tokens[:, None]
        _fill(ds, "replay", lp, token, valid=valid, finish=schema.FINISH.index("not_applicable"), experts=experts)
        ds["anchor_token_id"].values[0] = np.where(valid[..., None], anchor_ids, -1)
        ds["anchor_logprob"].values[0] = np.where(valid[..., None], np.take_along_axis(lp, anchor_ids, -1), np.nan)
        ds["anchor_tail_logprob"].values[0] = np.where(valid, _tail(lp, anchor_ids), np.nan)
        if decode:
            more = phase * np.random.default_rng([seed, _PHASE, i]).standard_normal(size)
            own = _log_softmax(_follow(base + noise + more, after + noise + more, token))
            best = own.argmax(-1)
            ended = best == vocab - 1
            last = np.where(ended.any(1), ended.argmax(1), n_positions - 1)
            finish = np.where(ended.any(1), *map(schema.FINISH.index, ("eos", "length")))
            inside = np.arange(n_positions) <= last[:, None]
            _fill(ds, "decode", own, best, valid=inside, finish=finish, experts=experts)
            ds["text"].values[0] = [" ".join(f"t{x}" for x in r[: n + 1]) for r, n in zip(best, last, strict=True)]
        shards.append(schema.validate(ds, where=label))
        log_probs.append(lp)
    return Synthetic(shards, anchor, np.stack(log_probs), n_tokens)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _base(rng: np.random.Generator, size: tuple[int, int, int]) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Draw logits, some positions sharp and some flat; the last id is the end of text, best at the last position."""
    n_prompts, n_positions, _ = size
    logits = rng.standard_normal(size) * np.exp(rng.normal(1.0, 0.3, (n_prompts, n_positions, 1)))
    n = rng.integers((n_positions + 1) // 2, n_positions + 3, n_prompts)
    logits[..., -1] = logits.min(-1) - 3
    for p in np.flatnonzero(n <= n_positions):
        logits[p, n[p] - 1, -1] = logits[p, n[p] - 1].max() + 5
    return logits, np.minimum(n, n_positions).astype(np.int32)


def _follow(on_anchor: Any, off_anchor: Any, token: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the logits that a greedy decode meets: the anchor's up to the first other token, then another text's."""
    left = on_anchor.argmax(-1) != token
    out = np.array(on_anchor)
    for p in np.flatnonzero(left.any(1)):
        at = int(left[p].argmax())
        words = off_anchor[p, at + 1 :]
        turned = np.roll(words[:, :-1], int(on_anchor[p, at].argmax()), axis=-1)  # the end of text keeps its id
        out[p, at + 1 :] = np.concatenate([turned, words[:, -1:]], axis=-1)
    return out


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _top(values: NDArray[np.float64], k: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    return ids, np.take_along_axis(values, ids, -1)


def _tail(lp: NDArray[np.float64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    rest = np.exp(lp)
    np.put_along_axis(rest, ids, 0.0, axis=-1)
    return np.asarray(np.log(rest.sum(-1)))


def _empty(
    coords: Mapping[str, Any],
    label: str,
    size: tuple[int, int, int],
    k: int,
    seed: int,
    experts: tuple[int, int, int] | None,
) -> xr.Dataset:
    n_prompts, n_positions, _ = size
    names = {"prompt": [f"p{i:04d}" for i in range(n_prompts)]}
    for name, values in (("category", ("list", "code", "open")), ("language", ("en", "zh", "ru", "es"))):
        names[name] = [values[i % len(values)] for i in range(n_prompts)]
    moe = (range(experts[0]), experts[1]) if experts else ((), 0)
    ds = schema.new_shard(coords, label, names, n_positions=n_positions, k=k, moe=moe)
    prompts = [[*range(5 + i % 7), i] for i in range(n_prompts)]
    ds["prompt_sha256"].values[0] = [ids_sha256(p) for p in prompts]
    ds["n_prompt_tokens"].values[0] = [len(p) for p in prompts]
    ds["batch_index"].values[0] = np.arange(n_prompts) // coords["batch_size"]
    ds["row_in_batch"].values[0] = np.arange(n_prompts) % coords["batch_size"]
    found = {
        "synthetic": True,
        "logprob_mode": "raw",
        "weights_sha256": _hash(f"weights {coords['model']} {size} {seed}"),
        "tokenizer_sha256": _hash("synthetic"),
    }
    ds["provenance"].values[0] = json.dumps(found, sort_keys=True)
    return ds


def _fill(ds: xr.Dataset, scoring: str, lp: Any, token: Any, *, valid: Any, finish: Any, experts: Any) -> None:
    s, k = schema.SCORINGS.index(scoring), ds.sizes["k"]
    ids, best = _top(lp, k)
    for name, values, fill in (
        ("token_id", token, -1),
        ("logprob", np.take_along_axis(lp, token[..., None], -1)[..., 0], np.nan),
        ("tail_logprob", _tail(lp, ids), np.nan),
        ("entropy", -(np.exp(lp) * lp).sum(-1), np.nan),
        ("position_state", 0, schema.POSITION_STATES.index("short")),
    ):
        ds[name].values[0, s] = np.where(valid, values, fill)
    ds["top_token_id"].values[0, s] = np.where(valid[..., None], ids, -1)
    ds["top_logprob"].values[0, s] = np.where(valid[..., None], best, np.nan)
    ds["n_tokens"].values[0, s] = valid.sum(1)
    ds["finish_reason"].values[0, s] = finish
    ds["state"].values[0, s] = schema.STATES.index("ok")
    if experts:
        layers, slots, n = experts
        chosen = [_top(lp[..., i * n : (i + 1) * n], slots)[0] for i in range(layers)]
        ds["expert_id"].values[0, s] = np.where(valid[..., None, None], np.stack(chosen, axis=-2), -1)
