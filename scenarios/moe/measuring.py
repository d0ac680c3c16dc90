"""What the machine takes for rows, lanes, bytes and messages: measured before the first batch, renewed by every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from scenarios.moe.placing import Constants, Lanes, Sample, fitted
from scenarios.moe.sharded import PIECE_BYTES

REPEATS = 3
"""The fastest of so many counts: whatever holds a rank up makes it slower."""

FEW_ROWS, MANY_ROWS = 16, 128
FEW_BYTES, MANY_BYTES = 1 << 10, 1 << 18
"""For one rank; both small enough that a start takes milliseconds."""

WEIGHT = 0.1
"""Of a batch beside what was known before."""


def measured_constants(
    group: dist.ProcessGroup, shapes: Sequence[tuple[int, int]], *, dtype: torch.dtype, sum_dtype: torch.dtype,
    device: torch.device, num_micro_batches: int,
) -> Constants:
    """Measure what the performance model must know; collective over all ranks, some milliseconds.

    Args:
        group: the ranks that share experts.
        shapes: of an expert's matrices, ``(out, in)``; the first one's ``in`` is a row's size.
        dtype: of weights and rows.
        sum_dtype: of sums of gradients.
        device: of the layers.
        num_micro_batches: of a batch.

    Returns:
        The same on every rank: the slowest rank's seconds.
    """
    few, many = (_lane_s(shapes, rows, dtype, device) for rows in (FEW_ROWS, MANY_ROWS))
    small_s, large_s = (_exchange_s(group, num_bytes, device) for num_bytes in (FEW_BYTES, MANY_BYTES))
    seconds = torch.tensor([*few, *many, small_s, large_s], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    few_forward_s, few_backward_s, many_forward_s, many_backward_s, small_s, large_s = seconds.tolist()
    forward_row_s, forward_lane_s = _line(FEW_ROWS, few_forward_s, MANY_ROWS, many_forward_s)
    backward_row_s, backward_lane_s = _line(FEW_ROWS, few_backward_s, MANY_ROWS, many_backward_s)
    others = dist.get_world_size(group) - 1
    byte_s, message_s = _line(others * FEW_BYTES, small_s, others * MANY_BYTES, large_s)
    numbers = sum(outs * ins for outs, ins in shapes)
    return Constants(
        forward_row_s=forward_row_s, backward_row_s=backward_row_s, lane_s=forward_lane_s + backward_lane_s,
        row_bytes=shapes[0][1] * dtype.itemsize, byte_s=byte_s, message_s=message_s,
        expert_bytes=numbers * dtype.itemsize, gradient_bytes=numbers * sum_dtype.itemsize, piece_bytes=PIECE_BYTES,
        num_micro_batches=num_micro_batches,
    )  # fmt: skip


def renewed(
    constants: Constants, samples: Sequence[Sample], rest: tuple[float, float] | None = None
) -> Constants:
    """Take in what a batch took; the same on every rank.

    Args:
        constants: as known so far.
        samples: of its layers.
        rest: seconds of a block's forwards and backwards without its experts, if they are known.
    """
    found = fitted(constants, samples, weight=WEIGHT) if samples else constants
    return found if rest is None else replace(found, rest_forward_s=rest[0], rest_backward_s=rest[1])


def samples_of(
    layers: Sequence[int], rows: Sequence[Sequence[Sequence[float]]], lanes: Mapping[int, Lanes],
    times: Sequence[Sequence[Sequence[float]]],
) -> list[Sample]:
    """What the layers of a batch took.

    Args:
        layers: their indices.
        rows: for each of them, of each rank for each expert.
        lanes: who has computed them.
        times: for each of them seconds of forwards, backwards, exchanges, Trans and Agg, by rank; none where zero.
    """
    found = []
    for layer, table, (forward_s, backward_s, exchange_s, trans_s, agg_s) in zip(layers, rows, times, strict=True):
        if any(forward_s):
            found.append(Sample(
                lanes=lanes[layer], loads=tuple(map(tuple, table)), forward_s=tuple(forward_s),
                backward_s=tuple(backward_s), all_to_all_s=max(exchange_s) or None,
                trans_s=max(trans_s) or None, agg_s=max(agg_s) or None,
            ))  # fmt: skip
    return found


def _line(few: int, few_s: float, many: int, many_s: float) -> tuple[float, float]:
    """Seconds of one more, and of none, through two points; none below 0."""
    each_s = max(0.0, many_s - few_s) / (many - few)
    return each_s, max(0.0, few_s - few * each_s)


def _fastest(run: Callable[[], object]) -> float:
    found = []
    for _ in range(1 + REPEATS):  # the first one is slower
        get_accelerator().synchronize()
        began = perf_counter()
        run()
        get_accelerator().synchronize()
        found.append(perf_counter() - began)
    return min(found[1:])


@torch.no_grad()
def _lane_s(
    shapes: Sequence[tuple[int, int]], num_rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Seconds of one lane's forward and backward; without random numbers, which belong to the training."""
    weights = [torch.full(shape, 0.01, dtype=dtype, device=device) for shape in shapes]
    rows = [torch.full((num_rows, ins), 0.01, dtype=dtype, device=device) for _, ins in shapes]
    outs = [torch.full((num_rows, out), 0.01, dtype=dtype, device=device) for out, _ in shapes]

    def forward() -> None:
        for row, weight in zip(rows, weights, strict=True):
            torch.nn.functional.gelu(torch.mm(row, weight.t()), approximate="tanh")

    def backward() -> None:
        for row, out, weight in zip(rows, outs, weights, strict=True):
            torch.mm(out, weight)
            out.t().mm(row)

    return _fastest(forward), _fastest(backward)


def _exchange_s(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> float:
    """Seconds of an exchange of so many bytes with each rank."""
    sent = torch.zeros(dist.get_world_size(group), num_bytes, dtype=torch.uint8, device=device)
    taken = torch.empty_like(sent)
    return _fastest(lambda: dist.all_to_all_single(taken, sent, group=group))
