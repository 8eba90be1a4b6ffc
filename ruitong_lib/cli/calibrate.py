"""The verb that calibrates the gates."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ruitong_lib.cli import Json, Outputs, app, print_json


@app.command()
def calibrate(
    file: Annotated[Path, typer.Argument(help="Design file, e.g. params/demo-gates.yml.")],
    check: Annotated[
        bool, typer.Option(help="Run nothing; say whether the thresholds of gates.yml are stale.")
    ] = False,
    write: Annotated[
        bool,
        typer.Option(help="Put the thresholds into params/gates.yml, and the result where `ruitong table` finds it."),
    ] = False,
    outputs: Outputs = "",
    as_json: Json = False,
) -> None:
    """Calibrate the gates: thresholds from floor cells, false alarms on held-out ones, power against broken models.

    Kill it and call it again: it goes on where it was. Exit code 1 when the held-out alarms are too many, or with
    --check when the thresholds are stale; 2 when it could not run or there is nothing to check.
    """
    from ruitong_lib.measure.calibrate import run
    from ruitong_lib.measure.design import load_design

    design = load_design(file)
    folder = design.folder(outputs)
    if check:
        from ruitong_lib.measure import record

        causes, unseen = record.stale(design, folder)
        if as_json:
            print_json({"stale": causes, "not_looked_at": unseen})
        else:
            sound = (
                "the thresholds follow from their inputs" if not unseen else "nothing that could be looked at is stale"
            )
            print(*[f"stale: {c}" for c in causes] or [sound], sep="\n")
            print(*[f"not looked at: {u}" for u in unseen], sep="\n", end="\n" if unseen else "")
        raise typer.Exit(1 if causes else 0)
    result = run(design, outputs=outputs, say=lambda line: print(line, file=sys.stderr, flush=True))
    if write:
        from ruitong_lib.measure import record

        record.write(result)
        record.publish(result, outputs)
    if as_json:
        from ruitong_lib.measure.compare import jsonable

        print_json(jsonable(result))
    else:
        from ruitong_lib.report import power

        print(power.text(result))
    if not result["held_out"]["within"]:
        raise typer.Exit(1)
