"""Where experts are computed: placements as values, what they cost, and who plans them. Pure: no ranks, no devices.

Reading order: ``lanes`` (a placement).
"""

from scenarios.moe.placing.lanes import Lanes

__all__ = ["Lanes"]
