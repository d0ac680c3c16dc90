"""In which order to run a batch, and on which partition: from measured seconds and bytes to an order.

Pure functions of plain numbers, deterministic, so every rank that asks plans the same. To read it: ``planner`` (the
entry: an order for a workload), ``listing`` (list scheduling: a batch runs on paper, and its stages choose),
``justified`` (runs pushed to their end and back), ``runs`` (the loops of both), ``pace`` (how fast it is),
``retimed`` (the same order with other seconds), ``bounds`` (what no order can beat), ``memory`` (what an order may
hold), ``on_partition`` (the best order for a partition), ``even`` (partitions to begin from),
``partitions`` (what all partitions of a pipeline take at least), ``together`` (the best partition and order),
``assumed`` (what a profile without measured halves is taken to have), ``predicted`` (several partitions and orders side
by side).
"""

from dynpipe_ds.planning.assumed import assume_halves
from dynpipe_ds.planning.bounds import least_seconds, stage_bounds
from dynpipe_ds.planning.memory import activation_caps, worker_bytes_of_1f1b
from dynpipe_ds.planning.on_partition import plan_on_partition
from dynpipe_ds.planning.pace import agree_on_pace, pace
from dynpipe_ds.planning.planner import PlannedOrder, compile_planning, is_worth_compiling, plan_order
from dynpipe_ds.planning.predicted import PredictedBatch, predict_batches
from dynpipe_ds.planning.together import PlannedBatch, plan_batch

__all__ = [
    "PlannedBatch", "PlannedOrder", "PredictedBatch", "activation_caps", "agree_on_pace", "assume_halves",
    "compile_planning", "is_worth_compiling", "least_seconds", "pace", "plan_batch", "plan_on_partition", "plan_order",
    "predict_batches", "stage_bounds", "worker_bytes_of_1f1b",
]  # fmt: skip
