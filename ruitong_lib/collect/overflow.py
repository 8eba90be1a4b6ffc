"""Where logits turned NaN: a second pass with hooks, run only when a row has such logits."""

from typing import Any

import torch


class _FoundError(Exception):
    pass


def first_layer(model: Any, ids: list[int], device: torch.device) -> dict[str, Any]:
    """Return the first module, in the order of execution, that gave a NaN or an infinity for one text.

    A layer that has no parts is also looked at before it runs: a value that overflows in its parent's own arithmetic
    (a product of two projections, say) is then charged to the parent.

    Returns
    -------
    ``layer``, e.g. ``model.layers.34.mlp`` (empty where the text run alone stays finite), and
    ``non_finite_weights``: whether that layer's own weights hold the NaN or infinity.
    """
    found: list[str] = []

    def stop(name: str) -> None:
        found.append(name)
        raise _FoundError

    def after(name: str) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            if _bad(output):
                stop(name)

        return hook

    def before(name: str) -> Any:
        def hook(_module: Any, args: Any) -> None:
            if _bad(args):
                stop(name.rpartition(".")[0] or name)

        return hook

    modules = {name: m for name, m in model.named_modules() if name}
    handles = [m.register_forward_hook(after(name)) for name, m in modules.items()]
    handles += [
        m.register_forward_pre_hook(before(name)) for name, m in modules.items() if not any(True for _ in m.children())
    ]
    try:
        text = torch.tensor([ids]).to(device)
        hidden = model.get_decoder()(input_ids=text, use_cache=False).last_hidden_state
        model.get_output_embeddings()(hidden[:, -1])
    except _FoundError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    layer = found[0] if found else ""
    weights = modules[layer].parameters(recurse=False) if layer else ()
    # Quantised weights are finite by their making, and those on the disk (meta) cannot be looked at here.
    plain = [w for w in weights if type(w) is torch.nn.Parameter and w.device.type != "meta"]
    bad = any(w.is_floating_point() and not w.isfinite().all() for w in plain)
    return {"layer": layer, "non_finite_weights": bad}


def _bad(value: Any) -> bool:
    """Whether any tensor of a module's input or output holds a NaN or an infinity."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and not bool(value.isfinite().all())
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list | tuple) and any(map(_bad, value))
