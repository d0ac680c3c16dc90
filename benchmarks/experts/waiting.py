"""Experts that wait instead of computing: counts, rows, copies and sums of gradients travel as in a training.

What a lane contributes to its expert's gradient is the number of its rows, so the gradient that comes home tells
whether every lane has come once (:func:`check_gradients`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import now_s
from scenarios.moe.placing import Lanes
from scenarios.moe.sharded import Experts, LaneProducts, Planner, Reroute, SharedExperts, Sharing, share_experts
from scenarios.moe.telling import SharedBatch, tell, width

BACKWARD = 2.0
"""Seconds of a backward over those of its forward (Pro-Prophet, equation 3)."""


@dataclass(frozen=True)
class Sizes:
    """What waits, and for how long.

    Args:
        num_experts: E of a block.
        hidden: floats of a row.
        width: of an expert, which has two matrices.
        blocks: of the stage, each with experts.
        micro_batches: of a batch.
        rows: of a rank in a micro-batch.
        row_s: a row's forward in an expert, seconds.
        rest_s: forward of what is not experts in a block, of one micro-batch, seconds.
    """

    num_experts: int = 32
    hidden: int = 128
    width: int = 256
    blocks: int = 3
    micro_batches: int = 2
    rows: int = 512
    row_s: float = 80e-6
    rest_s: float = 20e-3

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of an expert's matrices, ``(out, in)``."""
        return (self.width, self.hidden), (self.hidden, self.width)

    def busy_s(self, lanes: Sequence[Sequence[Lanes]], routed: Sequence[Sequence[Tensor]]) -> float:
        """Seconds of a batch if nothing but waiting took time: the busiest rank's of each block and micro-batch.

        Args:
            lanes: who computes, by block and micro-batch.
            routed: rows, ``[R, E]``, by block and micro-batch.
        """
        found = 0.0
        for placed, tables in zip(lanes, routed, strict=True):
            for lane, table in zip(placed, tables, strict=True):
                owner = torch.tensor(lane.owner).flatten()
                rows = torch.zeros(lane.num_ranks, dtype=table.dtype).index_add_(0, owner, table.flatten())
                found += (1 + BACKWARD) * (int(rows.max()) * self.row_s + self.rest_s)
        return found


def wait_until(moment_s: float) -> None:
    """Sleep until a moment of ``time.perf_counter``; not at all if it is over."""
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


class _Rest(torch.autograd.Function):
    leaves_gradients_alone = True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        wait_until(time.perf_counter() + seconds)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wait_until(time.perf_counter() + BACKWARD * ctx.seconds)
        return gradient, None


class _Lanes(torch.autograd.Function):
    """Lanes that wait. Adding their gradients up is part of the wait, not of the time after it."""

    leaves_gradients_alone = True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, up: Tensor, down: Tensor, lanes: LaneProducts, block: WaitingBlock) -> Tensor:
        began = time.perf_counter()
        seconds = block.sizes.row_s * len(rows)
        ctx.lanes, ctx.block, ctx.seconds = lanes, block, BACKWARD * seconds
        wait_until(began + seconds)
        lanes.sharing.weights(lanes.state, "up").times.forward_s += time.perf_counter() - began
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        began = time.perf_counter()
        lanes: LaneProducts = ctx.lanes
        kinds = {name: lanes.sharing.weights(lanes.state, name) for name in lanes.own}
        for name, weights in kinds.items():
            assert weights.sums is not None
            for source, expert, start, stop in lanes.spans:
                matrix = torch.full_like(lanes.own[name][0], stop - start, requires_grad=False)
                weights.sums.add((source, expert), matrix)
        wait_until(began + ctx.seconds)
        if ctx.block.sizes.blocks == 1:  # or sums of other blocks may be on their way meanwhile
            ctx.block.held = max(ctx.block.held, lanes.sharing.sum_bytes)
        for weights in kinds.values():
            assert weights.sums is not None
            weights.sums.num_added += 1
            weights.added()
        kinds["up"].times.backward_s += time.perf_counter() - began
        return gradient, None, None, None, None


class WaitingBlock(SharedExperts):
    """A block whose router is told and whose experts wait.

    Args:
        sizes: of it.
        num_ranks: R that share its experts.

    Attributes:
        counts: rows of the next micro-batch for each expert, ``[E]``.
        held: most bytes of sums so far, where it is the only block.
        last: what the lanes of the last micro-batch were multiplied with; its state has the jobs of the batch.
    """

    counts: Tensor

    def __init__(self, sizes: Sizes, num_ranks: int) -> None:
        super().__init__()
        self.sizes = sizes
        share = sizes.num_experts // num_ranks
        self.up, self.down = (nn.Parameter(torch.zeros(share, *shape)) for shape in sizes.shapes)
        self.held = 0
        self.last: LaneProducts | None = None

    def forward(self, rows: Tensor) -> Tensor:
        """Wait; rows ``[N, hidden]``, sorted by expert, come back as they are."""
        return self.run_shared(_Rest.apply(rows, self.sizes.rest_s), self.counts)

    def expert_weights(self) -> dict[str, nn.Parameter]:
        """This rank's own experts."""
        return {"up": self.up, "down": self.down}

    def run_lanes(self, rows: Tensor, lanes: LaneProducts) -> Tensor:
        """Wait for as long as the lanes' rows take."""
        self.last = lanes
        return _Lanes.apply(rows, self.up, self.down, lanes, self)


@dataclass(frozen=True)
class Batch:
    """What a batch took, the same on every rank.

    Args:
        seconds: from its begin to its end, when all ranks have told each other of it.
        trained_s: to the gradients' being at home, of the slowest rank.
        shared: loads, placements, seconds and plans of its blocks.
        trans_s: of the slowest rank, by block; 0 where nothing travelled.
        agg_s: the same, from the time at which all ranks had come to it.
    """

    seconds: float
    trained_s: float
    shared: SharedBatch
    trans_s: tuple[float, ...]
    agg_s: tuple[float, ...]


def check_gradients(gradients: Iterable[Tensor], rows: Tensor, rank: int) -> None:
    """Refuse gradients that are not what every lane has given once.

    Args:
        gradients: of a rank's own experts, ``[E/R, …]`` each.
        rows: of each rank for each expert in the batch, ``[R, E]``.
        rank: whose.

    Raises:
        RuntimeError: if any number differs.
    """
    num_ranks, num_experts = rows.shape
    share = num_experts // num_ranks
    own = rows.sum(dim=0)[rank * share : (rank + 1) * share] / num_ranks
    for gradient in gradients:
        if not (gradient == own[:, None, None]).all():
            raise RuntimeError(
                f"experts of rank {rank} have gradients {gradient[:, 0, 0].tolist()}, and lanes gave {own.tolist()}"
            )


class Waiting:
    """A stage of such blocks, on all ranks; everything is collective.

    Args:
        sizes: of the blocks.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.num_ranks, self.rank = sizes, dist.get_world_size(), dist.get_rank()
        self.blocks = [WaitingBlock(sizes, self.num_ranks) for _ in range(sizes.blocks)]
        ranks = list(range(self.num_ranks))
        groups = [dist.new_group(ranks) for _ in range(3)]
        self.group, self._reroute = groups[0], None
        self._sharing = Sharing(
            groups[0], groups[1], groups[2], num_experts=sizes.num_experts, device=torch.device("cpu"),
            reroute=self._within_copies,
        )
        share_experts(self._sharing)

    def close(self) -> None:
        """End its threads."""
        share_experts(None)
        self._sharing.close()

    def _within_copies(self, lanes: Lanes, rows: list[list[int]]) -> Lanes:
        return lanes if self._reroute is None else self._reroute(lanes, rows)

    def batch(
        self, routed: Sequence[Sequence[Tensor]], lanes: Mapping[int, Lanes], planner: Planner | None = None,
        reroute: Reroute | None = None,
    ) -> Batch:
        """Run one batch.

        Args:
            routed: rows of each rank for each expert, ``[R, E]``, by block and micro-batch.
            lanes: placements by block.
            planner: places all blocks for the next batch.
            reroute: as :class:`~scenarios.moe.sharded.Sharing`'s.

        Raises:
            RuntimeError: if a planner has failed, or a gradient is not what the lanes have given.
        """
        sizes, self._reroute = self.sizes, reroute
        indices = range(sizes.blocks) if planner is not None else ()
        began = now_s()
        layers = {index: Experts(block, block.expert_weights()) for index, block in enumerate(self.blocks)}
        self._sharing.begin(layers, lanes, sizes.micro_batches, indices, planner)
        for micro_batch in range(sizes.micro_batches):
            rows = torch.zeros(int(routed[0][micro_batch][self.rank].sum()), sizes.hidden, requires_grad=True)
            x = rows
            for block, tables in zip(self.blocks, routed, strict=True):
                block.counts = tables[micro_batch][self.rank]
                x = block(x)
            x.backward(torch.zeros_like(x))
        states = [block.last.state for block in self.blocks if block.last is not None]
        gradients = [block.finish_gradients() for block in self.blocks]
        trained_s = time.perf_counter() - began
        told = [tell(layer, self.rank) for _, layer in sorted(self._sharing.take_done().items())]
        table = torch.tensor([each.numbers for each in told], dtype=torch.float64)
        dist.all_reduce(table, group=self.group)
        seconds = now_s() - began
        for each in told:
            if each.error is not None:
                raise RuntimeError(each.error)
        for tables, found in zip(routed, gradients, strict=True):
            check_gradients(found.values(), torch.stack(list(tables)).sum(0), self.rank)
        trans_s = [0.0 if state is None or state.trans is None else state.trans.seconds for state in states]
        agg_s = []
        for state in states:
            summed = None if state is None or state.agg is None else state.agg.wait(0.0)
            agg_s.append(0.0 if summed is None else summed.seconds)
        for block in self.blocks:
            block.last = None
        slowest = torch.tensor([*trans_s, *agg_s, trained_s, seconds], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
        assert table.shape[1] == width(self.num_ranks, sizes.num_experts)
        shared = SharedBatch.of(table, self.num_ranks, sizes.num_experts)
        all_s = slowest.tolist()
        parts = (tuple(all_s[: sizes.blocks]), tuple(all_s[sizes.blocks : -2]))
        return Batch(all_s[-1], all_s[-2], shared, *parts)
