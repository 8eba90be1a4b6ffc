"""The calibrated thresholds in ``params/gates.yml``: written by a run, read by gates, checked for being stale."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from ruitong_lib import paths
from ruitong_lib.benchmark import keep_result
from ruitong_lib.errors import RuitongError
from ruitong_lib.measure import scores
from ruitong_lib.measure.calibrate import machine, table_sha256
from ruitong_lib.measure.design import VERSION, Design

GATES = paths.PARAMS / "gates.yml"
_MARK = "calibration: # written by `ruitong calibrate --write`; do not edit. `--check` says whether it is stale\n"
_DERIVATION = (
    "A replicate is (pair of cells × block of prompts); no two pairs share a cell, no two blocks a prompt, none is "
    "bit-identical. threshold of a score: the ⌈level (m + 1)⌉-th smallest of its m values. The compound score is the "
    "largest of the rank-scaled scores, each scaled by the replicates that share neither pair nor block with it; limit "
    "is the value of a score at which the compound score reaches its threshold. All are for one block of this design."
)


def section(result: Mapping[str, Any], changelog: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what of a run's result belongs into ``gates.yml``; numbers in full precision."""
    c, p = result["calibration"], result["provenance"]
    entry = {
        "date": p["date"],
        "change": f"thresholds from {c['m']} replicates of {result['design']}",
        "scores_sha256": p["scores_sha256"],
    }
    known = [e for e in changelog if e["scores_sha256"] != entry["scores_sha256"]]
    return {
        "design": result["design"],
        "derivation": _DERIVATION,
        **p,
        "level": c["level"],
        "m": c["m"],
        "n_eff": round(c["n_eff"], 1),
        "compound_threshold": c["threshold"],
        "false_alarms": {
            s: {"rate": round(r["rate"], 4), "lo": round(r["lo"], 4), "hi": round(r["hi"], 4)}
            for s, r in c["false_alarms"].items()
        },
        "scores": {s: {k: v for k, v in f.items() if k != "largest"} for s, f in c["scores"].items()},
        "changelog": [*known, entry],
    }


def write(result: Mapping[str, Any], path: Path = GATES) -> None:
    """Put a run's thresholds into ``gates.yml``, after everything that people wrote there."""
    text = path.read_text(encoding="utf-8")
    before = text.partition(_MARK)[0].rstrip("\n")
    old = (yaml.safe_load(text) or {}).get("calibration") or {}
    body = yaml.safe_dump(
        section(result, list(old.get("changelog", []))), sort_keys=False, allow_unicode=True, width=118
    )
    indented = "".join(f"  {line}\n" for line in body.splitlines())
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(f"{before}\n{_MARK}{indented}", encoding="utf-8")
    os.replace(temporary, path)


def publish(result: Mapping[str, Any], outputs: str = "") -> Path:
    """Leave a run's result as ``results/calibration.json``, which `ruitong table` makes part of a release."""
    power = [{"id": f"{r['fault']}-{r['severity']:g}", **r} for r in result["power"]]
    gates = [{"id": r["gate"], **r} for r in result["gates"]]
    return keep_result("calibration", {**result, "power": power, "gates": gates}, outputs)


def thresholds(path: Path = GATES) -> dict[str, Any]:
    """Return the calibrated thresholds.

    Raises
    ------
    RuitongError
        When there are none, with the line that makes them.
    """
    found: dict[str, Any] = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("calibration") or {}
    if not found:
        raise RuitongError(
            f"{path.name} holds no calibrated thresholds: run 'ruitong calibrate params/demo-gates.yml --write'"
        )
    return found


def read_scores(folder: Path) -> pd.DataFrame:
    """Return the scores of every replicate of a run, as they were written, bit for bit."""
    return pd.read_csv(folder / "scores.csv", engine="python")  # the C parser of older releases rounds the last bit


def read_result(folder: Path) -> dict[str, Any]:
    """Return a run's result.

    Raises
    ------
    RuitongError
        When the run is not there, with the line that makes it.
    """
    path = folder / "result.json"
    if not path.is_file():
        raise RuitongError(f"no calibration at {folder}: run 'ruitong calibrate params/{folder.name}.yml' first")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def stale(design: Design, folder: Path, path: Path = GATES) -> tuple[list[str], list[str]]:
    """Say whether the thresholds of ``gates.yml`` still follow from their inputs.

    Design, prompt sets, the code's version and the weights are hashed anew. Where the run's scores are at hand, the
    thresholds are derived from them again.

    Returns
    -------
    What is stale, one line a cause, and what could not be looked at here.

    Raises
    ------
    RuitongError
        When there are no thresholds, or they are of another design.
    """
    known = thresholds(path)
    if known["design"] != design.name:
        raise RuitongError(f"{path.name} holds the thresholds of {known['design']!r}, not of {design.name!r}")
    causes = []
    if known["version"] != VERSION:
        causes.append(f"the code: version {known['version']} made them, this is {VERSION}")
    if known["design_sha256"] != design.sha256:
        causes.append(f"the design {design.name}: it was changed since")
    for name, sha in design.prompt_sets().items():
        if known["prompt_sets"].get(name) != sha:
            causes.append(
                f"the prompt set {name}: its hash is {sha[:12]}, theirs {known['prompt_sets'].get(name)!s:.12}"
            )
    made, here = ({**x["packages"], "hardware": x["hardware"]} for x in (known, machine()))
    unseen = [f"another {n}: {made[n]} made the thresholds, this is {here[n]}" for n in made if made[n] != here[n]]
    weights = _weights(design)
    if not weights:
        unseen.append("the weights: the model is not here")
    elif weights != known["weights_sha256"]:
        causes.append(f"the weights: their hash is {weights[:12]}, theirs {known['weights_sha256'][:12]}")
    if not (folder / "scores.csv").is_file():
        unseen.append(f"the scores: no run at {folder}, so the thresholds were not derived again")
        return causes, unseen
    table = read_scores(folder)
    table = table[table["kind"] == "calibration"]
    if table_sha256(table) != known["scores_sha256"]:
        return [*causes, f"the scores: those of {folder} are of another run"], unseen
    again = scores.calibrate(table, level=design.document["level"], minimum=design.document["minimum_replicates"])
    pairs = [("compound_threshold", known["compound_threshold"], again["threshold"])]
    pairs += [
        (f"{s}.{k}", known["scores"][s][k], f[k]) for s, f in again["scores"].items() for k in ("threshold", "limit")
    ]
    pairs += [
        (f"false_alarms.{s}.rate", known["false_alarms"][s]["rate"], round(r["rate"], 4))
        for s, r in again["false_alarms"].items()
    ]
    causes += [
        f"{name}: {theirs:g} there, {ours:g} derived"
        for name, theirs, ours in pairs
        if not math.isclose(theirs, ours, rel_tol=1e-9)
    ]
    return causes, unseen


def _weights(design: Design) -> str:
    from ruitong_lib.collect import models

    model = design.document["model"]
    try:
        folder = models.embedded_folder() if model == models.EMBEDDED else Path(model)
    except RuitongError:
        return ""
    return models.weights_sha256(folder) if folder.is_dir() else ""
