"""Where experts are computed: placements as values, what they cost, and who plans them. Pure: no ranks, no devices.

Reading order: ``lanes`` (a placement), ``constants``, ``traffic`` and ``model`` (what one costs), ``fitting`` (from
measured batches), ``rivals`` (rules of others), ``columns``, ``state``, ``moves`` and ``search`` (ours), ``planners``
(all of them by name), ``when`` (in which batches).
"""

from scenarios.moe.placing.constants import Constants, Link
from scenarios.moe.placing.fitting import Sample, fitted
from scenarios.moe.placing.lanes import Lanes
from scenarios.moe.placing.model import LayerModel, LayerSeconds
from scenarios.moe.placing.planners import PLANNERS, check_planner, plan, reroute
from scenarios.moe.placing.when import WhenToPlan, balance

__all__ = [
    "PLANNERS", "Constants", "Lanes", "LayerModel", "LayerSeconds", "Link", "Sample", "WhenToPlan", "balance",
    "check_planner", "fitted", "plan", "reroute",
]  # fmt: skip
