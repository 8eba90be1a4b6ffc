"""Put two cells side by side: manifests first, then the same prompts, positions and ids, or a refusal."""

import numpy as np
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError
from ruitong_lib.measure import configuration, kernels

# Coordinates that do not title a row: `device` follows from `hardware`, `anchor` is checked by the hash of its arrays.
_NOT_AXES = ("device", "anchor")
AXES = tuple(c for c in schema.CELL_COORDS if c not in _NOT_AXES)
_OK, _MISSING = schema.STATES.index("ok"), schema.STATES.index("missing")


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
    """Return the fields in which two cells (no dimension ``cell``) differ, in the order of the schema."""
    return tuple(a for a in AXES if reference[a].item() != candidate[a].item())


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
    pa, pb = schema.provenance(reference), schema.provenance(candidate)
    if configuration.identity(reference) != configuration.identity(candidate):
        raise RefusedError(
            "one side knows its tokens by id, the other by their text alone: the two cannot be matched. Collect both "
            "with a server that returns token ids"
        )
    for key, what in (("logprob_mode", "logprob modes"), ("weights_sha256", "weights")):
        known = {pa.get(key), pb.get(key)} - {None, "", "unknown"}
        if len(known) > 1:
            raise RefusedError(f"different {what}: {str(pa[key])[:12]} and {str(pb[key])[:12]}; not the same model")
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
            raise RefusedError(
                f"the {side} {cell['cell'].item()} is in state {', '.join(names)} for {len(bad)} of {len(state)} "
                f"prompts (e.g. {str(bad[0])!r}); its numbers mean nothing. Collect it in another precision, or report "
                "it as failed"
            )
    if scoring == "replay" and _anchor_hash(reference) != _anchor_hash(candidate):
        raise RefusedError(
            f"different anchors: {reference['anchor'].item()!r} and {candidate['anchor'].item()!r} have other token "
            "arrays; replay both over the same anchor"
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
    both["valid"] = (("prompt", "position"), valid & states_ok)
    both = both.assign_coords({c: ("prompt", a[c].values) for c in schema.PROMPT_COORDS})
    both.attrs = {
        "reference": a["cell"].item(),
        "candidate": b["cell"].item(),
        "scoring": scoring,
        "third_party_anchor": int(
            {a["anchor"].item(), b["anchor"].item()}.isdisjoint({a["cell"].item(), b["cell"].item()})
            and scoring == "replay"
        ),
        "n_not_ok": int((valid & ~states_ok).sum()),
    }
    if strict and scoring == "decode" and configuration.identity(a) == "text":
        configuration.refuse(both, a, b)
    return both


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
