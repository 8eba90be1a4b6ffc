"""Precision: the dtype that a model is loaded in, and the W8A8 recipe."""

import re
from typing import TYPE_CHECKING, Any

from ruitong_lib.errors import RuitongError

if TYPE_CHECKING:
    import torch


def load_dtype(precision: str) -> "torch.dtype":
    """Return the dtype that the weights are loaded in; W8A8 starts from bf16."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "w8a8": torch.bfloat16}[precision]


def apply(model: Any, precision: str) -> dict[str, Any]:
    """Quantise a loaded model in place where the precision asks for it, and return the recipe for the manifest.

    W8A8 is torchao's dynamic recipe: int8 weights per output channel, int8 activations per token, symmetric, computed
    on the fly. The output embedding (lm_head) stays in bf16 and the recipe says so.

    Raises
    ------
    RuitongError
        When the effective dtype after loading is not the one asked for.
    """
    import torch

    wanted = load_dtype(precision)
    other = {n: p for n, p in model.named_parameters() if p.is_floating_point() and p.dtype != wanted}
    # transformers keeps a few small weights of some families in fp32 on purpose (a router's); the recipe lists them.
    few = sum(p.numel() for p in other.values()) * 10 < sum(p.numel() for p in model.parameters())
    effective = {str(p.dtype) for p in other.values() if p.dtype != torch.float32 or not few}
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
    if precision != "w8a8":
        return recipe
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    head = model.get_output_embeddings()
    quantised: list[str] = []

    def wanted_linear(module: Any, name: str) -> bool:
        keep = isinstance(module, torch.nn.Linear) and module is not head
        if keep:
            quantised.append(name)
        return keep

    quantize_(model, Int8DynamicActivationInt8WeightConfig(), filter_fn=wanted_linear)
    if not quantised:
        raise RuitongError("precision 'w8a8' found no torch.nn.Linear to quantise in this model")
    return recipe | {
        "weights": "int8, symmetric, per output channel",
        "activations": "int8, symmetric, dynamic per token",
        "quantiser": "torchao Int8DynamicActivationInt8WeightConfig",
        "linear_layers": len(quantised),
        "left_out": ["lm_head"],
        "base": str(wanted),
    }
