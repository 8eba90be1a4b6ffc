"""Compare two cells: manifests first, then deltas per prompt and position, then summaries with intervals."""

import dataclasses
import math
from typing import Any

import numpy as np
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError
from ruitong_lib.measure import configuration, kernels
from ruitong_lib.measure.metrics import METRICS

DRAWS = 2000  # bootstrap resamples of prompts
# Coordinates that do not title a row: `device` follows from `hardware`, `anchor` is checked by the hash of its arrays.
_NOT_AXES = ("device", "anchor")
AXES = tuple(c for c in schema.CELL_COORDS if c not in _NOT_AXES)
_OK, _MISSING = schema.STATES.index("ok"), schema.STATES.index("missing")


@dataclasses.dataclass(frozen=True)
class Value:
    """One metric of one comparison: undefined is NaN, and ``n`` says of how many positions (or prompts)."""

    value: float
    unit: str
    lo: float
    hi: float
    p50: float
    p99: float
    max: float
    n: int
    top_share: float = math.nan  # share of the total that the largest 1 % of positions carry


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The deltas between two cells under one scoring."""

    reference: str
    candidate: str
    differs_in: tuple[str, ...]
    scoring: str
    n_prompts: int
    n_positions: int
    metrics: dict[str, Value]
    notes: dict[str, Any]
    positions: xr.Dataset  # each metric over (prompt, position), NaN where not compared

    @property
    def axis(self) -> str:
        """What the row is about: the one field that differs, ``mixed`` for several, ``none``."""
        return axis_name(self.differs_in)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold: NaN becomes null."""
        out = dataclasses.asdict(dataclasses.replace(self, positions=xr.Dataset()))
        del out["positions"]
        cleaned: dict[str, Any] = jsonable(out)
        return cleaned


def axis_name(differs_in: tuple[str, ...]) -> str:
    """Return the name of a row's axis in the words of the ladder."""
    names = {"onednn_isa": "kernels", "composition": "batch composition", "batch_size": "batch size", "repeat": "rerun"}
    if len(differs_in) != 1:
        return "mixed: " + ", ".join(names.get(d, d) for d in differs_in) if differs_in else "none"
    return names.get(differs_in[0], differs_in[0])


def jsonable(value: Any) -> Any:
    """Turn NaN and infinities into None and numpy scalars into Python's, at any depth."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _one(shard: xr.Dataset, side: str) -> xr.Dataset:
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
    a, b = _one(reference, "reference"), _one(candidate, "candidate")
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


def compare(
    reference: xr.Dataset,
    candidate: xr.Dataset,
    *,
    scoring: str = "replay",
    draws: int = DRAWS,
    seed: int = 0,
    pair: xr.Dataset | None = None,
) -> Comparison:
    """Compare two shards.

    Parameters
    ----------
    reference, candidate
        Shards (cell: 1), in this order.
    scoring
        "replay" (every anchor position) or "decode" (positions at risk of divergence); never mixed.
    draws, seed
        Bootstrap over prompts: percentile intervals of 95 %. A maximum has none (it grows with n).
    pair
        ``align(reference, candidate, scoring=scoring)``, where it is at hand.

    Returns
    -------
    Comparison

    Raises
    ------
    RefusedError
        See :func:`check`.
    """
    pair = align(reference, candidate, scoring=scoring) if pair is None else pair
    fields = xr.Dataset({name: facts.function(pair) for name, facts in METRICS.items()})
    weights = kernels.bootstrap_weights(pair.sizes["prompt"], draws, seed)
    values = {
        name: _summary(fields[name].values, facts.unit, facts.summary, weights) for name, facts in METRICS.items()
    }
    flips = int((fields["top1_agreement"] == 0).sum())
    notes: dict[str, Any] = {
        "flips": flips,
        "tied_flips": int(fields["tied_flips"].sum()),
        "not_ok_positions": pair.attrs["n_not_ok"],
        "third_party_anchor": bool(pair.attrs["third_party_anchor"]),
        "perplexity_ratio": math.exp(-values["direction"].value) if values["direction"].n else math.nan,
        "lattice_step": {
            side: kernels.lattice_step(pair[f"{side}_top_logprob"].values) for side in ("reference", "candidate")
        },
        "identical": is_identical(pair),
    }
    if scoring == "decode":
        text, more = _text(pair, weights)
        values |= text
        notes |= more | {"hazard": flips / max(1, int(pair["valid"].sum()))}
    return Comparison(
        reference=pair.attrs["reference"],
        candidate=pair.attrs["candidate"],
        differs_in=differs_in(_one(reference, "reference"), _one(candidate, "candidate")),
        scoring=scoring,
        n_prompts=int(pair["valid"].any("position").sum()),
        n_positions=int(pair["valid"].sum()),
        metrics=values,
        notes=notes,
        positions=fields.assign(valid=pair["valid"], gap=reference_gap(pair)).assign_attrs(pair.attrs),
    )


def reference_gap(pair: xr.Dataset) -> xr.DataArray:
    """Return the reference's top-1/top-2 gap (nat) at each position: how far from a tie it was."""
    lp = pair["reference_top_logprob"].astype(np.float64)
    gap = (lp.isel(k=0) - lp.isel(k=1)).where(pair["valid"])
    gap.attrs = {"units": "nat", "long_name": "reference's top-1/top-2 gap"}
    return gap.drop_vars("k", errors="ignore")


def is_identical(pair: xr.Dataset) -> bool:
    """Whether both sides are as long, and bit-equal in each number of the compared positions (NaN equals NaN)."""
    if (pair["reference_n_tokens"].values != pair["candidate_n_tokens"].values).any():
        return False
    for name in ("token", "logprob", "rest", "top_id", "top_logprob"):
        a, b = pair[f"reference_{name}"], pair[f"candidate_{name}"]
        if not ((a == b) | (a.isnull() & b.isnull()) | ~pair["valid"]).all():
            return False
    return True


def _summary(field: np.ndarray[Any, Any], unit: str, how: str, weights: np.ndarray[Any, Any]) -> Value:
    """Summarise (prompt, position): sums over prompts and positions, never means of per-prompt means."""
    known = np.isfinite(field)
    n = int(known.sum())
    nan = math.nan
    if not n:
        return Value(nan, unit, nan, nan, nan, nan, nan, 0)
    flat = field[known]
    sums, counts = np.where(known, field, 0.0).sum(1), known.sum(1)
    lo = hi = nan
    if how == "max":
        value = float(flat.max())
    else:
        value = float(sums.sum() / n) if how == "mean" else float(sums.sum())
        drawn = weights @ sums
        if how == "mean":
            drawn = drawn / np.maximum(weights @ counts, 1)
        lo, hi = (float(x) for x in np.quantile(drawn, [0.025, 0.975]))
    total = np.abs(flat).sum()
    share = float(np.sort(np.abs(flat))[-math.ceil(n / 100) :].sum() / total) if total > 0 else nan
    p50, p99 = (float(x) for x in np.quantile(flat, [0.5, 0.99]))
    return Value(value, unit, lo, hi, p50, p99, float(flat.max()), n, share)


def _text(pair: xr.Dataset, weights: np.ndarray[Any, Any]) -> tuple[dict[str, Value], dict[str, Any]]:
    """Text metrics of a decode pair: they are per prompt, so ``n`` counts prompts."""
    first, n = pair["first_difference"].values, len(pair["prompt"])
    na, nb = pair["reference_n_tokens"].values, pair["candidate_n_tokens"].values
    nan = math.nan
    identical = (first < 0).astype(float)
    share = np.quantile(weights @ identical / n, [0.025, 0.975])
    ratio = np.quantile((weights @ nb) / (weights @ na), [0.025, 0.975])
    time, event = divergence_events(pair)
    horizon = pair.sizes["position"]
    lost = kernels.cumulative_incidence(time, event, horizon)[0].sum()
    draws = weights[: min(len(weights), 500)]
    rows = [np.repeat(np.arange(n), w) for w in draws]
    resampled = [kernels.cumulative_incidence(time[r], event[r], horizon)[0].sum() for r in rows]
    low, high = np.quantile(resampled, [0.025, 0.975])
    values = {
        "identical_texts": Value(float(identical.mean()), "1", float(share[0]), float(share[1]), nan, nan, nan, n),
        "length_ratio": Value(float(nb.sum() / na.sum()), "1", float(ratio[0]), float(ratio[1]), nan, nan, nan, n),
        "mean_tokens_lost": Value(float(lost), "tokens", float(low), float(high), nan, nan, nan, n),
    }
    return values, {"diverged": int((event == 1).sum()), "horizon": horizon}


def divergence_events(pair: xr.Dataset) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return per prompt when its two texts parted, and how: 1 diverged, 2 both ended alike, 0 cut at the limit.

    Most answers end by themselves, so the end is a competing event and not censoring, which it would have to be
    independent of divergence for. A text that its lower limit cut, and that agrees so far, is censored too.
    """
    first = pair["first_difference"].values
    na, nb = pair["reference_n_tokens"].values, pair["candidate_n_tokens"].values
    finish, theirs = pair["reference_finish_reason"].values, pair["candidate_finish_reason"].values
    shorter = np.where(na < nb, finish, theirs)
    cut = (na != nb) & (first == np.minimum(na, nb)) & (shorter == schema.FINISH.index("length"))
    ended = (finish == schema.FINISH.index("eos")) & ~cut
    event = np.where((first >= 0) & ~cut, 1, np.where(ended, 2, 0))
    return np.where(event == 1, first, np.minimum(na, nb) - 1), event
