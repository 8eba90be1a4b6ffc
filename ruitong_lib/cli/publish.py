"""Verbs that publish: one data file, the table made from it, and the check of every printed number."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ruitong_lib import paths
from ruitong_lib.cli import Json, Outputs, app, print_json
from ruitong_lib.errors import RuitongError

Benchmark = Annotated[Path, typer.Option(help="What the table is made of.")]
DEFAULT = paths.PARAMS / "benchmark.yml"


@app.command()
def aggregate(benchmark: Benchmark = DEFAULT, outputs: Outputs = "") -> None:
    """Gather the grids and the published runs of the benchmark into outputs/ruitong.nc."""
    from ruitong_lib import schema
    from ruitong_lib.benchmark import gather, load_benchmark

    first, others = gather(load_benchmark(benchmark), outputs=outputs)
    print(schema.save(first, paths.outputs(outputs) / "ruitong.nc", groups=others))
    for source, reason in json.loads(first.attrs["absent"]).items():
        print(f"not here: {source}: {reason}")


@app.command()
def table(
    dataset: Annotated[Path | None, typer.Argument(help="Data file; by default outputs/ruitong.nc.")] = None,
    version: Annotated[str, typer.Option(help="Name of the release; by default the benchmark's.")] = "",
    benchmark: Benchmark = DEFAULT,
    check: Annotated[
        bool, typer.Option(help="Check every number that is printed anywhere against the release.")
    ] = False,
    update: Annotated[bool, typer.Option(help="With --check: write params/numbers.txt anew, for review.")] = False,
    diff: Annotated[str, typer.Option(help="Show what changed since this release, and why; writes nothing.")] = "",
    outputs: Outputs = "",
    as_json: Json = False,
) -> None:
    """Make the delta table of a data file: outputs/tables/VERSION/.

    With --check nothing is made: exit code 1 when a number in README, METHOD, the notebooks' prose or the site differs
    from the release or is not in it.
    """
    from ruitong_lib.benchmark import load_benchmark
    from ruitong_lib.report import numbers, release

    folder = paths.outputs(outputs)
    made_of = load_benchmark(benchmark)
    version = version or made_of["version"]
    if check:
        wrong = numbers.check(folder / "tables" / version, site=folder / "site", update=update)
        print_json(wrong) if as_json else print(*wrong or ["every number is in the release"], sep="\n")
        raise typer.Exit(1 if wrong else 0)
    file = dataset or folder / "ruitong.nc"
    if not file.is_file():
        raise RuitongError(f"no data file at {file}; make it: ruitong grid params/demo.yml, then ruitong aggregate")
    document = release.build(file, made_of, version=version)
    if diff:
        lines = release.diff(release.read(folder / "tables" / diff), document)
        print_json(lines) if as_json else print(*lines or ["nothing changed"], sep="\n")
        return
    where = release.write(document, folder / "tables", results=sorted((folder / "results").glob("*.json")))
    print_json({k: v for k, v in document.items() if k != "shards"}) if as_json else print(
        (where / "delta_table.md").read_text(encoding="utf-8"), where, sep="\n"
    )


@app.command()
def site(
    version: Annotated[str, typer.Option(help="Release; by default the benchmark's.")] = "",
    benchmark: Benchmark = DEFAULT,
    outputs: Outputs = "",
    as_json: Json = False,
) -> None:
    """Build the site of a release: outputs/site/, to be opened from there or put on any server."""
    from ruitong_lib.benchmark import load_benchmark
    from ruitong_lib.report import site as sites

    folder = paths.outputs(outputs)
    release = folder / "tables" / (version or load_benchmark(benchmark)["version"])
    files = sites.build(release, folder / "site")
    found = {str(p.relative_to(folder / "site")): p.stat().st_size for p in files}
    print_json(found) if as_json else print(*[f"{size:9,} {name}" for name, size in found.items()], sep="\n")


@app.command()
def submit(
    shards: Annotated[
        list[Path], typer.Argument(help="Shards: the reference, the candidate, and cells for the floor.")
    ],
    reference: Annotated[
        str, typer.Option(help="Label of the reference cell, where it is not the plain bf16 one.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Check shards made elsewhere (schema, provenance, states, privacy) and print the rows that they would add.

    Sends nothing. Exit code 2 when a shard cannot be published as it is.
    """
    from ruitong_lib import schema, submission
    from ruitong_lib.report.markdown import to_markdown

    loaded = {str(path): schema.load(path) for path in shards}
    wrong = {path: submission.problems(ds) for path, ds in loaded.items()}
    rows = [] if any(wrong.values()) else submission.preview(list(loaded.values()), reference=reference)
    if as_json:
        print_json({"problems": wrong, "rows": rows})
    else:
        print(*[f"{path}: {p}" for path, found in wrong.items() for p in found] or [to_markdown(rows)], sep="\n")
    if any(wrong.values()):
        raise typer.Exit(2)
