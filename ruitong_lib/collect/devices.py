"""Devices: what was asked for, what is here, what the driver calls it, and the switches that change its numbers."""

import contextlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruitong_lib.errors import DeviceUnavailableError, RuitongError

if TYPE_CHECKING:
    import torch

_ISA = "ONEDNN_MAX_CPU_ISA"
# The CPU flags that pick oneDNN's kernels, the strongest first.
_ISA_FLAGS = ("amx_fp16", "amx_bf16", "avx512_fp16", "avx512_bf16", "avx512f", "avx2", "sve2", "sve", "asimd")
# Usual memory sizes in GiB. A driver keeps some for itself, more or less from release to release, so the label takes
# the smallest size that holds what the driver reports: 79.1 and 79.6 GiB are both the 80 GB card.
_SIZES = (4, 5, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 128, 141, 144, 180, 192, 256, 288)
# What `deterministic` sets before torch starts, because the libraries read it once. The first value is set; the others
# are as good. CPU kernels need nothing: reruns are bit-exact there, and the ladder of floors measures it.
_ONCE: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8")},
    "rocm": {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8")},  # hipBLAS reads it too
    "npu": {
        "HCCL_DETERMINISTIC": ("true", "True", "TRUE", "strict"),
        "LCCL_DETERMINISTIC": ("1",),
        "CLOSE_MATMUL_K_SHIFT": ("1",),
        "ATB_MATMUL_SHUFFLE_K_ENABLE": ("0",),
        "ATB_LLM_LCOC_ENABLE": ("0",),
    },
}
_broken: list[str] = []  # why torch could not be imported in this process
_set_here: set[str] = set()  # names of _ONCE that an earlier deterministic cell set in this process


def prepare(*, onednn_isa: str, device: str = "cpu", deterministic: bool = False) -> None:
    """Set what torch and its libraries read only once. Call it before torch is imported.

    oneDNN looks at ``ONEDNN_MAX_CPU_ISA`` at its first operation and never again, so a value that comes too late
    would label numbers with an instruction set that they were not computed with. The variables of a deterministic run
    are no different. They stay set: taking them back would hide what the libraries have read.

    Raises
    ------
    RuitongError
        When torch is already imported under another value.
    """
    kind = device.partition(":")[0]
    if kind == "auto" and "torch" in sys.modules:
        kind = kind_of(resolve(device))
    wanted: dict[str, tuple[str, ...]] = {_ISA: (onednn_isa,)}
    if deterministic:
        for values in _ONCE.values() if kind == "auto" else [_ONCE.get(kind, {})]:
            wanted |= values
    else:
        wanted |= dict.fromkeys(sorted(_set_here), ("",))
    other = {name: values[0] for name, values in wanted.items() if os.environ.get(name, "") not in values}
    for name, value in other.items():
        if "torch" in sys.modules:
            asked = f"onednn_isa={onednn_isa!r}" if name == _ISA else f"deterministic={deterministic}"
            raise RuitongError(
                f"{asked} was asked for, which needs {name}={value!r}, but torch is already imported with "
                f"{name}={os.environ.get(name, '')!r}, and it is read once. Restart the kernel and run this cell first"
            )
        if value:
            os.environ[name] = value
            _set_here.update({name} - {_ISA})
        else:
            os.environ.pop(name, None)
            _set_here.discard(name)


def resolve(device: str) -> "torch.device":
    """Turn the word of a user (``auto``, ``npu``, ``cuda:1``, ``rocm``) into a torch device that is here.

    ROCm builds of torch call their device ``cuda``; ``rocm`` asks for such a build.

    Raises
    ------
    DeviceUnavailableError
        Naming the part that is missing and how to get it; raised before any model is loaded.
    """
    kind, _, index = device.partition(":")
    torch = _import_torch(kind)
    if kind == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if found is None else torch.device(found.type, 0)  # type: ignore[no-any-return]
    if kind == "cpu":
        return torch.device("cpu")  # type: ignore[no-any-return]
    name = "cuda" if kind == "rocm" else kind
    module = _module(name)
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
    return torch.device(f"{name}:{index or 0}")  # type: ignore[no-any-return]


def kind_of(device: "torch.device") -> str:
    """Return a device's kind in the words of a cell: torch's type, but ``rocm`` for the ``cuda`` of a ROCm build."""
    import torch

    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


def _module(name: str) -> Any:
    import torch

    try:
        return torch.get_device_module(name)
    except RuntimeError:  # torch has no such backend
        return None


def _import_torch(kind: str) -> Any:
    """Import torch; where a half-installed torch_npu breaks that, say which of torch_npu and CANN is missing."""
    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        raise DeviceUnavailableError(
            "device 'npu' needs torch_npu, which is not installed. On an Ascend machine with CANN and its driver: "
            "conda env create -f environment-npu.yml (or pip install -e '.[npu]'). No Ascend here: use -p device cpu"
        )
    try:
        if _broken:  # half a torch is left behind, and a second import would complain about that instead
            raise ImportError(_broken[0])
        import torch
    except Exception as e:
        if importlib.util.find_spec("torch_npu") is None:
            raise
        if not _broken:
            _broken.append(f"{type(e.__cause__ or e).__name__}: {e.__cause__ or e}")
        raise DeviceUnavailableError(f"device {kind!r}: {_no_cann(_broken[0])}") from e
    return torch


def _no_cann(message: str) -> str:
    return (
        f"torch_npu is installed, but it cannot be loaded ({message}), and it breaks 'import torch' with it. For an "
        "Ascend device: install the CANN toolkit and source its set_env.sh. To use this machine without one: pip "
        "uninstall torch-npu, or another environment (TORCH_DEVICE_BACKEND_AUTOLOAD=0 lets torch import, but "
        "transformers asks for torch_npu again)"
    )


def npu_problem() -> str:
    """Say why torch_npu cannot be loaded here, or return an empty string.

    A failed import leaves half a torch behind, which no second import can mend, so it is tried in another process.
    """
    asked = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    if not asked or "torch" in sys.modules or importlib.util.find_spec("torch_npu") is None:
        return ""
    code = "try:\n import torch\nexcept Exception as e:\n c = e.__cause__ or e\n print(f'{type(c).__name__}: {c}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found = done.stdout.strip() or ("" if done.returncode == 0 else f"exit code {done.returncode}")
    return _no_cann(found) if found else ""


def _missing(kind: str, torch: Any) -> str:
    if kind == "npu":
        if _module("npu") is None:
            return (
                "device 'npu': torch_npu is installed, but torch did not load it, because "
                f"TORCH_DEVICE_BACKEND_AUTOLOAD={os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD', '')}: unset it"
            )
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
    tool = {"cuda": "nvidia-smi", "rocm": "rocminfo", "xpu": "xpu-smi"}.get(kind)
    advice = f"Check {tool} and install the matching build of torch" if tool else "It needs an Apple-silicon Mac"
    return f"device {kind!r} is not here: {build}. {advice}; or use -p device cpu"


def hardware(device: str) -> str:
    """Return the label of the hardware: the card's name, memory and architecture, or the CPU's model and ISA.

    For a CPU torch is not imported.
    """
    if device.partition(":")[0] == "cpu":
        return cpu_label()
    return label(resolve(device))


def label(device: "torch.device") -> str:
    """Return a device's label from what its driver says, e.g. ``NVIDIA A100-SXM4-40GB (40 GB, sm_80)``.

    Name and memory tell SKUs apart, so Ascend910B1 to B4 and the two sizes of an A100 are different hardware.
    """
    if device.type == "cpu":
        return cpu_label()
    facts = driver(device)
    found = facts["properties"]
    arch = str(found.get("gcnArchName") or "").partition(":")[0] if facts["kind"] == "rocm" else ""
    name = " ".join(re.sub(r"\((?:R|TM)\)", "", str(facts["name"])).split()) or arch or facts["kind"]
    parts = []
    if name.startswith("Ascend910_93"):
        parts.append("910C")  # the driver's names of this SKU are numbers only
    gib = (found.get("total_memory") or 0) / 2**30
    if gib:
        parts.append(f"{next((s for s in _SIZES if gib <= s), round(gib))} GB")
    if facts["kind"] == "cuda" and found.get("major"):
        parts.append(f"sm_{found['major']}{found['minor']}")
    parts += [p for p in [arch] if p and p != name]
    return name + (f" ({', '.join(parts)})" if parts else "")


def driver(device: "torch.device") -> dict[str, Any]:
    """Return all that the driver says about a device, for the manifest; serial numbers and bus addresses left out."""
    import torch

    module, kind = _module(device.type), kind_of(device)
    found: dict[str, Any] = {"kind": kind, "name": "", "properties": {}, "driver": _driver_version(kind)}
    if kind == "mps":
        found["name"], found["cores"] = torch.backends.mps.get_name(), torch.backends.mps.get_core_count()
    if hasattr(module, "get_device_properties"):
        found["properties"] = _plain(module.get_device_properties(device))
    if hasattr(module, "get_device_name"):
        found["name"] = str(module.get_device_name(device)).strip()
    found["name"] = found["name"] or str(found["properties"].get("name") or "").strip()
    return found


def _plain(properties: Any) -> dict[str, Any]:
    out = {}
    for name in dir(properties):
        if name.startswith(("_", "pci_")) or "uuid" in name or "luid" in name:
            continue
        with contextlib.suppress(Exception):  # a field that this driver does not fill may raise anything
            value = getattr(properties, name)
            if not callable(value):
                out[name] = value if isinstance(value, str | int | float | bool | None) else str(value)
    return out


def _driver_version(kind: str) -> dict[str, str]:
    """Return versions of the driver and of the vendor's libraries, as far as they can be read."""
    if kind == "npu":
        with contextlib.suppress(Exception):  # older releases of torch_npu have no such function
            from torch_npu.npu.utils import get_cann_version

            return {part.lower(): str(get_cann_version(part)) for part in ("CANN", "DRIVER")}
        return {}
    file = {"cuda": "/proc/driver/nvidia/version", "rocm": "/sys/module/amdgpu/version"}.get(kind, "")
    text = Path(file).read_text(encoding="utf-8", errors="replace") if file and Path(file).is_file() else ""
    number = re.search(r"\d+(?:\.\d+)+", text)
    return {"kernel_module": number.group()} if number else {}


def cpu_label() -> str:
    """Return the CPU's model and its strongest instruction set, e.g. ``Intel Xeon Processor (amx_bf16)``."""
    facts = cpu_facts()
    return str(facts["model"]) + (f" ({facts['isa'][0]})" if facts["isa"] else "")


def cpu_facts() -> dict[str, Any]:
    """Return the CPU's model, the instruction sets that pick its kernels (strongest first), and the cores to use."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""

    def field(names: str) -> str:
        found = re.search(rf"^(?:{names})\s*:\s*(.+)$", text, re.M)
        return found.group(1) if found else ""

    arm = "/".join(filter(None, (field("CPU implementer"), field("CPU part"))))  # many ARM kernels print no name
    model = field("model name|Model") or " ".join(filter(None, (platform.processor() or platform.machine(), arm)))
    model = re.sub(r"\((?:R|TM|tm|r)\)|@.*$|\bCPU\b", "", model)
    present = set(field("flags|Features").split())
    return {"model": " ".join(model.split()), "isa": [f for f in _ISA_FLAGS if f in present], "cores": cores()}


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

        torch.accelerator.synchronize(device)


def reset_peak_memory(device: "torch.device") -> None:
    """Start a new measurement of :func:`memory`."""
    module = _module(device.type)
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def memory(device: "torch.device") -> dict[str, int]:
    """Return the bytes that tensors hold on a device now and held at most; empty where no allocator counts (CPU)."""
    module = _module(device.type)
    names = {"allocated": "memory_allocated", "peak": "max_memory_allocated"}
    return {n: int(getattr(module, f)(device)) for n, f in names.items() if device.type != "cpu" and hasattr(module, f)}
