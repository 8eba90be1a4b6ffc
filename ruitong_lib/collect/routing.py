"""Which experts a mixture of experts sent each scored token to."""

import re
from typing import Any

import torch


class Routing:
    """Hooks on the experts of each layer that routes: what the router chose, at the rows that are scored.

    The rows are picked on the device as each layer runs, so a long prompt costs no memory.
    """

    def __init__(self, layers: dict[int, Any]) -> None:
        """Watch the ``experts`` modules of these layers."""
        self.layers = sorted(layers)
        self.shape: tuple[int, ...] | None = None  # (layers, slots), known after the first forward pass
        self._at: torch.Tensor | None = None
        self._seen: dict[int, torch.Tensor] = {}
        for number, experts in layers.items():
            experts.register_forward_pre_hook(self._hook(number), with_kwargs=True)

    def watch(self, at: torch.Tensor) -> None:
        """Record the next forward pass at these rows of (batch × sequence), flattened."""
        self._at, self._seen = at, {}

    def take(self) -> torch.Tensor | None:
        """Return (rows, layer, slot) int16 on the CPU and stop; None where a layer did not show its choice."""
        seen, self._at, self._seen = self._seen, None, {}
        if len(seen) < len(self.layers) or len({x.shape for x in seen.values()}) > 1:
            return None
        experts = torch.stack([seen[n].cpu() for n in self.layers], dim=1)
        self.shape = tuple(experts.shape[1:])
        return experts

    def _hook(self, number: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._at is None:
                return
            for x in (*args, *kwargs.values()):
                if isinstance(x, torch.Tensor) and x.dtype in {torch.int32, torch.int64}:
                    self._seen[number] = x.reshape(-1, x.shape[-1])[self._at.to(x.device)].to(torch.int16)
                    return

        return hook


def find(model: Any) -> Routing | None:
    """Return the routing of a mixture of experts, or None for a dense model.

    A layer routes where a module ``experts`` stands beside its ``gate`` or ``router``: so it is in every mixture of
    transformers 5, whose experts are called with the ids that the router chose.
    """
    layers: dict[int, Any] = {}
    for name, module in model.named_modules():
        beside = dict(module.named_children())
        if "experts" in beside and ("gate" in beside or "router" in beside):
            number = re.search(r"\.(\d+)(?:\.|$)", name)
            layers[int(number.group(1)) if number else len(layers)] = beside["experts"]
    return Routing(layers) if layers else None
