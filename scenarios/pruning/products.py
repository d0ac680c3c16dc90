"""Products with a pruned weight, forward and backward, that do no work for what is pruned.

Activations come and go as ``[…, features]``. Sparse and block products work on them **feature-major**,
``[features, tokens]``, so that every non-zero of the weight multiplies one contiguous row of tokens. The
result is that memory seen as ``[…, features]``: as long as what follows is elementwise and then another such
product, nothing is ever transposed.

Autograd of ``csr @ x`` would make a dense weight gradient; these functions make it at the non-zeros alone. They
compute no gradient that ``ctx.needs_input_grad`` does not ask for and change none in place, and say so: a backward
can be split there.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scenarios.kernels import sum_rows

# Said once by every rank, of an interface that has been there since torch 1.10.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")


@dataclass
class Work:
    """Multiply-adds that a layer's products have really done since they were last taken.

    Attributes:
        multiply_adds: counted from the operands of every product, forward and backward.
    """

    multiply_adds: int = 0

    def take(self) -> int:
        """Return the count and start anew."""
        count, self.multiply_adds = self.multiply_adds, 0
        return count


class Pattern(NamedTuple):
    """Where the non-zeros of a weight ``[out, in]`` are, row by row and column by column, as int32.

    Attributes:
        rows: ``[out + 1]``, where each row's non-zeros start among all, in row-major order.
        columns: ``[non-zeros]``, the column of each.
        rows_t: same as ``rows`` for the transposed weight, ``[in + 1]``.
        columns_t: same as ``columns`` for the transposed weight.
        order_t: ``[non-zeros]``, for each non-zero of the transposed weight its place in row-major order.
    """

    rows: Tensor
    columns: Tensor
    rows_t: Tensor
    columns_t: Tensor
    order_t: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.rows.numel() - 1, self.rows_t.numel() - 1


def pattern_of(kept: Tensor) -> Pattern:
    """List the places that a mask ``[out, in]`` keeps."""
    numbers = kept.flatten().cumsum(0, dtype=torch.int32).view(kept.shape) - 1
    kept_t = kept.t().contiguous()
    return Pattern(
        _starts(kept), kept.nonzero()[:, 1].int(), _starts(kept_t), kept_t.nonzero()[:, 1].int(), numbers.t()[kept_t]
    )


def mask_of(pattern: Pattern) -> Tensor:
    """Return the mask ``[out, in]`` that :func:`pattern_of` was given."""
    out_features, in_features = pattern.shape
    kept = torch.zeros(out_features, in_features, dtype=torch.bool, device=pattern.rows.device)
    rows = torch.arange(out_features, device=kept.device).repeat_interleave(pattern.rows.diff())
    kept[rows, pattern.columns.long()] = True
    return kept


def _starts(kept: Tensor) -> Tensor:
    return F.pad(kept.sum(1).cumsum(0), (1, 0)).int()


def feature_major(x: Tensor) -> Tensor:
    """Lay ``[…, features]`` out as ``[features, tokens]``, contiguous; no copy where it is so already."""
    return x.reshape(-1, x.shape[-1]).t().contiguous()


def _as_tokens(y: Tensor, like: Tensor) -> Tensor:
    """See ``[features, tokens]`` as ``[…, features]``, with ``like``'s leading sizes and type."""
    return y.t().view(*like.shape[:-1], y.shape[0]).to(like.dtype)


def _csr(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    # Indices are right by construction; checking them would cost more than the product.
    return torch.sparse_csr_tensor(rows, columns, values, shape, check_invariants=False)


def _multiply(csr: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """``csr @ x + bias`` for feature-major ``x``; ``torch.sparse.mm`` would make a copy of zeros first."""
    return torch.addmm(x.new_zeros(1, 1) if bias is None else bias[:, None], csr, x)


class MaskedProduct(torch.autograd.Function):
    """``x @ weight.T + bias`` with a dense weight; pruned elements get no gradient."""

    leaves_gradients_alone = True
    backward_can_be_split = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, work: Work) -> Tensor:
        """Multiply.

        Args:
            ctx: autograd's.
            x: ``[…, in]``.
            weight: ``[out, in]``, zero where pruned.
            bias: ``[out]`` or ``None``.
            mask: ``[out, in]``, false where pruned; empty if nothing is.
            work: counts.
        """
        ctx.save_for_backward(x, weight, mask)
        ctx.work = work
        work.multiply_adds += weight.numel() * (x.numel() // x.shape[-1])
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Give the gradients of ``x``, ``weight`` and ``bias`` that are asked for."""
        x, weight, mask = ctx.saved_tensors
        grad = grads[0]
        tokens = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
        if ctx.needs_input_grad[1]:
            grad_weight = tokens.t() @ x.reshape(-1, x.shape[-1])
            if mask.numel():
                grad_weight.mul_(mask)  # a quarter of masked_fill_'s time on a CPU
        if ctx.needs_input_grad[2]:
            grad_bias = tokens.sum(0)
        ctx.work.multiply_adds += weight.numel() * tokens.shape[0] * sum(ctx.needs_input_grad[:2])
        return grad_x, grad_weight, grad_bias, None, None


class CSRProduct(torch.autograd.Function):
    """``x @ weight.T + bias`` with the weight's non-zeros alone, in compressed sparse rows.

    Computed in float32 at least: neither MKL nor ``sampled_addmm`` takes bfloat16.
    """

    leaves_gradients_alone = True
    backward_can_be_split = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, work: Work, *pattern: Tensor
    ) -> Tensor:
        """Multiply.

        Args:
            ctx: autograd's.
            x: ``[…, in]``.
            values: ``[non-zeros]`` of the weight, in row-major order.
            bias: ``[out]`` or ``None``.
            work: counts.
            *pattern: the fields of :class:`Pattern`.
        """
        places = Pattern(*pattern)
        dtype = torch.promote_types(values.dtype, torch.float32)
        xt = feature_major(x).to(dtype)
        csr = _csr(places.rows, places.columns, values.to(dtype), places.shape)
        yt = _multiply(csr, xt, None if bias is None else bias.to(dtype))
        ctx.save_for_backward(xt, values, *pattern)
        ctx.work = work
        work.multiply_adds += values.numel() * xt.shape[1]
        return _as_tokens(yt, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Give the gradients of ``x``, ``values`` and ``bias`` that are asked for."""
        xt, values, *pattern = ctx.saved_tensors
        places, grad = Pattern(*pattern), grads[0]
        gt = feature_major(grad).to(xt.dtype)
        weights = values.to(xt.dtype)
        grad_x = grad_values = grad_bias = None
        if ctx.needs_input_grad[0]:
            out_features, in_features = places.shape
            transposed = weights.index_select(0, places.order_t)
            csr_t = _csr(places.rows_t, places.columns_t, transposed, (in_features, out_features))
            grad_x = _as_tokens(_multiply(csr_t, gt, None), grad)
        if ctx.needs_input_grad[1]:
            csr = _csr(places.rows, places.columns, weights, places.shape)
            grad_values = torch.sparse.sampled_addmm(csr, gt, xt.t(), beta=0.0).values().to(values.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = gt.sum(1).to(values.dtype)
        ctx.work.multiply_adds += values.numel() * gt.shape[1] * sum(ctx.needs_input_grad[:2])
        return grad_x, grad_values, grad_bias, None, *(None for _ in pattern)


class BlockProduct(torch.autograd.Function):
    """``x @ weight.T + bias`` where groups of rows share the columns they keep: small dense products."""

    leaves_gradients_alone = True
    backward_can_be_split = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, blocks: Tensor, bias: Tensor | None, columns: Tensor, work: Work
    ) -> Tensor:
        """Multiply.

        Args:
            ctx: autograd's.
            x: ``[…, in]``.
            blocks: ``[groups, rows, kept]``, the weight's rows in groups, at the columns that each group keeps.
            bias: ``[groups * rows]`` or ``None``.
            columns: ``[groups, kept]``, which these are.
            work: counts.
        """
        xt = feature_major(x)
        yt = torch.bmm(blocks, _gathered(xt, columns)).flatten(0, 1)
        if bias is not None:
            yt += bias[:, None]
        ctx.save_for_backward(xt, blocks, columns)
        ctx.work = work
        work.multiply_adds += blocks.numel() * xt.shape[1]
        return _as_tokens(yt, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Give the gradients of ``x``, ``blocks`` and ``bias`` that are asked for."""
        xt, blocks, columns = ctx.saved_tensors
        gt = feature_major(grads[0])
        by_group = gt.view(*blocks.shape[:2], gt.shape[1])
        grad_x = grad_blocks = grad_bias = None
        if ctx.needs_input_grad[0]:
            parts = torch.bmm(blocks.transpose(1, 2), by_group).flatten(0, 1)
            grad_x = _as_tokens(_scattered(parts, columns, xt.shape[0]), grads[0])
        if ctx.needs_input_grad[1]:
            # Gathered again rather than kept: it is as large as the input times the number of groups.
            grad_blocks = torch.bmm(by_group, _gathered(xt, columns).transpose(1, 2))
        if ctx.needs_input_grad[2]:
            grad_bias = gt.sum(1)
        ctx.work.multiply_adds += blocks.numel() * gt.shape[1] * sum(ctx.needs_input_grad[:2])
        return grad_x, grad_blocks, grad_bias, None, None


def _gathered(xt: Tensor, columns: Tensor) -> Tensor:
    """Rows of ``[in, tokens]`` that each group reads: ``[groups, kept, tokens]``."""
    return xt.index_select(0, columns.flatten()).view(*columns.shape, xt.shape[1])


def _scattered(parts: Tensor, columns: Tensor, in_features: int) -> Tensor:
    """Add up the rows ``[groups * kept, tokens]`` that belong to the same column, always in the same order."""
    return sum_rows(parts, columns.flatten(), in_features)
