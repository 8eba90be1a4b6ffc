"""Precision: the dtype that a model is loaded in, and the recipe of a quantised one."""

import importlib.util
import re
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ruitong_lib.errors import RuitongError

if TYPE_CHECKING:
    import torch


def check(precision: str, device: "torch.device") -> None:
    """Refuse fp8 where the card's matrix units do not take it; called before a model is loaded.

    Raises
    ------
    RuitongError
        Naming the card, and what may be asked for instead.
    """
    if precision != "fp8":
        return
    import torch

    found = f"device {device.type!r}"
    if device.type == "cuda":
        found = torch.cuda.get_device_name(device)
        if torch.version.hip is None:
            major, minor = torch.cuda.get_device_capability(device)
            if (major, minor) >= (8, 9):
                return
            found += f" (compute capability {major}.{minor})"
        else:
            arch = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
            if arch.startswith("gfx94"):
                return
            found += f" ({arch})"
    raise RuitongError(
        "precision 'fp8' (weights and activations) needs an NVIDIA card from compute capability 8.9 on (L40S, H100) or "
        f"an AMD MI300 (gfx94x); this is {found}. Use w8a8, bf16, fp16 or fp32"
    )


def load_dtype(precision: str) -> "torch.dtype":
    """Return the dtype that the weights are loaded in; W8A8 and fp8 start from bf16, TF32 keeps float32 in memory."""
    import torch

    wide = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}
    return wide.get(precision, torch.bfloat16)


def of_checkpoint(config: Mapping[str, Any] | None, precision: str, name: str) -> dict[str, Any] | None:
    """Return the recipe that a checkpoint was quantised with, or None for one with plain weights.

    Parameters
    ----------
    config
        ``quantization_config`` of the checkpoint's config.json, or None.
    precision
        What the cell asks for.
    name
        The checkpoint, for messages.

    Raises
    ------
    RuitongError
        For a quantised checkpoint under another precision than w8a8, one in another format than compressed-tensors,
        one that is not int8 weights and int8 activations, or where the package is missing.
    """
    if config is None:
        return None
    method = str(config.get("quant_method", "unknown"))
    if precision != "w8a8":
        raise RuitongError(
            f"{name!r} is quantised ({method}), so precision={precision!r} would carry a label that its weights no "
            "longer have; ask for precision='w8a8', or take the base model"
        )
    if method != "compressed-tensors":
        raise RuitongError(
            f"{name!r} is quantised with {method!r}; taken are compressed-tensors with int8 weights and int8 "
            "activations (W8A8), and plain checkpoints, which are quantised here"
        )
    if importlib.util.find_spec("compressed_tensors") is None:
        raise RuitongError(
            f"{name!r} is a compressed-tensors checkpoint, which needs a package that is not installed: "
            "pip install 'ruitong[compressed]' (or pip install compressed-tensors)"
        )
    groups = list((config.get("config_groups") or {}).values())
    sides = {side: [g.get(side) or {} for g in groups] for side in ("weights", "input_activations")}
    for side, args in sides.items():
        other = [a for a in args if (a.get("num_bits"), a.get("type", "int")) != (8, "int")]
        if other or not args:
            first = other[0] if other else {}
            found = f"{first.get('type', 'int')}{first['num_bits']}" if "num_bits" in first else "not quantised"
            raise RuitongError(
                f"{name!r} has {side.replace('_', ' ')} that are {found}; precision 'w8a8' takes int8 weights and int8 "
                "activations"
            )
    return {
        "weights": _shown(sides["weights"]),
        "activations": _shown(sides["input_activations"]),
        "quantiser": f"compressed-tensors {metadata.version('compressed-tensors')}, by the checkpoint's maker",
        "arithmetic": "simulated: int8 values of weights and activations, products in bf16",
        "format": str(config.get("format", "")),
        "targets": sorted({t for g in groups for t in g.get("targets", [])}),
        "left_out": sorted(config.get("ignore") or []),
        "kv_cache": _shown([config["kv_cache_scheme"]]) if config.get("kv_cache_scheme") else "not quantised",
    }


def _shown(args: list[dict[str, Any]]) -> str:
    """Say in words what a scheme of compressed-tensors does, e.g. ``int8, symmetric, dynamic per token``."""
    words = {
        f"{a.get('type', 'int')}{a.get('num_bits')}, {'symmetric' if a.get('symmetric', True) else 'asymmetric'}, "
        f"{'dynamic' if a.get('dynamic') else 'static'} per {a.get('strategy', 'tensor')}"
        + (f" of {a['group_size']}" if a.get("group_size") else "")
        for a in args
    }
    return "; ".join(sorted(words))


def apply(model: Any, precision: str, checkpoint: dict[str, Any] | None = None) -> dict[str, Any]:
    """Check a loaded model's dtype, quantise it in place where asked for, and return the recipe for the manifest.

    W8A8 and fp8 are torchao's dynamic recipes: weights per output channel, activations per token, symmetric, computed
    on the fly. They take ``torch.nn.Linear`` alone; the output embedding stays in bf16. What was quantised is counted
    afterwards, because torchao passes over shapes that its kernels do not take.

    Parameters
    ----------
    model
        As loaded, in ``load_dtype(precision)``.
    precision
        What the cell asks for.
    checkpoint
        :func:`of_checkpoint`'s recipe: the weights are already quantised.

    Raises
    ------
    RuitongError
        When the effective dtype is not the one asked for, or most weights would stay unquantised (the experts of a
        mixture are no ``torch.nn.Linear``).
    """
    wanted = load_dtype(precision)
    if checkpoint is not None:
        model.hf_quantizer.compressor.decompress_model(model)  # else at the first call of the whole model
    other = {n: p for n, p in model.named_parameters() if p.is_floating_point() and p.dtype != wanted}
    # transformers keeps a few small weights of some families in fp32 on purpose (a router's); the recipe lists them.
    few = sum(p.numel() for p in other.values()) * 10 < sum(p.numel() for p in model.parameters())
    effective = {str(p.dtype) for p in other.values() if str(p.dtype) != "torch.float32" or not few}
    if effective:
        raise RuitongError(
            f"precision {precision!r} needs weights in {wanted}, but the model holds {', '.join(sorted(effective))} "
            "after loading; a row must not carry a dtype that it was not computed in"
        )
    recipe: dict[str, Any] = {
        "weights": str(wanted),
        "activations": str(wanted),
        "kept_in_fp32": sorted({re.sub(r"\d+", "*", n) for n in other}),
    }
    if checkpoint is not None:
        layers = [m for m in model.modules() if getattr(m, "quantization_scheme", None) is not None]
        if not layers:
            raise RuitongError("the quantised checkpoint's targets match no layer of this model")
        return recipe | checkpoint | {"base": str(wanted), "linear_layers": len(layers)}
    return recipe | (_quantise(model, precision) if precision in {"w8a8", "fp8"} else {})


def _quantise(model: Any, precision: str) -> dict[str, Any]:
    import torch
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        PerRow,
        quantize_,
    )

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
    if not linear:
        raise RuitongError(f"precision {precision!r} found no torch.nn.Linear to quantise in this model")
    chosen = Int8DynamicActivationInt8WeightConfig()
    if precision == "fp8":
        chosen = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    # Weights of matrix products: all that has two or more dimensions, without the two embeddings.
    ends = {id(m.weight) for m in (head, embedding)}
    before = {n: p.numel() for n, p in model.named_parameters() if p.ndim > 1 and id(p) not in ends}
    plain = {n: type(m.weight) for n, m in linear.items()}
    quantize_(model, chosen, filter_fn=lambda _, name: name in linear)
    done = {f"{n}.weight" for n, m in linear.items() if type(m.weight) is not plain[n]}
    share = sum(before[n] for n in done) / sum(before.values())
    left = sorted({re.sub(r"\d+", "*", n) for n in before if n not in done})
    if share < 0.5:
        raise RuitongError(
            f"precision {precision!r} would quantise {share:.0%} of the weights and leave {', '.join(left[:4])} in "
            "bf16 (the experts of a mixture are no torch.nn.Linear, and kernels pass over some shapes); a row must not "
            "carry a precision that it was not computed in. Give a quantised checkpoint, or use bf16"
        )
    what = "int8"
    if precision == "fp8":
        first = linear[next(n for n in linear if f"{n}.weight" in done)].weight
        what = str(getattr(first, "qdata", first).dtype).removeprefix("torch.")
    return {
        "weights": f"{what}, symmetric, per output channel",
        "activations": f"{what}, symmetric, dynamic per token",
        "quantiser": f"torchao {type(chosen).__name__}",
        "linear_layers": len(done),
        "share_quantised": round(share, 4),
        "left_out": ["lm_head", *left],
        "base": "torch.bfloat16",
        **({"fp8_flavour": what} if precision == "fp8" else {}),
    }
