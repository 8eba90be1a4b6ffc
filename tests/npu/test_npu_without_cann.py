"""torch_npu installed where CANN is not: 'import torch' itself fails, and Ruitong explains instead of dying."""

import subprocess
import sys
from pathlib import Path

from ruitong_lib.paths import NOTEBOOKS, ROOT

# What torch_npu 2.13.0 says on a machine without CANN; the fixture raises it.
MESSAGE = "libhccl.so: cannot open shared object file: No such file or directory"
CANNOT = f"torch_npu is installed, but it cannot be loaded (ImportError: {MESSAGE})"


def run(env: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_npu_doctor_explains(no_cann: dict[str, str]) -> None:
    broken = run(no_cann, "-c", "import torch")
    assert "Failed to load the backend extension: torch_npu" in broken.stderr  # what everybody else shows
    done = run(no_cann, "-m", "ruitong_lib.cli", "doctor")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert f"absent   npu                      torch_npu 2.13.0\n         → {CANNOT}" in done.stdout
    for advice in ("set_env.sh", "pip uninstall torch-npu", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert advice in done.stdout
    assert "threads; ISA " in done.stdout  # torch was loaded without it, so the rest of the machine is seen
    assert "device 'cuda' is not here" in done.stdout or "ok       cuda" in done.stdout


def test_npu_cell_explains(no_cann: dict[str, str], tmp_path: Path) -> None:
    notebook = [str(NOTEBOOKS / "run_cell.ipynb"), str(tmp_path / "out.ipynb")]
    done = run(no_cann, "-m", "papermill", "--no-progress-bar", *notebook, "-p", "device", "npu")
    assert done.returncode == 1
    assert f"DeviceUnavailableError: device 'npu': {CANNOT}" in done.stderr


def test_npu_problem_touches_no_other_device_in_silence(no_cann: dict[str, str]) -> None:
    code = (
        "from ruitong_lib import RuitongError\nfrom ruitong_lib.collect import devices\n"
        "for kind in ('npu', 'cpu', 'auto'):\n"
        "    try:\n        devices.resolve(kind)\n"
        "    except RuitongError as e:\n        print(e)\n"
    )
    done = run(no_cann, "-c", code)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    for kind, line in zip(("npu", "cpu", "auto"), lines, strict=True):
        assert line.startswith(f"device '{kind}': {CANNOT}")


def test_npu_not_loaded_by_choice(no_cann: dict[str, str]) -> None:
    env = no_cann | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    code = (
        "from ruitong_lib.collect import devices\n"
        "try:\n    devices.resolve('npu')\nexcept ValueError as e:\n    print(e)\n"
    )
    assert "torch did not load it, because TORCH_DEVICE_BACKEND_AUTOLOAD=0: unset it" in run(env, "-c", code).stdout
