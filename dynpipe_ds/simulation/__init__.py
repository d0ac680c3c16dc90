"""One training batch of a pipeline on paper: how long it takes, who waits for whom, and what it holds.

Pure functions of plain numbers: no ranks, no devices, the same result everywhere. To read it:
``workload`` (what each stage has to do), ``schedules`` (in which order: DeepSpeed's own instruction
streams), ``streams`` (the reference: runs the instructions one by one), ``waves`` (the fast way: whole
diagonals of the schedule at once, equal bit for bit), ``simulate`` (the entry) and ``closed_forms``.
"""

from dynpipe_ds.simulation.closed_forms import (
    bubble_ratio_1f1b,
    chimera_bubble_ratio,
    equal_stages_s,
    flow_line_s,
)
from dynpipe_ds.simulation.outcome import Interval, Simulation, StageOutcome
from dynpipe_ds.simulation.schedules import Instruction, Op, ScheduleName, streams_of
from dynpipe_ds.simulation.simulate import predicted_batches_s, simulate
from dynpipe_ds.simulation.waves import makespans
from dynpipe_ds.simulation.workload import Sends, Workload

__all__ = [
    "Instruction",
    "Interval",
    "Op",
    "ScheduleName",
    "Sends",
    "Simulation",
    "StageOutcome",
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
