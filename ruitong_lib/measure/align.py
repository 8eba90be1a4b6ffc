"""Put two cells side by side: manifests first, then the same prompts, positions and ids, or a refusal."""

from typing import Any

import numpy as np
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError
from ruitong_lib.measure import configuration, kernels, scaling

# Coordinates that do not title a row: `device` follows from `hardware`, `anchor` is checked by the hash of its arrays.
_NOT_AXES = ("device", "anchor")
AXES = tuple(c for c in schema.CELL_COORDS if c not in _NOT_AXES)
# What a server decides by itself, so that its cell does not know it: where the engines differ, it follows from that.
_ENGINES_OWN = ("attention", "onednn_isa", "deterministic", "threads")
_OK, _MISSING = schema.STATES.index("ok"), schema.STATES.index("missing")

_TEXTS = "; the texts alone can still be compared: scoring='text'"


def axis_name(differs_in: tuple[str, ...]) -> str:
    """Return the name of a row's axis in the words of the ladder."""
    names = {"onednn_isa": "kernels", "composition": "batch composition", "batch_size": "batch size", "repeat": "rerun"}
    if len(differs_in) != 1:
        return "mixed: " + ", ".join(names.get(d, d) for d in differs_in) if differs_in else "none"
    return names.get(differs_in[0], differs_in[0])


def one_cell(shard: xr.Dataset, side: str) -> xr.Dataset:
    """Drop the dimension ``cell`` of a shard; an aggregate is refused."""
    if shard.sizes.get("cell", 1) != 1:
        raise RefusedError(f"the {side} holds {shard.sizes['cell']} cells; pick one: schema.select(ds, label)")
    return shard.isel(cell=0) if "cell" in shard.dims else shard


def differs_in(reference: xr.Dataset, candidate: xr.Dataset) -> tuple[str, ...]:
    """Return the fields in which two cells (no dimension ``cell``) differ, in the order of the schema.

    Attention, kernels and threads of a server are its own; against another engine they are part of the axis ``engine``.
    """
    engines = {reference["engine"].item(), candidate["engine"].item()}
    skip = _ENGINES_OWN if len(engines) > 1 and "endpoint" in engines else ()
    return tuple(a for a in AXES if a not in skip and reference[a].item() != candidate[a].item())


def default_scoring(reference: xr.Dataset, candidate: xr.Dataset) -> str:
    """Return "replay" where both shards hold one, else "decode" (a published or served run may hold no replay)."""
    states = [s["state"].sel(scoring="replay").values for s in (reference, candidate)]
    return "decode" if any((x == _MISSING).all() for x in states) else "replay"


def check(reference: xr.Dataset, candidate: xr.Dataset, scoring: str) -> None:
    """Refuse a comparison that would be meaningless, before any number is computed.

    Raises
    ------
    RefusedError
        Naming the cause: other prompts or prompt ids, other weights, raw against processed logprobs, another anchor,
        a scoring that a side does not have, or NaN logits.
    """
    if scoring not in schema.SCORINGS:
        raise RefusedError(f"scoring must be one of {', '.join(schema.SCORINGS)}, got {scoring!r}")
    check_prompts(reference, candidate)
    pa, pb = schema.provenance(reference), schema.provenance(candidate)
    if configuration.identity(reference) != configuration.identity(candidate):
        raise RefusedError(
            "one side knows its tokens by id, the other by their text alone: the two cannot be matched. Collect both "
            "with a server that returns token ids, or compare their texts alone: scoring='text'"
        )
    for key, what in (("logprob_mode", "logprob modes"), ("weights_sha256", "weights")):
        known = {pa.get(key), pb.get(key)} - {None, "", "unknown"}
        if len(known) > 1 and not (key == "weights_sha256" and quantised_elsewhere(reference, candidate)):
            raise RefusedError(f"different {what}: {str(pa[key])[:12]} and {str(pb[key])[:12]}; not the same model")
    for side, found in (("reference", pa), ("candidate", pb)):
        if found.get("logprob_mode") == "processed":
            raise RefusedError(
                f"the {side}'s logprobs are processed (taken after temperature, top-k or top-p), so they are not the "
                "model's distribution. Ask the server for raw ones (vLLM: --logprobs-mode raw_logprobs), or compare "
                "the texts alone: scoring='text'"
            )
    _check_states(reference, candidate, scoring)
    if scoring == "replay" and _anchor_hash(reference) != _anchor_hash(candidate):
        raise RefusedError(
            f"different anchors: {reference['anchor'].item()!r} and {candidate['anchor'].item()!r} have other token "
            "arrays; replay both over the same anchor"
        )


def quantised_elsewhere(reference: xr.Dataset, candidate: xr.Dataset) -> str:
    """Say what a pair rests on whose one side is a checkpoint that its maker quantised; empty for any other pair.

    Its bytes are not those of the base, so nothing proves that it was made from it: whoever ran the cell named the base
    (``model`` beside ``checkpoint``), and the other side has to be that base in another precision.
    """
    found = [schema.provenance(c) for c in (reference, candidate)]
    quantised = [f.get("quantized_checkpoint", False) for f in found]
    if sum(quantised) != 1 or not found[quantised.index(True)].get("base_named"):
        return ""
    if reference["model"].item() != candidate["model"].item():
        return ""
    if reference["precision"].item() == candidate["precision"].item():
        return ""
    return "weights quantised elsewhere; identity not proven"


def check_prompts(reference: xr.Dataset, candidate: xr.Dataset) -> None:
    """Refuse two cells (no dimension ``cell``) that did not read the same prompts.

    Raises
    ------
    RefusedError
        Naming the prompts that only one side has, or whose token ids differ.
    """
    ours, theirs = set(reference["prompt"].values), set(candidate["prompt"].values)
    if ours != theirs:
        only = sorted(map(str, ours ^ theirs))
        raise RefusedError(
            f"different prompts: {reference['prompts'].item()} has {len(ours)}, {candidate['prompts'].item()} has "
            f"{len(theirs)}, {len(only)} are on one side only (e.g. {only[0]!r}). Collect both with the same prompt set"
        )
    a = reference["prompt_sha256"].astype(str)
    b = candidate["prompt_sha256"].astype(str).sel(prompt=a["prompt"])
    other = a["prompt"].values[a.values != b.values]
    if len(other):
        raise RefusedError(
            f"different prompt ids for {len(other)} of {len(ours)} prompts (e.g. {str(other[0])!r}): another "
            "tokenizer, chat template, double BOS or thinking switch; the two sides did not read the same text"
        )


def _check_states(reference: xr.Dataset, candidate: xr.Dataset, scoring: str) -> None:
    for side, cell in (("reference", reference), ("candidate", candidate)):
        state = cell["state"].sel(scoring=scoring).values
        if (state == _MISSING).any():
            raise RefusedError(
                f"the {side} {cell['cell'].item()} has no {scoring} for {(state == _MISSING).sum()} of {len(state)} "
                "prompts; collect it with scoring='both', or compare with "
                f"scoring={next(s for s in schema.SCORINGS if s != scoring)!r}"
            )
        if (state != _OK).any():
            names = sorted({schema.STATES[s] for s in state[state != _OK]})
            bad = cell["prompt"].values[state != _OK]
            first = schema.provenance(cell).get("overflow", {}).get("layer", "")
            where = f"; the first layer that overflowed is {first}" if first and "nan_logits" in names else ""
            raise RefusedError(
                f"the {side} {cell['cell'].item()} is in state {', '.join(names)} for {len(bad)} of {len(state)} "
                f"prompts (e.g. {str(bad[0])!r}){where}; its numbers mean nothing. Collect it in another precision, or "
                f"report it as failed{_TEXTS if scoring == 'decode' else ''}"
            )


def _anchor_hash(cell: xr.Dataset) -> str:
    r = cell.sel(scoring="replay").sortby("prompt")
    return schema.anchor_sha256(r["token_id"].values, r["anchor_token_id"].values, r["n_tokens"].values)


def align(reference: xr.Dataset, candidate: xr.Dataset, *, scoring: str = "replay", strict: bool = True) -> xr.Dataset:
    """Check two shards and put both sides on the same prompts, positions and ids.

    Replay: every anchor position, the anchor ids, the mass outside them as each side stored it. Decode: the positions
    at risk, up to and including the first differing token, the ids that both sides list, rest 1 − Σ.

    Parameters
    ----------
    reference, candidate
        Shards (cell: 1).
    scoring
        "replay" or "decode".
    strict
        Refuse sides that only their texts identify and that the data show to have been set up differently
        (:func:`ruitong_lib.measure.configuration.evidence`); False is for looking at such a pair.

    Returns
    -------
    Dataset over (prompt, position, k): ``{reference,candidate}_{logprob,rest,top_id,top_logprob,token,token_logprob,
    n_tokens,finish_reason}``, ``valid`` and, for decode, ``first_difference`` (prompt; −1 for identical texts).

    Raises
    ------
    RefusedError
        See :func:`check`.
    """
    a, b = one_cell(reference, "reference"), one_cell(candidate, "candidate")
    check(a, b, scoring)
    b = b.sel(prompt=a["prompt"])
    width = int(max(s["n_tokens"].sel(scoring=scoring).max() for s in (a, b)))
    k = min(a.sizes["k"], b.sizes["k"])
    a, b = (_cut(s.sel(scoring=scoring), width).isel(k=slice(k)) for s in (a, b))
    if configuration.identity(a) == "text":
        a, b = configuration.with_codes(a, b)
    # `.values`: the cell's scalar coordinates would ride along in each array, and cost more than the arithmetic.
    both = xr.Dataset(coords={"prompt": a["prompt"].values, "position": np.arange(width), "k": np.arange(k)})
    for side, s in (("reference", a), ("candidate", b)):
        for name, new in (
            ("token_id", "token"),
            ("logprob", "token_logprob"),
            ("top_token_id", "top_id"),
            ("top_logprob", "top_logprob"),
            ("n_tokens", "n_tokens"),
            ("finish_reason", "finish_reason"),
        ):
            both[f"{side}_{new}"] = (s[name].dims, s[name].values)
    states_ok = (a["position_state"].values == 0) & (b["position_state"].values == 0)
    if scoring == "replay":
        for side, s in (("reference", a), ("candidate", b)):
            both[f"{side}_logprob"] = (("prompt", "position", "k"), s["anchor_logprob"].values.astype(np.float64))
            both[f"{side}_rest"] = (("prompt", "position"), np.exp(s["anchor_tail_logprob"].values.astype(np.float64)))
        _censor(both, a["anchor_token_id"].values)
        valid = np.arange(width) < a["n_tokens"].values[:, None]
    else:
        lp = a["top_logprob"].values.astype(np.float64)
        lq = kernels.match(a["top_token_id"].values, b["top_token_id"].values, b["top_logprob"].values)
        lp = np.where(np.isfinite(lq), lp, np.nan)
        # Likeliest on both sides first: "the ten best" are the same ones whichever side is the reference.
        order = np.lexsort((a["top_token_id"].values, -(lp + lq)))
        lp, lq = (np.take_along_axis(x, order, -1) for x in (lp, lq))
        for side, x in (("reference", lp), ("candidate", lq)):
            both[f"{side}_logprob"] = (("prompt", "position", "k"), x)
            both[f"{side}_rest"] = (("prompt", "position"), 1 - np.nansum(np.exp(x), axis=-1))
        na, nb = a["n_tokens"].values, b["n_tokens"].values
        first = kernels.first_difference(a["token_id"].values, b["token_id"].values, na, nb)
        both["first_difference"] = ("prompt", first)
        # At risk: up to and including the first differing token; never past the end of either text.
        last = np.where(first < 0, na, np.minimum(first + 1, np.minimum(na, nb)))
        valid = np.arange(width) < last[:, None]
    if "expert_id" in a and "expert_id" in b:
        # In an aggregate a cell has the layers and slots of all models.
        both_have = {d: np.union1d(a[d].values, b[d].values) for d in ("moe_layer", "slot")}
        for side, s in (("reference", a), ("candidate", b)):
            both[f"{side}_experts"] = s["expert_id"].reindex(both_have, fill_value=-1).variable
    both["valid"] = (("prompt", "position"), valid & states_ok)
    both = both.assign_coords({c: ("prompt", a[c].values) for c in schema.PROMPT_COORDS})
    both.attrs = {
        "weights_note": quantised_elsewhere(a, b),
        "reference": a["cell"].item(),
        "candidate": b["cell"].item(),
        "scoring": scoring,
        "third_party_anchor": int(
            {a["anchor"].item(), b["anchor"].item()}.isdisjoint({a["cell"].item(), b["cell"].item()})
            and scoring == "replay"
        ),
        "n_not_ok": int((valid & ~states_ok).sum()),
    }
    if strict and "endpoint" in {a["engine"].item(), b["engine"].item()}:
        scaling.refuse(both)
    if strict and scoring == "decode" and configuration.identity(a) == "text":
        configuration.refuse(both, a, b)
    return both


def _censor(both: xr.Dataset, ids: np.ndarray[Any, Any]) -> None:
    """Keep, of a replay, the anchor ids that both sides know, where a server listed its own best ones and not all.

    Such an id is censored: below the server's k-th, and no number. The mass outside the known ids is then 1 − Σ on
    both sides: what a server left out has no logsumexp of its own. Positions that both know whole are not touched.
    """
    sides = ("reference", "candidate")
    lp = [both[f"{s}_logprob"].values for s in sides]
    known = np.isfinite(lp[0]) & np.isfinite(lp[1])
    rests = [np.isfinite(both[f"{s}_rest"].values) for s in sides]
    whole = (known | (ids < 0)).all(-1) & ((rests[0] & rests[1]) | (ids < 0).all(-1))
    if whole.all():
        return
    for side, x in zip(sides, lp, strict=True):
        kept = np.where(known | whole[..., None], x, np.nan)
        rest = np.where(whole, both[f"{side}_rest"].values, 1 - np.nansum(np.exp(kept), axis=-1))
        both[f"{side}_logprob"] = (("prompt", "position", "k"), kept)
        both[f"{side}_rest"] = (("prompt", "position"), rest)


def _cut(ds: xr.Dataset, width: int) -> xr.Dataset:
    """Cut or pad to ``width`` positions explicitly: xarray would join shorter cells to the inner part in silence."""
    if ds.sizes["position"] >= width:
        return ds.isel(position=slice(width))
    short = width - ds.sizes["position"]
    return ds.pad(position=(0, short), constant_values={v.name: v.fill for v in schema.VARIABLES if v.name in ds})


def reference_gap(pair: xr.Dataset) -> xr.DataArray:
    """Return the reference's top-1/top-2 gap (nat) at each position: how far from a tie it was."""
    lp = pair["reference_top_logprob"].astype(np.float64)
    gap = (lp.isel(k=0) - lp.isel(k=1)).where(pair["valid"])
    gap.attrs = {"units": "nat", "long_name": "reference's top-1/top-2 gap"}
    return gap.drop_vars("k", errors="ignore")
