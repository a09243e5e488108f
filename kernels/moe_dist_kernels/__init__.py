"""Triton kernels of a mixture-of-experts layer and their launchers.

Owns kernels and how they are launched; knows nothing of tuning, stores or ranks. Imported by moe_dist's triton backend and
by the tests alone.
"""

from moe_dist_kernels.decode import DecodeTile
from moe_dist_kernels.experts import Experts, is_interpreted
from moe_dist_kernels.grouped import ProductTile
from moe_dist_kernels.plan import (
    DecodePlan,
    ExpertsShape,
    Limits,
    Plan,
    RouterShape,
    SortedPlan,
    SpecialisedPlan,
    all_launches,
    scratch,
)

__all__ = [
    "DecodePlan",
    "DecodeTile",
    "Experts",
    "ExpertsShape",
    "Limits",
    "Plan",
    "ProductTile",
    "RouterShape",
    "SortedPlan",
    "SpecialisedPlan",
    "all_launches",
    "is_interpreted",
    "scratch",
]
