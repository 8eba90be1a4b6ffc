"""Ruitong measures how much a model's output changes on another accelerator, beside the noise floor.

The public names below need neither torch nor transformers nor matplotlib; collecting a cell imports
them inside :mod:`ruitong_lib.collect`, drawing one inside :mod:`ruitong_lib.report.plots`.
"""

from ruitong_lib.cell import Cell
from ruitong_lib.errors import RefusedError, RuitongError
from ruitong_lib.measure.align import align
from ruitong_lib.measure.compare import compare
from ruitong_lib.measure.floor import floor_for, ladder, ratio
from ruitong_lib.schema import combine, load, save, validate

__version__ = "0.1.0"

__all__ = [
    "Cell",
    "RefusedError",
    "RuitongError",
    "__version__",
    "align",
    "combine",
    "compare",
    "floor_for",
    "ladder",
    "load",
    "ratio",
    "save",
    "validate",
]
