"""The published way of comparing two corpora, kept to reproduce its numbers and to show what is wrong with them.

Nothing else in Ruitong uses these functions. They look only at the positions *before* the first differing token, where
top-1 agreement is 1 by construction, and report the worst single position, which grows with the number of positions.
:mod:`ruitong_lib.measure.compare` is what to use.
"""

import dataclasses
import math

import numpy as np
import xarray as xr
from scipy import stats

from ruitong_lib.measure import kernels
from ruitong_lib.measure.align import align


@dataclasses.dataclass(frozen=True)
class Published:
    """What the published reports print of a pair."""

    n_prompts: int
    identical_texts: int
    diverged: int
    diverged_share: float
    diverged_lo: float  # Wilson, 95 %
    diverged_hi: float
    max_delta_prob: float  # worst position before the divergence, the ten best tokens matched by text
    mass_delta: float  # worst prompt's |difference of the mean top-k mass| before the divergence
    top1_agreement: float  # 1 by construction


def reproduce(reference: xr.Dataset, candidate: xr.Dataset) -> Published:
    """Compare two text shards as the published reports do, on the prompts that both have.

    Parameters
    ----------
    reference, candidate
        Shards (cell: 1) of :mod:`ruitong_lib.collect.corpora`.
    """
    a, b = shared_prompts(reference, candidate)
    pair = align(a, b, scoring="decode", strict=False)
    first, n = pair["first_difference"].values, pair["reference_n_tokens"].values
    before = pair["position"].values < np.where(first < 0, n, first)[:, None]
    delta = kernels.max_delta(pair["reference_logprob"].values, pair["candidate_logprob"].values, prob=True)
    mass = [np.exp(pair[f"{s}_top_logprob"].values.astype(np.float64)).sum(-1) for s in ("reference", "candidate")]
    compared = before.any(1)
    means = [np.where(before, m, 0).sum(1)[compared] / before.sum(1)[compared] for m in mass]
    top = [pair[f"{s}_top_id"].values[..., 0] for s in ("reference", "candidate")]
    texts = a["text"].values[0] == b["text"].sel(prompt=a["prompt"]).values[0]
    diverged = int((first >= 0).sum())
    wilson = stats.binomtest(diverged, len(first)).proportion_ci(method="wilson")
    return Published(
        n_prompts=len(first),
        identical_texts=int(texts.sum()),
        diverged=diverged,
        diverged_share=diverged / len(first),
        diverged_lo=float(wilson.low),
        diverged_hi=float(wilson.high),
        max_delta_prob=float(np.nanmax(delta[before])) if before.any() else math.nan,
        mass_delta=float(np.abs(means[0] - means[1]).max()) if before.any() else math.nan,
        top1_agreement=float((top[0] == top[1])[before].mean()) if before.any() else math.nan,
    )


def agreement_past_divergence(reference: xr.Dataset, candidate: xr.Dataset) -> tuple[int, int]:
    """Count equal tokens over *all* common positions, also where the sides are continuing different sentences.

    Returns
    -------
    Equal tokens, and positions: the published "15 % top-1 agreement" of the Ascend service, which means nothing.
    """
    a, b = shared_prompts(reference, candidate)
    pair = align(a, b, scoring="decode", strict=False)
    shorter = np.minimum(pair["reference_n_tokens"].values, pair["candidate_n_tokens"].values)
    common = pair["position"].values < shorter[:, None]
    equal = pair["reference_token"].values == pair["candidate_token"].values
    return int(equal[common].sum()), int(common.sum())


def shared_prompts(reference: xr.Dataset, candidate: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Cut two shards to the prompts that both have, in the reference's order."""
    both = set(reference["prompt"].values) & set(candidate["prompt"].values)
    keep = [p for p in reference["prompt"].values if p in both]
    return reference.sel(prompt=keep), candidate.sel(prompt=keep)
