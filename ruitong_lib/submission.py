"""Shards made elsewhere: whether they can join the table, and the rows that they would add."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError, RuitongError
from ruitong_lib.report import table

# What a row of the table cannot do without; the words say what it is for.
_NEEDED = {
    "weights_sha256": "that both sides ran the same weights",
    "tokenizer_sha256": "that both sides have the same tokenizer",
    "logprob_mode": "that logprobs are raw",
    "hardware": "what it ran on",
    "precision": "what it was computed in",
    "prompts": "which prompts were run",
    "content_key": "which parameters it was collected with",
}
# What says who or where, and never belongs into a public file.
_PRIVATE = {
    "an absolute path": r"(?:^|[\s\"'=:(])(?:(?:/[\w.~-]+){2,}|[A-Za-z]:\\{1,2}\w[^\s\"']+)",
    "an address": r"\bhttps?://(?!huggingface\.co\b)[^\s\"'/]+|\b(?:\d{1,3}\.){3}\d{1,3}\b",
    "an e-mail address": r"\b[\w.+-]+@[\w-]+\.[\w.]+\b",
    "a key": r"\b(?:sk|hf|ghp|gho|xoxb|AKIA)[-_]?[A-Za-z0-9_-]{16,}\b"
    r"|(?i:bearer\s+\S+|api[_-]?key\W{1,4}\S+|password\W{1,4}\S+)",
    "a host name": r"(?i:\"(?:host|hostname|node|nodename|user|username|login)\"\s*:\s*\"[^\"]+\")",
}


def problems(shard: xr.Dataset) -> list[str]:
    """Return what keeps one shard out of the table: missing provenance, states that are not ok, private words.

    Parameters
    ----------
    shard
        From :func:`ruitong_lib.schema.load`, which has checked the schema.
    """
    found = schema.provenance(shard)
    out = [f"provenance lacks {k}, which shows {what}" for k, what in _NEEDED.items() if not found.get(k)]
    if found.get("logprob_mode") not in ("raw", None):
        out.append(f"logprobs are {found['logprob_mode']!r}; the table holds raw ones only")
    ran = shard["state"].values != schema.STATES.index("missing")
    bad = ran & (shard["state"].values != schema.STATES.index("ok"))
    if not ran.any():
        out.append("no prompt was run")
    if bad.any():
        names = sorted({schema.STATES[s] for s in shard["state"].values[bad]})
        out.append(
            f"{int(bad.sum())} rows are in state {', '.join(names)}: such a run is published as failed, not as a row"
        )
    positive = bool((shard["top_logprob"] > 0).any() or (shard["logprob"] > 0).any())
    if positive:
        out.append("there are positive logprobs")
    return out + list(_private(shard))


def _private(shard: xr.Dataset) -> Iterator[str]:
    """Look at each text that is no model output; the same word is named once."""
    texts = {"provenance": json.dumps(schema.provenance(shard), ensure_ascii=False)}
    texts |= {n: str(shard[n].values[0]) for n, t in schema.CELL_COORDS.items() if t == "str"}
    texts |= {f"attribute {k}": str(v) for k, v in shard.attrs.items()}
    for where, text in texts.items():
        for what, pattern in _PRIVATE.items():
            hit = re.search(pattern, text)
            if hit:
                shown = hit.group(0).strip(" \"'=:(")[:12]
                yield f"{where} holds {what} ({shown}…): take it out, or collect again; nothing private is published"


def preview(shards: Sequence[xr.Dataset], *, reference: str = "") -> list[dict[str, Any]]:
    """Return the rows that these shards would add, with the floor that they bring themselves.

    Raises
    ------
    RuitongError
        Where fewer than two are given, or they do not go together.
    """
    if len(shards) < 2:
        raise RuitongError("a row compares two cells: give the reference too, and one more cell for the floor")
    try:
        return table.delta_rows(schema.combine(shards), reference=reference)
    except RefusedError as e:
        raise RuitongError(f"these shards do not make a row: {e}") from e
