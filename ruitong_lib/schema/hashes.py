"""Hashes of arrays, never of files: the same on every machine, and free of padding."""

import hashlib
from typing import Any

import numpy as np


def array_sha256(*arrays: np.ndarray[Any, Any]) -> str:
    """Hash arrays by shape, dtype and bytes; the same on every machine of the same byte order."""
    h = hashlib.sha256()
    for a in arrays:
        a = np.ascontiguousarray(a)  # noqa: PLW2901
        h.update(f"{a.dtype.str}{a.shape}".encode())
        h.update(a.tobytes())
    return h.hexdigest()


def anchor_sha256(token_id: np.ndarray[Any, Any], top_token_id: np.ndarray[Any, Any], n: np.ndarray[Any, Any]) -> str:
    """Hash an anchor, free of padding: per prompt its token ids (P, T) and top-k ids (P, T, K), cut at ``n`` (P)."""
    k = int(np.flatnonzero((top_token_id >= 0).any((0, 1))).max(initial=-1)) + 1  # beside a larger k, −1 follows
    tops = top_token_id[..., :k]
    return array_sha256(*[a[i, : n[i]].astype(np.int32) for i in range(len(n)) for a in (token_id, tops)])
