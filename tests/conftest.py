import os

# No test talks to the hub, and none computes on kernels that the user's shell picked.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("ONEDNN_MAX_CPU_ISA", None)

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, settings

from ruitong_lib import schema
from ruitong_lib.testing import Synthetic, synthetic_shards, tiny_model

settings.register_profile(
    "ruitong",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ruitong")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen3", tmp_path_factory.mktemp("tiny") / "tiny-qwen3")


@pytest.fixture(scope="session")
def _synthetic() -> Synthetic:
    cells: list[dict[str, Any]] = [{}, {"noise": 0.05, "hardware": "card-b"}, {"noise": 0.02, "batch_size": 8}]
    return synthetic_shards(cells, n_prompts=12, n_positions=16, vocab=120, seed=1)


@pytest.fixture
def synthetic(_synthetic: Synthetic) -> Synthetic:
    """Three cells: the base, other hardware, another batch size; the shards may be changed in place."""
    return Synthetic(
        [s.copy(deep=True) for s in _synthetic.shards], _synthetic.anchor, _synthetic.log_probs, _synthetic.n_tokens
    )


@pytest.fixture(scope="session")
def pad_positions() -> Any:
    """Lengthen a shard by ``extra`` positions of padding, as an aggregate with a longer cell does."""

    def pad(shard: xr.Dataset, extra: int) -> xr.Dataset:
        padded = shard.drop_vars("position").pad(
            position=(0, extra), constant_values={v.name: v.fill for v in schema.VARIABLES if v.name in shard}
        )
        padded = padded.assign_coords(position=np.arange(padded.sizes["position"], dtype=np.int32))
        return schema.validate(padded)

    return pad


BENCHMARK: dict[str, Any] = {
    "name": "Test table",
    "version": "2026-01-02",
    "supersedes": "",
    "grids": [],
    "published": {},
    "planned": [
        {
            "model": "org/large",
            "hardware": "Card B",
            "axis": "hardware",
            "change": "A → B, bf16",
            "run": "ruitong grid params/large.yml --device npu",
        }
    ],
}


@pytest.fixture(scope="session")
def release_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data file of four cells, and one that was planned and not collected."""
    cells: list[dict[str, Any]] = [
        {},
        {"noise": 0.05, "attention": "eager"},
        {"noise": 0.05, "batch_size": 8},
        {"noise": 0.6, "precision": "w8a8"},
    ]
    shards = synthetic_shards(cells, seed=3).shards
    ds = schema.combine(shards)
    ds.attrs |= {
        "reference": str(shards[0]["cell"].values[0]),
        "grid": "test",
        "not_collected": '{"a.cell": "planned"}',
    }
    return schema.save(ds, tmp_path_factory.mktemp("release") / "ruitong.nc")


@pytest.fixture(scope="session")
def release_folder(release_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release made from that file."""
    from ruitong_lib.report import release

    return release.write(release.build(release_file, BENCHMARK), tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="session")
def benchmark() -> dict[str, Any]:
    """What the test release is made of, beside its data."""
    return BENCHMARK
