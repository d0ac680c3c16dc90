"""Optimizer state that comes from a checkpoint instead of another stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dynpipe_ds.host.optimizers.flat import FlatOptimizer, write_state
from dynpipe_ds.host.optimizers.groups import State
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer


def restore_state(
    optimizer: StageOptimizer, states: Mapping[nn.Parameter, State], settings: Sequence[Mapping[str, Any]],
    template: State,
) -> None:
    """Put stored state into the present optimizer of a stage; communicates nothing.

    Args:
        optimizer: the stage's; its groups hold the stage's present parameters.
        states: complete state of each parameter that has some; for flat optimizers as :class:`Pieces`, with
            the fp32 weights as ``"master"``.
        settings: learning rate and the like, of every parameter group.
        template: of flat optimizers, what groups without such parameters take (the count of steps); else empty.
    """
    if isinstance(optimizer, FlatOptimizer):
        _restore_flat(optimizer, states, settings, template)
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
    optimizer: FlatOptimizer, states: Mapping[nn.Parameter, State], settings: Sequence[Mapping[str, Any]],
    template: State,
) -> None:
    basic, index = optimizer.groups.optimizer, optimizer.groups.index
    for group, setting in zip(basic.param_groups, settings, strict=True):
        group.update(setting)
    template = next((state for state in states.values() if len(state) > 1), template)
    by_group = {index[parameter]: state for parameter, state in states.items() if len(state) > 1}
    basic.state.clear()
    if template:
        optimizer.make_states([by_group.get(i, template) for i in range(len(basic.param_groups))])
    for parameter, state in states.items():
        write_state(parameter, state)
