"""Verbs that measure one pair of shards."""

import math
from typing import Annotated

import typer

from ruitong_lib.cli import Json, Scoring, Shard, app, print_json


@app.command()
def compare(
    reference: Shard,
    candidate: Shard,
    floor: Annotated[
        tuple[str, str] | None, typer.Option(help="The two shards of the noise floor: adds R, verdict and reasons.")
    ] = None,
    oracle: Annotated[
        str, typer.Option(help="A replay of the same anchor in fp32 or fp64: adds how far each side is from it.")
    ] = "",
    scoring: Scoring = "",
    as_json: Json = False,
) -> None:
    """Compare two shards: every metric with its interval, and with --floor the verdict.

    With --oracle: KL(candidate, oracle) / KL(reference, oracle), who is further, and both directions; it changes no
    verdict.

    Exit code with --floor: 0 equivalent, within margin or identical, 1 different, 3 inconclusive; 2 refused, always.
    """
    from ruitong_lib.collect.corpora import open_shard
    from ruitong_lib.measure.align import default_scoring
    from ruitong_lib.measure.compare import compare as compare_shards
    from ruitong_lib.measure.oracle import against_oracle
    from ruitong_lib.measure.pairs import judge_with_floor
    from ruitong_lib.report import oracle as oracles
    from ruitong_lib.report.markdown import number

    a, b = open_shard(reference), open_shard(candidate)
    scoring = scoring or default_scoring(a, b)
    if floor is None:
        c, v = compare_shards(a, b, scoring=scoring), None
    else:
        c, v = judge_with_floor(a, b, (open_shard(floor[0]), open_shard(floor[1])), scoring=scoring)
    held = against_oracle(a, b, open_shard(oracle)).to_dict() if oracle else None
    if as_json:
        print_json(c.to_dict() | (v.to_dict() if v else {}) | ({"oracle": held} if held else {}))
    else:
        print(f"reference {c.reference}\ncandidate {c.candidate}\naxis      {c.axis}\nscoring   {c.scoring}")
        print(f"n         {c.n_prompts} prompts, {c.n_positions} positions\n")
        for name, m in c.metrics.items():
            interval = f"[{number(m.lo)}, {number(m.hi)}]"
            print(f"{name:20} {number(m.value):>10} {m.unit:6} {interval:22} p99 {number(m.p99):>9}  n {m.n}")
        if held:
            print(f"\noracle    {held['oracle']}")
            for side in ("reference", "candidate"):
                d = held[side]
                print(f"{side:10}KL {oracles.distance_text(d)} nat; direction {oracles.direction_text(d)} nat")
            print(f"ratio     {oracles.ratio_text(held['ratio'])}\nfurther   {held['further']}: {held['reason']}")
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
    from ruitong_lib.measure.align import default_scoring
    from ruitong_lib.measure.compare import jsonable
    from ruitong_lib.measure.plan import plan as plan_comparison

    a, b = open_shard(reference), open_shard(candidate)
    floors = (open_shard(floor[0]), open_shard(floor[1]))
    p = plan_comparison(
        a, b, floors, scoring=scoring or default_scoring(a, b), margin=margin, tokens_per_second=tokens_per_second
    )
    found = jsonable(p.to_dict())
    print_json(found) if as_json else print(*[f"{k:18} {v}" for k, v in found.items()], sep="\n")
    if p.n_prompts is None:
        raise typer.Exit(3)
