"""Expert parallelism over the data-parallel ranks: each computes its own experts, for the tokens of all.

The experts' weights stay replicated. A rank's gradient of its own experts holds what the tokens of all
replicas contribute, that of the other experts is zero; DeepSpeed's mean over the replicas is therefore the same
as in plain data parallelism, and so is everything that builds on it (ZeRO-1, bf16, clipping, moving layers,
checkpoints, another number of replicas).

Every replica runs the same collectives in the same order whatever its counts are: none may wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_group: dist.ProcessGroup | None = None


def set_expert_group(group: dist.ProcessGroup | None) -> None:
    """Choose the ranks that share the experts, for all layers of this process.

    Layers do not hold the group, since they travel between processes. All members must run the same layers on
    micro-batches of their own, also in evaluation.

    Args:
        group: the data-parallel group; ``None``, or a group of one, for no expert parallelism.
    """
    global _group
    _group = group if group is not None and dist.get_world_size(group) > 1 else None


def expert_group() -> dist.ProcessGroup | None:
    """Return the ranks that share the experts, if any."""
    return _group


def expert_ranges(num_experts: int, num_ranks: int) -> tuple[range, ...]:
    """Place experts on ranks: contiguous, as equal in number as can be.

    Args:
        num_experts: ``E``; with fewer than ranks, some rank has none.
        num_ranks: ranks that share them.

    Returns:
        The experts of each rank.
    """
    bounds = [rank * num_experts // num_ranks for rank in range(num_ranks + 1)]
    return tuple(range(first, end) for first, end in zip(bounds, bounds[1:], strict=False))


@dataclass(frozen=True)
class Exchange:
    """How the rows of one layer and micro-batch travel to the ranks of their experts, and back.

    Attributes:
        group: the ranks that share the experts.
        experts: this rank's.
        counts: rows of each of them from all ranks together, ``[len(experts)]``.
        send: rows for each rank.
        receive: rows from each rank.
        order: where each row, sorted by expert, is in what comes in, which is sorted by rank and then expert.
        inverse: the inverse permutation.
    """

    group: dist.ProcessGroup
    experts: range
    counts: Tensor
    send: list[int]
    receive: list[int]
    order: Tensor
    inverse: Tensor

    def there(self, rows: Tensor) -> Tensor:
        """Bring this rank's rows, sorted by expert, to the experts; return what came in, sorted by expert."""
        arrived = rows.new_empty(sum(self.receive), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), self.receive, self.send, group=self.group)
        return arrived.index_select(0, self.order)

    def back(self, rows: Tensor) -> Tensor:
        """Bring rows from the experts to where they came from, in their order there."""
        arrived = rows.new_empty(sum(self.send), rows.shape[1])
        dist.all_to_all_single(
            arrived, rows.index_select(0, self.inverse), self.send, self.receive, group=self.group
        )
        return arrived


def plan_exchange(counts: Tensor, group: dist.ProcessGroup) -> Exchange:
    """Tell every rank how many rows it will get; collective over the group.

    Args:
        counts: rows that this rank has for each expert, ``[E]``.
        group: the ranks that share the experts.

    Returns:
        The exchange of the rows themselves.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    ranges = expert_ranges(len(counts), num_ranks)
    num_local = len(ranges[rank])
    incoming = counts.new_empty(num_ranks * num_local)
    dist.all_to_all_single(
        incoming, counts, [num_local] * num_ranks, [len(experts) for experts in ranges], group=group
    )
    by_source = incoming.view(num_ranks, num_local)
    host = torch.cat((counts, by_source.sum(1))).tolist()  # the one time that the host waits
    receive = host[len(counts) :]
    expert = torch.arange(num_local, device=counts.device).repeat(num_ranks)
    order = expert.repeat_interleave(incoming, output_size=sum(receive)).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return Exchange(
        group=group,
        experts=ranges[rank],
        counts=by_source.sum(0),
        send=[sum(host[experts.start : experts.stop]) for experts in ranges],
        receive=receive,
        order=order,
        inverse=inverse,
    )


class _There(torch.autograd.Function):
    leaves_gradients_alone = True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.there(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.back(gradient), None


class _Back(torch.autograd.Function):
    leaves_gradients_alone = True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.back(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.there(gradient), None


def to_experts(rows: Tensor, exchange: Exchange) -> Tensor:
    """Bring rows ``[N, hidden]`` to their experts' ranks; the gradient takes the way back. Collective."""
    return _There.apply(rows, exchange)


def from_experts(rows: Tensor, exchange: Exchange) -> Tensor:
    """Bring the experts' answers to the tokens' ranks; the gradient takes the way back. Collective."""
    return _Back.apply(rows, exchange)
