"""Pruning while training: global magnitude, exact over all stages, with real savings.

Read ``scenario`` first (what happens when), then ``selection`` (which weights stay), ``linear`` (how a layer
stores them) and ``products`` (how they are multiplied).
"""

from scenarios.pruning.linear import Form, PrunableLinear
from scenarios.pruning.scenario import PrunableSpec, Pruning, make_prunable, prunable_weights, prune_globally
from scenarios.pruning.schedule import CubicSchedule

__all__ = [
    "CubicSchedule", "Form", "PrunableLinear", "PrunableSpec", "Pruning", "make_prunable", "prunable_weights",
    "prune_globally",
]  # fmt: skip
