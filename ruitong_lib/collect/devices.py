"""Devices: what was asked for, what is here, what it is called, and what has to be set before torch is imported."""

import contextlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruitong_lib.errors import DeviceUnavailableError, RuitongError

if TYPE_CHECKING:
    import torch

# The CPU flags that pick oneDNN's kernels, the strongest first.
_ISA_FLAGS = ("amx_fp16", "amx_bf16", "avx512_fp16", "avx512_bf16", "avx512f", "avx2", "asimd")


def prepare(*, onednn_isa: str) -> None:
    """Set what torch reads only once. Call it before torch is imported.

    oneDNN looks at ``ONEDNN_MAX_CPU_ISA`` at its first operation and never again, so a value that comes too late
    would label numbers with an instruction set that they were not computed with.

    Raises
    ------
    RuitongError
        When torch is already imported under another value.
    """
    present = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    if "torch" in sys.modules and present != onednn_isa:
        raise RuitongError(
            f"onednn_isa={onednn_isa!r} was asked for, but torch is already imported with "
            f"ONEDNN_MAX_CPU_ISA={present!r}, and oneDNN reads it once. Restart the kernel and run this cell first"
        )
    if onednn_isa:
        os.environ["ONEDNN_MAX_CPU_ISA"] = onednn_isa
    else:
        os.environ.pop("ONEDNN_MAX_CPU_ISA", None)


def resolve(device: str) -> "torch.device":
    """Turn the word of a user (``auto``, ``npu``, ``cuda:1``, ``rocm``) into a torch device that is here.

    ROCm builds of torch call their device ``cuda``; ``rocm`` asks for such a build.

    Raises
    ------
    DeviceUnavailableError
        Naming the part that is missing and how to get it; raised before any model is loaded.
    """
    kind, _, index = device.partition(":")
    if kind == "npu":
        _check_npu()
    import torch

    if kind == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    if kind == "cpu":
        return torch.device("cpu")
    name = "cuda" if kind == "rocm" else kind
    module: Any = getattr(torch, name, None)
    if module is None or not module.is_available():
        raise DeviceUnavailableError(_missing(kind, torch))
    if kind == "rocm" and torch.version.hip is None:
        raise DeviceUnavailableError(
            "device 'rocm' needs a ROCm build of torch; this one is built for CUDA: use 'cuda'"
        )
    if kind == "cuda" and torch.version.hip is not None:
        raise DeviceUnavailableError("device 'cuda' is here an AMD card: ask for 'rocm', so that the row says so")
    count = module.device_count()
    if index and int(index) >= count:
        raise DeviceUnavailableError(f"device {device!r} is not here: {kind} has {count} device(s), 0 to {count - 1}")
    return torch.device(f"{name}:{index or 0}")


def _check_npu() -> None:
    """Say which of torch_npu, CANN and the device is missing, without letting a half installation break torch."""
    if importlib.util.find_spec("torch_npu") is None:
        raise DeviceUnavailableError(
            "device 'npu' needs torch_npu, which is not installed. On an Ascend machine with CANN and its driver: "
            "conda env create -f environment-npu.yml (or pip install -e '.[npu]'). No Ascend here: use -p device cpu"
        )
    if "torch" in sys.modules:
        return  # torch loads torch_npu by itself, so it came through
    try:
        import torch  # noqa: F401
    except Exception as e:
        for name in [m for m in sys.modules if m == "torch" or m.startswith(("torch.", "torch_npu"))]:
            del sys.modules[name]
        raise DeviceUnavailableError(
            f"device 'npu': torch_npu is installed, but CANN is not ({type(e).__name__}: {e}). Install the CANN "
            "toolkit and source its set_env.sh; to use torch without it: TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        ) from e


def _missing(kind: str, torch: Any) -> str:
    if kind == "npu":
        return (
            "device 'npu': torch_npu and CANN load, but no device is visible. Check npu-smi info, the driver, "
            "ASCEND_RT_VISIBLE_DEVICES and the container's /dev/davinci*"
        )
    build = f"torch {torch.__version__} is built for " + (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU only"
    )
    tool = {"cuda": "nvidia-smi", "rocm": "rocminfo", "xpu": "xpu-smi", "mps": "an Apple-silicon Mac"}[kind]
    advice = f"Check {tool} and install the matching build of torch; or use -p device cpu"
    return f"device {kind!r} is not here: {build}. {advice}"


def hardware(device: str) -> str:
    """Return the label of the hardware: the card's name from its driver, or the CPU's model and instruction set.

    For a CPU torch is not imported.
    """
    if device.partition(":")[0] == "cpu":
        return cpu_label()
    found = resolve(device)
    if found.type == "cpu":
        return cpu_label()
    import torch

    module: Any = torch.get_device_module(found)
    return str(module.get_device_name(found)) if hasattr(module, "get_device_name") else found.type


def cpu_label() -> str:
    """Return the CPU's model and its strongest instruction set, e.g. ``Intel Xeon Processor (amx_bf16)``."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.M)
    model = found.group(1) if found else platform.processor() or platform.machine()
    model = re.sub(r"\((?:R|TM|tm|r)\)|@.*$|\bCPU\b", "", model)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    present = set(flags.group(1).split()) if flags else set()
    isa = next((f for f in _ISA_FLAGS if f in present), "")
    return " ".join(model.split()) + (f" ({isa})" if isa else "")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def threads(n: int) -> Iterator[int]:
    """Run torch on ``n`` CPU threads (0: one a core) and put the old number back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n or cores())
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def synchronize(device: "torch.device") -> None:
    """Wait until the device has done what it was given, so that a clock tells the truth."""
    if device.type != "cpu":
        import torch

        module: Any = torch.get_device_module(device)
        module.synchronize()
