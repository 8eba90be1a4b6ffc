"""The two passes over a causal LM: greedy decode with the KV cache, and replay of a given continuation."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ruitong_lib import schema
from ruitong_lib.collect import devices, epilogue, memory
from ruitong_lib.collect.parts import Parts
from ruitong_lib.collect.routing import Routing
from ruitong_lib.errors import RuitongError

HEAD_ROWS = 256  # scored rows that go through the output embedding at once
_OK, _NAN = schema.STATES.index("ok"), schema.STATES.index("nan_logits")
_EOS, _LENGTH = schema.FINISH.index("eos"), schema.FINISH.index("length")


class Anchor(NamedTuple):
    """The continuation that is replayed: per prompt its tokens, and at each position the ids that are scored."""

    label: str
    token_id: np.ndarray[Any, Any]  # (prompt, position) int32, padded with −1
    top_token_id: np.ndarray[Any, Any]  # (prompt, position, k) int32
    n_tokens: np.ndarray[Any, Any]  # (prompt,)

    @property
    def sha256(self) -> str:
        """Hash of the anchor's arrays."""
        return schema.anchor_sha256(self.token_id, self.top_token_id, self.n_tokens)


class Run(NamedTuple):
    """What decode and replay share."""

    model: Any
    device: torch.device
    ids: list[list[int]]
    batches: list[list[int]]
    k: int
    progress: Callable[[str, int, int], None] | None = None
    routing: Routing | None = None  # of a mixture of experts

    def each_batch(
        self,
        scoring: str,
        work: Callable[[list[int]], object],
        *,
        trial: Callable[[list[int]], object],
        lengths: Sequence[int],
        first_only: bool = False,
    ) -> None:
        """Do the batches and report each one that is done; see :func:`memory.each` for one that does not fit."""
        done = itertools.count(1)

        def reported(rows: list[int]) -> None:
            work(rows)
            if self.progress is not None and not first_only:
                self.progress(scoring, next(done), len(self.batches))

        batches = self.batches[:1] if first_only else self.batches
        memory.each(batches, reported, what=scoring, trial=trial, lengths=lengths, device=self.device)


def batch_rows(n: int, batch_size: int, composition: int = 0) -> list[list[int]]:
    """Return which of ``n`` prompts run together: in order, or shuffled with ``composition`` as the seed."""
    order = np.arange(n) if composition == 0 else np.random.default_rng(composition).permutation(n)
    return [order[i : i + batch_size].tolist() for i in range(0, n, batch_size)]


def _add_experts(out: dict[str, torch.Tensor], shape: Sequence[int] | None) -> None:
    """Make the array of a mixture's experts, whose shape is known after the first forward pass."""
    if shape is not None and "expert_id" not in out:
        out["expert_id"] = torch.full((*out["logprob"].shape, *shape), -1, dtype=torch.int16)


def _hidden(
    run: Run, input_ids: torch.Tensor, scored: torch.Tensor, **more: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the last hidden state, where the inputs are, and the experts (rows, layer, slot) of the scored rows.

    ``scored`` are rows of (batch × sequence), flattened. A model spread over devices ends on another one than it
    begins on.
    """
    if run.routing is not None:
        run.routing.watch(scored)
    hidden = run.model.get_decoder()(input_ids=input_ids, **more).last_hidden_state.to(run.device)
    return hidden, None if run.routing is None else run.routing.take()


def _pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pad on the right: no row's first position is ever masked. The mask is None where nothing is padded."""
    width = max(map(len, rows))
    ids = torch.tensor([[*r, *[0] * (width - len(r))] for r in rows])
    if all(len(r) == width for r in rows):
        return ids.to(device), None
    lengths = torch.tensor([len(r) for r in rows])
    return ids.to(device), (torch.arange(width) < lengths[:, None]).long().to(device)


def _empty(run: Run, width: int) -> dict[str, torch.Tensor]:
    p, k = len(run.ids), run.k
    return {
        "token_id": torch.full((p, width), -1, dtype=torch.int32),
        "logprob": torch.full((p, width), torch.nan),
        "top_token_id": torch.full((p, width, k), -1, dtype=torch.int32),
        "top_logprob": torch.full((p, width, k), torch.nan),
        "tail_logprob": torch.full((p, width), torch.nan),
        "entropy": torch.full((p, width), torch.nan),
        "position_state": torch.full((p, width), schema.POSITION_STATES.index("short"), dtype=torch.int8),
        "n_tokens": torch.zeros(p, dtype=torch.int32),
        "finish_reason": torch.full((p,), schema.FINISH.index("not_applicable"), dtype=torch.int8),
        "state": torch.full((p,), _OK, dtype=torch.int8),
    }


def _write(
    out: dict[str, torch.Tensor],
    at: tuple[torch.Tensor, torch.Tensor],
    rows: epilogue.Rows,
    experts: torch.Tensor | None,
) -> None:
    if experts is not None:
        _add_experts(out, experts.shape[1:])
        out["expert_id"][at] = experts
    for name in ("top_token_id", "top_logprob", "tail_logprob", "entropy"):
        out[name][at] = getattr(rows, name)
    out["position_state"][at] = torch.where(rows.bad, schema.POSITION_STATES.index("nan"), 0).to(torch.int8)
    out["state"][at[0][rows.bad]] = _NAN


def decode(
    run: Run, max_new_tokens: int, eos: set[int], timing: dict[str, Any], *, warm: bool = True
) -> dict[str, np.ndarray[Any, Any]]:
    """Decode greedily with the KV cache, one token at a time, from raw logits.

    Prompts are padded on the right and each new token gets its own position id, so the cache of a short prompt has a
    masked gap and no row starts with padding. A row that has ended stays in its batch: the batch shape is what is
    measured. The end-of-text token is part of the row. A row whose logits turn NaN stops there, with that state.
    ``warm`` runs the first batch once before the clock starts; ``timing`` receives the speed.

    Returns
    -------
    The arrays of the shard for ``scoring="decode"``, dims (prompt, position[, k]).
    """
    _check_padding(run)
    out = _empty(run, max_new_tokens)

    def trial(rows: list[int], limit: int = max_new_tokens) -> None:
        _decode_batch(run, rows, limit, set(), _empty(run, limit))

    tries: dict[str, Any] = {"trial": trial, "lengths": [len(i) for i in run.ids]}
    if warm:
        run.each_batch("decode", lambda rows: trial(rows, min(2, max_new_tokens)), first_only=True, **tries)
    devices.synchronize(run.device)
    start = time.perf_counter()
    run.each_batch("decode", lambda rows: _decode_batch(run, rows, max_new_tokens, eos, out), **tries)
    devices.synchronize(run.device)
    seconds = time.perf_counter() - start
    n = int(out["n_tokens"].sum())
    timing["decode"] = {"seconds": round(seconds, 4), "new_tokens": n, "tokens_per_second": round(n / seconds, 2)}
    width = max(1, int(out["n_tokens"].max()))
    return {k: v.numpy()[:, :width] if v.ndim > 1 else v.numpy() for k, v in out.items()}


def _check_padding(run: Run) -> None:
    padded = any(len({len(run.ids[r]) for r in rows}) > 1 for rows in run.batches)
    if padded and "sliding_attention" in (getattr(run.model.config, "layer_types", None) or []):
        raise RuitongError(
            "this model has sliding-window attention, whose window counts padding: decode it with batch_size=1, "
            "or replay only"
        )


def _decode_batch(run: Run, rows: list[int], limit: int, eos: set[int], out: dict[str, torch.Tensor]) -> None:
    from transformers import DynamicCache

    head = run.model.get_output_embeddings()
    index = torch.tensor(rows)
    lengths = torch.tensor([len(run.ids[r]) for r in rows]).to(run.device)
    ids, mask = _pad([run.ids[r] for r in rows], run.device)
    cache = DynamicCache(config=run.model.config)
    row = torch.arange(len(rows), device=run.device)
    scored_rows = row * ids.shape[1] + lengths - 1
    hidden, experts = _hidden(run, ids, scored_rows, attention_mask=mask, cache=cache, use_cache=True)
    hidden = hidden[row, lengths - 1]
    alive = torch.ones(len(rows), dtype=torch.bool)
    for t in range(limit):
        blocks = [hidden[a : a + HEAD_ROWS] for a in range(0, len(rows), HEAD_ROWS)]
        parts = [epilogue.score(head(some), run.k) for some in blocks]
        scored = epilogue.Rows(*map(torch.cat, zip(*parts, strict=True)))
        now = alive.nonzero()[:, 0]
        at = (index[now], torch.full_like(now, t))
        _write(out, at, epilogue.Rows(*[x[now] for x in scored]), None if experts is None else experts[now])
        token = scored.top_token_id[:, 0]
        out["token_id"][at] = token[now]
        out["logprob"][at] = scored.top_logprob[now, 0]
        out["n_tokens"][index[now]] += 1
        ended = torch.tensor([int(i) in eos for i in token])
        out["finish_reason"][index[alive & ended]] = _EOS
        out["finish_reason"][index[alive & ~ended]] = _LENGTH
        alive &= ~ended & ~scored.bad
        if t + 1 == limit or not alive.any():
            break
        step = token.clamp_min(0).long()[:, None].to(run.device)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        positions = (lengths + t)[:, None]
        more = {"attention_mask": mask, "position_ids": positions, "cache": cache, "use_cache": True}
        hidden, experts = _hidden(run, step, row, **more)
        hidden = hidden[:, 0]


def replay(
    run: Run, anchor: Anchor, timing: dict[str, Any], *, warm: bool = True, parts: Parts | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Score a given continuation in one forward pass a batch (teacher forcing).

    Only the scored positions go through the output embedding, ``HEAD_ROWS`` at a time, so the memory above the model
    is one block of logits however long the texts are. ``warm`` and ``timing`` as for :func:`decode`; the warm-up also
    checks that the model's logits are its output embedding of the hidden state. ``parts`` keeps finished batches, and
    those that a killed run kept are not computed again; the speed is of the others.

    Returns
    -------
    The arrays of the shard for ``scoring="replay"``, and ``anchor_logprob``, ``anchor_tail_logprob``.
    """
    width = anchor.token_id.shape[1]
    out = _empty(run, width)
    out["anchor_logprob"] = torch.full((len(run.ids), width, anchor.top_token_id.shape[2]), torch.nan)
    out["anchor_tail_logprob"] = torch.full((len(run.ids), width), torch.nan)
    out["token_id"] = torch.from_numpy(anchor.token_id.copy())
    out["n_tokens"] = torch.from_numpy(anchor.n_tokens.copy())

    def trial(rows: list[int], *, check: bool = False) -> None:
        _replay_batch(run, rows, anchor, {k: v.clone() for k, v in out.items()}, check=check)

    def work(rows: list[int]) -> None:
        if not kept.issuperset(rows):
            _replay_batch(run, rows, anchor, out)
            if parts is not None:
                parts.add(rows, out)

    lengths = [len(i) + int(n) for i, n in zip(run.ids, anchor.n_tokens, strict=True)]
    tries: dict[str, Any] = {"trial": trial, "lengths": lengths}
    if warm:
        run.each_batch("replay", lambda rows: trial(rows, check=True), first_only=True, **tries)
    _add_experts(out, run.routing.shape if run.routing is not None else None)
    devices.synchronize(run.device)
    start = time.perf_counter()
    kept = parts.restore(out) if parts is not None else set()
    run.each_batch("replay", work, **tries)
    devices.synchronize(run.device)
    seconds = time.perf_counter() - start
    fresh = [r for r in range(len(run.ids)) if r not in kept]
    scored = int(anchor.n_tokens[fresh].sum())
    n = sum(len(run.ids[r]) for r in fresh) + scored
    timing["replay"] = {
        "seconds": round(seconds, 4),
        "tokens": n,
        "scored_tokens": scored,
        "tokens_per_second": round(n / seconds, 2),
        **({"prompts_kept_from_a_killed_run": len(kept)} if kept else {}),
    }
    return {k: v.numpy() for k, v in out.items()}


def _replay_batch(
    run: Run, rows: list[int], anchor: Anchor, out: dict[str, torch.Tensor], *, check: bool = False
) -> None:
    # The last anchor token is scored but not read, so it is not fed.
    texts = [run.ids[r] + anchor.token_id[r, : anchor.n_tokens[r] - 1].tolist() for r in rows]
    ids, mask = _pad(texts, run.device)
    row = torch.tensor([i for i, r in enumerate(rows) for _ in range(anchor.n_tokens[r])])
    position = torch.tensor([t for r in rows for t in range(anchor.n_tokens[r])])
    start = torch.tensor([len(run.ids[r]) - 1 for r in rows])
    prompt = torch.tensor(rows)[row]
    scored_rows = row * ids.shape[1] + start[row] + position
    hidden, experts = _hidden(run, ids, scored_rows, attention_mask=mask, use_cache=False)
    if check:
        _check_head(run, ids, mask, hidden)
    head = run.model.get_output_embeddings()
    top_ids = torch.from_numpy(anchor.top_token_id)
    for a in range(0, len(row), HEAD_ROWS):
        i, t, p = (x[a : a + HEAD_ROWS] for x in (row, position, prompt))
        logits = head(hidden[i.to(run.device), (start[i] + t).to(run.device)])
        # The anchor's own token is its best one, the first of the ids, unless the anchor is not a greedy decode.
        ids_wanted = top_ids[p, t]
        own = out["token_id"][p, t]
        scored = epilogue.score(logits, run.k, ids_wanted)
        _write(out, (p, t), scored, None if experts is None else experts[a : a + HEAD_ROWS])
        out["anchor_logprob"][p, t] = scored.logprob
        out["anchor_tail_logprob"][p, t] = scored.rest_logprob
        out["logprob"][p, t] = torch.where(own == ids_wanted[:, 0], scored.logprob[:, 0], torch.nan)


def _check_head(run: Run, ids: torch.Tensor, mask: torch.Tensor | None, hidden: torch.Tensor) -> None:
    """Refuse a model whose logits are more than lm_head(hidden): soft-capping or scaling would be left out."""
    theirs = run.model(input_ids=ids[:1], attention_mask=None if mask is None else mask[:1], logits_to_keep=1).logits
    ours = run.model.get_output_embeddings()(hidden[:1, -1:])
    ours, theirs = ours.float().cpu(), theirs.float().cpu()
    scale = float(theirs.nan_to_num(0, 0, 0).abs().max())  # a NaN is a state of the row, found when it is scored
    if not torch.allclose(ours, theirs, rtol=0.05, atol=0.05 * scale, equal_nan=True):
        raise RuitongError(
            f"the logits of {run.model.config.model_type!r} are not its output embedding of the last hidden state "
            "(soft-capping or scaling), so this collector would score another distribution; it takes no such models"
        )
