"""The table as a site: static pages in three languages, made from a release's files, with no request off the page."""

import hashlib
import itertools
import math
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ruitong_lib import paths
from ruitong_lib.measure.verdict import Margin, margin_for
from ruitong_lib.report import release
from ruitong_lib.report.markdown import RUNG_ORDER, number

Row = dict[str, Any]
TEMPLATES = Path(__file__).parent / "templates"
PAGES = {"en": "index.html", "zh": "zh.html", "ru": "ru.html"}
FILES = ("delta_table.csv", "delta_table.json", "shards.json", "delta_table.md")
COLUMNS = ("model", "axis", "change", "hardware", "n", "kl", "floor", "r", "verdict")
_FACETS = ("model", "hardware", "axis", "verdict", "status")
_ORDER = {s: i for i, s in enumerate(release.STATUSES)}


def build(folder: Path, out: Path) -> list[Path]:
    """Build the site of a release.

    Parameters
    ----------
    folder
        The release, ``outputs/tables/<version>``.
    out
        Where to; what was there is replaced as a whole.

    Returns
    -------
    The pages and data files.
    """
    work = Path(tempfile.mkdtemp(prefix=".site-", dir=out.parent))
    try:
        for name, text in pages(folder).items():
            (work / name).write_text(text, encoding="utf-8")
        (work / "data").mkdir()
        for name in FILES:
            shutil.copyfile(folder / name, work / "data" / name)
        work.chmod(0o755)
        shutil.rmtree(out, ignore_errors=True)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return sorted(p for p in out.rglob("*") if p.is_file())


def stale(site: Path, folder: Path) -> list[str]:
    """Return what of a built site is not what the release makes now: a changed digit anywhere is found."""
    return differences(site, pages(folder) | {f"data/{n}": (folder / n).read_text(encoding="utf-8") for n in FILES})


def differences(site: Path, wanted: Mapping[str, str]) -> list[str]:
    """Return which files of a site are not the texts wanted."""
    found = {n: (site / n).read_text(encoding="utf-8") if (site / n).is_file() else "" for n in wanted}
    return [
        f"site/{n} is not what the release makes: build it again (ruitong site)"
        for n in wanted
        if found[n] != wanted[n]
    ]


def pages(folder: Path) -> dict[str, str]:
    """Return each page of the site of a release: name → HTML."""
    import jinja2
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    document = release.read(folder)
    load = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=load, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["whole"] = _whole
    css, script = (Markup((TEMPLATES / n).read_text(encoding="utf-8")) for n in ("style.css", "table.js"))
    languages = yaml.safe_load((TEMPLATES / "strings.yml").read_text(encoding="utf-8"))
    ordered = sorted(document["rows"], key=lambda r: _ORDER[r["status"]])
    out = {}
    for lang, page in PAGES.items():
        t = languages[lang]
        rows = [_view(r, document, t) for r in ordered]
        out[page] = environment.get_template("page.html.j2").render(
            d=document,
            t=t,
            lang=lang,
            languages=languages,
            pages=PAGES,
            css=css,
            script=script,
            rows=rows,
            columns=COLUMNS,
            numeric={"n", "kl", "floor", "r"},
            facets={f: sorted({r[f] for r in rows} - {""}) for f in _FACETS},
            statuses=dict(sorted(Counter(r["status"] for r in rows).items(), key=lambda x: _ORDER[x[0]])),
            ladders=_ladders(document["rows"], t),
            files=[_file(folder / n) for n in FILES],
            citation=citation(document),
        )
    method = MarkdownIt("commonmark").enable("table").render((paths.ROOT / "METHOD.md").read_text(encoding="utf-8"))
    # A wide table scrolls by itself, by keyboard too, so that the page is never wider than a phone.
    count = itertools.count(1)
    method = re.sub(
        r"<table>.*?</table>",
        lambda m: f'<div class="scroll" tabindex="0" role="region" aria-label="Table {next(count)}">{m.group(0)}</div>',
        method,
        flags=re.S,
    )
    out["method.html"] = environment.get_template("method.html.j2").render(d=document, css=css, body=Markup(method))
    return out


def _whole(text: Any) -> Any:
    """Keep a browser from breaking a number at the hyphen of its exponent."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"[\d.]+e-\d+", r'<span class="n">\g<0></span>', str(escape(text))))


def citation(document: Row) -> str:
    """Return the BibTeX entry of a release."""
    return (
        f"@misc{{ruitong-{document['version']},\n  title = {{{document['name']}}},\n"
        f"  author = {{{{The Ruitong developers}}}},\n  year = {{{document['version'][:4]}}},\n"
        f"  note = {{Release {document['version']}, METHOD {document['method']}, ruitong {document['ruitong']}}}\n}}"
    )


def _file(path: Path) -> Row:
    content = path.read_bytes()
    size = f"{len(content) / 1024:.0f} KiB"
    return {"name": path.name, "size": size, "sha256": hashlib.sha256(content).hexdigest()[:16]}


def _view(r: Row, document: Row, t: Mapping[str, Any]) -> Row:
    """Return what the page shows of a row, as text; numbers to sort by beside it, empty where there are none."""
    metrics, ratio, floor = (r.get(k) or {} for k in ("metrics", "ratio", "floor"))
    kl, verdict, decode = metrics.get("kl") or {}, r.get("verdict") or {}, r.get("decode") or {}
    texts = (decode.get("metrics") or metrics).get("identical_texts")
    sides = [r[s] for s in ("reference", "candidate") if r.get(s) in document["shards"]]
    has_ratio = ratio.get("value") is not None
    return {
        "id": r["id"],
        "status": r["status"],
        "model": r.get("model", ""),
        "hardware": r.get("hardware", ""),
        "axis": r["axis"],
        "change": r["change"],
        "verdict": verdict.get("verdict", ""),
        "exploratory": r.get("exploratory", False),
        "n": r.get("n_prompts", ""),
        "n_text": f"{r['n_prompts']}, {r['n_positions']}" if metrics else "",
        "kl": "" if kl.get("value") is None else kl["value"],
        "kl_text": _interval(kl) if metrics else "",
        "floor_kl": floor.get("mean_kl") or "",
        "floor_text": f"{floor['rung']}, {number(floor['mean_kl'])}" if floor else "" if metrics else "–",
        "r": ratio["value"] if has_ratio else "",
        "r_text": _interval(ratio) if has_ratio else ratio.get("status", ""),
        "reasons": verdict.get("reasons") or ([r["reason"]] if r.get("reason") else []),
        "figure": _ratios(r, t) if ratio.get("value") else "",  # 0 has no place on a log scale
        "rounding": f"{r['rounding_class']} / {floor['rounding_class']}" if floor else "",
        "texts": f"{round(texts['value'] * texts['n'])} / {texts['n']}" if texts else "",
        "run": r["run"],
        "sides": [{"label": s, "sha256": document["shards"][s]["arrays_sha256"][:16]} for s in sides],
        "metrics": [
            {
                "name": name,
                "value": number(m["value"], 4),
                "interval": "" if m["lo"] is None else f"[{number(m['lo'])}, {number(m['hi'])}]",
                "n": m["n"],
                "unit": m["unit"],
            }
            for name, m in metrics.items()
        ],
    }


def _interval(m: Mapping[str, Any]) -> str:
    return f"{number(m['value'])} [{number(m['lo'])}, {number(m['hi'])}]"


def _ratios(r: Row, t: Mapping[str, Any]) -> Any:
    """R over the row's own floor, and over every other floor, as a figure of intervals on a log scale."""
    own = {"label": f"{t['over']} {r['floor']['rung']}", **r["ratio"], "own": True}
    others = [
        {"label": f"{t['over']} {f['rung']}: {f['between']}", **{k: f[f"ratio_{k}"] for k in ("value", "lo", "hi")}}
        for f in r["over_every_floor"]
        if f.get("ratio_value") and f["rung"] != "rerun"
    ]
    margin: Margin = margin_for(r["rounding_class"], r["floor"]["rounding_class"])[0]
    return _dots(
        [own, *others], marks={"1": 1.0, f"{t['margin']} {margin.value:g}": margin.value}, label=f"R, {r['change']}"
    )


def _ladders(rows: Sequence[Row], t: Mapping[str, Any]) -> list[Row]:
    """Every floor of each model that has some of its own, one figure a model."""
    out = []
    collected = [r for r in rows if r["status"] == "collected" and not r.get("exploratory")]
    for model in dict.fromkeys(r["model"] for r in collected):
        seen = {
            (f["rung"], f["reference"], f["candidate"]): f
            for r in collected
            if r["model"] == model
            for f in r["over_every_floor"]
            if f["rung"] != "two roundings" and f["mean_kl"]
        }
        ordered = sorted(seen.values(), key=lambda f: (RUNG_ORDER.index(f["rung"]), f["mean_kl"]))
        dots = [{"label": f"{f['rung']}: {f['between']}", "value": f["mean_kl"]} for f in ordered]
        if dots:
            out.append({"model": model, "figure": _dots(dots, marks={}, label=f"{t['ladder']}: {t['ladder_text']}")})
    return out


def _dots(points: Sequence[Row], *, marks: Mapping[str, float], label: str) -> Any:
    """Draw values with intervals on a log scale as inline SVG: it takes the page's colours, and says its numbers."""
    from markupsafe import Markup, escape

    ends = [x for p in points for x in (p["value"], p.get("lo"), p.get("hi")) if x] + list(marks.values())
    low, high = math.floor(math.log10(min(ends) * 0.8)), math.ceil(math.log10(max(ends) * 1.25))
    width, left, step, top = 470, 18, 36, 18

    def x(value: float) -> float:
        share = (math.log10(value) - low) / (high - low)
        return round(left + min(max(share, 0), 1) * (width - 2 * left), 1)

    bottom = top + step * len(points)
    parts = []
    for exponent in range(low, high + 1):
        at = x(10.0**exponent)
        parts.append(f'<line x1="{at}" x2="{at}" y1="{top}" y2="{bottom}" stroke="var(--line)"/>')
        parts.append(f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{10.0**exponent:g}</text>')
    for anchor, (name, value) in zip(("end", "start"), marks.items(), strict=False):
        at = x(value)
        line = f'<line x1="{at}" x2="{at}" y1="{top}" y2="{bottom}" stroke="currentColor" stroke-dasharray="4 3"/>'
        parts += [line, f'<text x="{at}" y="{top - 5}" text-anchor="{anchor}">{escape(name)}</text>']
    said = []
    for i, p in enumerate(points):
        y = top + step * i + 25
        colour = "var(--accent)" if p.get("own") or not marks else "currentColor"
        shown = _interval(p) if p.get("lo") else number(p["value"])
        said.append(f"{p['label']}: {shown}")
        parts.append(f'<text x="{left}" y="{y - 9}">{escape(p["label"])}: {shown}</text>')
        if p.get("lo"):
            parts.append(
                f'<line x1="{x(p["lo"])}" x2="{x(p["hi"])}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
            )
        parts.append(f'<circle cx="{x(p["value"])}" cy="{y}" r="4" fill="{colour}"/>')
    text = escape(f"{label}. {'; '.join(said)}")
    head = f'<svg viewBox="0 0 {width} {bottom + 24}" width="{width}" role="img" aria-label="{text}">'
    return Markup(head + "".join(parts) + "</svg>")


def weight(site: Path) -> int:
    """Return the bytes of the pages, without the data."""
    return sum((site / p).stat().st_size for p in (*PAGES.values(), "method.html"))
