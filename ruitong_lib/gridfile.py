"""A grid file and its expansion into cells: the anchor, the reference, the others and the oracle."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ruitong_lib.cell import Cell, check_types, slug
from ruitong_lib.errors import RuitongError, did_you_mean
from ruitong_lib.paths import found


class Grid(NamedTuple):
    """A grid file, expanded: the anchor first, then the reference, then the others."""

    name: str
    anchor: Cell
    reference: Cell
    cells: tuple[Cell, ...]  # everything but anchor and oracle, the reference among them; `anchor` to be filled in
    oracle: Cell | None = None  # what every cell is held against; runs last, because it is slow
    anchor_file: str = ""  # a shard whose text is replayed; then the anchor is not collected


def load_grid(path: str | Path, **overrides: Any) -> Grid:
    """Read and check a grid file.

    ``defaults`` holds for each cell; ``anchor`` and ``reference`` are patches over them; ``cells`` is a list of
    patches, ``product`` a mapping from a field to its values, of which each combination becomes a cell. ``oracle`` is a
    patch too: a replay in fp32 or fp64, on the CPU unless it names a device itself.

    Parameters
    ----------
    path
        A YAML file, as those in ``params/``.
    **overrides
        Fields set in each cell, e.g. ``outputs``. ``device`` and ``max_memory`` leave the oracle alone; ``anchor`` is
        the shard to replay instead of collecting an anchor; another ``model`` is added to the grid's name.

    Raises
    ------
    RuitongError
        For an unreadable file, an unknown key, a bad value (the cell is named), or a cell given twice.
    """
    path = found(str(path))
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise RuitongError(f"cannot read the grid {path}: {e}") from e
    known = ("name", "description", "defaults", "anchor", "reference", "cells", "product", "oracle")
    if not isinstance(document, dict):
        raise RuitongError(f"{path} must be a mapping with the keys {', '.join(known)}")
    for key in document:
        if key not in known:
            raise RuitongError(
                f"{path}: unknown key {key!r}.{did_you_mean(str(key), known)} Known are: {', '.join(known)}"
            )
    for key, kind, what in (("defaults", dict, "a mapping"), ("cells", list, "a list"), ("product", dict, "a mapping")):
        if not isinstance(document.get(key) or kind(), kind):
            raise RuitongError(f"{path}: {key} must be {what}, got {document[key]!r}")
    defaults = document.get("defaults") or {}
    other_model = overrides.get("model", defaults.get("model")) != defaults.get("model")
    anchor_file = str(overrides.pop("anchor", ""))
    if anchor_file:
        anchor_file = str(found(anchor_file).resolve())
        if not Path(anchor_file).is_file():
            raise RuitongError(f"the anchor {anchor_file} is no file; give the .nc shard whose text is to be replayed")

    def cell(patch: Any, what: str, **more: Any) -> Cell:
        if not isinstance(patch, dict):
            raise RuitongError(f"{path}: {what} must be a mapping of parameters, got {patch!r}")
        try:
            return Cell(**_checked({**defaults, **patch, **overrides, **more}))
        except RuitongError as e:
            raise RuitongError(f"{path}: {what}: {e}") from e

    anchor = cell(document.get("anchor", {}), "anchor", scoring="both")
    patches = [(document.get("reference", {}), "reference")]
    patches += [(p, f"cell {i + 1}") for i, p in enumerate(document.get("cells") or [])]
    product = document.get("product") or {}
    if product:
        bad = next((k for k, v in product.items() if not isinstance(v, list)), None)
        if bad:
            raise RuitongError(f"{path}: product.{bad} must be a list of values, got {product[bad]!r}")
        for values in itertools.product(*product.values()):
            patch = dict(zip(product, values, strict=True))
            patches.append((patch, f"product {patch}"))

    def replays(patch: Any) -> bool:
        return not isinstance(patch, dict) or (patch.get("scoring") or defaults.get("scoring")) != "decode"

    cells = [cell(p, what, **({"anchor": "anchor"} if replays(p) else {})) for p, what in patches]
    for i, c in enumerate(cells):
        if c in cells[:i]:
            raise RuitongError(f"{path}: {patches[i][1]} is the same as {patches[cells.index(c)][1]}; remove one")
    oracle = None
    if "oracle" in document:
        for name in ("device", "max_memory"):
            overrides.pop(name, None)
        patch = document["oracle"]
        where = {"device": "cpu", "max_memory": "", **patch} if isinstance(patch, dict) else patch
        oracle = cell(where, "oracle", scoring="replay", anchor="anchor")
        if oracle.precision not in ("fp32", "fp64"):
            raise RuitongError(f"{path}: oracle: precision must be fp32 or fp64, got {oracle.precision!r}")
        if oracle in cells:
            raise RuitongError(f"{path}: oracle is the same as {patches[cells.index(oracle)][1]}; remove that one")
    name = str(document.get("name", path.stem)) + (f".{slug(anchor.model.split('/')[-1])}" if other_model else "")
    return Grid(name, anchor, cells[0], tuple(cells), oracle, anchor_file)


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    check_types(values)
    return values
