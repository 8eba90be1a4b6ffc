"""The simulated ``npu`` device, compiled once and put on ``PYTHONPATH``; nothing here is known to ruitong_lib."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SIM = Path(__file__).parent / "sim"


def distribution(folder: Path, version: str) -> None:
    """Make a folder on PYTHONPATH look as if pip had installed torch_npu there, autoload entry point and all."""
    info = folder / f"torch_npu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


@pytest.fixture(scope="session")
def sim_npu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that has the simulated device. Compiling takes half a minute, once a torch release."""
    import torch
    from torch.utils import cpp_extension

    source = SIM / "sim_npu.cpp"
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = request.config.cache.mkdir(f"sim-npu-{key}") / "sim_npu.so"
    if not library.is_file():
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            pytest.fail("the simulated npu needs a C++20 compiler: install g++, or set CXX")
        made = library.with_suffix(f".{os.getpid()}.so")
        command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", str(source), "-o", str(made)]
        command += [f"-I{p}" for p in cpp_extension.include_paths()]
        command += [f"-L{p}" for p in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.fail(f"the simulated npu does not compile:\n{done.stderr[-3000:]}")
        os.replace(made, library)
    folder = tmp_path_factory.mktemp("sim-npu")
    shutil.copytree(SIM / "torch_npu", folder / "torch_npu")
    shutil.copy(library, folder / "torch_npu" / "sim_npu.so")
    distribution(folder, "0+simulated")
    return environment(folder)


@pytest.fixture(scope="session")
def no_cann(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that has a torch_npu without CANN, loaded by torch's own entry point."""
    folder = tmp_path_factory.mktemp("no-cann")
    (folder / "torch_npu").mkdir()
    message = "libhccl.so: cannot open shared object file: No such file or directory"
    (folder / "torch_npu" / "__init__.py").write_text(f"import torch\nraise ImportError({message!r})\n")
    distribution(folder, "2.13.0")
    return environment(folder)
