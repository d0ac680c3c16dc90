"""Optimizer state that comes from a checkpoint instead of another stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.migration.optimizer_state import FlatOptimizer, StageOptimizer, State, _write_state


def restore_state(
    optimizer: StageOptimizer, states: Mapping[nn.Parameter, State], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Put stored state into the present optimizer of a stage; communicates nothing.

    Args:
        optimizer: the stage's; its groups hold the stage's present parameters.
        states: complete state of each parameter that has some; ``"master"`` with the fp32 weights for flat
            optimizers.
        settings: learning rate and the like, of every parameter group.
    """
    if isinstance(optimizer, FlatOptimizer):
        _restore_flat(optimizer, states, settings)
    else:
        _restore_plain(optimizer, states, settings)


def _restore_plain(
    optimizer: StageOptimizer, states: Mapping[nn.Parameter, State], settings: Sequence[Mapping[str, Any]]
) -> None:
    basic = optimizer.groups.optimizer
    entries: dict[int, State] = {}
    groups: list[dict[str, Any]] = []
    position = 0
    for group, setting in zip(basic.param_groups, settings, strict=True):
        members = group["params"]
        for i, parameter in enumerate(members, start=position):
            if parameter in states:
                entries[i] = {key: _own(value) for key, value in states[parameter].items()}
        groups.append({**setting, "params": list(range(position, position + len(members)))})
        position += len(members)
    basic.load_state_dict({"state": entries, "param_groups": groups})


def _own(value: Any) -> Any:
    """A copy in memory: what was read may be mapped from the file."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _restore_flat(
    optimizer: FlatOptimizer, states: Mapping[nn.Parameter, State], settings: Sequence[Mapping[str, Any]]
) -> None:
    wrapper, basic, index = optimizer.engine.optimizer, optimizer.groups.optimizer, optimizer.groups.index
    for group, setting in zip(basic.param_groups, settings, strict=True):
        group.update(setting)
    template = next((state for state in states.values() if len(state) > 1), None)
    by_group = {index[parameter]: state for parameter, state in states.items() if len(state) > 1}
    basic.state.clear()
    if template is not None:
        for i, group in enumerate(basic.param_groups):
            flat = group["params"][0]
            basic.state[flat] = _empty_state(flat, by_group.get(i, template))
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()
    for parameter, state in states.items():
        if getattr(parameter, "_hp_mapping", None) is not None:
            _write_state(parameter, state)


def _empty_state(flat: Tensor, state: State) -> State:
    return {
        key: torch.zeros_like(flat, dtype=value.dtype) if isinstance(value, Tensor) and value.dim() > 0 else _own(value)
        for key, value in state.items()
        if key != "master"
    }
