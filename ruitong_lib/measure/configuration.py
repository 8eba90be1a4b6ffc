"""Two sides known by their texts alone: whether they ran the same thing at all.

Where prompt ids were recorded, equal hashes prove that both sides read the same input. A source of texts cannot prove
it: another chat template, another thinking switch or other weights leave no trace in the manifest. The data have to
show that nothing of the kind happened, or the pair is refused, whatever the hardware.
"""

import numpy as np
import pandas as pd
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError
from ruitong_lib.measure.kernels import Array

# Rounding flips near-ties: on the published GPU pairs each flip sits at a gap of at most 0.54 nat. Beyond 5/4 nat, the
# last edge of the gap bins, the two sides were sure of different tokens.
SURE = 5 / 4  # nat
_REPEATS = 1024  # more than the alternatives of any server: code = text · 1024 + occurrence


def identity(cell: xr.Dataset) -> str:
    """Return what identifies a cell's tokens and prompts: "ids", or "text" where the source has no ids."""
    return str(schema.provenance(cell).get("identity", "ids"))


def with_codes(reference: xr.Dataset, candidate: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Fill the ids of two sides whose tokens are texts with codes that both share.

    A code stands for a text and for its how-manieth occurrence in the row: several ids may decode to one text
    (``""``, ``�``), and such repeats are told apart by their order.
    """
    sides = reference, candidate
    names = ("token_text", "top_token_text")
    codes, _ = pd.factorize(np.concatenate([s[n].values.ravel() for s in sides for n in names]))
    out, start = [], 0
    for s in sides:
        valid = np.arange(s.sizes["position"]) < s["n_tokens"].values[:, None]
        split = [start, start + s["token_text"].size, start + s["token_text"].size + s["top_token_text"].size]
        token, top = (codes[i:j].reshape(s[n].shape) for n, i, j in zip(names, split, split[1:], strict=False))
        start = split[-1]
        before = np.stack([(top[..., :j] == top[..., j : j + 1]).sum(-1) for j in range(top.shape[-1])], axis=-1)
        listed = valid[..., None] & np.isfinite(s["top_logprob"].values)
        ids = {
            "token_id": (("prompt", "position"), np.where(valid, token * _REPEATS, -1).astype(np.int32)),
            "top_token_id": (
                ("prompt", "position", "k"),
                np.where(listed, top * _REPEATS + before, -1).astype(np.int32),
            ),
        }
        out.append(s.assign(ids))
    return out[0], out[1]


def refuse(pair: xr.Dataset, reference: xr.Dataset, candidate: xr.Dataset) -> None:
    """Refuse a decode pair of texts whose flips are no near-ties.

    The rule is symmetric and knows no names: at least half of the prompts flipped, and the median flip sits at a
    top-1/top-2 gap above 5/4 nat (the larger of the two sides' gaps).

    Raises
    ------
    RefusedError
        With the evidence.
    """
    flipped, _, gap = flip_gaps(pair)
    if flipped.any(1).sum() * 2 >= len(flipped) and np.median(gap[flipped]) > SURE:
        raise RefusedError(
            "a difference of configuration, not a measurement of hardware: the two sides did not run the same thing "
            "(chat template, thinking switch, weights, sampling or serving), so no delta is reported and nothing after "
            "the first difference is compared. Evidence: "
            + "; ".join(evidence(pair, reference, candidate))
            + ". Record prompt ids and the serving configuration on both sides, and collect again"
        )


def flip_gaps(pair: xr.Dataset) -> tuple[Array, Array, Array]:
    """Return where the best tokens differ (prompt, position), the reference's gap, the larger of both gaps (nat)."""
    best = (pair[f"{side}_top_id"].values[..., 0] for side in ("reference", "candidate"))
    flipped = np.not_equal(*best) & pair["valid"].values
    lp = [pair[f"{side}_top_logprob"].values.astype(np.float64) for side in ("reference", "candidate")]
    gaps = [x[..., 0] - x[..., 1] for x in lp]
    return flipped, gaps[0], np.fmax(*gaps)


def evidence(pair: xr.Dataset, reference: xr.Dataset, candidate: xr.Dataset) -> list[str]:
    """List what the data and the manifests say about whether two sides ran the same thing.

    Parameters
    ----------
    pair
        ``compare.align(reference, candidate, scoring="decode", strict=False)``.
    reference, candidate
        The two shards (or cells without the dimension ``cell``).
    """
    a, b = (s.isel(cell=0) if "cell" in s.dims else s for s in (reference, candidate))
    flipped, gap, _ = flip_gaps(pair)
    first = pair["first_difference"].values
    texts = a["text"].values, b["text"].sel(prompt=a["prompt"]).values
    parted, n = int((texts[0] != texts[1]).sum()), len(first)
    at = first[first >= 0]
    lines = [f"{parted} of {n} texts differ" + (f", half of them by token {int(np.median(at)) + 1}" if len(at) else "")]
    if flipped.any():
        g = gap[flipped]
        lines.append(
            f"the first differing tokens sit at reference gaps of {np.median(g):.1f} nat (median) to {g.max():.1f} nat "
            "(rounding flips near-ties)"
        )
    for side, cell in (("reference", a), ("candidate", b)):
        known = schema.provenance(cell)
        repeats, of = known.get("repeats_exactly"), known.get("repeats_of", 0)
        if repeats is not None and repeats < of:
            lines.append(f"the {side} repeats only {repeats} of {of} of its own texts bit-exactly")
        missing = [x for x in known.get("not_declared", []) if x in {"precision", "hardware", "engine"}]
        if missing:
            lines.append(f"the {side} does not declare its {', '.join(missing)}")
    lines += [
        f"other {name}: {a[name].item() or 'undeclared'!s} and {b[name].item() or 'undeclared'!s}"
        for name in ("engine", "precision")
        if a[name].item() != b[name].item()
    ]
    ended = [
        (s["finish_reason"].values == schema.FINISH.index("eos")) & (s["n_tokens"].values > 0) for s in _decodes(a, b)
    ]
    last = [
        {str(t[n - 1]) for t, n, e in zip(s["token_text"].values, s["n_tokens"].values, end, strict=True) if e}
        for s, end in zip(_decodes(a, b), ended, strict=True)
        if "token_text" in s
    ]
    if len(last) == 2 and min(map(len, last)) == 1 and max(map(len, last)) > 1:
        side = "reference" if len(last[0]) == 1 else "candidate"
        lines.append(f"the {side} reports the end-of-text token, the other side leaves it out")
    return lines


def _decodes(*cells: xr.Dataset) -> list[xr.Dataset]:
    return [c.sel(scoring="decode") if "scoring" in c.dims else c for c in cells]
