"""One product a lane: its bits depend on the lane's rows alone, so not on the rank that computes it.

Whatever is computed for a lane is computed for its rows apart, elementwise functions as well: the last elements of a
tensor are rounded otherwise than those before them where a vector has no room for them.

Gradients of weights are no gradients to autograd. They are added up by lane, over the micro-batches of a batch, and
what is given to autograd is nothing; the layer has them finished when the batch is over. The functions declare that
their backward can be split, so planned orders compute these gradients in W, and count the parameter's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from scenarios.moe.sharded.exchange import Span

Lane = tuple[int, int]
"""Source rank and expert."""


@dataclass
class LaneTimes:
    """Seconds that a layer has taken on this rank in a batch; none is measured where the host does not wait for them.

    Attributes:
        forward_s: of products of lanes.
        backward_s: of their backward.
        exchange_s: of exchanges of rows, from the time on at which all ranks had come to them.
        trans_s: of weights on their way, beside whatever ran.
        agg_s: of sums on their way, from the time on at which all ranks had come to them, beside whatever ran.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    exchange_s: float = 0.0
    trans_s: float = 0.0
    agg_s: float = 0.0


class LaneSums:
    """Gradients of one weight by lane, summed over the micro-batches of a batch, in the order of their backwards.

    Args:
        dtype: to sum in; ``None``: that of the weight.

    Attributes:
        num_added: backwards that have added theirs.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.num_added = 0
        self._sums: dict[Lane, Tensor] = {}

    def add(self, lane: Lane, gradient: Tensor) -> None:
        """Add what one micro-batch contributes.

        Args:
            lane: whose.
            gradient: nobody else's; it may become the sum.
        """
        known = self._sums.get(lane)
        gradient = gradient if self.dtype is None else gradient.to(self.dtype)
        if known is None:
            self._sums[lane] = gradient
        else:
            known += gradient

    def take(self, lane: Lane) -> Tensor | None:
        """Hand a lane's sum over and forget it; ``None`` if there is none."""
        return self._sums.pop(lane, None)

    def clear(self) -> None:
        """Forget all."""
        self.num_added = 0
        self._sums.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums that are held."""
        return sum(tensor.nbytes for tensor in self._sums.values())


@dataclass(frozen=True)
class LaneWeights:
    """Weights of one kind for the lanes of this rank.

    Attributes:
        first: index of the first expert of this rank's own.
        copies: weights of other ranks' experts.
        sums: takes their gradients; ``None``: they are not wanted (in evaluation).
        added: called when it has taken those of a micro-batch.
        times: of the layer.
    """

    first: int
    copies: Mapping[int, Tensor]
    sums: LaneSums | None
    added: Callable[[], object] = lambda: None
    times: LaneTimes = field(default_factory=LaneTimes)

    def of(self, expert: int, own: Tensor) -> Tensor:
        """One expert's matrix.

        Args:
            expert: which.
            own: the stack of this rank's own.
        """
        place = expert - self.first
        return own[place] if 0 <= place < len(own) else self.copies[expert]


class _Multiply(torch.autograd.Function):
    leaves_gradients_alone = True
    backward_can_be_split = True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, own: Tensor, weights: LaneWeights, spans: Sequence[Span]) -> Tensor:
        began = perf_counter()
        ctx.save_for_backward(rows, own)
        ctx.weights, ctx.spans = weights, spans
        width = own.shape[1]
        out = rows.new_empty(len(rows), width)
        for _, expert, start, stop in spans:
            torch.mm(rows[start:stop], weights.of(expert, own).t(), out=out[start:stop])
        weights.times.forward_s += perf_counter() - began
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        began, (rows, own) = perf_counter(), ctx.saved_tensors
        weights: LaneWeights = ctx.weights
        gradient = gradient.contiguous()
        for_rows = None
        if ctx.needs_input_grad[0]:
            for_rows = torch.empty_like(rows)
            for _, expert, start, stop in ctx.spans:
                torch.mm(gradient[start:stop], weights.of(expert, own), out=for_rows[start:stop])
        if ctx.needs_input_grad[1] and weights.sums is not None:
            for source, expert, start, stop in ctx.spans:
                weights.sums.add((source, expert), gradient[start:stop].t().mm(rows[start:stop]))
            weights.sums.num_added += 1
            weights.added()
        weights.times.backward_s += perf_counter() - began
        return for_rows, None, None, None


class _Gelu(torch.autograd.Function):
    leaves_gradients_alone = True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, spans: Sequence[Span], times: LaneTimes) -> Tensor:
        began = perf_counter()
        ctx.save_for_backward(rows)
        ctx.spans, ctx.times = spans, times
        out = torch.empty_like(rows)
        for *_, start, stop in spans:
            torch.ops.aten.gelu.out(rows[start:stop], approximate="tanh", out=out[start:stop])
        times.forward_s += perf_counter() - began
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        began, (rows,) = perf_counter(), ctx.saved_tensors
        gradient = gradient.contiguous()
        found = torch.empty_like(rows)
        for *_, start, stop in ctx.spans:
            torch.ops.aten.gelu_backward.grad_input(
                gradient[start:stop], rows[start:stop], approximate="tanh", grad_input=found[start:stop]
            )
        ctx.times.backward_s += perf_counter() - began
        return found, None, None


def multiply(rows: Tensor, own: Tensor, weights: LaneWeights, spans: Sequence[Span]) -> Tensor:
    """Multiply each lane's rows with its expert's matrix.

    Args:
        rows: of all lanes, ``[N, in]``.
        own: this rank's own matrices, ``[E/R, out, in]``.
        weights: copies of others, and the place for gradients.
        spans: the lanes' rows.

    Returns:
        ``[N, out]``. The gradient of ``own`` goes to ``weights.sums``, and autograd gets none.
    """
    # Lanes of one expert one after the other: all but the first find its weights in the cache.
    return _Multiply.apply(rows, own, weights, sorted(spans, key=attrgetter("expert")))


def gelu(rows: Tensor, spans: Sequence[Span], times: LaneTimes) -> Tensor:
    """GELU (by tanh) of each lane's rows, ``[N, width]``."""
    return _Gelu.apply(rows, spans, times)
