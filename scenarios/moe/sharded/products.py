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
from itertools import groupby
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


class _Mlp(torch.autograd.Function):
    """Expert by expert, so that what one product gives is in the cache when the next one takes it, and weights stay."""

    leaves_gradients_alone = True
    backward_can_be_split = True

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, up: Tensor, down: Tensor, ups: LaneWeights, downs: LaneWeights, spans: Sequence[Span]
    ) -> Tensor:
        began = perf_counter()
        inner, out = rows.new_empty(len(rows), up.shape[1]), rows.new_empty(len(rows), down.shape[1])
        active = torch.empty_like(inner)
        for expert, lanes in groupby(spans, attrgetter("expert")):
            parts = [slice(start, stop) for *_, start, stop in lanes]
            matrices = ups.of(expert, up).t(), downs.of(expert, down).t()
            for part in parts:
                torch.mm(rows[part], matrices[0], out=inner[part])
                torch.ops.aten.gelu.out(inner[part], approximate="tanh", out=active[part])
            for part in parts:
                torch.mm(active[part], matrices[1], out=out[part])
        ctx.save_for_backward(rows, up, down, inner, active)
        ctx.ups, ctx.downs, ctx.spans, ctx.for_inner = ups, downs, spans, None
        ups.times.forward_s += perf_counter() - began
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        began, (rows, up, down, inner, active) = perf_counter(), ctx.saved_tensors
        ups, downs, gradient = ctx.ups, ctx.downs, gradient.contiguous()
        wants_rows, wants_up, wants_down = ctx.needs_input_grad[:3]
        wants_up, wants_down = wants_up and ups.sums is not None, wants_down and downs.sums is not None
        # The second half of a backward needs what the first one came to on its way.
        known, ctx.for_inner = None if wants_rows else ctx.for_inner, None
        for_inner = torch.empty_like(inner) if known is None else known
        if wants_rows and not wants_up and up.requires_grad and ups.sums is not None:
            ctx.for_inner = for_inner
        for_rows = torch.empty_like(rows) if wants_rows else None
        for expert, lanes in groupby(ctx.spans, attrgetter("expert")):
            parts = [((source, expert), slice(start, stop)) for source, _, start, stop in lanes]
            if known is None and (wants_rows or wants_up):
                matrix = downs.of(expert, down)
                for _, part in parts:
                    torch.mm(gradient[part], matrix, out=for_inner[part])
                    torch.ops.aten.gelu_backward.grad_input(
                        for_inner[part], inner[part], approximate="tanh", grad_input=for_inner[part]
                    )
            if for_rows is not None:
                matrix = ups.of(expert, up)
                for _, part in parts:
                    torch.mm(for_inner[part], matrix, out=for_rows[part])
            for lane, part in parts if wants_down else ():
                downs.sums.add(lane, gradient[part].t().mm(active[part]))
            for lane, part in parts if wants_up else ():
                ups.sums.add(lane, for_inner[part].t().mm(rows[part]))
        for wanted, weights in ((wants_down, downs), (wants_up, ups)):
            if wanted:
                weights.sums.num_added += 1
                weights.added()
        ups.times.backward_s += perf_counter() - began
        return for_rows, None, None, None, None, None


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


def mlp(
    rows: Tensor, up: Tensor, down: Tensor, ups: LaneWeights, downs: LaneWeights, spans: Sequence[Span]
) -> Tensor:
    """Multiply each lane's rows with two matrices of its expert, with GELU (by tanh) between.

    Args:
        rows: of all lanes, ``[N, hidden]``.
        up: this rank's own first matrices, ``[E/R, width, hidden]``.
        down: its second ones, ``[E/R, hidden, width]``.
        ups: copies of others' first matrices, and the place for gradients.
        downs: the same of second ones.
        spans: the lanes' rows.

    Returns:
        ``[N, hidden]``. The gradients of the matrices go to ``ups.sums`` and ``downs.sums``, and autograd gets none.
    """
    return _Mlp.apply(rows, up, down, ups, downs, sorted(spans, key=attrgetter("expert")))
