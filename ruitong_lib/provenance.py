"""What ran: versions, hardware, flags, environment and hashes, as one JSON-able dict."""

import datetime
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
from importlib import metadata
from typing import Any

from ruitong_lib.paths import ROOT

PACKAGES = (
    "ruitong", "torch", "torch_npu", "transformers", "torchao", "accelerate", "tokenizers", "numpy", "scipy", "xarray",
    "h5netcdf", "papermill", "compressed-tensors",
)  # fmt: skip
# Variables that change numbers; anything else of the environment stays private, and so does a value that is a path.
ENVIRONMENT = (
    # CPU
    "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_MAX_CPU_ISA",
    "DNNL_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS",
    "MKL_DYNAMIC", "MKL_DEBUG_CPU_TYPE", "OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_SCHEDULE", "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS", "KMP_DETERMINISTIC_REDUCTION",
    # CUDA
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_LINALG_PREFER_CUSOLVER", "TORCH_CUDNN_V8_API_DISABLED",
    "TORCH_CUDNN_SDPA_ENABLED", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "NCCL_ALGO", "NCCL_PROTO",
    # ROCm
    "HIP_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "HIPBLASLT_ALLOW_TF32", "HIPBLASLT_TENSILE_LIBPATH",
    "HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG", "ROCBLAS_USE_HIPBLASLT", "ROCBLAS_DEFAULT_ATOMICS_MODE",
    "ROCBLAS_INTERNAL_FP16_ALT_IMPL", "ROCBLAS_TENSILE_LIBPATH", "TORCH_BLAS_PREFER_HIPBLASLT",
    "DISABLE_ADDMM_HIP_LT", "TORCH_ROCM_FA_PREFER_CK", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "MIOPEN_FIND_MODE",
    "MIOPEN_FIND_ENFORCE", "MIOPEN_DEBUG_CONV_DETERMINISTIC", "MIOPEN_DEBUG_CONV_GEMM", "MIOPEN_DEBUG_CONV_WINOGRAD",
    "MIOPEN_DEBUG_CONVOLUTION_ATTRIB_FP16_ALT_IMPL", "PYTORCH_MIOPEN_SUGGEST_NHWC",
    # Ascend
    "HCCL_DETERMINISTIC", "HCCL_ALGO", "HCCL_OP_EXPANSION_MODE", "LCCL_DETERMINISTIC", "CLOSE_MATMUL_K_SHIFT",
    "ATB_MATMUL_SHUFFLE_K_ENABLE", "ATB_LLM_LCOC_ENABLE", "ASCEND_LAUNCH_BLOCKING", "ASCEND_RT_VISIBLE_DEVICES",
    "TASK_QUEUE_ENABLE", "INF_NAN_MODE_ENABLE", "INF_NAN_MODE_FORCE_DISABLE", "ACL_OP_DETERMINISTIC",
    "ACL_PRECISION_MODE", "TORCH_NPU_USE_COMPATIBLE_IMPL",
    # torch
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_TUNABLEOP_TUNING",
    "PYTORCH_TUNABLEOP_NUMERICAL_CHECK", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF",
    "PYTORCH_MPS_FAST_MATH", "PYTORCH_MPS_PREFER_METAL", "PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_JIT",
    "PYTORCH_NVFUSER_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE",
)  # fmt: skip
_SERIAL = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}")  # CUDA_VISIBLE_DEVICES may name cards by serial number


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

    b: Any = torch.backends
    matmul = b.cuda.matmul
    reductions = [f"allow_{kind}_reduced_precision_reduction{s}" for kind in ("fp16", "bf16") for s in ("", "_split_k")]
    return {
        # The getters of the older switches fail where both kinds were used; these always answer.
        "float32_precision": {
            "all": b.fp32_precision,
            "cuda.matmul": matmul.fp32_precision,
            "mkldnn.matmul": b.mkldnn.matmul.fp32_precision,
            "cudnn.conv": b.cudnn.conv.fp32_precision,
            "cudnn.rnn": b.cudnn.rnn.fp32_precision,
        },
        "cuda.matmul": {n: getattr(matmul, n, None) for n in (*reductions, "allow_fp16_accumulation")},
        "cuda.sdp": {
            n: getattr(b.cuda, f"{n}_enabled")() for n in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
        }
        | {"fp16_bf16_reduction_math": b.cuda.fp16_bf16_reduction_math_sdp_allowed()},
        "cuda.blas_library": str(b.cuda.preferred_blas_library()),
        "cudnn": {n: getattr(b.cudnn, n) for n in ("enabled", "deterministic", "benchmark")},
        "npu": _npu_flags(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()),
        "mkldnn": bool(b.mkldnn.enabled),
        "cpu_capability": b.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "cudnn_version": b.cudnn.version() if b.cudnn.is_available() else None,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "environment": environment(),
    }


def _npu_flags() -> dict[str, Any]:
    import torch

    npu = getattr(torch, "npu", None)
    parts: list[tuple[str, Any]] = [(n, getattr(npu, n, None)) for n in ("matmul", "conv")]
    return {f"{n}.allow_hf32": p.allow_hf32 for n, p in parts if hasattr(p, "allow_hf32")}


def environment() -> dict[str, str]:
    """Return the variables that change numbers and are set; of one that holds a path or an address, only that it is."""
    found = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return {
        name: "(set)" if set("/\\@") & set(value) or _SERIAL.search(value) else value for name, value in found.items()
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
