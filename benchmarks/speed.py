"""Replay, decode and comparison against their peers, interleaved in one run: python benchmarks/speed.py [--runs 7]."""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers import DynamicCache

from ruitong_lib.cell import Cell
from ruitong_lib.collect import forward, models
from ruitong_lib.collect.forward import Anchor, Run
from ruitong_lib.measure.compare import compare
from ruitong_lib.prompts import load_prompts, render
from ruitong_lib.testing import synthetic_shards


def interleaved(runs: int, **calls: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each call, in turn, after one warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if run:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def anchor_for(run: Run, n: int, k: int) -> Anchor:
    rng = np.random.default_rng(0)
    shape = (len(run.ids), n)
    vocab = run.model.config.vocab_size
    top = np.stack([[rng.choice(vocab, k, replace=False) for _ in range(n)] for _ in range(shape[0])]).astype(np.int32)
    return Anchor("", top[:, :, 0].copy(), top, np.full(shape[0], n, np.int32))


def bare_forward(run: Run, anchor: Anchor) -> None:
    for rows in run.batches:
        texts = [run.ids[r] + anchor.token_id[r, : anchor.n_tokens[r] - 1].tolist() for r in rows]
        ids, mask = forward._pad(texts, run.device)
        run.model(input_ids=ids, attention_mask=mask, use_cache=False)


def generate(run: Run, n: int) -> None:
    for rows in run.batches:
        texts = [run.ids[r] for r in rows]
        width = max(map(len, texts))
        ids = torch.tensor([[0] * (width - len(t)) + t for t in texts])
        mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts])
        run.model.generate(
            ids, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0,
            cache=DynamicCache(config=run.model.config),
        )  # fmt: skip


def lm_eval_loglikelihood(run: Run, anchor: Anchor, tokenizer: object, batch_size: int) -> Callable[[], object] | None:
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        return None
    peer = HFLM(pretrained=run.model, tokenizer=tokenizer, batch_size=batch_size, max_length=4096)
    rows = [(("", ""), ids, anchor.token_id[i].tolist()) for i, ids in enumerate(run.ids)]
    return lambda: peer._loglikelihood_tokens(rows, disable_tqdm=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--precision", default="bf16")
    options = parser.parse_args()
    loaded = models.load(Cell(scoring="both", precision=options.precision))
    every = render(load_prompts("core-16").prompts, loaded.tokenizer)[:8]
    every = [(i * 4)[:128] for i in every]  # prompts of one length, so that the share of scored positions is known
    print(
        f"threads {torch.get_num_threads()}, precision {options.precision}, medians of {options.runs} interleaved runs"
    )
    with torch.inference_mode():
        for batch_size in (1, 8):
            for prompt, scored in ((128, 43), (128, 128), (18, 128)):
                ids = [i[:prompt] for i in every]
                run = Run(loaded.model, loaded.device, ids, forward.batch_rows(len(ids), batch_size), 20)
                anchor = anchor_for(run, scored, 20)
                calls: dict[str, Callable[[], object]] = {
                    "ours": partial(forward.replay, run, anchor, {}, warm=False),
                    "bare": partial(bare_forward, run, anchor),
                }
                peer = lm_eval_loglikelihood(run, anchor, loaded.tokenizer, batch_size)
                if peer is not None:
                    calls["lm_eval"] = peer
                s = interleaved(options.runs, **calls)
                ratios = ", ".join(f"{s[name] / s['ours']:.2f} of {name}" for name in calls if name != "ours")
                share = scored / (prompt + scored - 1)
                print(f"replay  batch {batch_size}, {share:.0%} of positions scored: tokens/s {ratios}", flush=True)
        for batch_size in (1, 8):
            ids = [i[:64] for i in (every * 2)[: 2 * batch_size]]
            run = Run(loaded.model, loaded.device, ids, forward.batch_rows(len(ids), batch_size), 20)
            s = interleaved(
                options.runs,
                ours=partial(forward.decode, run, 32, set(), {}, warm=False),
                generate=partial(generate, run, 32),
            )
            print(f"decode  batch {batch_size}: tokens/s {s['generate'] / s['ours']:.2f} of generate", flush=True)
    shards = synthetic_shards(n_prompts=540, n_positions=256, k=20, decode=False, vocab=64).shards
    s = interleaved(options.runs, compare=lambda: compare(shards[0], shards[1]))
    print(f"compare 540 × 256 × 20 with intervals: {s['compare']:.2f} s")


if __name__ == "__main__":
    main()
