"""How tight the k = 20 KL bound is on the embedded model: python benchmarks/kl_bound.py [--prompts core-16]."""

import argparse
import tempfile

import numpy as np

from ruitong_lib.cell import Cell
from ruitong_lib.collect import models, run_cell
from ruitong_lib.measure.compare import compare
from ruitong_lib.testing import exact_kl


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
    exact = exact_kl(anchor, models.embedded_folder(), options.prompts)[:, : bound.shape[1]]
    known = np.isfinite(bound)
    above = int((bound[known] > exact[known] * (1 + 1e-6) + 1e-9).sum())
    tight = np.nansum(bound) / np.nansum(exact)
    print(f"{known.sum()} positions: bound above the exact KL at {above}; Σ bound / Σ exact = {tight:.4f}")


if __name__ == "__main__":
    main()
