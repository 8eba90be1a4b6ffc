"""Make a shard from the raw responses of a run, and from nothing else that the server said."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from ruitong_lib import provenance, schema
from ruitong_lib.cell import SERVERS_OWN
from ruitong_lib.collect.served import rows, vocabulary
from ruitong_lib.collect.served.asking import Route
from ruitong_lib.collect.served.raw import body_of, busy_seconds, load
from ruitong_lib.collect.served.responses import parse, parse_prompt
from ruitong_lib.collect.served.sanity import examine, text_differs
from ruitong_lib.collect.served.sending import Job
from ruitong_lib.prompts import ids_sha256

log = logging.getLogger("ruitong")
# What a server's own settings decide; nobody outside can see them.
ENGINE_FIELDS: dict[str, Any] = {"device": "", "attention": "", "onednn_isa": "", "deterministic": False, "threads": 0}
_SHOWN = 1000  # findings kept one by one; all are counted


class Measured(NamedTuple):
    """What a run leaves: the report of the probe, and the files of the responses by place of the prompt."""

    report: dict[str, Any]
    route: Route
    k: int  # alternatives asked for in the decode
    decode: dict[int, Path]  # empty: not measured
    replay: dict[int, Path]  # a prompt whose anchor has no token has none
    replay_k: int
    anchor: Any  # forward.Anchor, or None
    warm: dict[str, Any]


def decode_rows(job: Job, files: dict[int, Path], k: int) -> tuple[list[rows.Row], list[tuple[float, float]]]:
    """Read the decode: a row a prompt, and when each request was in flight (start, seconds)."""
    eos = set(vocabulary.eos_ids(job.cell, job.words))
    out, times = [], []
    for i in range(len(job.ids)):
        stored = load(files[i])
        times.append((stored["started"], stored["seconds"]))
        parsed, problem = body_of(stored)
        row = rows.decoded(parse(parsed), job.words, k=k, eos=eos, status=problem)
        row = examine(row, job.words, k=k, greedy=True)
        odd = text_differs(row, job.words)
        if odd is not None:
            row.spoil(odd)
        out.append(row)
    return out, times


def own_anchor(job: Job, files: dict[int, Path], k: int) -> Any:
    """Return the cell's own text as an anchor; None where its tokens have no ids."""
    from ruitong_lib.collect.forward import Anchor
    from ruitong_lib.collect.transformers import with_options

    decoded, _ = decode_rows(job, files, k)
    if not rows.identified(decoded) or not any(r.n for r in decoded):
        return None
    a = rows.arrays(decoded, job.cell.top_k)
    anchor = Anchor(job.label, a["token_id"], rows.known_first(a["top_token_id"]), a["n_tokens"])
    return with_options(anchor, [p.id for p in job.prompts.prompts], job.options)


def build(job: Job, m: Measured) -> xr.Dataset:
    """Make the shard from the raw responses."""
    cell, report = job.cell, m.report
    decoded, decode_times = decode_rows(job, m.decode, m.k) if m.decode else ([], [])
    replayed, replay_times = _replay_rows(job, m)
    by_id = rows.identified(decoded)
    width = cell.top_k if m.replay or not m.decode else max(m.k, 1)
    parts = [rows.arrays(r, width) if r else None for r in (decoded, replayed)]
    facts = vocabulary.facts(cell, job.words)
    findings = [
        {"scoring": scoring, "prompt": p.id, **f.to_dict()}
        for scoring, some in (("decode", decoded), ("replay", replayed))
        for p, r in zip(job.prompts.prompts, some, strict=False)
        for f in r.findings
    ]
    counts = Counter(f["name"] for f in findings)
    found = provenance.software() | {
        "cell": {n: v for n, v in cell.manifest().items() if n not in {"device", *SERVERS_OWN}},
        "content_key": job.key,
        "identity": "ids" if by_id else "text",
        "hardware": cell.hardware,
        "declared": ["hardware", "precision", "weights"],
        "probe": _without_paths(report),
        "asked": {"path": m.route.path, **m.route.extra},
        "logprob_mode": report["logprob_mode"],
        "top_k": {"asked": cell.top_k, "got": m.k, "replay_asked": m.replay_k if m.replay else None},
        "warm": m.warm,
        "findings": findings[:_SHOWN],
        "findings_by_name": dict(sorted(counts.items())),
        "prompts": {"name": job.prompts.name, "version": job.prompts.version, "sha256": job.prompts.sha256},
        "anchor_sha256": m.anchor.sha256 if m.anchor is not None and m.replay else None,
        **({"options": job.options} if any(p.options for p in job.prompts.prompts) else {}),
        "timing": {
            **_timing("decode", "new_tokens", decode_times, decoded),
            **_timing("replay", "scored_tokens", replay_times, replayed),
        },
        **facts,
    }
    coords = {
        **{n: v for n, v in cell.manifest().items() if n in schema.CELL_COORDS},
        **ENGINE_FIELDS,
        "hardware": cell.hardware,
        "prompts": job.prompts.name,
        "anchor": m.anchor.label if m.anchor is not None and m.replay else "",
    }
    ds = schema.new_shard(
        coords,
        job.label,
        {
            n: [getattr(p, a) for p in job.prompts.prompts]
            for n, a in (("prompt", "id"), ("category", "category"), ("language", "language"))
        },
        n_positions=max(p["token_id"].shape[1] for p in parts if p is not None),
        k=width,
        text_tokens=not by_id,
    )
    _fill(ds, parts)
    if m.replay:
        _fill_anchor(ds, m.anchor.top_token_id, replayed)
    ds["prompt_sha256"].values[0] = [ids_sha256(i) for i in job.ids]
    ds["n_prompt_tokens"].values[0] = [len(i) for i in job.ids]
    if decoded:
        ds["text"].values[0] = [r.text for r in decoded]
    ds["provenance"].values[0] = provenance.to_json(found)
    for name, count in sorted(counts.items()):
        log.info("%s: %s in %d rows", job.label, name, count)
    return schema.validate(ds, where=job.label)


def _without_paths(report: dict[str, Any]) -> dict[str, Any]:
    """Return the probe's report for a manifest: a server may name its model by a path on its disk."""

    def short(name: str) -> str:
        return Path(name).name if name.startswith("/") else name

    server = {**report["server"], "models": [short(n) for n in report["server"]["models"]]}
    return {**report, "server": server, "model": short(report["model"])}


def _replay_rows(job: Job, m: Measured) -> tuple[list[rows.Row], list[tuple[float, float]]]:
    out, times = [], []
    for i in range(len(job.ids)) if m.replay else ():
        tokens = m.anchor.token_id[i, : m.anchor.n_tokens[i]].tolist()
        if i not in m.replay:
            out.append(rows.Row())
            continue
        stored = load(m.replay[i])
        times.append((stored["started"], stored["seconds"]))
        parsed, problem = body_of(stored)
        scored = parse_prompt(parsed, [*job.ids[i], *tokens], m.replay_k, len(job.ids[i]))
        row = rows.replayed(scored, job.words, start=len(job.ids[i]), tokens=tokens, k=m.replay_k, status=problem)
        out.append(examine(row, job.words, k=m.replay_k, greedy=False))
    return out, times


def _fill(ds: xr.Dataset, parts: Sequence[dict[str, np.ndarray[Any, Any]] | None]) -> None:
    for scoring, part in enumerate(parts):
        for name, values in (part or {}).items():
            if values.ndim == 1:
                ds[name].values[0, scoring] = values
            elif name in ds:  # the texts of tokens are kept where ids are missing
                ds[name].values[0, scoring, :, : values.shape[1]] = values


def _fill_anchor(ds: xr.Dataset, top: np.ndarray[Any, Any], replayed: Sequence[rows.Row]) -> None:
    """Look up the anchor's ids among all that the server listed; those that it did not list stay NaN (censored)."""
    size, k = min(top.shape[1], ds.sizes["position"]), top.shape[2]
    ds["anchor_token_id"].values[0, :, :size, :k] = top[:, :size]
    for i, row in enumerate(replayed):
        for t in range(row.n):
            if row.flag[t] in {"ok", "censored"}:
                ds["anchor_logprob"].values[0, i, t, :k] = [row.known[t].get(int(a), math.nan) for a in top[i, t]]


def _timing(
    scoring: str, unit: str, times: list[tuple[float, float]], some: Sequence[rows.Row]
) -> dict[str, dict[str, float]]:
    seconds = max(busy_seconds(times), 1e-6)
    n = sum(r.n for r in some)
    values = {"seconds": round(seconds, 4), unit: n, "tokens_per_second": round(n / seconds, 2)}
    return {scoring: values} if times else {}
