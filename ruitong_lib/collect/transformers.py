"""Fill a shard from a Hugging Face causal LM: greedy decode, replay of an anchor, both from raw logits."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from ruitong_lib import provenance, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import devices, models, overflow, precision, routing, switches
from ruitong_lib.collect.forward import Anchor, Run, batch_rows, decode, replay
from ruitong_lib.collect.parts import Parts
from ruitong_lib.errors import RuitongError
from ruitong_lib.prompts import Prompt, ids_sha256, load_prompts, option_ids, render

_OK = schema.STATES.index("ok")


def collect(
    cell: Cell, *, progress: Callable[[str, int, int], None] | None = None, parts: Path | None = None
) -> xr.Dataset:
    """Run one cell and return its shard.

    Parameters
    ----------
    cell
        What to run.
    progress
        Called with the scoring, the batches done and the batches in all.
    parts
        Folder for the finished batches of a long replay (:mod:`ruitong_lib.collect.parts`); None keeps nothing.

    Returns
    -------
    A validated shard (cell: 1, scoring: 2, prompt, position, k).

    Raises
    ------
    RuitongError
        For a device, model, prompt set or anchor that cannot be used. Prompts and anchor are checked before the
        model is loaded, and a NaN in the logits is a state of the shard, not an error.
    """
    devices.prepare(onednn_isa=cell.onednn_isa, device=cell.device, deterministic=cell.deterministic)
    device = devices.resolve(cell.device)
    switches.check_precision(cell.precision, device)
    precision.check(cell.precision, device)
    prompts = load_prompts(cell.prompts)
    _check_options(prompts.prompts, cell.top_k)
    anchor_shard = schema.load(cell.anchor) if cell.anchor else None
    if anchor_shard is not None:
        _check_anchor(anchor_shard, [p.id for p in prompts.prompts], cell)
    torch.manual_seed(cell.seed)
    with (
        switches.determinism(cell.deterministic),
        switches.matmul_precision(cell.precision, device) as float32_bits,
        devices.threads(cell.threads) as n_threads,
        torch.inference_mode(),
    ):
        loaded = models.load(cell)
        held = devices.memory(device).get("allocated")
        devices.reset_peak_memory(device)
        ids = render(prompts.prompts, loaded.tokenizer, thinking=cell.thinking)
        hashes = [ids_sha256(i) for i in ids]
        options = option_ids(prompts.prompts, loaded.tokenizer, thinking=cell.thinking)
        limit = getattr(loaded.model.config, "max_position_embeddings", None)
        longest = max(map(len, ids)) + cell.max_new_tokens
        if limit and longest > limit:
            raise RuitongError(
                f"the longest prompt needs {longest} positions with max_new_tokens={cell.max_new_tokens}, "
                f"the model has {limit}; lower max_new_tokens or leave that prompt out"
            )
        batches = batch_rows(len(ids), cell.batch_size, cell.composition)
        experts = routing.find(loaded.model)
        run = Run(loaded.model, loaded.device, ids, batches, cell.top_k, progress, experts)
        eos = _eos_ids(loaded)
        timing: dict[str, Any] = {}
        decoded = decode(run, cell.max_new_tokens, eos, timing) if cell.scoring != "replay" else None
        hardware = devices.hardware(cell.device)
        anchor = None
        if anchor_shard is not None:
            anchor = load_anchor(anchor_shard, hashes)
        elif decoded is not None and cell.scoring == "both":
            label = cell.label(hardware=hardware, anchor="")
            anchor = Anchor(label, decoded["token_id"], decoded["top_token_id"], decoded["n_tokens"])
        if anchor is not None:
            anchor = with_options(anchor, [p.id for p in prompts.prompts], options)
        anchor_label = anchor.label if anchor_shard is not None and anchor is not None else ""
        keep = None
        if parts is not None and anchor is not None:
            parts_of = [cell.key(hardware=hardware, anchor=anchor_label), anchor.sha256, *hashes]
            parts_of += [loaded.manifest["weights_sha256"], provenance.matmul_sha256(loaded.device)]
            keep = Parts(parts, hashlib.sha256(" ".join(parts_of).encode()).hexdigest())
        replayed = replay(run, anchor, timing, parts=keep) if anchor is not None else None
        label = cell.label(hardware=hardware, anchor=anchor_label)
        found = provenance.software() | {
            "cell": cell.manifest(),
            "content_key": cell.key(hardware=hardware, anchor=anchor_label),
            "hardware": hardware,
            "device": str(loaded.device),
            "driver": devices.driver(loaded.device),
            "cpu": devices.cpu_facts(),
            "memory_bytes": {"model": held, **devices.memory(device)} if held else {},
            "flags": provenance.torch_flags() | {"float32_product_bits": float32_bits},
            "matmul_sha256": provenance.matmul_sha256(loaded.device),
            "logprob_mode": "raw",
            "eos_token_ids": sorted(eos),
            "generation_config_ignored": _non_greedy(loaded.model),
            "prompts": {"name": prompts.name, "version": prompts.version, "sha256": prompts.sha256},
            "anchor_sha256": anchor.sha256 if anchor is not None else None,
            **({"options": options} if any(p.options for p in prompts.prompts) else {}),
            "timing": timing,
            **({"router": "recorded" if experts.shape else "not recorded"} if experts else {}),
            **_overflow(run, [p.id for p in prompts.prompts], decoded, replayed),
            **loaded.manifest,
        }
        coords = {
            **{n: v for n, v in cell.manifest().items() if n in schema.CELL_COORDS},
            "device": devices.kind_of(loaded.device),
            "hardware": hardware,
            "threads": n_threads,
            "prompts": prompts.name,
            "anchor": anchor.label if anchor is not None else "",
        }
        ds = schema.new_shard(
            coords,
            label,
            {
                n: [getattr(p, a) for p in prompts.prompts]
                for n, a in (("prompt", "id"), ("category", "category"), ("language", "language"))
            },
            n_positions=max(r["token_id"].shape[1] for r in (decoded, replayed) if r is not None),
            k=cell.top_k,
            moe=(experts.layers, experts.shape[1]) if experts and experts.shape else ((), 0),
        )
        _fill(ds, decoded, replayed, anchor)
        ds["prompt_sha256"].values[0] = hashes
        ds["n_prompt_tokens"].values[0] = [len(i) for i in ids]
        for b, rows in enumerate(batches):
            ds["batch_index"].values[0, rows] = b
            ds["row_in_batch"].values[0, rows] = range(len(rows))
        if decoded is not None:
            ds["text"].values[0] = [
                loaded.tokenizer.decode([i for i in t[:n] if i >= 0], skip_special_tokens=True)  # −1: NaN logits
                for t, n in zip(decoded["token_id"].tolist(), decoded["n_tokens"].tolist(), strict=True)
            ]
        ds["provenance"].values[0] = provenance.to_json(found)
    return schema.validate(ds, where=label)


def _fill(ds: xr.Dataset, decoded: Any, replayed: Any, anchor: Anchor | None) -> None:
    for scoring, result in enumerate((decoded, replayed)):
        if result is None:
            continue
        width = result["token_id"].shape[1]
        for name in ("token_id", "logprob", "top_token_id", "top_logprob", "tail_logprob", "entropy", "position_state"):
            ds[name].values[0, scoring, :, :width] = result[name]
        if "expert_id" in result:
            ds["expert_id"].values[0, scoring, :, :width] = result["expert_id"]
        for name in ("n_tokens", "finish_reason", "state"):
            ds[name].values[0, scoring] = result[name]
    if replayed is not None and anchor is not None:
        width = anchor.token_id.shape[1]
        ds["anchor_token_id"].values[0, :, :width, : anchor.top_token_id.shape[2]] = anchor.top_token_id
        ds["anchor_logprob"].values[0, :, :width, : anchor.top_token_id.shape[2]] = replayed["anchor_logprob"]
        ds["anchor_tail_logprob"].values[0, :, :width] = replayed["anchor_tail_logprob"]


def _overflow(run: Run, prompts: Sequence[str], decoded: Any, replayed: Any) -> dict[str, Any]:
    """Find the first layer that overflowed, by a second pass over the first prompt that has NaN logits."""
    for scoring, result in (("decode", decoded), ("replay", replayed)):
        if result is None or (result["state"] == _OK).all():
            continue
        row = int(np.flatnonzero(result["state"] != _OK)[0])
        at = int(np.flatnonzero(result["position_state"][row] == schema.POSITION_STATES.index("nan"))[0])
        text = run.ids[row] + [int(t) for t in result["token_id"][row, :at]]
        found = overflow.first_layer(run.model, text, run.device)
        return {"overflow": found | {"prompt": prompts[row], "scoring": scoring, "position": at}}
    return {}


def _eos_ids(loaded: models.Loaded) -> set[int]:
    """Return the ids that end a text: the generation config's (a chat model may have several), else the tokenizer's."""
    eos = loaded.model.generation_config.eos_token_id
    eos = loaded.tokenizer.eos_token_id if eos is None else eos
    return {int(e) for e in (eos if isinstance(eos, list) else [eos]) if e is not None}


def _non_greedy(model: Any) -> dict[str, Any]:
    """Return what the model's own generation_config would have changed; recorded, never applied."""
    diff = model.generation_config.to_diff_dict()
    return {
        k: v for k, v in diff.items() if k not in {"transformers_version", "_from_model_config"} and "token_id" not in k
    }


def _check_anchor(shard: xr.Dataset, prompts: list[str], cell: Cell) -> None:
    if shard.sizes["cell"] != 1:
        raise RuitongError(f"anchor {cell.anchor} holds {shard.sizes['cell']} cells; an anchor is one shard")
    if list(shard["prompt"].values) != prompts:
        raise RuitongError(
            f"anchor {cell.anchor} was made with the prompt set {shard['prompts'].values[0]!r}, this cell runs "
            f"{cell.prompts!r}; replay needs the same prompts in the same order"
        )
    state = shard["state"].sel(scoring="decode").values[0]
    if (state != _OK).any():
        names = sorted({schema.STATES[s] for s in state[state != _OK]})
        raise RuitongError(
            f"anchor {cell.anchor} has no usable decode ({', '.join(names)}); collect it with scoring='both'"
        )
    if shard.sizes["k"] != cell.top_k:
        raise RuitongError(
            f"anchor {cell.anchor} stores k={shard.sizes['k']}, this cell asks for top_k={cell.top_k}; replays are "
            "comparable only over the same anchor ids, so use the same number"
        )


def _check_options(prompts: Sequence[Prompt], top_k: int) -> None:
    most = max(prompts, key=lambda p: len(p.options))
    if len(most.options) >= top_k:
        raise RuitongError(
            f"prompt {most.id!r} has {len(most.options)} options, which need top_k={len(most.options) + 1} or more: "
            f"each option's logprob takes the place of one of the alternatives; got top_k={top_k}"
        )


def with_options(anchor: Anchor, prompts: Sequence[str], options: Mapping[str, Mapping[str, int]]) -> Anchor:
    """Score the answer options too: at position 0 their ids replace the least likely of the anchor's ids.

    Every cell of a grid makes the same ids from the same anchor, so a replay holds the exact logprob of each option.
    The best id keeps its place, and an option that is among the ids already keeps its own.

    Parameters
    ----------
    anchor
        The continuation and its top-k ids.
    prompts
        Prompt ids, in the anchor's order.
    options
        Of :func:`ruitong_lib.prompts.option_ids`.
    """
    top = np.array(anchor.top_token_id)
    for row, prompt in enumerate(prompts):
        wanted = set(options.get(prompt, {}).values())
        missing = sorted(wanted - set(top[row, 0].tolist()))
        slots = [j for j in range(top.shape[2] - 1, 0, -1) if top[row, 0, j] not in wanted]
        for slot, i in zip(reversed(slots[: len(missing)]), missing, strict=True):
            top[row, 0, slot] = i
    return anchor._replace(top_token_id=top)


def load_anchor(shard: xr.Dataset, prompt_hashes: Sequence[str]) -> Anchor:
    """Take the anchor out of a shard: its decoded tokens and their top-k ids.

    Raises
    ------
    RuitongError
        When the shard's prompts have other token ids (another tokenizer, chat template or thinking switch).
    """
    theirs = shard["prompt_sha256"].values[0].tolist()
    other = [p for p, a, b in zip(shard["prompt"].values, theirs, prompt_hashes, strict=True) if a != b]
    if other:
        raise RuitongError(
            f"the anchor's prompts have other token ids ({len(other)} of {len(theirs)}, e.g. {other[0]!r}): another "
            "tokenizer, chat template, system message or thinking switch. Use an anchor of this model"
        )
    d = shard.isel(cell=0).sel(scoring="decode")
    width = int(d["n_tokens"].max())
    token, top, n = d["token_id"].values[:, :width], d["top_token_id"].values[:, :width], d["n_tokens"].values
    if ((token < 0) & (np.arange(width) < n[:, None])).any():
        raise RuitongError(
            f"the anchor {d['cell'].values} has tokens without ids (its server named them by text alone), so they "
            "cannot be replayed; use an anchor of engine 'transformers'"
        )
    # A server may leave an alternative without an id: those go last, for the first of a row must be one.
    top = np.take_along_axis(top, np.argsort(top < 0, axis=-1, kind="stable"), -1)
    return Anchor(str(d["cell"].values), token, top, n)
