"""The shard: one table of variables drives building, checking, encoding, saving, loading and combining.

A shard holds one cell (dimension ``cell`` of length 1), an aggregate holds many; both have the schema below and
one validator. Dimensions: ``cell``, ``scoring`` ("decode", "replay"), ``prompt``, ``position`` (0 is the first
token after the prompt) and ``k`` (0 is the best alternative); a mixture of experts has ``moe_layer`` (number of the
decoder layer) and ``slot`` (place among the experts chosen, in no order). Hashes are taken of arrays, never of files.

- ``table``: the variables, the coordinates and the states
- ``shard``: an empty shard, the validator, the mask, the provenance
- ``files``: netCDF-4
- ``aggregate``: many cells in one dataset
- ``hashes``: of arrays and anchors
"""

from ruitong_lib.schema.aggregate import combine, select
from ruitong_lib.schema.files import escape, load, save, unescape
from ruitong_lib.schema.hashes import anchor_sha256, array_sha256
from ruitong_lib.schema.shard import new_shard, provenance, valid_positions, validate
from ruitong_lib.schema.table import (
    CELL_COORDS,
    FINISH,
    POSITION_STATES,
    PROMPT_COORDS,
    SCHEMA_VERSION,
    SCORINGS,
    STATES,
    TABLE,
    VARIABLES,
    SchemaError,
    Variable,
)

__all__ = [
    "CELL_COORDS",
    "FINISH",
    "POSITION_STATES",
    "PROMPT_COORDS",
    "SCHEMA_VERSION",
    "SCORINGS",
    "STATES",
    "TABLE",
    "VARIABLES",
    "SchemaError",
    "Variable",
    "anchor_sha256",
    "array_sha256",
    "combine",
    "escape",
    "load",
    "new_shard",
    "provenance",
    "save",
    "select",
    "unescape",
    "valid_positions",
    "validate",
]
