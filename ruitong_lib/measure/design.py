"""The design of a calibration: a file that names the model, the cells, the blocks of prompts and the faults."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml

from ruitong_lib import paths
from ruitong_lib.errors import RuitongError, did_you_mean
from ruitong_lib.measure.faults import FAULTS, find
from ruitong_lib.prompts import Prompt, load_prompts

if TYPE_CHECKING:
    from ruitong_lib.collect.replicas import Replica

VERSION = 1  # raise it when a change of the code moves a threshold
SIDES = ("calibration", "held_out")
_KEYS = (
    "name", "description", "model", "precision", "threads", "seed", "level", "minimum_replicates", "hands", "blocks",
    "prompts", "calibration", "held_out", "faults",
)  # fmt: skip


class Design(NamedTuple):
    """A design file, checked."""

    name: str
    document: dict[str, Any]
    faults: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Hash of everything in the file but its words."""
        content = {k: v for k, v in self.document.items() if k not in {"name", "description"}}
        return hashlib.sha256(json.dumps([VERSION, content], sort_keys=True).encode()).hexdigest()

    def folder(self, outputs: str = "") -> Path:
        """Return where the run is kept: ``outputs/calibration/<name>``."""
        return paths.outputs(outputs) / "calibration" / self.name

    def prompt_sets(self) -> dict[str, str]:
        """Return the hash of each prompt set that the design draws from."""
        return {row["set"]: load_prompts(row["set"]).sha256 for row in self.document["prompts"]}

    def conditions(self) -> list[tuple[str, float]]:
        """Return every fault with each of its severities."""
        return [(name, s) for name in self.faults for s in FAULTS[name].severities]


def load_design(path: str | Path) -> Design:
    """Read and check a design file (``params/demo-gates.yml`` explains the keys).

    Raises
    ------
    RuitongError
        For an unreadable file, an unknown key, an odd number of cells, or an unknown fault.
    """
    path = paths.found(str(path))
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise RuitongError(f"cannot read the design {path}: {e}") from e
    if not isinstance(document, dict):
        raise RuitongError(f"{path} must be a mapping with the keys {', '.join(_KEYS)}")
    for key in document:
        if key not in _KEYS:
            raise RuitongError(f"{path}: unknown key {key!r}.{did_you_mean(str(key), _KEYS)} Known: {', '.join(_KEYS)}")
    missing = [k for k in _KEYS if k not in document and k != "description"]
    if missing:
        raise RuitongError(f"{path} lacks {', '.join(missing)}; params/demo-gates.yml shows each key")
    for side in SIDES:
        if len(document[side]) % 2 or not document[side]:
            raise RuitongError(f"{path}: {side} must hold pairs of cells, got {len(document[side])} cells")
    for key, parts in (("hands", SIDES), ("blocks", (*SIDES, "faults"))):
        counts = document[key] if isinstance(document[key], dict) else {}
        if set(counts) != set(parts) or not all(type(n) is int and n > 0 for n in counts.values()):
            raise RuitongError(f"{path}: {key} must give {' and '.join(parts)} a number above 0, got {document[key]!r}")
    if document["blocks"]["faults"] > document["blocks"]["held_out"]:
        raise RuitongError(f"{path}: blocks.faults must be at most blocks.held_out, the blocks that faults run on")
    chosen = list(FAULTS) if document["faults"] == "all" else list(document["faults"])
    for name in chosen:
        find(name)
    return Design(str(document["name"]), document, tuple(chosen))


class Layout(NamedTuple):
    """Which prompt is in which block: the calibration's blocks first, then the held-out ones."""

    prompts: tuple[Prompt, ...]
    limits: tuple[int, ...]  # tokens that the anchor writes
    block: dict[str, int]  # prompt id → block
    n_calibration: int

    @property
    def items(self) -> list[Prompt]:
        """The gate items among the prompts, of both sides."""
        return [p for p in self.prompts if p.options]

    def rows(self, side: str, blocks: int | None = None) -> list[int]:
        """Return the places of the prompts of a side, of its first ``blocks`` blocks."""
        first = 0 if side == "calibration" else self.n_calibration
        last = self.n_calibration if side == "calibration" else max(self.block.values()) + 1
        last = last if blocks is None else min(last, first + blocks)
        return [i for i, p in enumerate(self.prompts) if first <= self.block[p.id] < last]


def lay_out(design: Design, tokenizer: Any) -> Layout:
    """Deal the prompts at random (the design's seed), first to hands, then each side's prompts to its blocks.

    A hand holds as many prompts of each set as any other, and a side is replayed hand by hand, so that each batch has
    long and short prompts. Blocks take a side's prompts of each set in the order in which they are replayed.

    Raises
    ------
    RuitongError
        When a set has too few prompts of the length asked for, or its share of a hand is no whole number.
    """
    from ruitong_lib.prompts import render

    document = design.document
    blocks, hands = document["blocks"], document["hands"]
    dealt: list[list[tuple[Prompt, int, int]]] = [[] for _ in range(sum(hands[side] for side in SIDES))]
    for row in document["prompts"]:
        fit = [p for p in load_prompts(row["set"]).prompts if p.options or not row.get("with_options")]
        fit = [p for p, ids in zip(fit, render(fit, tokenizer), strict=True) if len(ids) <= row["at_most"]]
        each = {side: blocks[side] * row["a_block"] / hands[side] for side in SIDES}
        a_hand = int(each["calibration"])
        if set(each.values()) != {a_hand}:
            raise RuitongError(
                f"{row['set']}: blocks times a_block over hands must be one whole number on both sides, got "
                f"{each['calibration']:g} and {each['held_out']:g}"
            )
        needed = a_hand * len(dealt)
        if len(fit) < needed:
            raise RuitongError(
                f"{row['set']} has {len(fit)} prompts up to {row['at_most']} tokens, and the blocks need {needed}; "
                "raise at_most, or lower a_block or the number of blocks"
            )
        order = np.random.default_rng(document["seed"]).permutation(len(fit))[:needed]
        for i, at in enumerate(order):
            hand = i % len(dealt)
            place = hand * a_hand + i // len(dealt)  # among its set, in the order of replay
            dealt[hand].append((fit[at], row["new_tokens"], place // row["a_block"]))
    flat = [x for hand in dealt for x in hand]
    prompts, limits, of = zip(*flat, strict=True)
    return Layout(prompts, limits, {p.id: b for p, b in zip(prompts, of, strict=True)}, blocks["calibration"])


def replicas(design: Design, side: str) -> list["Replica"]:
    """Return the cells of a side; two that follow each other are a pair.

    Raises
    ------
    RuitongError
        For a field that is not known, or a cell that stands in the design twice, on whichever side.
    """
    from ruitong_lib.collect.replicas import Replica

    try:
        every = {s: [Replica(**cell) for cell in design.document[s]] for s in SIDES}
    except TypeError as e:
        raise RuitongError(f"{design.name}: a cell has a field that is not known: {e}") from e
    cells = [c for s in SIDES for c in every[s]]
    twice = next((c for i, c in enumerate(cells) if c in cells[:i]), None)
    if twice is not None:
        raise RuitongError(f"{design.name}: the cell {twice.name} stands there twice; no two pairs may share a cell")
    return every[side]
