"""What changes: the view that changes have of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.host.pipeline import Pipeline

if TYPE_CHECKING:
    from dynpipe_ds.module import DynamicPipelineModule


class Subject(Protocol):
    """A stage, as far as moving, replacing and freezing concern it.

    Attributes:
        pipeline: DeepSpeed's engine.
        module: its layers.
        optimizer: moves their optimizer state.
        buffer_bytes: largest message in which tensors travel.
    """

    pipeline: Pipeline
    module: DynamicPipelineModule
    optimizer: StageOptimizer | None
    buffer_bytes: int

    @property
    def device(self) -> torch.device:
        """Where the communication back-end works."""

    @property
    def stage_id(self) -> int:
        """Its number."""
