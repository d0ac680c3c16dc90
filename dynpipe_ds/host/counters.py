"""What an engine counts and what follows from that, as plain values: steps, learning rates, the loss scale."""

from __future__ import annotations

from typing import Any

from dynpipe_ds.host.pipeline import Pipeline

Plain = dict[str, Any]

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_OF_WRAPPERS = ("clip_grad", "dynamic_loss_scale", "overflow", "external_loss_scale")


def engine_state(pipeline: Pipeline) -> Plain:
    """The present state; containers are the caller's, tensors are the engine's own.

    Args:
        pipeline: the engine.
    """
    engine = pipeline.engine
    state: Plain = {name: int(getattr(engine, name)) for name in _COUNTERS}
    if engine.lr_scheduler is not None and hasattr(engine.lr_scheduler, "state_dict"):
        state["lr_scheduler"] = dict(engine.lr_scheduler.state_dict())
    if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None:
        state["random_ltd"] = dict(engine.random_ltd_scheduler.state_dict())
    if pipeline.has_optimizer:
        wrapper, groups = engine.optimizer, engine.stage_optimizer.groups.optimizer.param_groups
        state["settings"] = [{k: value for k, value in group.items() if k != "params"} for group in groups]
        state["wrapper"] = {name: vars(wrapper)[name] for name in _OF_WRAPPERS if name in vars(wrapper)}
        scaler = vars(wrapper).get("loss_scaler")
        state["loss_scaler"] = dict(vars(scaler)) if hasattr(scaler, "__dict__") else None
    return state


def take_engine_state(pipeline: Pipeline, state: Plain) -> None:
    """Put back what :func:`engine_state` gave, but for the settings of parameter groups.

    Args:
        pipeline: the engine.
        state: as given.
    """
    engine = pipeline.engine
    for name in _COUNTERS:
        setattr(engine, name, state[name])
    if "lr_scheduler" in state:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if "random_ltd" in state:
        engine.random_ltd_scheduler.load_state_dict(state["random_ltd"])
    for name, value in state.get("wrapper", {}).items():
        vars(engine.optimizer)[name] = value
    if state.get("loss_scaler") is not None:
        vars(engine.optimizer.loss_scaler).update(state["loss_scaler"])
