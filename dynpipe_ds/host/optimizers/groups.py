"""The optimizer's parameter groups, the same list on every stage.

A stage may hold no parameter of some group (no weight-decay group on a stage of norms, say). DeepSpeed
drops such groups, so that group *indices* differ between stages and LR schedulers see different lists.
Here every stage keeps every group: one without parameters holds a one-element placeholder that never
gets a gradient. A moved parameter then finds its group by index, with the learning rate the scheduler
left in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dynpipe_ds.host.optimizers.twins import Twins, follow

State = dict[str, Any]
Snapshot = tuple[dict[nn.Parameter, int], list[list[nn.Parameter]]]


class Entry(NamedTuple):
    """What an optimizer needs to know of a parameter that moves.

    Attributes:
        parameter: itself.
        group: index of its parameter group; ``None`` if the optimizer does not have it.
        state: named tensors and scalars, or what ``StageOptimizer.describe`` says of them; empty if there is none.
    """

    parameter: nn.Parameter
    group: int | None
    state: State


def _signature(group: Mapping[str, Any]) -> str:
    return repr(sorted((key, value) for key, value in group.items() if key != "params"))


class ParameterGroups:
    """Which local parameter belongs to which group of the basic optimizer.

    Args:
        optimizer: the optimizer whose ``param_groups`` are canonical from now on.
        device: where placeholders live.
        dtype: dtype of the model's parameters.
        twins: indices of groups that hold what single replicas own, and of those that they follow.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, device: torch.device, dtype: torch.dtype,
        twins: Twins | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.twins: Twins = twins or {}
        self.placeholders = [
            nn.Parameter(torch.zeros(1, device=device, dtype=dtype)) for _ in optimizer.param_groups
        ]
        for placeholder in self.placeholders:
            placeholder.ds_pipe_replicated = True  # type: ignore[attr-defined]  # not part of any norm
        self.index: dict[nn.Parameter, int] = {
            parameter: i for i, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }

    def install(self, *, trainable_only: bool) -> None:
        """Write the local parameters into the optimizer's groups; for one that flattens these, without frozen ones."""
        members = self._by_group(self.index, trainable_only=trainable_only)
        for group, parameters, placeholder in zip(
            self.optimizer.param_groups, members, self.placeholders, strict=True
        ):
            group["params"] = parameters or [placeholder]

    def members_after(
        self, departed: Collection[nn.Parameter], arrived: Mapping[nn.Parameter, int], order: Iterable[nn.Parameter]
    ) -> list[list[nn.Parameter]]:
        """What a flat optimizer will hold of each group, in the order in which it will lie there.

        Args:
            departed: parameters that leave.
            arrived: group index of each parameter that comes.
            order: of all parameters, then.
        """
        index = {p: i for p, i in self.index.items() if p not in departed}
        return self._by_group(_sorted({**index, **arrived}, order), trainable_only=True)

    def _by_group(self, index: Mapping[nn.Parameter, int], *, trainable_only: bool) -> list[list[nn.Parameter]]:
        members: list[list[nn.Parameter]] = [[] for _ in self.placeholders]
        for parameter, i in index.items():
            if not trainable_only or (parameter.requires_grad and parameter.numel()):
                members[i].append(parameter)
        return members

    def follow(self) -> None:
        """Give what single replicas own the settings that the user, or a scheduler, has given to its group."""
        follow(self.optimizer, self.twins)

    def replace(self, departed: Iterable[nn.Parameter], arrived: Mapping[nn.Parameter, int]) -> None:
        """Take note of parameters that left this stage, and of the groups of those that came."""
        for parameter in departed:
            self.index.pop(parameter, None)
        self.index.update(arrived)

    def snapshot(self) -> Snapshot:
        """Which parameter is where, for :meth:`put_back`."""
        return dict(self.index), [group["params"] for group in self.optimizer.param_groups]

    def put_back(self, snapshot: Snapshot) -> None:
        """Undo what followed a :meth:`snapshot`."""
        self.index, members = snapshot
        for group, parameters in zip(self.optimizer.param_groups, members, strict=True):
            group["params"] = parameters

    def sort(self, order: Iterable[nn.Parameter]) -> None:
        """Bring the parameters into the order in which a fresh DeepSpeed optimizer would hold them.

        Checkpoints know a parameter by its position only.
        """
        self.index = _sorted(self.index, order)


def _sorted(index: Mapping[nn.Parameter, int], order: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    position = {parameter: i for i, parameter in enumerate(order)}
    last = len(position)
    return dict(sorted(index.items(), key=lambda item: position.get(item[0], last)))


def agree_on_groups(optimizer: torch.optim.Optimizer) -> None:
    """Give every rank the same list of parameter groups, by index, adding empty ones where needed.

    Collective over all ranks; ``param_groups`` of the optimizer are extended and reordered in place.

    Raises:
        ValueError: on every rank, if the groups can't be matched, or the optimizers are of different kinds.
    """
    mine = [_signature(group) for group in optimizer.param_groups]
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (mine, settings, type(optimizer).__qualname__))
    kinds = {kind: rank for rank, (_, _, kind) in reversed(list(enumerate(gathered)))}
    if len(kinds) > 1:
        found = ", ".join(f"{kind} on rank {rank}" for kind, rank in sorted(kinds.items()))
        raise ValueError(
            f"the ranks have different kinds of optimizer ({found}), so layers that move would be trained otherwise or "
            "not at all; return the same kind everywhere, also for a stage without trainable parameters, which gets "
            'one empty group, [{"params": []}]'
        )
    everyone = [signatures for signatures, _, _ in gathered]
    if all(signatures == mine for signatures in everyone):
        return
    for rank, signatures in enumerate(everyone):
        if len(set(signatures)) != len(signatures):
            raise ValueError(
                f"the optimizer's parameter groups differ between ranks and rank {rank} has two with the "
                f"same settings ({signatures}), so they can't be matched; give every rank the same groups "
                "in the same order (an empty 'params' list is fine)"
            )
    union: dict[str, dict[str, Any]] = {}
    for signatures, their_settings, _ in gathered:
        for signature, setting in zip(signatures, their_settings, strict=True):
            union.setdefault(signature, setting)
    local = dict(zip(mine, optimizer.param_groups, strict=True))
    optimizer.param_groups[:] = [
        local.get(signature, {"params": [], **setting}) for signature, setting in union.items()
    ]


def check_scheduler(scheduler: Any, num_groups: int) -> None:
    """Refuse an LR scheduler that was built over other groups than the optimizer now has.

    Raises:
        ValueError: if the scheduler manages another number of groups.
    """
    base_lrs = getattr(scheduler, "base_lrs", None)
    if base_lrs is not None and len(base_lrs) != num_groups:
        raise ValueError(
            f"the LR scheduler manages {len(base_lrs)} parameter group(s) but the stages together have "
            f"{num_groups}; give every rank's optimizer all groups (an empty 'params' list is fine) before "
            "building the scheduler, or pass the scheduler as a callable"
        )


def add_copies(
    copies: Sequence[tuple[nn.Parameter, nn.Parameter]], optimizer: Any, parameters: Sequence[Any]
) -> list[Any]:
    """Put the copies of tied weights next to their originals in what a client hands over, where they are missing.

    Args:
        copies: pairs of (original, copy).
        optimizer: a client's optimizer, whose groups are extended; anything else is left alone.
        parameters: parameters, or parameter groups, which are extended in place.

    Returns:
        The parameters, extended.
    """
    groups = list(optimizer.param_groups) if isinstance(optimizer, torch.optim.Optimizer) else []
    for group in [*groups, *(g for g in parameters if isinstance(g, dict))]:
        group["params"] = _with_copies(list(group["params"]), copies)
    return _with_copies(list(parameters), copies)


def _with_copies(members: list[Any], copies: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> list[Any]:
    present = {id(p) for p in members}
    return members + [copy for original, copy in copies if id(original) in present and id(copy) not in present]
