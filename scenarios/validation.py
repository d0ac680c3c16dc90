"""Loss and perplexity on data that is not trained on; training goes on as if nothing had been evaluated."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from scenarios.data import ValidationBatches


class Validator:
    """Evaluates the model of one run.

    Args:
        engine: trains it.
        batches: what is evaluated.
        every: batches of training between two evaluations; 0 for none but those that are asked for.
    """

    def __init__(self, engine: Any, batches: ValidationBatches, *, every: int = 0) -> None:
        self._engine = engine
        self._batches = batches
        self._every = every

    def is_due(self, trained: int) -> bool:
        """Say whether to evaluate after so many batches of training."""
        return self._every > 0 and trained % self._every == 0

    def evaluate(self) -> float:
        """Return the mean loss over all tokens of the validation part, in nats; collective over all ranks.

        Weights, optimizer state, random streams, and what the seeds of later dropout follow from are left as they
        are. The mean is over micro-batches of equal size, in float64, the same on every rank.
        """
        total = 0.0
        with undisturbed(self._engine.module):
            for batch in range(len(self._batches)):
                size = len(self._batches.windows(batch))
                loss = self._engine.eval_batch(self._batches.micro_batches(batch), num_micro_batches=size)
                total += size * float(loss)
        return total / self._batches.num_micro_batches


@contextmanager
def undisturbed(module: Any) -> Iterator[None]:
    """Put back what running a pipeline module forward changes besides its output.

    Args:
        module: a ``PipelineModule``. With ``seed_layers`` it seeds all random streams before each layer, from a count
            of all micro-batches that it has seen.
    """
    accelerator = get_accelerator()
    on_device = accelerator.get_rng_state() if accelerator.device_name() != "cpu" else None
    streams = torch.get_rng_state(), np.random.get_state(), random.getstate()
    offset, training = module.micro_offset, module.training
    try:
        yield
    finally:
        torch.set_rng_state(streams[0])
        np.random.set_state(streams[1])
        random.setstate(streams[2])
        if on_device is not None:
            accelerator.set_rng_state(on_device)
        module.micro_offset = offset
        module.train(training)
