"""Gradients of stages without replicas stay where they are.

DeepSpeed copies them all into buckets, adds up one replica and copies them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from dynpipe_ds.config import DynamicPipelineConfig


class ReducingEngine(PipelineEngine):  # type: ignore[misc]
    """A pipeline engine that reduces gradients only where there is something to add; base of the dynamic engine."""

    dynamic_config: DynamicPipelineConfig

    def _reduce_non_expert_gradients(self, grads: Sequence[Any], elements_per_buffer: int) -> None:
        if not (self.dynamic_config.enabled and self._changes_nothing(grads)):
            super()._reduce_non_expert_gradients(grads, elements_per_buffer)

    def _changes_nothing(self, gradients: Sequence[Any]) -> bool:
        """Whether reducing gives the same bits: one replica, no rounding on the way."""
        return (
            dist.get_world_size(self.mpu.get_data_parallel_group()) == 1
            and self.gradient_predivide_factor() == 1
            and all(isinstance(g, Tensor) and g.dtype == self.communication_data_type for g in gradients)
        )
