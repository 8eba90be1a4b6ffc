"""Published and served runs that are kept as JSON (texts of tokens, no ids): fetched, checked, made into shards.

The layout is ``{label, model, max_tokens, top_k, entries: [{prompt, sampled_tokens[T], top_tokens[T][k],
top_logprobs[T][k], text, finish_reason}]}``. Such a file has no token ids: tokens are strings, several ids may decode
to one string, and the ids that the prompt was rendered to are unknown. The shard says so: ``"identity": "text"``.
"""

import functools
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import yaml

from ruitong_lib import paths, schema
from ruitong_lib.cell import slug
from ruitong_lib.errors import RuitongError, did_you_mean

PREFIX = "corpus:"
_FINISH = {"stop": "eos", "length": "length"}
_NOT_AVAILABLE = -1000.0  # servers write -9999 or -3.4e38 for "not available"; no logprob of float32 is that low
FACTS = ("hardware", "device", "engine", "precision")


@functools.cache
def registry() -> dict[str, Any]:
    """Return ``params/corpora.yml``: the address, the files with their hashes and facts, our prompt categories."""
    document: dict[str, Any] = yaml.safe_load((paths.PARAMS / "corpora.yml").read_text(encoding="utf-8"))
    return document


def names() -> tuple[str, ...]:
    """Return the names of the published corpora."""
    return tuple(registry()["files"])


def _known(name: str) -> Mapping[str, str]:
    files: dict[str, dict[str, str]] = registry()["files"]
    if name not in files:
        raise RuitongError(f"corpus must be one of {', '.join(files)}, got {name!r}.{did_you_mean(name, files)}")
    return files[name]


def folder() -> Path:
    """Return where the published files are: ``RUITONG_DATA``, or the folder that :func:`fetch` fills."""
    return Path(os.environ.get("RUITONG_DATA") or paths.cache() / "corpora")


def fetch(which: Iterable[str] = (), *, address: str = "") -> list[Path]:
    """Get published files by address and SHA-256; those that are there already are checked and kept.

    Parameters
    ----------
    which
        Names (:func:`names`); empty for all.
    address
        The folder to fetch from, in place of the published one (a mirror).

    Returns
    -------
    Their paths, in the order of ``which``.

    Raises
    ------
    RuitongError
        For an unknown name, a host that cannot be reached, or a file whose hash is another.
    """
    import pooch

    which = list(which) or list(names())
    base = (address or registry()["address"]).rstrip("/") + "/"
    store = pooch.create(folder(), base, registry={f"{n}.json": f"sha256:{_known(n)['sha256']}" for n in which})
    found = []
    for name in which:
        try:
            found.append(Path(store.fetch(f"{name}.json")))
        except (OSError, ValueError) as e:
            raise RuitongError(
                f"cannot fetch the corpus {name} from {base}: {e}. Run it again to go on where it stopped, or point "
                "RUITONG_DATA to a folder that has the files"
            ) from e
    return found


def open_shard(spec: str | os.PathLike[str]) -> xr.Dataset:
    """Open a shard wherever one is named: ``corpus:NAME``, the path of a published JSON file, or a shard's ``.nc``.

    Raises
    ------
    RuitongError
        For an unknown name, a file that is not there or has another hash, or one that is no corpus and no shard.
    """
    text = os.fspath(spec)
    if not text.startswith(PREFIX):
        return read(text) if text.endswith(".json") else schema.load(text)
    name = text.removeprefix(PREFIX)
    wanted = _known(name)["sha256"]
    path = folder() / f"{name}.json"
    if not path.is_file():
        raise RuitongError(
            f"the corpus {name} is not at {path}: run `ruitong fetch corpora`, or point RUITONG_DATA to a folder that "
            "has it"
        )
    got = hashlib.sha256(path.read_bytes()).hexdigest()
    if got != wanted:
        raise RuitongError(
            f"{path} has SHA-256 {got[:12]}…, the published file has {wanted[:12]}…: it was changed or cut short. "
            "Delete it and run `ruitong fetch corpora`, or import it under its path as a file of your own"
        )
    return read(path)


def read(path: str | os.PathLike[str], **facts: str) -> xr.Dataset:
    """Read one JSON file into a shard.

    Parameters
    ----------
    path
        The file. A published one is recognised by its SHA-256.
    **facts
        ``hardware``, ``device``, ``engine``, ``precision``: what the file itself does not say. Empty means unknown.

    Returns
    -------
    Shard (cell: 1) with a decode and no replay; tokens in ``token_text`` and ``top_token_text``.

    Raises
    ------
    RuitongError
        Naming the entry and what is wrong with it: a file cut short, ragged rows, a k that varies, positive logprobs,
        duplicate prompts.
    """
    path = Path(path)
    for name in facts:
        if name not in FACTS:
            raise RuitongError(f"facts must be of {', '.join(FACTS)}, got {name!r}.{did_you_mean(name, FACTS)}")
    try:
        content = path.read_bytes()
        document = json.loads(content)
    except OSError as e:
        raise RuitongError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise RuitongError(f"{path} is not JSON ({e}): was it cut short? Fetch or copy it again") from e
    sha = hashlib.sha256(content).hexdigest()
    published: dict[str, str] = next((f for f in registry()["files"].values() if f["sha256"] == sha), {})
    facts = {n: facts.get(n) or published.get(n, "") for n in FACTS}
    entries = _entries(document, str(path))
    arrays = _arrays(entries, str(path))
    return _shard(document, entries, arrays, facts, {"file": path.name, "file_sha256": sha})


def _entries(document: Any, where: str) -> list[dict[str, Any]]:
    entries = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise RuitongError(f"{where}: not a corpus: it must be a mapping with a list 'entries' that is not empty")
    if not isinstance(document.get("model"), str):
        raise RuitongError(f"{where}: 'model' must be the name of the model, got {document.get('model')!r}")
    total = document.get("total", len(entries))
    if total != len(entries):
        raise RuitongError(f"{where}: 'total' says {total} entries, the file holds {len(entries)}; fetch it again")
    wanted = {"prompt": str, "sampled_tokens": list, "top_tokens": list, "top_logprobs": list, "text": str}
    seen: dict[str, int] = {}
    for i, entry in enumerate(entries):
        for name, kind in wanted.items():
            value = entry.get(name) if isinstance(entry, dict) else None
            if not isinstance(value, kind):
                got = type(value).__name__
                raise RuitongError(f"{where}: entry {i}: {name!r} must be a {kind.__name__}, got {got}")
        if entry.get("finish_reason") not in _FINISH:
            reason = entry.get("finish_reason")
            raise RuitongError(f"{where}: entry {i}: finish_reason must be one of {', '.join(_FINISH)}, got {reason!r}")
        first = seen.setdefault(entry["prompt"], i)
        if first != i:
            raise RuitongError(f"{where}: entries {first} and {i} have the same prompt {entry['prompt'][:50]!r}")
    return entries


def _arrays(entries: list[dict[str, Any]], where: str) -> dict[str, np.ndarray[Any, Any]]:
    """Check the rows of every entry and put them into arrays (prompt, position[, k]), alternatives best first."""
    k = next((len(row) for e in entries for row in e["top_tokens"]), 0)
    if k < 2:
        raise RuitongError(f"{where}: {k} alternatives a position; at least 2 are needed (top_logprobs of the server)")
    n = np.array([len(e["sampled_tokens"]) for e in entries])
    shape = (len(entries), int(n.max()), k)
    top, token = np.full(shape, "", dtype=object), np.full(shape[:2], "", dtype=object)
    logprob = np.full(shape, np.nan)
    for i, e in enumerate(entries):
        lengths = [len(e[name]) for name in ("sampled_tokens", "top_tokens", "top_logprobs")]
        if len(set(lengths)) > 1:
            raise RuitongError(
                f"{where}: entry {i}: ragged: {lengths[0]} sampled_tokens, {lengths[1]} top_tokens, {lengths[2]} "
                "top_logprobs; they must be as long as each other"
            )
        if not n[i]:
            continue
        for name in ("top_tokens", "top_logprobs"):
            for t, row in enumerate(e[name]):
                if not isinstance(row, list) or len(row) != k:
                    got = len(row) if isinstance(row, list) else type(row).__name__
                    raise RuitongError(
                        f"{where}: entry {i}, position {t}: {name} has {got} alternatives, the first row has {k}"
                    )
        token[i, : n[i]], top[i, : n[i]] = e["sampled_tokens"], e["top_tokens"]
        try:
            logprob[i, : n[i]] = np.array(e["top_logprobs"], dtype=np.float64)  # null becomes NaN
        except (TypeError, ValueError) as error:
            raise RuitongError(f"{where}: entry {i}: top_logprobs must be numbers or null: {error}") from error
    for name, texts in (("sampled_tokens", token), ("top_tokens", top)):
        odd = next((x for x in texts.ravel() if not isinstance(x, str)), None)
        if odd is not None:
            raise RuitongError(f"{where}: {name} must be texts, got {odd!r} ({type(odd).__name__})")
    if (logprob > 1e-6).any():
        i, t, j = (int(x[0]) for x in np.nonzero(logprob > 1e-6))
        raise RuitongError(
            f"{where}: entry {i}, position {t}: logprob {logprob[i, t, j]:g} is positive (a logprob is at most 0): "
            "probabilities, or logits? Ask the server for logprobs"
        )
    valid = np.arange(shape[1]) < n[:, None]
    nan = np.isnan(logprob).any(-1) & valid
    masked = (np.nan_to_num(logprob, nan=0.0, neginf=-math.inf) <= _NOT_AVAILABLE).any(-1) & valid
    state = np.where(masked, "masked", np.where(nan, "nan", np.where(valid, "ok", "short")))
    logprob[masked | nan] = np.nan
    order = np.argsort(-logprob, axis=-1, kind="stable")  # a tie keeps the server's order: there is no id to break it
    return {
        "n": n,
        "token": token,
        "top": np.take_along_axis(top, order, -1),
        "logprob": np.minimum(np.take_along_axis(logprob, order, -1), 0.0),
        "position_state": np.vectorize(schema.POSITION_STATES.index)(state).astype(np.int8),
    }


def _shard(
    document: Mapping[str, Any],
    entries: list[dict[str, Any]],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    facts: Mapping[str, str],
    source: Mapping[str, str],
) -> xr.Dataset:
    hashes = [hashlib.sha256(e["prompt"].encode("utf-8", "surrogatepass")).hexdigest() for e in entries]
    category = {h: c for c, members in registry()["categories"].items() for h in members}
    prompts = {
        "prompt": [f"q-{h[:8]}" for h in hashes],
        "category": [category.get(h[:8], "") for h in hashes],
        "language": ["zh" if any("\u4e00" <= c <= "\u9fff" for c in e["prompt"]) else "" for e in entries],
    }
    label = str(document.get("label", ""))
    set_hash = hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()
    cell: dict[str, Any] = {**dict.fromkeys(schema.CELL_COORDS, ""), **facts}
    cell |= {c: 0 for c, kind in schema.CELL_COORDS.items() if kind != "str"}  # 0: the source does not say
    cell |= {
        "model": document["model"],
        "hardware": facts["hardware"] or label,
        "prompts": f"text-{len(entries)}-{set_hash[:8]}",
        "max_new_tokens": int(document.get("max_tokens") or 0),
    }
    key = schema.array_sha256(arrays["logprob"].astype(np.float32), arrays["n"])
    key = hashlib.sha256(f"{label}{key}{json.dumps(arrays['token'].tolist())}{set_hash}".encode()).hexdigest()
    name = [cell["model"].split("/")[-1], cell["hardware"], cell["precision"] or "undeclared"]
    n_positions, k = arrays["top"].shape[1:]
    ds = schema.new_shard(
        cell, ".".join([*map(slug, name), key[:8]]), prompts, n_positions=n_positions, k=k, text_tokens=True
    )
    decode = {"cell": 0, "scoring": schema.SCORINGS.index("decode")}
    sampled = (arrays["top"] == arrays["token"][..., None]) & np.isfinite(arrays["logprob"])
    at = np.take_along_axis(arrays["logprob"], sampled.argmax(-1)[..., None], -1)[..., 0]
    empty = arrays["n"] == 0
    for variable, values in {
        "token_text": arrays["token"],
        "top_token_text": arrays["top"],
        "top_logprob": arrays["logprob"],
        "logprob": np.where(sampled.any(-1), at, np.nan),
        "n_tokens": arrays["n"],
        "position_state": arrays["position_state"],
        "finish_reason": [schema.FINISH.index(_FINISH[e["finish_reason"]]) for e in entries],
        "state": np.where(empty, schema.STATES.index("missing"), schema.STATES.index("ok")),
    }.items():
        ds[variable][decode] = values
    ds["prompt_sha256"][0] = np.array(hashes, dtype=object)
    ds["text"][0] = np.array([e["text"] for e in entries], dtype=object)
    repeats = [e["reproducible_when_warm"] for e in entries if isinstance(e.get("reproducible_when_warm"), bool)]
    provenance = {
        "identity": "text",  # tokens and prompts are known by their text alone
        "logprob_mode": "unknown",
        "content_key": key,
        "label": label,
        "source": dict(source),
        "prompt_text": {p: e["prompt"] for p, e in zip(prompts["prompt"], entries, strict=True)},
        "repeats_exactly": sum(repeats) if repeats else None,
        "repeats_of": len(repeats),
        "not_declared": [*sorted(n for n in FACTS if not cell[n]), "batch_size", "attention", "prompt ids"],
    }
    ds["provenance"][0] = json.dumps(provenance, ensure_ascii=True, sort_keys=True)
    return schema.validate(ds, where=source["file"])
