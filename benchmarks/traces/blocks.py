"""Traces of transformers, block by block: what load models are made with.

L blocks stand between an embedding and a head; a dense block takes ``BLOCK_FORWARD_S`` forward and twice that backward;
its operations are counted for hidden size 1,024 and 2,048 tokens (8h^2 projections, 16h^2 MLP, 4nh scores a token).
Embedding and head take a tenth of a block in time and bytes, so that nothing but the dynamism makes stages unequal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from benchmarks.traces.trace import Source, Trace, TraceBatch

BLOCK_FORWARD_S = 0.010
BACKWARD_FACTOR = 2.0
EDGE = 0.1  # of a block: embedding and head, each
HIDDEN, LENGTH = 1024, 2048
BLOCK_BYTES = 12 * HIDDEN**2 * 4  # fp32 weights
MLP_BYTES = 2 / 3  # of a block


def operation_shares(length: int = LENGTH) -> tuple[float, float, float]:
    """Shares of a dense block's operations: projections, MLP, scores.

    Args:
        length: tokens of a sequence.
    """
    parts = (8 * HIDDEN**2, 16 * HIDDEN**2, 4 * length * HIDDEN)
    return tuple(part / sum(parts) for part in parts)  # type: ignore[return-value]


@dataclass(frozen=True)
class Moment:
    """All blocks from one batch on, in units of a dense forward and of a dense block's bytes.

    Args:
        batch: from which it holds.
        costs: of the blocks' forwards.
        backward: of their backwards.
        mlps: the MLP's part of each cost.
        parameters: what is left of their parameters.
        dispersion: as in :class:`~benchmarks.traces.trace.TraceBatch`, without embedding and head.
        frozen: leading blocks that are frozen.
    """

    batch: int
    costs: Sequence[float]
    backward: Sequence[float]
    mlps: Sequence[float]
    parameters: Sequence[float]
    dispersion: Sequence[float]
    frozen: int

    def listed(self, cut: Sequence[bool]) -> TraceBatch:
        """The same by layers, embedding and head added.

        Args:
            cut: of every block, whether attention and MLP are two layers.
        """
        forward, backward, held, spread = ([] for _ in range(4))
        for block, is_cut in enumerate(cut):
            cost, mlp, size = self.costs[block], self.mlps[block], self.parameters[block]
            parts = (cost - mlp, mlp) if is_cut else (cost,)
            forward += parts
            backward += [self.backward[block] * part / cost if cost else 0.0 for part in parts]
            held += (size * MLP_BYTES / 2, size * MLP_BYTES) if is_cut else (size,)
            spread += [self.dispersion[block]] * len(parts) if self.dispersion else []
        frozen = sum(1 + is_cut for is_cut in cut[: self.frozen])
        edges = 0.0 if frozen else EDGE * BACKWARD_FACTOR
        return TraceBatch(
            self.batch,
            tuple(round(BLOCK_FORWARD_S * c, 7) for c in (EDGE, *forward, EDGE)),
            tuple(round(BLOCK_FORWARD_S * c, 7) for c in (edges, *backward, EDGE * 2)),
            tuple(round(BLOCK_BYTES * p) for p in (EDGE, *held, EDGE)),
            frozen + 1 if frozen else 0,
            (0.0, *spread, 0.0) if any(spread) else (),
        )


def moment(
    batch: int, costs: Sequence[float], backward: Sequence[float] = (), *, mlps: Sequence[float] = (),
    parameters: Sequence[float] = (), dispersion: Sequence[float] = (), frozen: int = 0,
) -> Moment:
    """A moment from the costs of the blocks' forwards.

    Args:
        batch: from which it holds.
        costs: in units of a dense forward.
        backward: the same of backwards; left out: twice as much.
        mlps: the MLP's part of each cost; left out: the share that it has of a dense block.
        parameters: what is left of them; left out: all.
        dispersion: relative, among micro-batches; left out: none.
        frozen: leading blocks that are frozen.
    """
    return Moment(
        batch, costs, list(backward) or [BACKWARD_FACTOR * cost for cost in costs],
        list(mlps) or [operation_shares()[1] * cost for cost in costs], list(parameters) or [1.0] * len(costs),
        dispersion, frozen,
    )


def make(
    model: Callable[..., Trace], depth: int, moments: Sequence[Moment], seed: int, *, num_batches: int, halves: bool,
    whole: Collection[int] = (),
) -> Trace:
    """A trace that says which equations it is from.

    Args:
        model: the function that its docstring describes.
        depth: L.
        moments: rising.
        seed: of what was drawn; -1 for nothing.
        num_batches: length of the run.
        halves: whether attention and MLP of a block are two layers.
        whole: blocks that stay one layer all the same.
    """
    name = model.__name__
    text = " ".join((model.__doc__ or "").split("Args:")[0].split())
    source = Source("model", f"{model.__module__}.{name}: {text}", seed)
    cut = [halves and block not in whole for block in range(depth)]
    blocks = (
        f"block {block}{half}" for block in range(depth) for half in ((".attention", ".mlp") if cut[block] else ("",))
    )
    title = f"{name}, {depth} blocks" + (" in halves" if halves else "")
    return Trace(
        title, source, ("embedding", *blocks, "head"), num_batches, tuple(moment.listed(cut) for moment in moments)
    )


