"""The experts' arithmetic: rows sorted by expert through one stacked MLP each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scenarios.kernels import choose, sum_rows


class _TakeRows(torch.autograd.Function):
    leaves_gradients_alone = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return sum_rows(gradient, index, ctx.num_rows), None


class _AddRows(torch.autograd.Function):
    leaves_gradients_alone = True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index)
        return sum_rows(rows, index, num_rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradient.index_select(0, index), None, None


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows of ``[T, hidden]``, some perhaps several times; the same bits in every run, also backward."""
    return _TakeRows.apply(x, index)


def add_rows(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Add rows ``[N, hidden]`` up into ``[num_rows, hidden]``, where ``index`` says; the inverse of a gather."""
    return _AddRows.apply(rows, index, num_rows)


def run_experts(
    rows: Tensor, counts: Tensor, up: Tensor, down: Tensor, *, experts: range, kernel: str | None = None
) -> Tensor:
    """Compute a share of the experts.

    Args:
        rows: tokens sorted by expert, ``[N, hidden]``.
        counts: rows of each of ``experts``, which add up to ``N``.
        up: weights of all experts, ``[E, width, hidden]``.
        down: the same, ``[E, hidden, width]``.
        experts: those that are computed.
        kernel: ``"grouped_mm"``, one launch for all experts, or ``"loop"``, one product an expert; ``None`` for the
            best of :mod:`scenarios.kernels`.

    Returns:
        ``down[e] @ gelu(up[e] @ row)`` for each row, ``[N, hidden]``.

    Both weights always get a gradient, zero for the experts that are not computed: replicas must not differ in
    what there is to reduce.
    """
    if not len(rows):
        # No product, but the graph is whole, so that gradients (and collectives in it) go on.
        expert = min(experts.start, len(up) - 1)
        return _mlp(rows, up.unbind(0)[expert], down.unbind(0)[expert])
    if (kernel or choose("experts", rows.device, rows.dtype, *up.shape[1:]).name) == "grouped_mm":
        return _grouped(rows, counts, up[experts.start : experts.stop], down[experts.start : experts.stop])
    return _loop(rows, counts, up, down, experts)


def _loop(rows: Tensor, counts: Tensor, up: Tensor, down: Tensor, experts: range) -> Tensor:
    # Indexing the stack would make one full-size gradient an expert; unbind makes one for all.
    ups, downs = up.unbind(0), down.unbind(0)
    chunks = rows.split(counts.tolist())
    done = [
        _mlp(chunk, ups[e], downs[e]) for chunk, e in zip(chunks, experts, strict=True) if len(chunk)
    ]  # fmt: skip
    return torch.cat(done)


def _grouped(rows: Tensor, counts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    ends = counts.cumsum(0).to(torch.int32)
    middle = F.gelu(F.grouped_mm(rows, up.transpose(1, 2), offs=ends), approximate="tanh")
    return F.grouped_mm(middle, down.transpose(1, 2), offs=ends)


def _mlp(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(rows, up), approximate="tanh"), down)
