"""The ``ruitong`` command: each verb is one call into the library."""

import json
import sys
from typing import Annotated, Any

import typer

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
Shard = Annotated[str, typer.Argument(help="Shard: a .nc file, corpus:NAME, or a published .json file.")]
Scoring = Annotated[str, typer.Option(help="replay, decode or text; by default replay where both sides have one.")]


def main() -> None:
    """Run the command; what Ruitong refuses is one line on stderr and exit code 2, not a traceback."""
    try:
        app()
    except RuitongError as e:
        print(f"ruitong: {e}", file=sys.stderr)
        raise SystemExit(2) from None


def print_json(value: Any) -> None:
    """Print one JSON document; NaN is refused, so that each reader can parse it."""
    print(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False))


# The verbs: each module adds its own to `app`.
from ruitong_lib.cli import calibrate, compare, data, gates, machine, publish, served  # noqa: E402, F401
