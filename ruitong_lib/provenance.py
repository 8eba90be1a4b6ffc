"""What ran: versions, hardware, flags, environment and hashes, as one JSON-able dict."""

import datetime
import functools
import hashlib
import json
import os
import platform
import subprocess
from importlib import metadata
from typing import Any

from ruitong_lib.paths import ROOT

PACKAGES = (
    "ruitong", "torch", "torch_npu", "transformers", "torchao", "accelerate", "tokenizers", "numpy", "scipy", "xarray",
    "h5netcdf", "papermill",
)  # fmt: skip
# Variables that change numbers; anything else of the environment stays private.
ENVIRONMENT = (
    "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "OPENBLAS_CORETYPE", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC", "ATB_MATMUL_SHUFFLE_K_ENABLE",
    "ATB_LLM_LCOC_ENABLE", "ASCEND_LAUNCH_BLOCKING", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "MIOPEN_FIND_MODE", "MIOPEN_DEBUG_CONV_DETERMINISTIC", "TORCH_BLAS_PREFER_HIPBLASLT", "PYTORCH_TUNABLEOP_ENABLED",
)  # fmt: skip


def software() -> dict[str, Any]:
    """Return versions of what computes and stores, and the state of this repository. No host name, no path."""
    return {
        "packages": {p: v for p in PACKAGES if (v := version(p))},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "git": git_state(),
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def version(package: str) -> str:
    """Return an installed package's version, or an empty string."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def git_state() -> dict[str, Any]:
    """Return the commit of the repository and whether files were changed since; empty outside a repository."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain", "-uno").strip())}
    except (OSError, subprocess.SubprocessError):
        return {}


def torch_flags() -> dict[str, Any]:
    """Return the switches of torch that change numbers, and the environment's."""
    import torch

    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def matmul_sha256(device: Any) -> str:
    """Hash a fixed bf16 matrix product on a device: it tells kernels apart that report the same capability.

    The inputs are integers from a linear congruence, so they do not depend on a random generator. The inner length
    of 1,536 gives sums whose rounding depends on the order of accumulation.
    """
    import torch

    n = torch.arange(256 * 1536, dtype=torch.int64)
    a = (((n * 1103515245 + 12345) % 65536).double() / 65536 - 0.5).reshape(256, 1536)
    b = (((n * 69069 + 1) % 65536).double() / 65536 - 0.5).reshape(1536, 256)
    product = a.to(device, torch.bfloat16) @ b.to(device, torch.bfloat16)
    return hashlib.sha256(product.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def to_json(found: dict[str, Any]) -> str:
    """Return provenance as one ASCII JSON string: netCDF attributes hold no dict, None or bool."""
    return json.dumps(found, ensure_ascii=True, sort_keys=True)
