"""How a running model is broken and put back: hooks, attributes and weights, each with its undoing.

Nothing here imports torch before it is used.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ruitong_lib.errors import RuitongError

Undo = contextlib.ExitStack
Break = Callable[[Any, float, Undo], None]


def fault(function: Break) -> Callable[[Any, float], contextlib.AbstractContextManager[None]]:
    """Turn ``function(model, severity, undo)`` into a context manager that undoes what was done, in reverse order."""

    @functools.wraps(function)
    @contextlib.contextmanager
    def broken(model: Any, severity: float) -> Iterator[None]:
        import torch

        with Undo() as undo:
            with torch.inference_mode():
                function(model, severity, undo)
            yield

    return broken


def layers(model: Any, share: float = 1.0) -> list[Any]:
    """Return a share of the decoder's layers, evenly spread; at least one, then the middle one."""
    every = model.get_decoder().layers
    n = min(len(every), max(1, round(share * len(every))))
    return [every[int((i + 0.5) * len(every) / n)] for i in range(n)]


def part(owner: Any, name: str, what: str) -> Any:
    """Return a part of a model that a fault needs, or refuse a model that lacks it."""
    found = getattr(owner, name, None)
    if found is None:
        raise RuitongError(f"this fault needs {what} ({name}), which {type(owner).__name__} does not have")
    return found


def after(module: Any, change: Callable[[Any, tuple[Any, ...]], Any], undo: Undo) -> None:
    """Replace a module's output by ``change(output, positional arguments)``."""
    undo.callback(module.register_forward_hook(lambda _, args, out: change(out, args)).remove)


def before(module: Any, change: Callable[[tuple[Any, ...], dict[str, Any]], Any], undo: Undo) -> None:
    """Replace a module's arguments by ``change(args, kwargs)``."""
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: change(args, kwargs), with_kwargs=True)
    undo.callback(handle.remove)


def put(owner: Any, name: str, value: Any, undo: Undo) -> None:
    """Set an attribute."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def overwrite(tensor: Any, new: Any, undo: Undo) -> None:
    """Write into a weight or buffer in place, so that tied weights and views see it too."""
    import torch

    kept = tensor.data.clone()

    def put_back() -> None:
        with torch.inference_mode():
            tensor.data.copy_(kept)

    undo.callback(put_back)
    tensor.data.copy_(new)


def matrices(layer: Any) -> list[Any]:
    """Return a layer's weights without its norms and biases."""
    return [p for p in layer.parameters() if p.ndim == 2]


def first(out: Any) -> Any:
    """Return a module's output, or the first of several."""
    return out[0] if isinstance(out, tuple) else out


def with_first(out: Any, new: Any) -> Any:
    """Return a module's output with another first."""
    return (new, *out[1:]) if isinstance(out, tuple) else new
