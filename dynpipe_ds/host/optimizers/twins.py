"""Parameter groups for what single replicas own, beside the user's.

ZeRO-1 and bf16 share a whole parameter group out over the replicas, or not at all. So what a replica owns gets groups
of its own: every group of the user's with such a parameter gets a twin, the same on all stages, which follows it in
every setting. Learning-rate schedulers see the user's groups alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from dynpipe_ds.owning import is_owned
from dynpipe_ds.ranks.agreement import gather

Twins = dict[int, int]
"""Index of each twin, and of the group that it follows."""

_REPLICAS = "real_dp_process_group"  # of every parameter group, the replicas that share it out


def add_twins(optimizer: torch.optim.Optimizer, known: Collection[int] = ()) -> Twins:
    """Move what single replicas own into groups of its own; collective over all ranks.

    Args:
        optimizer: with the same groups on every rank; those that are new come after them.
        known: indices of groups that have twins elsewhere, of which this world knows nothing.
    """
    groups = optimizer.param_groups
    mine = set(known) | {i for i, group in enumerate(groups) if any(map(is_owned, group["params"]))}
    with_owned = sorted(set().union(*gather(mine)))
    twins = {len(groups) + n: i for n, i in enumerate(with_owned)}
    for i in twins.values():
        members = groups[i]["params"]
        groups.append({**groups[i], "params": [p for p in members if is_owned(p)]})
        groups[i]["params"] = [p for p in members if not is_owned(p)]
    return twins


def follow(optimizer: torch.optim.Optimizer, twins: Mapping[int, int]) -> None:
    """Give every twin the present settings of the group that it follows.

    Args:
        optimizer: that has them.
        twins: what :func:`add_twins` gave.
    """
    groups = optimizer.param_groups
    for twin, i in twins.items():
        groups[twin].update({key: value for key, value in groups[i].items() if key != "params"})


@contextmanager
def kept_apart(twins: Collection[int], alone: Any) -> Iterator[None]:
    """Let DeepSpeed's wrappers that are built within share out no twin.

    Args:
        twins: indices of the groups; without any nothing changes.
        alone: process group of this rank alone.
    """
    if not twins:
        yield
        return

    def keep(wrapper: Any, groups: list[Any]) -> None:
        vars(wrapper)[_REPLICAS] = [alone if i in twins else group for i, group in enumerate(groups)]

    apart = property(lambda wrapper: vars(wrapper)[_REPLICAS], keep)
    try:
        for kind in (DeepSpeedZeroOptimizer, BF16_Optimizer):
            setattr(kind, _REPLICAS, apart)
        yield
    finally:
        for kind in (DeepSpeedZeroOptimizer, BF16_Optimizer):
            delattr(kind, _REPLICAS)


def leave_out_of_sums(wrapper: Any, twins: Collection[int]) -> None:
    """Let a wrapper that was built :func:`kept_apart` have no twin's gradients added up over replicas.

    Args:
        wrapper: DeepSpeed's.
        twins: indices of the groups.
    """
    if isinstance(wrapper, BF16_Optimizer):
        flats = wrapper.fp32_groups_gradients_flat
        wrapper.non_expert_gradients = [flat for i, flat in enumerate(flats) if i not in twins]
    for i in twins:
        wrapper.partition_count[i] = 1


class UsersGroups:
    """An optimizer without its twins, as its user made it, for a learning-rate scheduler.

    Args:
        optimizer: with the twins behind the user's groups.
        num_groups: of the user's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_groups: int) -> None:
        self._optimizer = optimizer
        self._num_groups = num_groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's."""
        return self._optimizer.param_groups[: self._num_groups]

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._optimizer, name)


@contextmanager
def twins_hidden(optimizer: torch.optim.Optimizer, twins: Collection[int]) -> Iterator[None]:
    """Let a scheduler that is made within see the user's groups alone.

    Args:
        optimizer: that has them.
        twins: indices of those to be hidden.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = groups[: len(groups) - len(twins)]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def show_users_groups(scheduler: Any, optimizer: torch.optim.Optimizer, twins: Collection[int]) -> None:
    """Let a scheduler, and those that it is made of, go on seeing the user's groups alone.

    Args:
        scheduler: any; ``None`` if there is none.
        optimizer: that has the groups.
        twins: indices of those to be hidden.
    """
    if not twins or scheduler is None:
        return
    shown = UsersGroups(optimizer, len(optimizer.param_groups) - len(twins))
    attributes = getattr(scheduler, "__dict__", {})
    held = attributes.get("optimizer")
    if held is optimizer or getattr(held, "optimizer", None) is optimizer:
        scheduler.optimizer = shown
    inner = [attributes.get("scheduler"), *(attributes.get("_schedulers") or ())]
    for part in inner:
        show_users_groups(part, optimizer, twins)
