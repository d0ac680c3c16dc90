"""Layers with parameters that single replicas own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

from dynpipe_ds import Replica, building_replica, own_by_replica
from tests.distributed.models import HIDDEN

ROWS = 12
"""Of a whole: for 1, 2, 3, 4 and 6 replicas."""


def whole(seed: int) -> Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.3


class Own(nn.Module):
    """Every replica computes with its rows alone, and leaves their gradient to autograd."""

    def __init__(self) -> None:
        super().__init__()
        replica = building_replica()
        rows = replica.rows(ROWS)
        self.norm = nn.LayerNorm(HIDDEN)
        self.rows = nn.Parameter(whole(5)[rows.start : rows.stop].clone())
        own_by_replica(self.rows, replica)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(x) @ self.rows.t()) @ self.rows


class Whole(nn.Module):
    """What :class:`Shared` computes, by a parameter that all replicas have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.rows = nn.Parameter(whole(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.rows)

    def compute(self, x: Tensor, rows: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(x) @ rows.t()) @ rows


class Shared(Whole):
    """All replicas compute with the rows of all, gathered once a batch; each owns some, and gets their gradients."""

    def __init__(self) -> None:
        super().__init__()
        replica = building_replica()
        rows = replica.rows(ROWS)
        self.rows = nn.Parameter(self.rows.detach()[rows.start : rows.stop].clone())
        own_by_replica(self.rows, replica)
        self.gathered: Tensor | None = None
        self.gradient: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.compute(x, self.gather())
        if self.gathered is None:
            self.gathered = self.gather().requires_grad_()
            self.gathered.register_post_accumulate_grad_hook(self.add)
        return self.compute(x, self.gathered)

    def gather(self) -> Tensor:
        group = groups._get_data_parallel_group()
        found = [torch.empty_like(self.rows.detach()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, self.rows.detach().contiguous(), group=group)
        return torch.cat(found)

    def add(self, gathered: Tensor) -> None:
        """As DeepSpeed does, in fp32 where the model is bf16."""
        gradient, gathered.grad = gathered.grad.float(), None
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def finish_gradients(self) -> dict[nn.Parameter, Tensor]:
        group = groups._get_data_parallel_group()
        replica = Replica(dist.get_rank(group), dist.get_world_size(group))
        mine = torch.zeros(ROWS, HIDDEN) if self.gradient is None else self.gradient
        everyone = [torch.empty_like(mine) for _ in range(replica.count)]
        dist.all_gather(everyone, mine.contiguous(), group=group)
        total = everyone[0]
        for other in everyone[1:]:
            total += other
        self.drop_gradients()
        rows = replica.rows(ROWS)
        return {self.rows: (total / replica.count)[rows.start : rows.stop]}

    def drop_gradients(self) -> None:
        self.gathered = self.gradient = None


class Known(Own):
    """The gradient is known: replica d's is d + 1 times a whole of ones, halves and quarters."""

    def finish_gradients(self) -> dict[nn.Parameter, Tensor]:
        return {self.rows: known(self.rows)}


def known(rows: Tensor) -> Tensor:
    group = groups._get_data_parallel_group()
    pattern = torch.tensor([1.0, 0.5, 0.25, -1.0]).repeat(rows.numel() // 4).view(rows.shape)
    return (dist.get_rank(group) + 1) * pattern


class Unowned(Own):
    """As :class:`Own`, by a parameter that is not marked."""

    def __init__(self) -> None:
        super().__init__()
        del self.rows.owned_by_replica
