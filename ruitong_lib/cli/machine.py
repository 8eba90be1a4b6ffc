"""Verbs that run cells or look at this machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ruitong_lib.cli import Json, Outputs, app, print_json


@app.command()
def grid(
    file: Annotated[Path, typer.Argument(help="Grid file, e.g. params/demo.yml.")],
    outputs: Outputs = "",
    device: Annotated[str, typer.Option(help="Device of each cell but the oracle, e.g. cuda, rocm, npu, mps.")] = "",
    anchor: Annotated[str, typer.Option(help="Shard whose text is replayed; by default the grid makes its own.")] = "",
    override: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of any parameter, in each cell; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Show what would run and where; load no model, run nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a grid of cells, each in its own kernel; what is there already is kept.

    Kill it and call it again: it goes on where it was. Exit code 2 when a cell failed.
    """
    from tqdm import tqdm

    from ruitong_lib import grid as grids
    from ruitong_lib.cell import from_text
    from ruitong_lib.gridfile import load_grid

    given = from_text(override or [])
    given |= {k: v for k, v in (("device", device), ("anchor", anchor)) if v}
    loaded = load_grid(file, **given, **({"outputs": str(Path(outputs).resolve())} if outputs else {}))
    if dry_run:
        rows = grids.preview(loaded)
        for r in [] if as_json else rows:
            fields = " ".join(f"{k}={v}" for k, v in r["changes"].items())
            print(f"{r['role']:9} {r['device']:6} {r['label']:60} {fields}{' (collected)' if r['collected'] else ''}")
        if as_json:
            print_json(rows)
        elif rows[0]["missing"]:
            print(f"\nNot here, so these have no labels yet: {rows[0]['missing']}", file=sys.stderr)
        return
    with tqdm(total=len(loaded.cells) + 1, unit="cell", disable=as_json, file=sys.stderr) as bar:

        def report(result: grids.Result, done: int, total: int) -> None:
            seconds = f" in {result.seconds:.0f} s" if result.seconds else ""
            bar.write(f"{result.status:9} {result.label}{seconds} {result.reason}".rstrip(), file=sys.stderr)
            bar.update()

        results = grids.run(loaded, report=report)
    failed = [r for r in results if r.status == "failed"]
    if as_json:
        print_json([{"label": r.label, "status": r.status, "seconds": r.seconds, "reason": r.reason} for r in results])
    if failed:
        raise typer.Exit(2)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what hardware and versions are here, what is missing, and what to do. Exit code 2 if nothing can run."""
    from ruitong_lib.doctor import examine, report

    findings = examine()
    if as_json:
        print_json(report(findings))
    else:
        for f in findings:
            print(f"{f.status:8} {f.what:24} {f.found}".rstrip() + (f"\n{'':9}→ {f.do}" if f.do else ""))
    if any(f.status == "missing" and f.needed for f in findings):
        raise typer.Exit(2)
