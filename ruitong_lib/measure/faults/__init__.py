"""Faults: deliberate defects that a metric or gate has to notice, each a function and a row of facts.

Three kinds. A *model* fault is a context manager that breaks a running Hugging Face model and puts every bit back at
its end. An *inputs* fault renders the prompts wrongly. A *shard* fault changes a stored shard. Severities run from mild
to severe and were fixed before any of them was measured.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ruitong_lib.errors import RuitongError, did_you_mean
from ruitong_lib.measure.faults import inputs, model, shards


class Fault(NamedTuple):
    """What is known of a fault beforehand."""

    kind: str  # model, cache (a model fault that only a pass through the KV cache meets), inputs, shard
    function: Callable[..., Any]
    stands_for: str
    unit: str  # of the severity
    severities: tuple[float, ...]  # mild to severe


_LAYERS = "share of layers"
_ONE, _SOME, _ALL = 0.03, 0.2, 1.0  # one layer of thirty, a fifth, all of them

FAULTS: dict[str, Fault] = {
    "temperature": Fault("model", model.temperature, "logprobs of a tempered distribution", "ε of ×(1 + ε)",
                         (0.01, 0.05, 0.2)),
    "rope_theta": Fault("model", model.rope_theta, "another RoPE base than the checkpoint's", "factor on theta",
                        (1.01, 1.1, 10)),
    "rope_offset": Fault("model", model.rope_offset, "queries rotated to another position than keys", "positions",
                         (1, 2, 8)),
    "attention_scale": Fault("model", model.attention_scale, "a wrong softmax scale", "ε of ×(1 + ε)",
                             (0.01, 0.05, 0.3)),
    "causal_leak": Fault("model", model.causal_leak, "a causal mask that is off by one", _LAYERS, (_ONE, _SOME, _ALL)),
    "rms_eps": Fault("model", model.rms_eps, "another epsilon in RMSNorm", "factor on eps", (0.1, 10, 1000, 1e5)),
    "layer_weak": Fault("model", model.layer_weak, "a layer that is skipped, whole or in part", "share left out",
                        (0.01, 0.1, 1)),
    "layer_noise": Fault("model", model.layer_noise, "a layer whose weights were damaged in transfer",
                         "noise over spread of the weights", (0.01, 0.1, 1)),
    "layer_stale": Fault("model", model.layer_stale, "a layer that holds other weights than the rest",
                         "share of the neighbour's", (0.01, 0.1, 1)),
    "swapped_heads": Fault("model", model.swapped_heads, "two heads in each other's place", _LAYERS,
                           (_ONE, _SOME, _ALL)),
    "gqa_mixup": Fault("model", model.gqa_mixup, "query heads that read the wrong group's keys and values", _LAYERS,
                       (_ONE, _SOME, _ALL)),
    "int8_weights": Fault("model", model.int8_weights, "weights in int8, by output channel", _LAYERS,
                          (_ONE, _SOME, _ALL)),
    "fp8_weights": Fault("model", model.fp8_weights, "weights in fp8 (E4M3), by output channel", _LAYERS,
                         (_ONE, _SOME, _ALL)),
    "int4_weights": Fault("model", model.int4_weights, "weights in int4, by output channel", _LAYERS,
                          (_ONE, _SOME, _ALL)),
    "w8a8": Fault("model", model.w8a8, "int8 weights and dynamic int8 activations", _LAYERS, (_ONE, _SOME, _ALL)),
    "saturation": Fault("model", model.saturation, "activations that saturate between layers", "largest value kept",
                        (1000, 100, 10)),
    "fp16_overflow": Fault("model", model.fp16_overflow, "an fp16 product clamped at 65504",
                           "bits of scale before the clamp", (0, 8, 14)),
    "lm_head": Fault("model", model.lm_head, "the output embedding in low precision", "bits of its weights",
                     (8, 6, 4)),
    "top1_demoted": Fault("model", model.top1_demoted, "one corrupted position in N: its best token becomes the fifth",
                          "N", (256, 64, 8)),
    "kv_position": Fault("cache", model.kv_position, "new tokens' positions off against the cached ones", "positions",
                         (1, 4, 32)),
    "kv_length": Fault("cache", model.kv_length, "the cached length is short: the last entries are not seen", "entries",
                       (1, 4, 16)),
    "kv_values": Fault("cache", model.kv_values, "cached values one slot away from their keys", _LAYERS,
                       (_ONE, _SOME, _ALL)),
    "template": Fault("inputs", inputs.template, "a wrong chat template: 1 its last token is missing, 2 none at all",
                      "kind", (1, 2)),
    "double_bos": Fault("inputs", inputs.double_bos, "beginning-of-text tokens too many", "tokens", (1, 4)),
    "truncated": Fault("inputs", inputs.truncated, "the beginning of the context is cut off", "share of the prompt",
                       (0.1, 0.5)),
    "processed": Fault("shard", shards.processed, "logprobs after top-k and top-p sampling filters", "top-p",
                       (0.999, 0.95, 0.5)),
    "shifted": Fault("shard", shards.shifted, "numbers one position away from their token", "share of prompts",
                     (0.1, 0.3, 1)),
    "transposed": Fault("shard", shards.transposed, "the two best alternatives in each other's place",
                        "share of positions", (1 / 64, 1 / 8, 1)),
}  # fmt: skip


def find(name: str) -> Fault:
    """Return a fault by its name.

    Raises
    ------
    RuitongError
        For an unknown name.
    """
    if name not in FAULTS:
        raise RuitongError(f"fault must be one of {', '.join(FAULTS)}, got {name!r}.{did_you_mean(name, FAULTS)}")
    return FAULTS[name]


@contextlib.contextmanager
def broken(name: str, severity: float, running: Any) -> Iterator[Any]:
    """Break a running model (kinds "model" and "cache") for the length of a ``with`` block.

    Parameters
    ----------
    name, severity
        The fault. A severity of its own may lie between those of the table.
    running
        A Hugging Face causal LM. Its weights, buffers, attributes and hooks are the same, bit for bit, afterwards,
        also after an exception.

    Raises
    ------
    RuitongError
        For an unknown fault, one that does not work on a model, or a model that lacks the part to be broken.
    """
    fault = find(name)
    if fault.kind not in {"model", "cache"}:
        raise RuitongError(f"fault {name!r} changes the {fault.kind}, not a running model")
    with fault.function(running, severity):
        yield running
