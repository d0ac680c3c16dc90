"""The two halves of a backward, on autograd's public calls; together they add up the bits of the plain one.

The first half computes the gradients of the inputs, by ``torch.autograd.grad``, and notes what gradient each product
gets whose side waits. Nothing is added to a parameter's gradient. The second half computes these products' other
gradients and lets autograd carry them on to the parameters, with all hooks on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from dynpipe_ds._versions import is_older
from dynpipe_ds.splitting.graph import CantBeSplit, Cut, Side, find_cut, node_of, release

_LEAST_TORCH = "2.7"
_HELD_BYTES = 1 << 18
"""Gradients that are ready wait for each other up to this size: a call of autograd takes longer than a small sum."""


class ParameterHalf:
    """What is left of a backward: the gradients of the parameters.

    Args:
        cut: products and their sides.
        gradients: of the outputs of each product that got one, in the order in which they came.
        computed: nodes of other parameters with their gradients.

    Attributes:
        parameters: whose gradients it adds up.
    """

    def __init__(
        self, cut: Cut, gradients: dict[Node, tuple[Tensor | None, ...]], computed: dict[Node, Tensor]
    ) -> None:
        self._sides = {node: cut.waiting[node] for node in gradients}
        self._gradients, self._computed, self._has_shared = gradients, computed, cut.has_shared
        leaves = computed.keys() | {leaf for side in self._sides.values() for leaf in side.leaves}
        self.parameters: frozenset[Tensor] = frozenset(map(_variable, leaves))

    def run(
        self, begins: Callable[[Tensor, Callable[[], None]], object] | None = None,
        only: Set[Tensor] | None = None,
    ) -> frozenset[Tensor]:
        """Compute the gradients and add them up, those that are left.

        Args:
            begins: called before each product, with a parameter of it and with what adds up the gradients so far.
            only: parameters; what adds up gradients of others, too, is left. ``None``: all.

        Returns:
            The parameters that got a gradient.
        """
        nodes = self._those(only)
        sides = [self._sides[node] for node in nodes]
        adding = _Adding(Counter(leaf for side in sides for leaf in side.leaves) if self._has_shared else None)
        for leaf in [leaf for leaf in self._computed if only is None or _variable(leaf) in only]:
            adding.add(GradientEdge(leaf, 0), self._computed.pop(leaf))
            adding.leaves.add(leaf)
        edges = [edge for side in sides for edge in side.edges]

        def compute() -> None:
            for node in nodes:
                side = self._sides.pop(node)
                if begins is not None:
                    begins(_variable(side.leaves[0]), adding.settle)
                self._compute(node, side, adding)
                adding.computed(side.leaves)

        if edges:
            _computing_only(edges, compute)
        adding.finish()
        return frozenset(map(_variable, adding.leaves))

    def _those(self, only: Set[Tensor] | None) -> list[Node]:
        """Products that are left and reach only some parameters, and none that a product reaches which must wait."""
        if only is None:
            return list(self._sides)
        apart = {node for node, side in self._sides.items() if any(_variable(leaf) not in only for leaf in side.leaves)}
        grown = True
        while grown and self._has_shared:
            reached = {leaf for node in apart for leaf in self._sides[node].leaves}
            more = {node for node, side in self._sides.items() if not reached.isdisjoint(side.leaves)}
            grown, apart = more != apart, more
        return [node for node in self._sides if node not in apart]

    def _compute(self, node: Node, side: Side, adding: _Adding) -> None:
        """Compute what a product's side gets. Nothing of it lives on here: the next one's takes its memory."""
        gradients = self._gradients.pop(node)
        if side.function is not None:
            found = side.function.compute(gradients)
        else:
            computed = node(*gradients)  # type: ignore[operator]
            computed = computed if isinstance(computed, tuple) else (computed,)
            found = [computed[place] for place in side.places]
        for edge, gradient in zip(side.edges, found, strict=True):
            adding.add(edge, gradient)
        release((node,))


class _Adding:
    """Gradients on their way to parameters.

    Args:
        uses: how many products reach each parameter; all of them go in one call, since they are one sum. ``None``:
            one reaches each.
    """

    def __init__(self, uses: Counter[Node] | None) -> None:
        self.leaves: set[Node] = set()
        self._uses = uses
        self._open: set[Node] = set()
        self._edges: list[GradientEdge] = []
        self._gradients: list[Tensor] = []
        self._num_bytes = 0

    def add(self, edge: GradientEdge, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        # As autograd does between two nodes: what was spread over an axis is added up over it.
        about = edge.node._input_metadata[edge.output_nr]
        gradient = gradient if gradient.shape == about.shape else gradient.sum_to_size(about.shape)
        gradient = gradient if gradient.dtype == about.dtype else gradient.to(about.dtype)
        self._edges.append(edge)
        self._gradients.append(gradient)
        self._num_bytes += gradient.nbytes

    def computed(self, leaves: tuple[Node, ...]) -> None:
        self.leaves.update(leaves)
        if self._uses is not None:
            self._uses.subtract(leaves)
            self._open = {leaf for leaf in self._open.union(leaves) if self._uses[leaf]}
        if self._num_bytes >= _HELD_BYTES:
            self.settle()

    def settle(self) -> None:
        """Add up what is ready, unless a sum is open."""
        if not self._open:
            self.finish()

    def finish(self) -> None:
        edges, gradients, self._edges, self._gradients, self._num_bytes = self._edges, self._gradients, [], [], 0
        if edges:
            torch.autograd.backward(edges, gradients)


def backward_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> ParameterHalf:
    """Run the first half of a backward: set the gradients of the inputs.

    Args:
        outputs: distinct tensors that require a gradient.
        gradients: theirs; ``None`` for a scalar's 1.
        inputs: leaves that require a gradient, at least one.

    Returns:
        The other half.

    Raises:
        CantBeSplit: if the backward must run whole, which can be done then: nothing was added up or let go of.
    """
    if (reason := _why_not_here()) is not None:
        raise CantBeSplit(reason)
    cut = find_cut(list(dict.fromkeys(map(node_of, outputs))), map(node_of, inputs))
    noted: dict[Node, tuple[Tensor | None, ...]] = {}
    note = _note_copy if cut.has_functions else _note
    handles = [node.register_prehook(partial(note, noted, node, side.passed)) for node, side in cut.waiting.items()]
    functions = [side.function for side in cut.waiting.values() if side.function is not None]
    for function in functions:
        function.begin()
    try:
        found = _gradients(outputs, gradients, inputs, cut)
    except Exception as error:
        for function in functions:
            function.restore()
        if any(side.passed for side in cut.waiting.values()):  # what was let go of can't run again
            raise
        raise CantBeSplit(f"{type(error).__name__}: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    for tensor, gradient in zip(inputs, found, strict=False):
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
    computed = zip(cut.at_once, found[len(inputs) :], strict=True)
    release(cut.spent)
    return ParameterHalf(cut, noted, {leaf: gradient for leaf, gradient in computed if gradient is not None})


def _gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], cut: Cut
) -> tuple[Tensor | None, ...]:
    parameters = [_variable(leaf) for leaf in cut.at_once]
    wanted = (*inputs, *parameters)
    with _without_hooks(parameters):
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            outputs, wanted, gradients, retain_graph=True, allow_unused=True
        )
    return found


def _note(
    noted: dict[Node, tuple[Tensor | None, ...]], node: Node, passed: tuple[Node, ...],
    gradients: tuple[Tensor | None, ...],
) -> None:
    """Note what a product gets, and let go of what nobody needs from now on: what comes next takes its memory."""
    if any(gradient is not None for gradient in gradients):
        noted[node] = gradients
    release(passed)


def _note_copy(
    noted: dict[Node, tuple[Tensor | None, ...]], node: Node, passed: tuple[Node, ...],
    gradients: tuple[Tensor | None, ...],
) -> None:
    """A function that comes later may change its gradient in place, which may be this one, too."""
    _note(noted, node, passed, tuple(None if gradient is None else gradient.clone() for gradient in gradients))


@contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep tensor hooks of parameters for the second half: autograd runs them for whoever asks for a gradient."""
    tables = [table for tensor in parameters if (table := tensor._backward_hooks)]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def _computing_only(edges: Sequence[GradientEdge], compute: Callable[[], None]) -> None:
    """Run something for which nodes that it calls compute only what goes to some edges.

    A node computes what the backward in progress asks for. This one asks for these edges, and reaches none of them.
    """
    with torch.inference_mode(False), torch.enable_grad():
        seed = torch.zeros((), device="cpu", requires_grad=True)
        root = seed.clone()
    root.register_hook(lambda _gradient: compute())  # type: ignore[no-untyped-call]
    wanted: list[Any] = [seed, *edges]
    torch.autograd.grad(root, wanted, allow_unused=True)


def _variable(leaf: Node) -> Tensor:
    variable: Tensor = leaf.variable  # type: ignore[attr-defined]
    return variable


@cache
def _why_not_here() -> str | None:
    if is_older(torch.__version__, _LEAST_TORCH):
        return f"torch {torch.__version__}, older than {_LEAST_TORCH}"
    saved: Any = torch.ones((), requires_grad=True).exp().grad_fn._raw_saved_result  # type: ignore[union-attr]
    return None if hasattr(saved, "unpack_hook") else f"torch {torch.__version__}, which tells too little of its graph"
