"""Peak memory above the model, 64 prompts × 512 tokens at V = 151,936: python benchmarks/memory.py [--prompts 64]."""

import argparse
import json
import resource
import tempfile
from pathlib import Path

from ruitong_lib.cell import Cell
from ruitong_lib.collect import models
from ruitong_lib.collect.transformers import collect
from ruitong_lib.measure.compare import compare
from ruitong_lib.testing import tiny_model


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("qwen3", Path(folder) / "tiny", vocab_size=151_936)
        prompts = Path(folder) / "prompts.jsonl"
        rows = [
            json.dumps({"id": f"p{i}", "text": f"Count to {i} and tell what you saw."}) for i in range(options.prompts)
        ]
        prompts.write_text("\n".join(rows), encoding="utf-8")
        cell = Cell(
            model=str(model), prompts=str(prompts), precision="fp32", scoring="both", batch_size=options.batch_size,
            max_new_tokens=options.tokens,
        )  # fmt: skip
        models.load(cell)
        loaded = peak()
        shard = collect(cell)
        collected = peak()
        compare(shard, shard.assign_coords(cell=["again"]))
        compared = peak()
    n = int(shard["n_tokens"].sum())
    print(f"{n} positions; model {loaded:.2f} GiB")
    print(f"above it: decode and replay {collected - loaded:.2f} GiB, then compare {compared - loaded:.2f} GiB")


if __name__ == "__main__":
    main()
