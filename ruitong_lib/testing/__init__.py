"""Seeded synthetic shards with a known answer, and tiny random models, for tests and for teaching.

- ``synthetic``: shards made from known distributions
- ``models``: tiny random models, and the KL over the full vocabulary of a real one
"""

from ruitong_lib.testing.models import FAMILIES, MIXTURES, exact_kl, tiny_model
from ruitong_lib.testing.synthetic import DEFAULTS, Synthetic, synthetic_shards

__all__ = [
    "DEFAULTS",
    "FAMILIES",
    "MIXTURES",
    "Synthetic",
    "exact_kl",
    "synthetic_shards",
    "tiny_model",
]
