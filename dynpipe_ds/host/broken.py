"""DeepSpeed's engine after a batch, or anything else that ranks do together, has broken off anywhere in its middle."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER

from dynpipe_ds.host.pipeline import Pipeline


def abandon_batch(pipeline: Pipeline) -> None:
    """Leave no trace of what was going on, but for weights and optimizer state, which are then to be replaced.

    Args:
        pipeline: nothing of which communicates any more.
    """
    engine: Any = pipeline.engine
    timer = engine.timers(TRAIN_BATCH_TIMER)
    if getattr(timer, "started_", False):
        timer.stop()
    engine.grad_layer = engine.loss = None
    with getattr(engine, "_running_engine_backward_lock", nullcontext()):
        engine._running_engine_backward = engine._force_grad_boundary = engine.inside_no_sync_ctxt = False
        engine._running_engine_backward_count = 0
    for buffers in engine.pipe_buffers.values():
        buffers[:] = [None] * len(buffers)
    engine.reset_activation_shape()
    pipeline.in_flight.forget_layers()
    pipeline.owned.drop()
    if pipeline.has_optimizer:
        engine.optimizer.zero_grad()
    for parameter in engine.module.parameters():
        parameter.grad = None
    engine.module.recorder = None
    engine.module.train()
