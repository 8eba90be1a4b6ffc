"""How tight the k = 20 KL bound is on the embedded model: python benchmarks/kl_bound.py [--prompts core-16]."""

import argparse
import tempfile

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ruitong_lib.cell import Cell
from ruitong_lib.collect import models, run_cell
from ruitong_lib.measure.compare import compare
from ruitong_lib.prompts import load_prompts, render


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", default="core-16")
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as outputs:
        base = {"prompts": options.prompts, "max_new_tokens": options.tokens, "outputs": outputs}
        path, anchor = run_cell(Cell(precision="fp32", scoring="both", **base), progress=False)
        _, other = run_cell(Cell(precision="bf16", anchor=str(path), **base), progress=False)
    bound = compare(anchor, other).positions["kl"].values
    folder = models.embedded_folder()
    rows = render(load_prompts(options.prompts).prompts, AutoTokenizer.from_pretrained(folder))
    sides = [AutoModelForCausalLM.from_pretrained(folder, dtype=d).eval() for d in (torch.float32, torch.bfloat16)]
    replayed = anchor.isel(cell=0).sel(scoring="replay")
    exact = np.full_like(bound, np.nan)
    for i, ids in enumerate(rows):
        n = int(replayed["n_tokens"][i])
        text = torch.tensor([ids + replayed["token_id"].values[i, : n - 1].tolist()])
        with torch.inference_mode():
            hidden = [
                m.get_decoder()(input_ids=text, use_cache=False).last_hidden_state[0, len(ids) - 1 :] for m in sides
            ]
            heads = zip(sides, hidden, strict=True)
            p, q = (m.get_output_embeddings()(h).double().log_softmax(-1) for m, h in heads)
        exact[i, :n] = (((p.exp() - q.exp()) * (p - q)).sum(-1) / 2).numpy()
    known = np.isfinite(bound)
    above = int((bound[known] > exact[known] * (1 + 1e-6) + 1e-9).sum())
    tight = np.nansum(bound) / np.nansum(exact)
    print(f"{known.sum()} positions: bound above the exact KL at {above}; Σ bound / Σ exact = {tight:.4f}")


if __name__ == "__main__":
    main()
