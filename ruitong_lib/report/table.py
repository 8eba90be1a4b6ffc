"""The delta table: one row a candidate, never without its floor; as Markdown, CSV and JSON."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError, RuitongError
from ruitong_lib.measure import floor as floors
from ruitong_lib.measure.align import align, axis_name, differs_in
from ruitong_lib.measure.compare import compare, jsonable
from ruitong_lib.measure.flips import flips_beyond_floor
from ruitong_lib.measure.verdict import Verdict, holm, judge
from ruitong_lib.report import oracle as oracles
from ruitong_lib.report import router
from ruitong_lib.report.markdown import to_markdown

Row = dict[str, Any]


def reference_label(ds: xr.Dataset, reference: str = "") -> str:
    """Return the label of the reference: the one given, else the dataset's own, else its only plain bf16 cell.

    Raises
    ------
    RuitongError
        When the label is unknown, or the dataset names none and has no single candidate for it.
    """
    labels = [str(c) for c in ds["cell"].values]
    reference = reference or str(ds.attrs.get("reference", ""))
    if reference:
        if reference not in labels:
            raise RuitongError(f"no cell {reference!r}; the dataset holds: {', '.join(labels)}")
        return reference
    plain = (
        (ds["precision"] == "bf16")
        & (ds["batch_size"] == 1)
        & (ds["attention"] == "sdpa")
        & (ds["onednn_isa"] == "")
        & ~ds["deterministic"]
        & (ds["repeat"] == 0)
    )
    found = [c for c, p in zip(labels, plain.values, strict=True) if p]
    if len(found) != 1:
        raise RuitongError(
            f"which cell is the reference? {len(found)} of {len(labels)} are plain bf16 cells of batch 1; name one: "
            f"{', '.join(found or labels)}"
        )
    return found[0]


def delta_rows(ds: xr.Dataset, *, reference: str = "") -> list[Row]:
    """Compare every cell of an aggregate with the reference and return one row each.

    A row holds the replay deltas, the floor by the rule of :mod:`ruitong_lib.measure.floor`, the ratio with its
    interval, the ratio over every other floor at hand, and the decode deltas where both sides decoded. A comparison
    that is refused is a row that says why; so is a cell that was planned and not collected.
    """
    reference = reference_label(ds, reference)
    ladders = {s: floors.ladder(ds, scoring=s) for s in schema.SCORINGS}
    a = schema.select(ds, reference)
    rows = []
    for candidate in (str(c) for c in ds["cell"].values):
        if candidate in (reference, ds.attrs.get("oracle")):
            continue  # an oracle is no candidate; how far each cell is from it is a section of its own
        b = schema.select(ds, candidate)
        if b["model"].item() == a["model"].item():
            rows.append(_row(ds, a, b, ladders))
    # One table, one family: its rows' verdicts on KL are adjusted together.
    judged = [r for r in rows if isinstance(r.get("verdict"), Verdict)]
    for r, v in zip(judged, holm([r["verdict"] for r in judged]), strict=True):
        r["verdict"] = v.to_dict()
    for label, reason in json.loads(ds.attrs.get("not_collected", "{}")).items():
        status = "planned" if reason == "planned" else "failed"
        rows.append({"status": status, "reason": reason, "reference": reference, "candidate": label, "axis": ""})
    return sorted(rows, key=lambda r: (r["status"] != "ok", str(r["axis"]).startswith("mixed"), r["axis"]))


def _row(ds: xr.Dataset, a: xr.Dataset, b: xr.Dataset, ladders: dict[str, list[floors.Floor]]) -> Row:
    reference, candidate = a["cell"].item(), b["cell"].item()
    fields = differs_in(a.isel(cell=0), b.isel(cell=0))
    row: Row = {
        "status": "ok",
        "reason": "",
        "model": a["model"].item(),
        "hardware": a["hardware"].item(),
        "axis": axis_name(fields),
        "change": ", ".join(f"{_shown(a[f].item())} → {_shown(b[f].item())}" for f in fields),
        "reference": reference,
        "candidate": candidate,
        "prompts": a["prompts"].item(),
    }
    try:
        c = compare(a, b)
    except RefusedError as e:
        return row | {"status": "refused", "reason": str(e)}
    row |= {
        "scoring": c.scoring,
        "n_prompts": c.n_prompts,
        "n_positions": c.n_positions,
        "metrics": c.to_dict()["metrics"],
        "notes": jsonable(c.notes),
    }
    chosen = floors.floor_for(ds, reference, candidate, rungs=ladders["replay"])
    kl = c.positions["kl"]
    row["floor"] = chosen.to_dict() if chosen else None
    row["ratio"] = vars(floors.ratio(kl, chosen.kl)) if chosen else None
    row["rounding_class"] = floors.rounding_class(a["precision"].item(), b["precision"].item())
    pair = align(a, b)
    if chosen:
        base = align(schema.select(ds, chosen.reference), schema.select(ds, chosen.candidate))
        row["flips"] = flips_beyond_floor(pair, base)
        chosen = dataclasses.replace(chosen, pair=base)
    row["router"] = router.section(pair, chosen, ladders["replay"])
    verdict = judge(a, b, chosen, pair=pair)
    row["over_every_floor"] = _every_floor(ds, row, kl, ladders["replay"])
    row["oracle"] = oracles.section(ds, a, b)
    if (a["state"].sel(scoring="decode").values == 0).all() and (b["state"].sel(scoring="decode").values == 0).all():
        row["decode"] = _decode(ds, a, b, ladders["decode"])
    cleaned: Row = jsonable(row)
    return cleaned | {"verdict": verdict}


def _shown(value: Any) -> str:
    return str(value) if value != "" else "no cap"  # only onednn_isa and revision may be empty


def _every_floor(ds: xr.Dataset, row: Row, kl: xr.DataArray, rungs: Sequence[floors.Floor]) -> list[Row]:
    own = {row["reference"], row["candidate"]}
    out = []
    for f in rungs:
        if {f.reference, f.candidate} == own or (f.rung != "rerun" and ds["repeat"].sel(cell=f.reference).item()):
            continue  # the row itself; and a rerun's own rungs would only say the same twice
        out.append(f.to_dict() | {"between": _between(ds, f), **_prefixed(floors.ratio(kl, f.kl))})
    two = floors.two_rounding_sum(ds, row["reference"], row["candidate"])
    if two is not None and own != {two[0]}:
        finer, parts = two
        precision = ds["precision"].sel(cell=finer).item()
        facts: Row = {
            "rung": "two roundings",
            "reference": finer,
            "candidate": "both sides",
            "rounding_class": "2×bf16",
        }
        summed = sum(float(p.sum() / p.notnull().sum()) for p in parts)
        facts |= {"between": f"each side and {precision}, summed", "mean_kl": summed}
        out.append(facts | _prefixed(floors.ratio(kl, parts)))
    return out


def _prefixed(ratio: floors.Ratio) -> Row:
    return {f"ratio_{k}": v for k, v in vars(ratio).items()}


def _between(ds: xr.Dataset, f: floors.Floor) -> str:
    """Say which two cells a floor lies between, in a few words."""
    a, b = (ds.sel(cell=c) for c in (f.reference, f.candidate))
    engine = f", {a['engine'].item()}" if len(set(ds["engine"].values.tolist())) > 1 else ""
    if f.rung == "phase":
        return f"decode and replay, {a['precision'].item()} b{a['batch_size'].item()}{engine}"
    field = floors.RUNGS[f.rung]
    where = ("" if field == "precision" else f", {a['precision'].item()}") + ("" if field == "engine" else engine)
    batch = "" if field == "batch_size" else f" b{a['batch_size'].item()}"
    return f"{_shown(a[field].item())} and {_shown(b[field].item())}{where}{batch}"


def _decode(ds: xr.Dataset, a: xr.Dataset, b: xr.Dataset, rungs: Sequence[floors.Floor]) -> Row | None:
    c = compare(a, b, scoring="decode")
    chosen = floors.floor_for(ds, a["cell"].item(), b["cell"].item(), scoring="decode", rungs=rungs)
    ratio = vars(floors.ratio(c.positions["kl"], chosen.kl)) if chosen else None
    out = {"n_positions": c.n_positions, "metrics": c.to_dict()["metrics"], "notes": c.notes, "ratio": ratio}
    if chosen:
        base = compare(schema.select(ds, chosen.reference), schema.select(ds, chosen.candidate), scoring="decode")
        out["floor"] = chosen.to_dict() | {"metrics": base.to_dict()["metrics"], "notes": base.notes}
    return out


def write(rows: Sequence[Row], folder: Path, *, title: str = "") -> list[Path]:
    """Write ``delta_table.md``, ``.csv`` and ``.json`` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "md": to_markdown(rows, title=title),
        "csv": to_frame(rows).to_csv(index=False),
        "json": json.dumps(list(rows), indent=1, ensure_ascii=False, allow_nan=False),
    }
    paths = [folder / f"delta_table.{ending}" for ending in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    return paths


def to_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Return one flat line a row: every metric with its interval and n, the floor and the ratio."""
    flat = []
    for r in rows:
        line = {k: r.get(k) for k in ("status", "axis", "change", "reference", "candidate", "prompts", "scoring")}
        line |= {k: r.get(k) for k in ("n_prompts", "n_positions", "rounding_class", "reason")}
        for name, m in (r.get("metrics") or {}).items():
            line |= {f"{name}.{k}": v for k, v in m.items()}
        for part in ("floor", "ratio", "flips", "notes"):
            line |= {f"{part}.{k}": v for k, v in (r.get(part) or {}).items() if not isinstance(v, dict)}
        v = r.get("verdict") or {}
        line |= {"verdict": v.get("verdict"), "reasons": "; ".join(v.get("reasons", ()))}
        line |= oracles.flat(r.get("oracle"))
        decode = r.get("decode") or {}
        for name in ("identical_texts", "mean_tokens_lost", "length_ratio"):
            line |= {f"decode.{name}.{k}": v for k, v in (decode.get("metrics", {}).get(name) or {}).items()}
        flat.append(line)
    return pd.DataFrame(flat)


def prompt_overview(ds: xr.Dataset) -> pd.DataFrame:
    """Return how each prompt of a shard went: tokens, why it ended, mean logprob and entropy, and the text."""
    one = ds.isel(cell=0)
    scoring = "decode" if (one["state"].sel(scoring="decode") == 0).any() else "replay"
    s = one.sel(scoring=scoring)
    return pd.DataFrame(
        {
            "category": s["category"].values,
            "language": s["language"].values,
            "prompt tokens": s["n_prompt_tokens"].values,
            "tokens": s["n_tokens"].values,
            "ended by": [schema.FINISH[i] for i in s["finish_reason"].values],
            "state": [schema.STATES[i] for i in s["state"].values],
            "mean logprob, nat": s["logprob"].mean("position").values.round(4),
            "mean entropy, nat": s["entropy"].mean("position").values.round(4),
            "text": [str(t)[:60] for t in s["text"].values],
        },
        index=pd.Index(s["prompt"].values, name=f"prompt ({scoring})"),
    )
