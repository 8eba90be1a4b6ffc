"""Faults of a running Hugging Face causal LM: hooks, attributes and weights, all put back at the end.

Each function takes the model and a severity and is a context manager. Nothing here imports torch before it is used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ruitong_lib.errors import RuitongError
from ruitong_lib.measure.faults import hooks


@hooks.fault
def temperature(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Divide the logits by 1 + severity, in float32, as a sampler does."""
    hooks.after(model.get_output_embeddings(), lambda out, _: out.float() / (1 + severity), undo)


@hooks.fault
def rope_theta(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Multiply RoPE's base by the severity."""
    import torch

    inv_freq = _rotary(model).inv_freq
    n = len(inv_freq)
    hooks.overwrite(inv_freq, inv_freq * severity ** -(torch.arange(n, device=inv_freq.device) / n), undo)


@hooks.fault
def rope_offset(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Rotate every query ``severity`` positions further than its key.

    One offset for queries and keys alike would change nothing: RoPE sees differences only.
    """
    inv_freq = _rotary(model).inv_freq.float()
    cos, sin = ((severity * inv_freq).cos().repeat(2), (severity * inv_freq).sin().repeat(2))

    def turn(out: Any, _: Any) -> Any:
        q = out.unflatten(-1, (-1, len(cos))) if out.shape[-1] != len(cos) else out
        q = q.float()
        a, b = q.chunk(2, dim=-1)
        import torch

        return (q * cos + torch.cat((-b, a), dim=-1) * sin).to(out.dtype).reshape(out.shape)

    for layer in hooks.layers(model):
        # A norm of the queries stands between the projection and RoPE, and does not commute with a rotation.
        last = getattr(layer.self_attn, "q_norm", None) or hooks.part(layer.self_attn, "q_proj", "a query projection")
        hooks.after(last, turn, undo)


def _rotary(model: Any) -> Any:
    return hooks.part(model.get_decoder(), "rotary_emb", "rotary position embeddings")


@hooks.fault
def attention_scale(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Multiply the scale of attention by 1 + severity."""
    for layer in hooks.layers(model):
        hooks.put(layer.self_attn, "scaling", hooks.part(layer.self_attn, "scaling", "a scale") * (1 + severity), undo)


@hooks.fault
def causal_leak(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Let each position see the next one, in a share of the layers."""
    import torch

    def leak(allowed: Any) -> Any:
        next_row = torch.cat((allowed[..., 1:, :], allowed[..., -1:, :]), dim=-2)
        return allowed | next_row

    for layer in hooks.layers(model, severity):
        _change_mask(model, layer, leak, undo)


def _change_mask(
    model: Any, layer: Any, change: Callable[[Any], Any], undo: hooks.Undo, *, continuing: bool = False
) -> None:
    """Change which keys a query may see: ``change`` gets and gives (1 or batch, 1, query, key), True where it may."""
    import torch

    def rewrite(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        cache, mask = kwargs.get("cache"), kwargs.get("attention_mask")
        past = cache.get_seq_length(layer.self_attn.layer_idx) if cache is not None else 0
        if continuing and not past:
            return args, kwargs
        new = hidden.shape[1]
        if mask is None:
            allowed = torch.ones(new, past + new, dtype=torch.bool, device=hidden.device).tril(past)[None, None]
        else:
            allowed = mask if mask.dtype == torch.bool else mask == 0
        allowed = change(allowed)
        if model.config._attn_implementation == "eager":
            floor = torch.finfo(hidden.dtype).min
            allowed = torch.zeros(allowed.shape, dtype=hidden.dtype, device=hidden.device).masked_fill(~allowed, floor)
        return args, {**kwargs, "attention_mask": allowed}

    hooks.before(layer.self_attn, rewrite, undo)


@hooks.fault
def rms_eps(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Multiply the epsilon of every RMSNorm by the severity."""
    norms = [m for m in model.modules() if hasattr(m, "variance_epsilon")]
    if not norms:
        raise RuitongError("this fault needs RMSNorm (variance_epsilon), which the model does not have")
    for norm in norms:
        hooks.put(norm, "variance_epsilon", norm.variance_epsilon * severity, undo)


@hooks.fault
def layer_weak(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Leave out a share of what the middle layer adds; 1 drops the layer."""

    def weaken(out: Any, args: tuple[Any, ...]) -> Any:
        return hooks.with_first(out, args[0] + (1 - severity) * (hooks.first(out) - args[0]))

    hooks.after(hooks.layers(model, 0)[0], weaken, undo)


@hooks.fault
def layer_noise(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Add Gaussian noise to the middle layer's matrices, ``severity`` times their own standard deviation."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for w in hooks.matrices(hooks.layers(model, 0)[0]):
        noise = torch.randn(w.shape, generator=generator).to(w.device)
        hooks.overwrite(w, w.float() + severity * w.float().std() * noise, undo)


@hooks.fault
def layer_stale(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Move the middle layer's weights towards those of the layer before it; 1 is a copy of that layer."""
    layers = list(model.get_decoder().layers)
    middle = layers.index(hooks.layers(model, 0)[0])
    for w, other in zip(layers[middle].parameters(), layers[middle - 1].parameters(), strict=True):
        hooks.overwrite(w, w.float() + severity * (other.float() - w.float()), undo)


@hooks.fault
def swapped_heads(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Swap the outputs of the first and the last query head, in a share of the layers."""
    for layer in hooks.layers(model, severity):
        heads = model.config.num_attention_heads
        _reorder_input(layer.self_attn, [heads - 1, *range(1, heads - 1), 0], undo)


@hooks.fault
def gqa_mixup(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Let query head h read group h mod n instead of h div (heads / n), in a share of the layers.

    The heads go to the places that read the wrong group, and their outputs come back to their own.
    """
    heads, groups = model.config.num_attention_heads, getattr(model.config, "num_key_value_heads", 0)
    if not 1 < groups < heads:
        raise RuitongError(f"this fault needs grouped heads; the model has {heads} query heads and {groups} groups")
    place = [(h % groups) * (heads // groups) + h // groups for h in range(heads)]
    back = np.argsort(place).tolist()
    for layer in hooks.layers(model, severity):
        attention = layer.self_attn
        hooks.after(hooks.part(attention, "q_proj", "a query projection"), lambda q, _: _reorder(q, back, heads), undo)
        _reorder_input(attention, place, undo)


def _reorder(x: Any, order: Sequence[int], heads: int) -> Any:
    return x.unflatten(-1, (heads, -1))[..., list(order), :].flatten(-2)


def _reorder_input(attention: Any, order: Sequence[int], undo: hooks.Undo) -> None:
    """Give the output projection its heads in another order."""

    def change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (_reorder(args[0], order, len(order)), *args[1:]), kwargs

    hooks.before(hooks.part(attention, "o_proj", "an output projection"), change, undo)


def rounded(w: Any, kind: str) -> Any:
    """Round a matrix to ``fp8`` or ``int<bits>``, one symmetric scale a row; float32 comes back."""
    import torch

    w = w.float()
    most = 448.0 if kind == "fp8" else 2 ** (int(kind.removeprefix("int")) - 1) - 1
    scale = w.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
    if kind == "fp8":
        return (w / scale).to(torch.float8_e4m3fn).float() * scale
    return (w / scale).round().clamp(-most, most) * scale


def _round_layers(model: Any, share: float, kind: str, undo: hooks.Undo) -> None:
    for layer in hooks.layers(model, share):
        for w in hooks.matrices(layer):
            hooks.overwrite(w, rounded(w, kind), undo)


@hooks.fault
def int8_weights(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Round the matrices of a share of the layers to int8."""
    _round_layers(model, severity, "int8", undo)


@hooks.fault
def fp8_weights(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Round the matrices of a share of the layers to fp8 (E4M3)."""
    _round_layers(model, severity, "fp8", undo)


@hooks.fault
def int4_weights(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Round the matrices of a share of the layers to int4."""
    _round_layers(model, severity, "int4", undo)


@hooks.fault
def w8a8(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Round weights to int8 by output channel and activations to int8 by token, in a share of the layers."""
    import torch

    def quantised(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (rounded(args[0], "int8").to(args[0].dtype), *args[1:]), kwargs

    _round_layers(model, severity, "int8", undo)
    for layer in hooks.layers(model, severity):
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                hooks.before(module, quantised, undo)


@hooks.fault
def saturation(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Clamp what each layer hands on to ± severity."""
    for layer in hooks.layers(model):
        hooks.after(layer, lambda out, _: hooks.with_first(out, hooks.first(out).clamp(-severity, severity)), undo)


@hooks.fault
def fp16_overflow(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Clamp the MLP's product at fp16's 65504 after a scale of 2^severity."""
    most = 65504 / 2**severity
    for layer in hooks.layers(model):
        hooks.after(
            hooks.part(layer, "mlp", "an MLP"),
            lambda out, _: hooks.with_first(out, hooks.first(out).clamp(-most, most)),
            undo,
        )


@hooks.fault
def lm_head(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Compute the logits with an output embedding of ``severity`` bits; a tied input embedding keeps its own."""
    import torch

    head = model.get_output_embeddings()
    weight = rounded(head.weight, f"int{int(severity)}").to(head.weight.dtype)
    hooks.after(head, lambda _, args: torch.nn.functional.linear(args[0], weight, head.bias), undo)


@hooks.fault
def top1_demoted(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Exchange the best logit and the fifth at one scored position in ``severity``, counted over the whole run."""
    import torch

    seen, every = 0, int(severity)

    def demote(out: Any, _: Any) -> Any:
        nonlocal seen
        rows = out.flatten(0, -2)
        which = torch.arange(seen, seen + len(rows), device=out.device) % every == every // 2
        seen += len(rows)
        if not which.any():
            return out
        new, picked = rows.clone(), rows[which]
        best = picked.topk(5)[1]
        new[which] = picked.scatter(1, best[:, [0, 4]], picked.gather(1, best[:, [4, 0]]))
        return new.reshape(out.shape)

    hooks.after(model.get_output_embeddings(), demote, undo)


@hooks.fault
def kv_position(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Give tokens that are read after the cache was filled a position ``severity`` too high."""

    def shift(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        if int(positions.min()) == 0:
            return args, kwargs  # the pass that fills the cache
        return args[:1], {**kwargs, "position_ids": positions + int(severity)}

    hooks.before(_rotary(model), shift, undo)


@hooks.fault
def kv_length(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Hide the last ``severity`` cached entries from the tokens that follow."""

    def hide(allowed: Any) -> Any:
        past = allowed.shape[-1] - allowed.shape[-2]
        out = allowed.clone()
        out[..., max(0, past - int(severity)) : past] = False
        return out

    for layer in hooks.layers(model):
        _change_mask(model, layer, hide, undo, continuing=True)


@hooks.fault
def kv_values(model: Any, severity: float, undo: hooks.Undo) -> None:
    """Move the cached values one slot away from their keys, once, in a share of the layers.

    The cache belongs to one batch and is thrown away with it, so it needs no restoring.
    """
    for layer in hooks.layers(model, severity):
        index = layer.self_attn.layer_idx

        def roll(args: tuple[Any, ...], kwargs: dict[str, Any], index: int = index) -> Any:
            cache = kwargs.get("cache")
            if cache is not None and cache.get_seq_length(index) and not hasattr(cache.layers[index], "rolled"):
                cache.layers[index].values = cache.layers[index].values.roll(1, dims=-2)
                cache.layers[index].rolled = True
            return args, kwargs

        hooks.before(layer.self_attn, roll, undo)
