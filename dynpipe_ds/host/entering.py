"""What DeepSpeed's engine of a newcomer takes over from the job, and how it is built before it is a part of one.

A newcomer builds its engine in a world of its own, as the only stage of a pipeline, without any layer. What such an
engine lacks is what an engine keeps besides layers: counters, the scheduler, settings of parameter groups, loss scale,
sizes of batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dynpipe_ds.host.files import take_counters, take_settings
from dynpipe_ds.host.optimizers.flat import FlatOptimizer
from dynpipe_ds.host.optimizers.restore import restore_state
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.host.pipeline import Pipeline

_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OF_FLAT = ("clip_grad", "loss_scaler", "dynamic_loss_scale", "overflow")


def description(pipeline: Pipeline) -> dict[str, Any]:
    """What an engine was made with, for comparison: JSON, optimizer, back-end, data."""
    engine = pipeline.engine
    basic = None if engine.stage_optimizer is None else engine.stage_optimizer.groups.optimizer
    data = engine.training_data
    return {
        "config": dict(engine._config._param_dict),
        "optimizer": None if basic is None else {
            "wrapper": type(engine.optimizer).__name__, "kind": type(basic).__name__, "groups": len(basic.param_groups)
        },
        "backend": {"name": dist.get_backend(), "device": pipeline.device.type, "axes": list(pipeline.sizes)},
        "data": {"samples": len(data) if hasattr(data, "__len__") else None},
    }


def shared_state(pipeline: Pipeline) -> dict[str, Any]:
    """What is the same on every rank, as plain values and tensors."""
    engine, optimizer = pipeline.engine, pipeline.engine.stage_optimizer
    basic = optimizer.groups.optimizer
    state: dict[str, Any] = {
        "global_steps": engine.global_steps, "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "sizes": {name: getattr(engine._config, name) for name in _SIZES},
        "settings": [{key: value for key, value in g.items() if key != "params"} for g in basic.param_groups],
        "template": _template(optimizer), "flat": {},
    }
    if engine.lr_scheduler is not None:
        state["lr_scheduler"] = engine.lr_scheduler.state_dict()
    if isinstance(optimizer, FlatOptimizer):
        state["flat"] = {n: getattr(engine.optimizer, n) for n in _OF_FLAT if hasattr(engine.optimizer, n)}
    return state


def _template(optimizer: StageOptimizer) -> dict[str, Any]:
    """Names and kinds of a flat buffer's state, with its count of steps; moments without elements' values."""
    if not isinstance(optimizer, FlatOptimizer):
        return {}
    for state in optimizer.groups.optimizer.state.values():
        if state:
            return {
                key: torch.zeros(2, dtype=value.dtype)
                if isinstance(value, torch.Tensor) and value.numel() > 1 else value
                for key, value in state.items()
            }
    return {}


def take_shared_state(pipeline: Pipeline, state: Mapping[str, Any]) -> None:
    """Take over what :func:`shared_state` gave on another rank; here are no parameters yet."""
    engine = pipeline.engine
    take_sizes(pipeline, state["sizes"])
    restore_state(engine.stage_optimizer, {}, state["settings"], state["template"])
    if isinstance(engine.stage_optimizer, FlatOptimizer):
        take_settings(pipeline, state["flat"])
    take_counters(pipeline, state, with_scheduler=True)


def take_sizes(pipeline: Pipeline, sizes: Mapping[str, int]) -> None:
    """Train batches of the job's sizes."""
    engine = pipeline.engine
    for name, value in sizes.items():
        setattr(engine._config, name, value)
    engine.micro_batches, engine.micro_batch_size = engine.gradient_accumulation_steps(), sizes[_SIZES[1]]
    engine.batch_timer.batch_size = engine.tput_timer.batch_size = engine.train_batch_size()


def alone(module: Any, config: Any) -> None:
    """Let a newcomer's engine be that of the only rank, after its configuration was read for the job's replicas.

    Args:
        module: its module.
        config: DeepSpeed's.
    """
    module._grid.data_parallel_size = 1
    config.train_batch_size = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps


def renew_replicas(pipeline: Pipeline) -> None:
    """Give an optimizer that shares its buffers over replicas those of the world that it has entered."""
    engine, optimizer = pipeline.engine, pipeline.engine.stage_optimizer
    if isinstance(optimizer, FlatOptimizer) and engine.dp_world_size > 1:
        optimizer.prepare([], {})
        optimizer.fill({})
        optimizer.commit()


def renew_data(pipeline: Pipeline) -> None:
    """Let a loader that DeepSpeed has made of the user's data read what this replica reads."""
    engine = pipeline.engine
    if engine.training_data:
        engine._build_data_iter(engine.training_data)
