"""Many replays of one model in one process: cells that differ only in what should not matter, and broken ones.

A kernel for each cell would spend the time on starting. Here the model is loaded once for each attention
implementation, and batch shape, composition, order of summation and a split prompt are changed between replays.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr

from ruitong_lib import provenance, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import devices, models
from ruitong_lib.collect.forward import Anchor, Run, batch_rows, decode, replay
from ruitong_lib.collect.transformers import _eos_ids, with_options
from ruitong_lib.errors import RuitongError, did_you_mean
from ruitong_lib.prompts import Prompt, ids_sha256, option_ids, render

ATTENTION = ("sdpa", "eager", "sdpa_math")  # sdpa_math: scaled_dot_product_attention's unfused kernel


@dataclasses.dataclass(frozen=True)
class Replica:
    """What one replay does differently; none of it should matter.

    Raises
    ------
    RuitongError
        For an attention that is not known.
    """

    attention: str = "sdpa"
    batch_size: int = 4
    composition: int = 0  #: which prompts share a batch: 0 is their order, n a shuffle seeded with n
    order: int = 0  #: order of summation in the MLPs: 0 is the checkpoint's, n a permutation seeded with n
    split: bool = False  #: read each prompt in two parts through the KV cache, as chunked prefill does
    threads: int = 0  #: CPU threads; 0 is the design's

    def __post_init__(self) -> None:
        """Check the choices before a model is loaded."""
        if self.attention not in ATTENTION:
            raise RuitongError(
                f"attention must be one of {', '.join(ATTENTION)}, got {self.attention!r}."
                + did_you_mean(self.attention, ATTENTION)
            )

    @property
    def name(self) -> str:
        """The replica in one word, e.g. ``eager-b4-c1-o3``."""
        parts = [self.attention.replace("_", ""), f"b{self.batch_size}"]
        parts += [f"{sign}{n}" for sign, n in (("c", self.composition), ("o", self.order), ("t", self.threads)) if n]
        return "-".join([*parts, *(["split"] if self.split else [])])


class Material(NamedTuple):
    """What every replay of a calibration shares."""

    prompts: tuple[Prompt, ...]
    hashes: list[str]  # of the prompt ids
    ids: list[list[int]]
    options: dict[str, dict[str, int]]
    anchor: Anchor
    k: int


class Bench:
    """A model on a device, loaded once for each attention implementation, and the replays that are asked of it."""

    def __init__(self, model: str, precision: str, *, device: str = "cpu", threads: int = 0) -> None:
        self.cell = Cell(model=model, precision=precision, device=device, scoring="both")
        self.threads = threads
        self._loaded: dict[str, models.Loaded] = {}

    def loaded(self, attention: str = "sdpa", precision: str = "") -> models.Loaded:
        """Return the model in an attention implementation, loading it at the first call."""
        attention = attention.partition("_")[0]
        key = f"{attention} {precision}"
        if key not in self._loaded:
            cell = dataclasses.replace(self.cell, attention=attention, precision=precision or self.cell.precision)
            self._loaded[key] = models.load(cell)
        return self._loaded[key]

    def release(self, precision: str) -> None:
        """Drop a model that is no longer needed."""
        for key in [k for k in self._loaded if k.endswith(f" {precision}")]:
            del self._loaded[key]

    def write_anchor(self, prompts: Sequence[Prompt], limits: Sequence[int], *, k: int = 20) -> Material:
        """Let the model in fp32 write the text that all replay, each prompt up to its own limit of tokens."""
        with devices.threads(self.threads), torch.inference_mode():
            loaded = self.loaded(precision="fp32")
            ids = render(prompts, loaded.tokenizer)
            width = max(limits)
            token = np.full((len(ids), width), -1, dtype=np.int32)
            top = np.full((len(ids), width, k), -1, dtype=np.int32)
            n = np.zeros(len(ids), dtype=np.int32)
            for limit in sorted(set(limits)):
                rows = [i for i, most in enumerate(limits) if most == limit]
                run = Run(loaded.model, loaded.device, [ids[i] for i in rows], batch_rows(len(rows), 8), k)
                found = decode(run, limit, _eos_ids(loaded), {}, warm=False)
                wide = found["token_id"].shape[1]
                token[rows, :wide], top[rows, :wide] = found["token_id"], found["top_token_id"]
                n[rows] = found["n_tokens"]
            options = option_ids(prompts, loaded.tokenizer)
        self.release("fp32")
        return material(prompts, ids, options, Anchor("", token, top, n))

    def replay(
        self,
        replica: Replica,
        of: Material,
        rows: Sequence[int],
        *,
        broken: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
        rendered: Callable[[Sequence[Prompt], Any], list[list[int]]] | None = None,
        label: str = "",
    ) -> xr.Dataset:
        """Replay some prompts under a replica and return the shard.

        Parameters
        ----------
        replica
            How.
        of
            What: prompts and anchor.
        rows
            Which prompts, as places in ``of.prompts``.
        broken
            A context manager that breaks the model for the length of the replay.
        rendered
            Another rendering of the prompts than the right one.
        label
            Label of the shard; a hash of all that was asked for is added.
        """
        part = Anchor(of.anchor.label, *(x[list(rows)] for x in of.anchor[1:]))
        prompts = [of.prompts[i] for i in rows]
        loaded = self.loaded(replica.attention)
        ids = rendered(prompts, loaded.tokenizer) if rendered else [of.ids[i] for i in rows]
        batches = batch_rows(len(ids), replica.batch_size, replica.composition)
        run = Run(loaded.model, loaded.device, ids, batches, of.k)
        with contextlib.ExitStack() as stack:
            n_threads = stack.enter_context(devices.threads(replica.threads or self.threads))
            if replica.attention == "sdpa_math":
                from torch.nn.attention import SDPBackend, sdpa_kernel

                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(summation_order(loaded.model, replica.order))
            if replica.split:
                stack.enter_context(split_prompt(loaded.model, min(map(len, ids)) - 1))
            if broken is not None:
                stack.enter_context(broken(loaded.model))
            with torch.inference_mode():
                found = replay(run, part, {}, warm=False)
        facts = {"replica": dataclasses.asdict(replica), "label": label, "rows": list(rows)}
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        coords = {
            **{c: getattr(self.cell, c) for c in schema.CELL_COORDS if hasattr(self.cell, c)},
            **{c: getattr(replica, c) for c in ("attention", "batch_size", "composition")},
            "threads": n_threads, "device": loaded.device.type, "hardware": devices.hardware(self.cell.device),
            "prompts": "calibration", "max_new_tokens": part.token_id.shape[1], "anchor": "anchor",
        }  # fmt: skip
        ds = schema.new_shard(
            coords,
            f"{label or replica.name}.{key[:8]}",
            {n: [getattr(p, a) for p in prompts]
             for n, a in (("prompt", "id"), ("category", "category"), ("language", "language"))},
            n_positions=part.token_id.shape[1],
            k=of.k,
        )  # fmt: skip
        for name in ("token_id", "logprob", "top_token_id", "top_logprob", "tail_logprob", "entropy", "position_state"):
            ds[name].values[0, 1] = found[name]
        for name in ("n_tokens", "finish_reason", "state"):
            ds[name].values[0, 1] = found[name]
        ds["anchor_token_id"].values[0] = part.top_token_id
        for name in ("anchor_logprob", "anchor_tail_logprob"):
            ds[name].values[0] = found[name]
        ds["prompt_sha256"].values[0] = [ids_sha256(i) for i in ids]
        ds["n_prompt_tokens"].values[0] = [len(i) for i in ids]
        for b, members in enumerate(batches):
            ds["batch_index"].values[0, members] = b
            ds["row_in_batch"].values[0, members] = range(len(members))
        known = {p.id for p in prompts}
        ds["provenance"].values[0] = provenance.to_json(
            {
                **facts,
                "logprob_mode": "raw",
                "weights_sha256": loaded.manifest["weights_sha256"],
                "options": {p: o for p, o in of.options.items() if p in known},
            }
        )
        return schema.validate(ds, where=label)


def material(
    prompts: Sequence[Prompt], ids: list[list[int]], options: dict[str, dict[str, int]], anchor: Anchor
) -> Material:
    """Put together what the replays share; the options' ids are scored at position 0."""
    with_ids = with_options(anchor, [p.id for p in prompts], options)
    return Material(tuple(prompts), [ids_sha256(i) for i in ids], ids, options, with_ids, anchor.top_token_id.shape[2])


@contextlib.contextmanager
def summation_order(model: Any, seed: int) -> Iterator[None]:
    """Permute the inner units of every MLP: the same function in exact arithmetic, summed in another order.

    Another accelerator's kernels do that too. ``seed`` 0 changes nothing. The weights come back bit for bit.

    Raises
    ------
    RuitongError
        For a model whose MLPs are not ``gate_proj``, ``up_proj``, ``down_proj``.
    """
    mlps = [layer.mlp for layer in model.get_decoder().layers] if seed else []
    if any(not hasattr(m, name) for m in mlps for name in ("gate_proj", "up_proj", "down_proj")):
        raise RuitongError("order needs MLPs of gate_proj, up_proj and down_proj; leave it at 0 for this model")
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(m.down_proj.weight.shape[1], generator=generator) for m in mlps]
    try:
        _permute(mlps, orders)
        yield
    finally:
        _permute(mlps, [torch.argsort(o) for o in orders])


def _permute(mlps: Sequence[Any], orders: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode():
        for mlp, order in zip(mlps, orders, strict=True):
            for part in (mlp.gate_proj, mlp.up_proj):
                for w in (part.weight, part.bias):
                    if w is not None:
                        w.data.copy_(w.data[order])
            mlp.down_proj.weight.data.copy_(mlp.down_proj.weight.data[:, order])


@contextlib.contextmanager
def split_prompt(model: Any, at: int) -> Iterator[None]:
    """Read each text in two passes: ``at`` tokens into the KV cache, then the rest through it (chunked prefill).

    What is scored lies in the second pass when ``at`` is below the shortest prompt, so a defect of the cache shows.
    """
    from transformers import DynamicCache

    decoder = model.get_decoder()
    whole = decoder.forward

    def forward(input_ids: Any, attention_mask: Any = None, use_cache: bool = False, **more: Any) -> Any:
        cache = DynamicCache(config=model.config)
        first = None if attention_mask is None else attention_mask[:, :at]
        begun = whole(input_ids=input_ids[:, :at], attention_mask=first, cache=cache, use_cache=True)
        rest = whole(input_ids=input_ids[:, at:], attention_mask=attention_mask, cache=cache, use_cache=True)
        rest.last_hidden_state = torch.cat((begun.last_hidden_state, rest.last_hidden_state), dim=1)
        return rest

    decoder.forward = forward
    try:
        yield
    finally:
        del decoder.forward
