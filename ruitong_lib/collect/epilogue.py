"""From logits to the numbers of a shard: exact top-k, logprobs, tail mass and entropy, a few rows at a time."""

from typing import NamedTuple

import torch

ROWS = 16  # rows of logits that are worked on at once: 16 × 50k float32 stay in a CPU cache
_BLOCK = 128
_LOW = 0xFFFFFFFF


def exact_top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k best logits of each row and their ids, ties by lowest id.

    ``torch.topk`` picks any of several equal logits, and bf16 logits tie often. Here the best k blocks of 128
    columns are found by their maxima, and within them an int64 key, the float's bits in monotone order above the
    inverted id, makes every entry distinct.

    Parameters
    ----------
    logits
        (rows, vocab), any floating dtype, no NaN.
    k
        At most vocab.

    Returns
    -------
    Values (rows, k) in float32, ids (rows, k) in int64.
    """
    padded = _scratch(logits.shape[0], logits.shape[1], logits.device)
    padded[:, : logits.shape[1]] = logits
    return _top_k(padded, k)


def _scratch(rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Return −inf in float32, (rows, vocab rounded up to whole blocks)."""
    return torch.full((rows, -(-vocab // _BLOCK) * _BLOCK), -torch.inf, device=device)


def _top_k(padded: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    table = padded.view(len(padded), -1, _BLOCK)
    blocks = table.shape[1]
    ids = torch.arange(blocks, device=padded.device)
    best = _keys(table.amax(-1), ids).topk(min(k, blocks))[0]
    block = _LOW - (best & _LOW)
    candidates = table.gather(1, block[..., None].expand(-1, -1, _BLOCK))
    ids = block[..., None] * _BLOCK + torch.arange(_BLOCK, device=padded.device)
    keys = _keys(candidates, ids).flatten(1).topk(k)[0]
    bits = (keys >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32), _LOW - (keys & _LOW)


def _keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    bits = (values + 0.0).view(torch.int32)  # −0.0 + 0.0 is 0.0: the two zeros tie
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) | (_LOW - ids)


class Rows(NamedTuple):
    """The numbers of some rows, on the CPU; NaN and −1 where ``bad`` (a row with NaN or +inf, or nothing finite)."""

    top_token_id: torch.Tensor  # (rows, k) int32
    top_logprob: torch.Tensor  # (rows, k) float32, as all that follow
    tail_logprob: torch.Tensor  # (rows,): the mass outside the top-k
    entropy: torch.Tensor  # (rows,)
    logprob: torch.Tensor  # (rows, m): of the ids that were asked for
    rest_logprob: torch.Tensor  # (rows,): the mass outside those ids
    bad: torch.Tensor  # (rows,) bool


def score(logits: torch.Tensor, k: int, ids: torch.Tensor | None = None) -> Rows:
    """Score rows of raw logits.

    The log-sum-exp is taken over the full vocabulary: exponentials and blocks of 128 in float32 on the device, the sum
    of the blocks and the logarithm in float64 on the CPU, since not every device has it. A logprob is a logit less
    that, within 1e-6 nat of a float64 log-softmax. The tail is summed with the named ids masked, never taken as 1 − Σp.

    Parameters
    ----------
    logits
        (rows, vocab), any floating dtype.
    k
        Number of best tokens.
    ids
        (rows, m) distinct token ids whose logprobs are wanted too, the first of each row ≥ 0; −1 is skipped (NaN).
    """
    rows, m = logits.shape[0], 0 if ids is None else ids.shape[1]
    out = Rows(
        torch.full((rows, k), -1, dtype=torch.int32),
        torch.full((rows, k), torch.nan),
        torch.full((rows,), torch.nan),
        torch.full((rows,), torch.nan),
        torch.full((rows, m), torch.nan),
        torch.full((rows,), torch.nan),
        torch.zeros(rows, dtype=torch.bool),
    )
    # Buffers of this size come fresh from the kernel at each allocation; made once, they are twice as fast.
    buffers = [_scratch(min(rows, ROWS), logits.shape[1], logits.device) for _ in range(2)]
    for start in range(0, rows, ROWS):
        some = slice(start, start + ROWS)
        _score(logits[some], k, None if ids is None else ids[some], Rows(*[t[some] for t in out]), buffers)
    return out


def _score(logits: torch.Tensor, k: int, ids: torch.Tensor | None, out: Rows, buffers: list[torch.Tensor]) -> None:
    highest = logits.amax(-1, keepdim=True).float()
    out.bad.copy_(~highest.isfinite().flatten())
    if out.bad.any():  # before any argmax: top-k of NaN gives arbitrary ids
        good = ~out.bad
        if good.any():
            some = Rows(*[t[good] for t in out])
            _score(logits[good.to(logits.device)], k, None if ids is None else ids[good], some, buffers)
            for whole, part in zip(out, some, strict=True):
                whole[good] = part
        return
    rows, vocab = logits.shape
    shifted, e = (b[:rows] for b in buffers)
    torch.sub(logits, highest, out=shifted[:, :vocab])
    torch.exp(shifted, out=e)  # the padding is −inf, so it weighs nothing
    log_z = _sum(e).log()
    top, top_ids = _top_k(shifted, k)
    out.top_token_id.copy_(top_ids)
    out.top_logprob.copy_(top.cpu().double() - log_z[:, None])
    out.tail_logprob.copy_(_rest(e, top_ids) - log_z)
    if ids is not None:
        known = ids >= 0
        safe = torch.where(known, ids, ids[:, :1]).long().to(logits.device)  # a skipped id masks the first one again
        own = shifted.gather(1, safe).cpu().double() - log_z[:, None]
        out.logprob.copy_(torch.where(known, own, torch.nan))
        out.rest_logprob.copy_(_rest(e, safe) - log_z)
    shifted[:, :vocab].clamp_(min=-1e4)  # −inf × 0 would be NaN; such an entry has no mass
    weighted = torch.linalg.vecdot(e[:, :vocab], shifted[:, :vocab]).cpu().double()
    out.entropy.copy_(log_z - weighted / log_z.exp())


def _sum(e: torch.Tensor) -> torch.Tensor:
    return e.view(len(e), -1, _BLOCK).sum(-1).cpu().double().sum(-1)


def _rest(e: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    kept = e.gather(1, ids)
    rest = _sum(e.scatter_(1, ids, 0.0)).log()
    e.scatter_(1, ids, kept)
    return rest
