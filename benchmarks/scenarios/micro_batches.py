"""Seconds of every layer in every micro-batch: what is measured before it is added up to a profile.

Layers take longer in one micro-batch than in another (tokens leave early, experts are picked, a machine is disturbed),
and a pipeline waits for the slower one each time, wherever its stages end. The ideal has to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from dynpipe_ds import DynamicPipelineEngine

DIGITS = 7  # of seconds: a tenth of a microsecond


def of_all_layers(engine: DynamicPipelineEngine, num_layers: int, num_micro_batches: int) -> list[list[list[float]]]:
    """Seconds by layer, forward and backward, and micro-batch; zero where this rank does not have the layer.

    Args:
        engine: has profiled the batch.
        num_layers: L.
        num_micro_batches: M.
    """
    table = np.zeros((num_layers, 2, num_micro_batches))
    for layer, seconds in engine.micro_batch_seconds().items():
        table[layer] = seconds
    rounded: list[list[list[float]]] = table.round(DIGITS).tolist()
    return rounded


def on_all_stages(batches: Sequence[list[list[list[float]]]]) -> list[list[list[list[float]]]]:
    """Tables that hold every stage's layers; collective over all ranks, which must be one a stage.

    Args:
        batches: this rank's table of every batch.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(batches))
    whole: list[list[list[list[float]]]] = np.sum(everyone, axis=0).round(DIGITS).tolist()
    return whole
