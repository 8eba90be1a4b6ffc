"""Calibration: floor replicates make thresholds, held-out ones check them, broken models show what they notice.

Every replay is kept as a shard, so a killed run goes on where it was, and the analysis needs the shards alone.
"""

import datetime
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.measure import scores
from ruitong_lib.measure.design import SIDES, VERSION, Design, Layout, lay_out, replicas
from ruitong_lib.measure.faults import FAULTS, broken
from ruitong_lib.measure.operating import analyse, broken_replica, fault_label

if TYPE_CHECKING:
    from ruitong_lib.collect.replicas import Bench, Material, Replica

Say = Callable[[str], None]


def run(design: Design, *, outputs: str = "", say: Say = print) -> dict[str, Any]:
    """Replay every cell and every fault that is not there yet, and analyse them.

    Parameters
    ----------
    design
        From :func:`load_design`.
    outputs
        Folder of generated files.
    say
        Called with lines for people: the estimate, the progress.

    Returns
    -------
    See :func:`analyse`. ``result.json``, ``scores.csv`` and the shards lie in the design's folder.
    """
    from ruitong_lib.collect.replicas import Bench

    start = time.perf_counter()
    document, folder = design.document, design.folder(outputs)
    cells = {side: replicas(design, side) for side in SIDES}
    bench = Bench(document["model"], document["precision"], threads=document["threads"])
    layout = lay_out(design, bench.loaded().tokenizer)
    store = _Store(folder, _key(design, bench))
    of = _material(bench, layout, store, say)
    jobs = _jobs(design, layout, cells)
    todo = [j for j in jobs if not store.has(j.label)]
    tokens = _tokens(of)
    if todo:
        say(_estimate(bench, todo, of, tokens))
    done = time.perf_counter()
    for i, job in enumerate(todo, 1):
        store.put(job.label, job.replay(bench, of))
        if i % 10 == 0 or i == len(todo):
            say(f"{i} of {len(todo)} replays in {time.perf_counter() - done:.0f} s")
    result = analyse(design, layout, store, cells)
    result["seconds_of_last_call"] = round(time.perf_counter() - start, 1)
    result["provenance"] = _provenance(design, of, bench)
    _write(folder, result)
    return result


class _Job(NamedTuple):
    """One replay that is kept as one shard."""

    label: str
    replica: "Replica"
    rows: Sequence[int]
    fault: str = ""
    severity: float = 0.0

    def replay(self, bench: "Bench", of: "Material") -> xr.Dataset:
        more: dict[str, Any] = {}
        if self.fault and FAULTS[self.fault].kind == "inputs":
            more["rendered"] = functools.partial(FAULTS[self.fault].function, severity=self.severity)
        elif self.fault:
            more["broken"] = functools.partial(broken, self.fault, self.severity)
        return bench.replay(self.replica, of, self.rows, label=self.label, **more)


def _jobs(design: Design, layout: Layout, cells: Mapping[str, Sequence["Replica"]]) -> list[_Job]:
    jobs = [_Job(f"{side}-{i:02d}", r, layout.rows(side)) for side in SIDES for i, r in enumerate(cells[side])]
    rows = layout.rows("held_out", design.document["blocks"]["faults"])
    for name, severity in design.conditions():
        if FAULTS[name].kind != "shard":
            replica = broken_replica(design, cells["held_out"], name, severity)
            jobs.append(_Job(fault_label(name, severity), replica, rows, name, severity))
    return jobs


class _Store:
    """The shards of a run: written whole or not at all, and only read back under the design that made them."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder / "cells", key
        mark = folder / "inputs.sha256"
        if not mark.is_file() or mark.read_text(encoding="utf-8") != key:
            for old in self.folder.glob("*.nc"):
                old.unlink()
            self.folder.mkdir(parents=True, exist_ok=True)
            mark.write_text(key, encoding="utf-8")

    def path(self, label: str) -> Path:
        return self.folder / f"{label}.nc"

    def has(self, label: str) -> bool:
        return self.path(label).is_file()

    def put(self, label: str, ds: xr.Dataset) -> None:
        schema.save(ds, self.path(label))

    def get(self, label: str) -> xr.Dataset:
        return schema.load(self.path(label))


def _material(bench: "Bench", layout: Layout, store: _Store, say: Say) -> "Material":
    """Return prompts and anchor; the anchor is written once and kept."""
    from ruitong_lib.collect.forward import Anchor
    from ruitong_lib.collect.replicas import material
    from ruitong_lib.prompts import option_ids, render

    path = store.folder.parent / "anchor.npz"
    tokenizer = bench.loaded().tokenizer
    if path.is_file():
        with np.load(path) as kept:
            if str(kept["key"]) == store.key:
                anchor = Anchor("anchor", kept["token_id"], kept["top_token_id"], kept["n_tokens"])
                ids = render(layout.prompts, tokenizer)
                return material(layout.prompts, ids, option_ids(layout.prompts, tokenizer), anchor)
    start = time.perf_counter()
    of = bench.write_anchor(layout.prompts, layout.limits)
    a = of.anchor
    temporary = path.with_name(".anchor.tmp.npz")
    np.savez_compressed(temporary, key=store.key, token_id=a.token_id, top_token_id=a.top_token_id, n_tokens=a.n_tokens)
    temporary.replace(path)
    seconds = time.perf_counter() - start
    say(f"anchor: {int(a.n_tokens.sum())} positions of {len(layout.prompts)} prompts, in {seconds:.0f} s")
    return of


def _tokens(of: "Material") -> np.ndarray[Any, Any]:
    return np.asarray([len(i) + n for i, n in zip(of.ids, of.anchor.n_tokens, strict=True)])


def _estimate(bench: "Bench", todo: Sequence[_Job], of: "Material", tokens: np.ndarray[Any, Any]) -> str:
    """Time one replay of a few prompts and say how long the rest will take."""
    rows = list(todo[0].rows)[:9]
    start = time.perf_counter()
    bench.replay(todo[0].replica, of, rows)
    rate = tokens[rows].sum() / (time.perf_counter() - start)
    total = sum(int(tokens[list(j.rows)].sum()) for j in todo)
    return f"{len(todo)} replays, {total} tokens at {rate:.0f} tokens/s: about {total / rate / 60:.0f} minutes"


def _inputs(design: Design, bench: "Bench") -> dict[str, Any]:
    """Return what decides the numbers; shards of another run are thrown away where it differs."""
    return {
        "version": VERSION,
        "design_sha256": design.sha256,
        "prompt_sets": design.prompt_sets(),
        "weights_sha256": bench.loaded().manifest["weights_sha256"],
        **machine(),
    }


def machine() -> dict[str, Any]:
    """Return what of this machine can move a score: its hardware and the versions of what computes."""
    from ruitong_lib import provenance
    from ruitong_lib.collect import devices

    return {
        "hardware": devices.hardware("cpu"),
        "packages": {p: provenance.version(p) for p in ("torch", "transformers")},
    }


def _key(design: Design, bench: "Bench") -> str:
    return hashlib.sha256(json.dumps(_inputs(design, bench), sort_keys=True).encode()).hexdigest()


def _provenance(design: Design, of: "Material", bench: "Bench") -> dict[str, Any]:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, **_inputs(design, bench), "anchor_sha256": of.anchor.sha256}


def table_sha256(table: pd.DataFrame) -> str:
    """Hash the scores that the thresholds were derived from."""
    names = scores.names_of(table)
    return schema.array_sha256(table[["pair", "block"]].to_numpy(np.int64), table[names].to_numpy(np.float64))


def _write(folder: Path, result: dict[str, Any]) -> None:
    from ruitong_lib.measure.compare import jsonable

    table = result.pop("tables")
    sha = table_sha256(table[table["kind"] == "calibration"])
    result["provenance"]["scores_sha256"] = sha
    temporary = folder / ".scores.tmp"
    table.to_csv(temporary, index=False, float_format="%.17g")
    temporary.replace(folder / "scores.csv")
    temporary = folder / ".result.tmp"
    temporary.write_text(json.dumps(jsonable(result), indent=1, allow_nan=False), encoding="utf-8")
    temporary.replace(folder / "result.json")
