"""The cell of a served model: what it needs, what it refuses, and what its key holds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ruitong_lib import RuitongError
from ruitong_lib.cell import SERVERS_OWN, Cell
from ruitong_lib.collect import shard_path

Make = Callable[..., Cell]
WHERE = {"hardware": "h", "anchor": ""}


@pytest.mark.parametrize("name", ["base_url", "hardware"])
def test_what_it_needs(cell: Make, name: str) -> None:
    with pytest.raises(RuitongError, match=f"engine='endpoint' needs {name}"):
        cell(**{name: ""})


@pytest.mark.parametrize("name", ["base_url", "served_model", "api_key_env", "hardware"])
def test_other_engines_take_none_of_its_fields(name: str) -> None:
    with pytest.raises(RuitongError, match=f"{name} is for engine='endpoint'"):
        Cell(scoring="both", **{name: "X"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention", "eager"), ("onednn_isa", "AVX2"), ("deterministic", True), ("max_memory", "auto"), ("threads", 2),
     ("checkpoint", "org/quantised")],
)  # fmt: skip
def test_what_a_server_decides_cannot_be_set_from_here(cell: Make, name: str, value: Any) -> None:
    assert name in SERVERS_OWN
    more = {"precision": "w8a8"} if name == "checkpoint" else {}
    with pytest.raises(RuitongError, match=f"{name}=.*cannot be set on a server"):
        cell(**{name: value, **more})


def test_the_key_knows_no_address_and_no_device_of_ours(cell: Make) -> None:
    base = cell()
    for name, value in (("base_url", "http://b.test/v1"), ("api_key_env", "A_KEY"), ("device", "npu")):
        assert dataclasses.replace(base, **{name: value}).key(**WHERE) == base.key(**WHERE)
    for name, value in (("served_model", "b"), ("batch_size", 8), ("repeat", 1), ("precision", "fp16")):
        assert dataclasses.replace(base, **{name: value}).key(**WHERE) != base.key(**WHERE)


def test_the_label_carries_the_declared_hardware(cell: Make) -> None:
    assert ".card-a.bf16.b1." in shard_path(cell()).name


@pytest.mark.parametrize("value", ["sk-abc-def", "a b", "1KEY", "x" * 80])
def test_a_variables_name_is_one(cell: Make, value: str) -> None:
    with pytest.raises(RuitongError, match="name of an environment variable") as e:
        cell(api_key_env=value)
    assert value not in str(e.value)


def test_a_local_folder_as_model_stays_out_of_the_manifest(cell: Make, folder: Path) -> None:
    assert cell().manifest()["model"] == folder.name
