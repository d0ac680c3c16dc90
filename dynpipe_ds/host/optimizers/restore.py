"""Optimizer state that comes from a checkpoint instead of another stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.host.optimizers.flat import FlatOptimizer
from dynpipe_ds.host.optimizers.groups import State
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer


@dataclass(frozen=True)
class Pieces:
    """One flat tensor as the consecutive pieces it was stored in, so that a rank reads only its own share.

    Attributes:
        tensors: the pieces, of one dimension.
    """

    tensors: tuple[Tensor, ...]

    @property
    def num_elements(self) -> int:
        """Elements of all pieces."""
        return sum(piece.numel() for piece in self.tensors)

    def copy_to(self, target: Tensor, start: int) -> None:
        """Fill a flat tensor.

        Args:
            target: takes as many elements as it has.
            start: position of the first of them in the whole.
        """
        position = 0
        for piece in self.tensors:
            low, high = max(start, position), min(start + target.numel(), position + piece.numel())
            if low < high:
                target[low - start : high - start].copy_(piece[low - position : high - position])
            position += piece.numel()


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
    wrapper, basic, index = optimizer.engine.optimizer, optimizer.groups.optimizer, optimizer.groups.index
    for group, setting in zip(basic.param_groups, settings, strict=True):
        group.update(setting)
    template = next((state for state in states.values() if len(state) > 1), template)
    by_group = {index[parameter]: state for parameter, state in states.items() if len(state) > 1}
    basic.state.clear()
    if template:
        for i, group in enumerate(basic.param_groups):
            flat = group["params"][0]
            basic.state[flat] = _empty_state(flat, by_group.get(i, template))
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()
    for parameter, state in states.items():
        _write_pieces(parameter, state)


def _write_pieces(parameter: nn.Parameter, state: State) -> None:
    """Fill this rank's share of a parameter's master weights and moments."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return
    for key, target in {"master": mapping.hp_fragment, **(mapping.optim_fragment or {})}.items():
        if isinstance(state.get(key), Pieces):
            state[key].copy_to(target.detach().view(-1), mapping.lp_fragment_address.start)


def _empty_state(flat: Tensor, state: State) -> State:
    return {
        key: torch.zeros_like(flat, dtype=value.tensors[0].dtype) if isinstance(value, Pieces) else _own(value)
        for key, value in state.items()
        if key != "master"
    }
