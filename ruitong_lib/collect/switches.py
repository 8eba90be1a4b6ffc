"""Switches of torch that change numbers: float32 products, deterministic algorithms. Each is set and put back."""

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ruitong_lib.collect import devices
from ruitong_lib.errors import RuitongError

if TYPE_CHECKING:
    import torch

FLOAT32_BITS = 23  # explicit bits of a float32 mantissa; TF32 has 10, bf16 7, Ascend's HF32 11
_PROBE = 256  # rows of the probe: a size at which tensor cores are used


def check_precision(precision: str, device: "torch.device") -> None:
    """Refuse a precision that the device's own driver says it does not have, before a model is loaded.

    Raises
    ------
    RuitongError
        For ``tf32`` where there is none, for ``bf16`` where it would be emulated or cast (V100, Ascend 910A, 310P),
        for ``fp64`` on devices without it.
    """
    import torch

    where = f"{devices.label(device)} (device {devices.kind_of(device)!r})"
    module: Any = torch.get_device_module(device)
    if precision == "tf32" and not _asked(module, "is_tf32_supported", device):
        raise RuitongError(
            f"precision 'tf32' needs a device that multiplies float32 in TF32 (an NVIDIA card from Ampere on, AMD "
            f"gfx94x or gfx95x), which {where} is not: a row must not carry a precision that it was not computed in. "
            "Use fp32 or bf16"
        )
    if precision in {"bf16", "w8a8"} and _asked(module, "is_bf16_supported", device) is False:
        raise RuitongError(
            f"precision {precision!r} needs bf16, which the driver of {where} does not offer: it would be emulated or "
            "cast to another dtype in silence. Use fp16 or fp32"
        )
    if precision == "fp64" and device.type in {"mps", "npu"}:
        raise RuitongError(f"precision 'fp64' is not computed on {where}; run the oracle with -p device cpu")


def _asked(module: Any, name: str, device: "torch.device") -> bool | None:
    """Ask a backend about the device; None where it has no answer."""
    function = getattr(module, name, None)
    if function is None or device.type == "cpu":
        return None
    # These functions speak of the current device, and torch.cuda's counts emulation unless told not to.
    options = {"including_emulation": False} if name == "is_bf16_supported" else {}
    with module.device(device) if hasattr(module, "device") else contextlib.nullcontext():
        try:
            return bool(function(**options))
        except TypeError:
            return bool(function())


@contextlib.contextmanager
def matmul_precision(precision: str, device: "torch.device") -> Iterator[int]:
    """Multiply float32 matrices as the precision says: in TF32 for ``tf32``, else in full; then put the switches back.

    The switches are only a wish (``NVIDIA_TF32_OVERRIDE`` and ROCm's variables can overrule them), so what they did is
    measured, and the number goes into the manifest.

    Yields
    ------
    The mantissa bits that a float32 product keeps on this device: 23 in full, 10 in TF32.

    Raises
    ------
    RuitongError
        When an fp32 or tf32 cell would get the other one's products.
    """
    import torch

    b: Any = torch.backends
    # The getter of the old switch fails where the user has mixed old and new ones; then only the new are put back.
    old = None
    with contextlib.suppress(RuntimeError):
        old = torch.get_float32_matmul_precision()
    places: list[tuple[Any, str]] = [
        (p, "fp32_precision") for p in (b.cuda.matmul, b.mkldnn.matmul, b.cudnn.conv, b.cudnn.rnn)
    ]
    module: Any = torch.get_device_module(device)
    places += [(p, "allow_hf32") for n in ("matmul", "conv") if hasattr(p := getattr(module, n, None), "allow_hf32")]
    before = [getattr(p, name) for p, name in places]
    tf32 = precision == "tf32"
    try:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        for p, name in places:
            setattr(p, name, False if name == "allow_hf32" else "tf32" if tf32 else "ieee")
        bits = product_bits(device)
        if (tf32 and bits == FLOAT32_BITS) or (precision == "fp32" and bits < FLOAT32_BITS):
            raise RuitongError(
                f"precision {precision!r} was asked for, but float32 products keep {bits} of {FLOAT32_BITS} mantissa "
                f"bits on {devices.label(device)}. Look at NVIDIA_TF32_OVERRIDE, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, "
                "HIPBLASLT_ALLOW_TF32"
            )
        yield bits
    finally:
        if old is not None:
            torch.set_float32_matmul_precision(old)
        for (p, name), value in zip(places, before, strict=True):
            setattr(p, name, value)


def product_bits(device: "torch.device") -> int:
    """Measure how many bits of the mantissa a float32 matrix product keeps on a device.

    Rows of 1 + 2^−k times the identity: full products give the rows back, and a rounded factor gives 1.
    """
    import torch

    k = torch.arange(_PROBE).remainder(FLOAT32_BITS) + 1
    rows = (1 + torch.exp2(-k.double())).float()[:, None].expand(-1, _PROBE).contiguous()
    kept = (rows.to(device) @ torch.eye(_PROBE).to(device)).cpu() == rows
    lost = k[~kept.all(1)]
    return int(lost.min()) - 1 if len(lost) else FLOAT32_BITS


@contextlib.contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Make torch use deterministic algorithms, or not, and put its switches back afterwards.

    What libraries read once is set by :func:`ruitong_lib.collect.devices.prepare` before torch is imported.

    Raises
    ------
    RuitongError
        Naming the operation that has no deterministic implementation.
    """
    import torch

    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    flags = cudnn.deterministic, cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(wanted)
        cudnn.deterministic, cudnn.benchmark = wanted, False
        yield
    except RuntimeError as e:
        found = re.search(r"(\S+) does not have a deterministic implementation", str(e))
        if found is None:
            raise
        raise RuitongError(
            f"deterministic=True, but the operation {found.group(1)!r} has no deterministic implementation on this "
            "device; run the cell with deterministic=False, and let its reruns say how much it varies"
        ) from e
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = flags
