"""Peak memory above weights and KV cache at V = 151,936: python benchmarks/memory.py [--wide].

Each line is a fresh process on the CPU, bf16. The peak is Linux's own (VmHWM, reset before the pass); the weights were
there before, and the KV cache is taken off by its size. The same pass with V = 512 tells what the vocabulary costs and
what the layers' activations cost, which grow with batch × prompt tokens and have nothing to do with the vocabulary.
``--wide`` takes the width of Qwen3-8B (one layer: activations do not add up over layers), which needs about 8 GB.
"""

import argparse
import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 151_936
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WIDE = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128,
}  # fmt: skip
NEW = 48


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"^{field}:\s+(\d+) kB$", text, re.M).group(1)) * 1024


def case(wide: bool, vocab: int, scoring: str, batch: int, prompt: int, attention: str) -> None:
    """Measure one pass in this process and print its numbers as JSON."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ruitong_lib.collect import forward

    sizes = {**(WIDE if wide else SMALL), "vocab_size": vocab, "tie_word_embeddings": False}
    layers = 1 if wide else 2
    config = AutoConfig.for_model("qwen3", num_hidden_layers=layers, max_position_embeddings=40_960, **sizes)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).eval()
        lengths = [prompt - i % 5 for i in range(batch)]  # ragged, so that there is padding and a mask
        rng = np.random.default_rng(0)
        ids = [rng.integers(0, 500, n).tolist() for n in lengths]
        run = forward.Run(model, torch.device("cpu"), ids, [list(range(batch))], 20)
        top = np.tile(np.arange(20, dtype=np.int32), (batch, NEW, 1))
        anchor = forward.Anchor("anchor", top[..., 0], top, np.full(batch, NEW, dtype=np.int32))
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = status("VmRSS")
        if scoring == "decode":
            forward.decode(run, NEW, set(), {}, warm=False)
        else:
            forward.replay(run, anchor, {}, warm=False)
        peak = status("VmHWM") - before
    tokens = sum(lengths) + batch * NEW if scoring == "decode" else 0
    cache = layers * 2 * tokens * sizes["num_key_value_heads"] * sizes["head_dim"] * 2
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    print(json.dumps({"peak": peak, "cache": cache, "weights": weights}))


def measured(*options: Any) -> dict[str, int]:
    command = [sys.executable, __file__, "--case", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case(*json.loads(options.case))
        return
    print(
        f"{'Qwen3-8B wide' if options.wide else 'hidden size 64'}, bf16, {NEW} new tokens; MB above weights and cache"
    )
    print("| attention | scoring | batch | prompt | peak | of it the vocabulary | the rest: activations | KV cache |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    shapes = [("sdpa", 1, 64), ("sdpa", 8, 64), ("sdpa", 32, 64), ("sdpa", 32, 1024)]
    shapes += [] if options.wide else [("sdpa", 32, 4096), ("eager", 32, 1024)]
    for attention, batch, prompt in shapes:
        for scoring in ("decode", "replay"):
            full, small = (measured(options.wide, v, scoring, batch, prompt, attention) for v in (VOCAB, 512))
            above, rest = full["peak"] - full["cache"], small["peak"] - small["cache"]
            cells = (above, above - rest, rest, full["cache"])
            print(
                f"| {attention} | {scoring} | {batch} | {prompt} | "
                + " | ".join(f"{x / 1e6:.0f}" for x in cells)
                + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
