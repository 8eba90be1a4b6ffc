"""run_cell.ipynb as it is, on the simulated device: the command that a user with an Ascend card types."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.paths import NOTEBOOKS, ROOT


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "three.jsonl"
    texts = ("List three metals.", "同一个模型，不同的加速器：答案会改变多少？", "def add(a, b):")
    rows = [json.dumps({"id": f"p{i}", "text": t}, ensure_ascii=False) for i, t in enumerate(texts)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def run_cell(env: dict[str, str], outputs: Path, **given: Any) -> subprocess.CompletedProcess[str]:
    parameters = [x for name, value in given.items() for x in ("-p", name, str(value))]
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", str(NOTEBOOKS / "run_cell.ipynb")]
    command += [str(outputs / "executed.ipynb"), "-p", "outputs", str(outputs), *parameters]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def given(tiny_folder: Path, prompts: Path) -> dict[str, Any]:
    common = {"model": tiny_folder, "prompts": prompts, "attention": "eager", "scoring": "both", "threads": 1}
    return common | {"batch_size": 2, "max_new_tokens": 6}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_npu_run_cell(sim_npu: dict[str, str], given: dict[str, Any], tmp_path: Path, precision: str) -> None:
    done = run_cell(sim_npu, tmp_path, **given, precision=precision, device="npu")
    assert done.returncode == 0, done.stderr[-3000:]

    executed = json.loads((tmp_path / "executed.ipynb").read_text(encoding="utf-8"))
    assert executed["metadata"]["papermill"]["parameters"]["device"] == "npu"
    injected = [
        "".join(c["source"]) for c in executed["cells"] if "injected-parameters" in c["metadata"].get("tags", [])
    ]
    assert 'device = "npu"' in injected[0]

    (path,) = (tmp_path / "cells").glob("*.nc")
    npu = schema.load(path)
    found = schema.provenance(npu)
    assert npu["device"].item() == "npu"
    assert npu["hardware"].item() == "Simulated NPU (64 GB)"
    assert found["device"] == "npu:0"
    assert found["packages"]["torch_npu"] == "0+simulated"
    driver = found["driver"]["properties"]
    assert driver["operators"] > 1000  # of a whole decode and replay: it ran there
    assert driver["synchronizations"] >= 4  # before and after each pass, or the speed is a fiction
    assert "uuid" not in driver
    size = {"fp32": 4, "bf16": 2, "fp16": 2}[precision]
    assert found["n_parameters"] * size <= found["memory_bytes"]["model"] < 1.2 * found["n_parameters"] * size
    assert found["memory_bytes"]["peak"] > found["memory_bytes"]["model"]
    assert all(t["tokens_per_second"] > 0 for t in found["timing"].values() if "tokens_per_second" in t)

    cpu = on_cpu(given, precision)
    assert sorted(map(str, npu.data_vars)) == sorted(map(str, cpu.data_vars))
    for name in set(npu.data_vars) - {"provenance"}:
        a, b = npu[name].values, cpu[name].values
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if a.dtype.kind == "f":
            a, b = a.view(np.int32), b.view(np.int32)  # bit for bit, NaN too
        np.testing.assert_array_equal(a, b, err_msg=str(name))
    assert (npu["state"] == 0).all()


def on_cpu(given: dict[str, Any], precision: str) -> xr.Dataset:
    from ruitong_lib.cell import Cell
    from ruitong_lib.collect.transformers import collect

    values = {n: str(v) if isinstance(v, Path) else v for n, v in given.items()}
    return collect(Cell(**values, precision=precision))


CODE = """
import json, sys
from ruitong_lib import RuitongError
from ruitong_lib.cell import Cell
from ruitong_lib.collect import run_cell
for cell in json.loads(sys.argv[1]):
    try:
        run_cell(Cell(**cell), progress=False)
    except RuitongError as e:
        print(e)
"""


def in_library(env: dict[str, str], given: dict[str, Any], *cells: dict[str, Any]) -> list[str]:
    """Run cells one after another in one new process; return what they were refused with."""
    base = {n: str(v) if isinstance(v, Path) else v for n, v in given.items()}
    command = [sys.executable, "-c", CODE, json.dumps([{**base, **c} for c in cells])]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_npu_deterministic_and_refusals(sim_npu: dict[str, str], given: dict[str, Any], tmp_path: Path) -> None:
    # as a user's shell may have them: one is as good, one is not
    env = sim_npu | {"HCCL_DETERMINISTIC": "strict", "ATB_LLM_LCOC_ENABLE": "1"}
    cell = {"precision": "bf16", "device": "npu:1", "outputs": str(tmp_path)}
    refused = {
        # no longer what it says: the libraries have read the variables of the cell before
        "deterministic=False was asked for, which needs ATB_LLM_LCOC_ENABLE=''": {"deterministic": False},
        "precision 'tf32' needs a device that multiplies float32 in TF32": {"precision": "tf32"},
        "precision 'fp64' is not computed on Simulated NPU": {"precision": "fp64"},
        "device 'npu:2' is not here: npu has 2 device(s), 0 to 1": {"device": "npu:2"},
    }
    nothing = {**cell, "model": str(tmp_path), "deterministic": True}  # refused before a model is looked for
    said = in_library(env, given, {**cell, "deterministic": True}, *[{**nothing, **more} for more in refused.values()])
    for line, message in zip(said, refused, strict=True):
        assert message in line
    (path,) = (tmp_path / "cells").glob("*.nc")
    ds = schema.load(path)
    found = schema.provenance(ds)
    assert ds["deterministic"].item() is True
    assert found["device"] == "npu:1"
    assert found["memory_bytes"]["peak"] > 0
    assert found["flags"]["deterministic_algorithms"] is True
    assert found["flags"]["npu"] == {"matmul.allow_hf32": False, "conv.allow_hf32": False}
    wanted = {"HCCL_DETERMINISTIC": "strict", "LCCL_DETERMINISTIC": "1", "CLOSE_MATMUL_K_SHIFT": "1"}
    wanted |= {"ATB_MATMUL_SHUFFLE_K_ENABLE": "0", "ATB_LLM_LCOC_ENABLE": "0"}
    assert wanted.items() <= found["flags"]["environment"].items()
    plain = on_cpu(given, "bf16")
    np.testing.assert_array_equal(ds["token_id"].values, plain["token_id"].values)
