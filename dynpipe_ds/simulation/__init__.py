"""One training batch of a pipeline on paper: how long it takes, who waits for whom, and what it holds.

Pure functions of plain numbers: no ranks, no devices, the same result everywhere. To read it:
``workload`` (what each stage has to do), :mod:`dynpipe_ds.schedule` (in which order), ``streams`` (the
reference: runs an order's instructions one by one), ``waves`` (the fast way: whole diagonals of 1F1B or
GPipe at once, equal bit for bit), ``timetable`` (for an order that is timed again and again, equal too),
``simulate`` (the entry) and ``closed_forms``.
"""

from dynpipe_ds.schedule import Instruction, Op, ScheduleName
from dynpipe_ds.simulation.closed_forms import (
    bubble_ratio_1f1b,
    chimera_bubble_ratio,
    equal_stages_s,
    flow_line_s,
)
from dynpipe_ds.simulation.outcome import Interval, Simulation, StageOutcome
from dynpipe_ds.simulation.simulate import predicted_batches_s, simulate, streams_of
from dynpipe_ds.simulation.timetable import Timetable
from dynpipe_ds.simulation.waves import makespans
from dynpipe_ds.simulation.workload import Workload

__all__ = [
    "Instruction",
    "Interval",
    "Op",
    "ScheduleName",
    "Simulation",
    "StageOutcome",
    "Timetable",
    "Workload",
    "bubble_ratio_1f1b",
    "chimera_bubble_ratio",
    "equal_stages_s",
    "flow_line_s",
    "makespans",
    "predicted_batches_s",
    "simulate",
    "streams_of",
]
