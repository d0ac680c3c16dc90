"""Layers that stop training, front to back: by a schedule, or once they have converged (Egeria, AutoFreeze)."""

from __future__ import annotations

from scenarios.freezing.autofreeze import AutoFreeze
from scenarios.freezing.egeria import EgeriaFreezing
from scenarios.freezing.prefix import FreezingScenario, freeze_prefix, set_frozen
from scenarios.freezing.schedule import FreezeSchedule, ScheduledFreezing

__all__ = [
    "AutoFreeze",
    "EgeriaFreezing",
    "FreezeSchedule",
    "FreezingScenario",
    "ScheduledFreezing",
    "freeze_prefix",
    "set_frozen",
]
