"""The public names of the package, and what has to happen once before any is used.

``import dynpipe_ds`` imports this file at once. Only ``dynpipe`` waits until a command needs it: importing torch and
DeepSpeed takes seconds, and who plans, or starts processes, needs neither.
"""

from __future__ import annotations

from dynpipe_ds._command_line import is_command_line
from dynpipe_ds.host.quiet import keep_deepspeed_quiet

keep_deepspeed_quiet()

from dynpipe_ds.host import install  # noqa: E402

if not is_command_line():  # `dynpipe doctor` must run where nothing may be trained, to say so
    install.check_version()

from dynpipe_ds.checkpoint import CheckpointError, keep_in_checkpoints  # noqa: E402
from dynpipe_ds.engine import DynamicPipelineEngine, engine_class  # noqa: E402
from dynpipe_ds.events import Overhead, RebalanceEvent, RepackEvent  # noqa: E402
from dynpipe_ds.host.install import init_distributed  # noqa: E402
from dynpipe_ds.host.parts import LayerPart, split_layers, whole_layers  # noqa: E402
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile, StageProfile  # noqa: E402
from dynpipe_ds.migration.replace import ParameterReplacement  # noqa: E402
from dynpipe_ds.migration.transaction import MigrationError  # noqa: E402
from dynpipe_ds.module import DynamicPipelineModule  # noqa: E402
from dynpipe_ds.owning import Replica, building_replica, own_by_replica  # noqa: E402
from dynpipe_ds.partition import register_partitioner  # noqa: E402
from dynpipe_ds.ranks.fatal import FatalError, RankLostError  # noqa: E402
from dynpipe_ds.repacking.live import RepackError  # noqa: E402
from dynpipe_ds.repeats import CountedForwards  # noqa: E402
from dynpipe_ds.snapshots.between import BetweenBatches  # noqa: E402

install.install(DynamicPipelineModule, engine_class)

__all__: list[str] = [
    "BetweenBatches",
    "CheckpointError",
    "CountedForwards",
    "DynamicPipelineEngine",
    "DynamicPipelineModule",
    "FatalError",
    "LayerPart",
    "LayerProfile",
    "MigrationError",
    "Overhead",
    "ParameterReplacement",
    "PipelineProfile",
    "RankLostError",
    "RebalanceEvent",
    "RepackError",
    "RepackEvent",
    "Replica",
    "StageProfile",
    "building_replica",
    "init_distributed",
    "keep_in_checkpoints",
    "own_by_replica",
    "register_partitioner",
    "split_layers",
    "whole_layers",
]
