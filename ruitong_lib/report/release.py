"""The table as a release: dated, versioned, made from one data file alone; its data, its hashes, what changed since.

A release is the folder ``outputs/tables/<version>/``: ``delta_table.md`` and ``.csv`` for people, ``delta_table.json``
with every row in full, ``shards.json`` with the array hashes and the provenance of each cell.
"""

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

import ruitong_lib
from ruitong_lib import paths, schema
from ruitong_lib.benchmark import PUBLISHED
from ruitong_lib.cell import slug
from ruitong_lib.errors import RuitongError
from ruitong_lib.measure.align import axis_name, differs_in
from ruitong_lib.measure.compare import Comparison, compare, jsonable
from ruitong_lib.measure.pairs import Pair, judge_pairs
from ruitong_lib.measure.verdict import EXIT, gates
from ruitong_lib.report import markdown, table

Row = dict[str, Any]
STATUSES = ("collected", "in progress", "planned", "failed", "refused")
# What names a row from release to release: never its label, whose key changes with each version of torch.
_NAMED_BY = ("model", "hardware", "axis", "change", "prompts", "scoring")


def build(path: Path, benchmark: Mapping[str, Any], *, version: str = "") -> Row:
    """Make a release from a data file and the benchmark's own rows.

    Parameters
    ----------
    path
        The file of ``ruitong aggregate``.
    benchmark
        From :func:`ruitong_lib.benchmark.load_benchmark`: title, planned rows, the floor of the published runs.
    version
        By default the benchmark's.

    Returns
    -------
    The document of ``delta_table.json``, with the key ``shards`` beside it. Undefined numbers are None.
    """
    parts = {"": schema.load(path)}
    for name in json.loads(parts[""].attrs.get("groups", "[]")):
        parts[name] = schema.load(path, group=name)
    rows: list[Row] = []
    shards: dict[str, Row] = {}
    for name, ds in parts.items():
        rows += _published(ds, benchmark["published"]) if name == PUBLISHED else _measured(ds)
        shards |= {str(c): shard_facts(ds, str(c)) for c in ds["cell"].values}
    for source, reason in json.loads(parts[""].attrs.get("absent", "{}")).items():
        run = "ruitong fetch corpora" if source == PUBLISHED else f"ruitong grid {source}"
        rows.append({"status": "planned", "axis": source, "change": "", "reason": reason, "run": run})
    rows += [{"status": "planned", "reason": "nobody has measured it yet", **row} for row in benchmark["planned"]]
    for row in rows:
        row["id"] = slug(" ".join(str(row.get(k, "")) for k in _NAMED_BY).replace("→", "to"))
        row["provenance"] = {s: f"shards.json#{row[s]}" for s in ("reference", "candidate") if row.get(s) in shards}
    _check_ids(rows)
    found: Row = jsonable(
        {
            "name": benchmark["name"],
            "version": version or benchmark["version"],
            "supersedes": benchmark["supersedes"],
            "method": method_number(),
            "ruitong": ruitong_lib.__version__,
            "margins": {k: gates()[k] for k in ("level", "minimum_prompts", "kl_ratio", "absolute_kl")},
            "rows": rows,
            "shards": shards,
        }
    )
    return found


def method_number() -> str:
    """Return the number of METHOD.md, which a published number is cited with."""
    found = re.match(r"# METHOD (\d+)", (paths.ROOT / "METHOD.md").read_text(encoding="utf-8"))
    return found.group(1) if found else ""


def _check_ids(rows: Sequence[Row]) -> None:
    ids = [r["id"] for r in rows]
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise RuitongError(f"two rows of the table have one name ({twice[0]}): nobody could cite them; remove one")


def _measured(ds: xr.Dataset) -> list[Row]:
    run = f"ruitong grid {ds.attrs.get('file', 'params/' + str(ds.attrs.get('grid', '')) + '.yml')}"
    rows = table.delta_rows(ds)
    facts = {"model": str(ds["model"].values[0]), "hardware": str(ds["hardware"].values[0])}
    out = []
    for row in rows:
        if row["status"] == "ok":
            out.append(row | {"status": "collected", "run": run})
        elif row["status"] == "refused":
            out.append(row | {"run": run})
        else:
            status = "in progress" if str(row["reason"]).startswith("in progress") else row["status"]
            out.append(row | facts | {"status": status, "run": run, "axis": "", "change": str(row["candidate"])})
    return out


def _published(ds: xr.Dataset, facts: Mapping[str, Any]) -> list[Row]:
    """Every pair of the published corpora as rows of the same shape as the measured ones."""
    labels: dict[str, str] = json.loads(ds.attrs["corpora"])
    shards = {name: schema.select(ds, label) for name, label in labels.items()}
    floor, stand_in = (tuple(facts[k]) for k in ("floor", "stand_in"))
    pairs = judge_pairs(shards, floor, stand_in=stand_in)
    bases = {f: compare(shards[f[0]], shards[f[1]], scoring="decode") for f in (floor, stand_in)}
    out = []
    for p in pairs:
        own = stand_in if (p.reference, p.candidate) == floor else floor
        out.append(_pair_row(p, shards, own, bases[own]))
    return out


def _pair_row(p: Pair, shards: Mapping[str, xr.Dataset], floor: Sequence[str], base: Comparison) -> Row:
    a, b = (shards[n].isel(cell=0) for n in (p.reference, p.candidate))
    fields = [f for f in differs_in(a, b) if f not in {"prompts", "max_new_tokens"}]
    names = ("hardware", "precision", "engine")
    row: Row = {
        "model": a["model"].item(),
        "hardware": a["hardware"].item(),
        "axis": axis_name(tuple(fields)),
        "change": " → ".join(_side(x, [f for f in names if f in fields] or ["hardware"]) for x in (a, b)),
        "reference": a["cell"].item(),
        "candidate": b["cell"].item(),
        "prompts": a["prompts"].item(),
        "scoring": "decode",
        "run": f"ruitong compare corpus:{p.reference} corpus:{p.candidate} --floor corpus:{floor[0]} corpus:{floor[1]}",
    }
    if p.comparison is None or p.verdict is None:
        return row | {"status": "refused", "reason": p.refusal}
    c, v = p.comparison, p.verdict
    more = [r for r in p.verdict.every_floor if v.floor is None or r["rung"] != v.floor.rung]
    row |= {
        "status": "collected",
        "reason": "measured by others",
        "exploratory": True,  # the rules were set after these data had been seen
        "n_prompts": c.n_prompts,
        "n_positions": c.n_positions,
        "metrics": c.to_dict()["metrics"],
        "notes": c.notes,
        "floor": v.floor.to_dict() if v.floor else None,
        "ratio": dataclasses.asdict(v.ratio) if v.ratio else None,
        "rounding_class": v.rounding_class,
        "flips": v.flips,
        "verdict": v.to_dict(),
        "one_rounding": p.one_rounding.to_dict() if p.one_rounding else None,
        "largest_flip_gap": p.largest_flip_gap,
        "over_every_floor": [_over(r, shards) for r in more],
        "decode": {
            "n_positions": c.n_positions,
            "metrics": c.to_dict()["metrics"],
            "notes": c.notes,
            "floor": {"rung": f"{floor[0]} → {floor[1]}", "metrics": base.to_dict()["metrics"], "notes": base.notes},
        },
    }
    return row


def _over(r: Row, shards: Mapping[str, xr.Dataset]) -> Row:
    names = {s["cell"].values[0]: n for n, s in shards.items()}
    sides = (str(names.get(r[s], r[s])) for s in ("reference", "candidate"))
    more = {"between": "each side and the finer cell, summed" if r["rung"] == "two roundings" else " and ".join(sides)}
    return {k: x for k, x in r.items() if k != "ratio"} | more | {f"ratio_{k}": x for k, x in r["ratio"].items()}


def _side(cell: xr.Dataset, fields: Sequence[str]) -> str:
    return " ".join(str(cell[f].item()) or "undeclared" for f in fields)


def shard_facts(ds: xr.Dataset, label: str) -> Row:
    """Return a cell's coordinates, provenance, and the hash of its arrays, free of an aggregate's padding."""
    one = schema.select(ds, label).isel(cell=0)
    one = one.isel(position=slice(int(one["n_tokens"].max()))).sortby("prompt")
    arrays = []
    for v in schema.VARIABLES:
        if v.name in one and v.name != "provenance":
            values = one[v.name].values
            text = v.dtype == "str"
            arrays.append(np.frombuffer("\0".join(map(str, values.ravel())).encode(), np.uint8) if text else values)
    return {
        "arrays_sha256": schema.array_sha256(*arrays),
        "coordinates": {n: one[n].item() for n in schema.CELL_COORDS},
        "provenance": schema.provenance(one),
    }


def write(document: Row, folder: Path, *, results: Sequence[Path] = ()) -> Path:
    """Write a release to ``folder/<version>`` and return that folder.

    ``results`` are JSON files of other commands (a calibration, the re-analysis of the published runs) whose numbers
    the documents cite; they become part of the release.
    """
    folder = folder / document["version"]
    folder.mkdir(parents=True, exist_ok=True)
    for path in results:
        shutil.copyfile(path, folder / path.name)
    rows = [r for r in document["rows"] if r["status"] == "collected"]
    texts = {
        "delta_table.md": to_markdown(document),
        "delta_table.csv": table.to_frame(document["rows"]).to_csv(index=False),
        "delta_table.json": _json({k: v for k, v in document.items() if k != "shards"}),
        "shards.json": _json(document["shards"]),
    }
    assert all(r["floor"] or r["verdict"]["verdict"] in EXIT for r in rows)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, sort_keys=True) + "\n"


def to_markdown(document: Row) -> str:
    """Return a release for people: a table a model, then what is planned, refused or failed, each with its line."""
    d = document
    lines = [
        f"# {d['name']}, {d['version']}",
        "",
        f"METHOD {d['method']}, ruitong {d['ruitong']}. Cite a number with this version, its n, interval and floor.",
    ]
    if d["supersedes"]:
        lines.append(f"Supersedes {d['supersedes']}.")
    collected = [r for r in d["rows"] if r["status"] == "collected"]
    for key in dict.fromkeys((r["model"], r["scoring"], r["prompts"]) for r in collected):
        model, scoring, prompts = key
        rows = [r | {"status": "ok"} for r in collected if (r["model"], r["scoring"], r["prompts"]) == key]
        text = markdown.to_markdown(rows, title=f"{model}, {scoring}, prompts {prompts}")
        lines += ["", re.sub(r"^(#+ )", r"#\1", text, flags=re.M).rstrip()]
        lines += ["", *[f"- {r['change']}: `{r['run']}`" for r in rows]]
    lines += ["", "## Not collected", "", "| status | model | axis | change | why | the line that measures it |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for r in d["rows"]:
        if r["status"] != "collected":
            cells = [r["status"], r.get("model", ""), r["axis"], r["change"], r["reason"], f"`{r['run']}`"]
            lines.append("| " + " | ".join(str(c).replace("|", "\\|").replace("\n", " ") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def read(folder: Path) -> Row:
    """Read a release's folder.

    Raises
    ------
    RuitongError
        Where there is none.
    """
    path = folder / "delta_table.json"
    if not path.is_file():
        there = sorted(p.parent.name for p in folder.parent.glob("*/delta_table.json"))
        raise RuitongError(f"no release at {folder}; there are: {', '.join(there) or 'none'}. Make one: ruitong table")
    document: Row = json.loads(path.read_text(encoding="utf-8"))
    return document | {"shards": json.loads((folder / "shards.json").read_text(encoding="utf-8"))}


def diff(old: Row, new: Row) -> list[str]:
    """Say what changed between two releases, and why: data, margins, METHOD or software.

    Returns
    -------
    Lines for people; empty where nothing changed but the version.
    """
    causes = [
        f"{name} {old[key]} → {new[key]}"
        for name, key in (("METHOD", "method"), ("ruitong", "ruitong"))
        if old[key] != new[key]
    ]
    if old["margins"] != new["margins"]:
        causes.append("margins of gates.yml")
    before, after = ({r["id"]: r for r in d["rows"]} for d in (old, new))
    lines = [f"added    {i}: {after[i]['status']}" for i in after if i not in before]
    lines += [f"removed  {i}: was {before[i]['status']}" for i in before if i not in after]
    for i in (i for i in after if i in before):
        changed = [
            f"{name} {a} → {b}"
            for (name, a), (_, b) in zip(_headline(before[i]), _headline(after[i]), strict=True)
            if a != b
        ]
        if changed:
            why = [
                f"other data in {s}"
                for s in ("reference", "candidate")
                if _hash(old, before[i], s) != _hash(new, after[i], s)
            ]
            lines.append(f"changed  {i}: {'; '.join(changed)} (because: {', '.join(why + causes) or 'unknown'})")
    return lines


def _hash(document: Row, row: Row, side: str) -> Any:
    return document["shards"].get(row.get(side), {}).get("arrays_sha256")


def _headline(row: Row) -> list[tuple[str, Any]]:
    kl, ratio = ((row.get("metrics") or {}).get("kl") or {}), row.get("ratio") or {}
    numbers = {
        "KL": kl.get("value"),
        "n": kl.get("n"),
        "R": ratio.get("value"),
        "L": ratio.get("lo"),
        "U": ratio.get("hi"),
    }
    shown = [(k, markdown.number(v, 4) if isinstance(v, float) and math.isfinite(v) else v) for k, v in numbers.items()]
    return [("status", row["status"]), *shown, ("verdict", (row.get("verdict") or {}).get("verdict"))]
