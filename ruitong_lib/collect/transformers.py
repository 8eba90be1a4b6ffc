"""Fill a shard from a Hugging Face causal LM: greedy decode, replay of an anchor, both from raw logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import xarray as xr

from ruitong_lib import provenance, schema
from ruitong_lib.cell import NOT_NUMBERS, Cell
from ruitong_lib.collect import devices, models
from ruitong_lib.collect.forward import Anchor, Run, batch_rows, decode, replay
from ruitong_lib.errors import RuitongError
from ruitong_lib.prompts import ids_sha256, load_prompts, render

_OK = schema.STATES.index("ok")


def collect(cell: Cell, *, progress: Callable[[str, int, int], None] | None = None) -> xr.Dataset:
    """Run one cell and return its shard.

    Parameters
    ----------
    cell
        What to run.
    progress
        Called with the scoring, the batches done and the batches in all.

    Returns
    -------
    A validated shard (cell: 1, scoring: 2, prompt, position, k).

    Raises
    ------
    RuitongError
        For a device, model, prompt set or anchor that cannot be used. Prompts and anchor are checked before the
        model is loaded, and a NaN in the logits is a state of the shard, not an error.
    """
    devices.prepare(onednn_isa=cell.onednn_isa)
    devices.resolve(cell.device)
    prompts = load_prompts(cell.prompts)
    anchor_shard = schema.load(cell.anchor) if cell.anchor else None
    if anchor_shard is not None:
        _check_anchor(anchor_shard, [p.id for p in prompts.prompts], cell)
    torch.manual_seed(cell.seed)
    with devices.threads(cell.threads) as n_threads, torch.inference_mode():
        loaded = models.load(cell)
        ids = render(prompts.prompts, loaded.tokenizer, thinking=cell.thinking)
        hashes = [ids_sha256(i) for i in ids]
        limit = getattr(loaded.model.config, "max_position_embeddings", None)
        longest = max(map(len, ids)) + cell.max_new_tokens
        if limit and longest > limit:
            raise RuitongError(
                f"the longest prompt needs {longest} positions with max_new_tokens={cell.max_new_tokens}, "
                f"the model has {limit}; lower max_new_tokens or leave that prompt out"
            )
        batches = batch_rows(len(ids), cell.batch_size, cell.composition)
        run = Run(loaded.model, loaded.device, ids, batches, cell.top_k, progress)
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
        replayed = replay(run, anchor, timing) if anchor is not None else None
        anchor_label = anchor.label if anchor_shard is not None and anchor is not None else ""
        label = cell.label(hardware=hardware, anchor=anchor_label)
        found = provenance.software() | {
            "cell": {f: getattr(cell, f) for f in cell.__dataclass_fields__ if f not in NOT_NUMBERS},
            "content_key": cell.key(hardware=hardware, anchor=anchor_label),
            "hardware": hardware,
            "device": str(loaded.device),
            "flags": provenance.torch_flags(),
            "matmul_sha256": provenance.matmul_sha256(loaded.device),
            "logprob_mode": "raw",
            "eos_token_ids": sorted(eos),
            "generation_config_ignored": _non_greedy(loaded.model),
            "prompts": {"name": prompts.name, "version": prompts.version, "sha256": prompts.sha256},
            "anchor_sha256": anchor.sha256 if anchor is not None else None,
            "timing": timing,
            **loaded.manifest,
        }
        coords = {
            **{n: getattr(cell, n) for n in schema.CELL_COORDS if hasattr(cell, n)},
            "device": loaded.device.type if torch.version.hip is None else "rocm",
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
        for name in ("n_tokens", "finish_reason", "state"):
            ds[name].values[0, scoring] = result[name]
    if replayed is not None and anchor is not None:
        width = anchor.token_id.shape[1]
        ds["anchor_token_id"].values[0, :, :width, : anchor.top_token_id.shape[2]] = anchor.top_token_id
        ds["anchor_logprob"].values[0, :, :width, : anchor.top_token_id.shape[2]] = replayed["anchor_logprob"]
        ds["anchor_tail_logprob"].values[0, :, :width] = replayed["anchor_tail_logprob"]


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
    return Anchor(
        str(d["cell"].values),
        d["token_id"].values[:, :width],
        d["top_token_id"].values[:, :width],
        d["n_tokens"].values,
    )
