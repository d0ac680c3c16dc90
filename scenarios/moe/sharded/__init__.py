"""Experts whose weights the replicas of a stage share out: each holds, trains and saves some of them.

Tokens go to the ranks that compute their experts, or experts' weights go to where the tokens are; which, a placement
says (``scenarios.moe.placing``), and it changes no bit of the training.

Reading order: ``exchange`` (rows), ``products`` (the arithmetic), ``chains`` and ``relay`` (weights and sums that
travel meanwhile), ``meetings`` (so that no rank waits for ever), ``sharing`` (a batch of all of it), ``layer`` (what a
layer with such experts is).
"""

from scenarios.moe.sharded.batch import Experts, LayerBatch, Planner, Reroute
from scenarios.moe.sharded.chains import PIECE_BYTES
from scenarios.moe.sharded.layer import LaneProducts, SharedExperts, cant_divide, keep_own_rows
from scenarios.moe.sharded.sharing import Sharing, share_experts, sharing_in_force

__all__ = [
    "PIECE_BYTES", "Experts", "LaneProducts", "LayerBatch", "Planner", "Reroute", "SharedExperts", "Sharing",
    "cant_divide", "keep_own_rows", "share_experts", "sharing_in_force",
]  # fmt: skip
