"""Where the backward of a micro-batch can be cut in two, as autograd's graph of it says.

Seen from the outputs, the graph has a trunk, the nodes from which an input is reached, and sides, which leave it for
parameters. Of a matrix product on the trunk the side waits: its gradient takes as long as the trunk's, and nobody needs
it before the optimizer's step. All other sides, those of norms, of most functions of the user's own, of what is
recomputed, are cheap or can't be run twice: they are computed along with the trunk.

Nearly all micro-batches have graphs of the same shape, so what follows from the shape alone is kept
(:mod:`~dynpipe_ds.splitting.shape`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from dynpipe_ds.splitting.functions import PartialBackward
from dynpipe_ds.splitting.shape import Shape, kind_of, plan_cut


class CantBeSplit(Exception):
    """Raised before anything is added up: this backward must run whole; the text says why, empty if it needs none."""


@dataclass(frozen=True, slots=True)
class Side:
    """What leaves a product for parameters.

    Attributes:
        places: which of the product's gradients go there.
        edges: where they go.
        leaves: nodes of the parameters that are reached.
        passed: nodes that nobody needs from the moment on at which the product gets its gradient.
        function: asks for these gradients, if the product is a function of somebody's own.
    """

    places: tuple[int, ...]
    edges: tuple[GradientEdge, ...]
    leaves: tuple[Node, ...]
    passed: tuple[Node, ...]
    function: PartialBackward | None


@dataclass(frozen=True)
class Cut:
    """A backward in two halves.

    Attributes:
        waiting: products and their sides, which are the second half.
        at_once: nodes of the parameters whose gradients the first half computes.
        spent: other nodes that nobody needs after the first half.
        has_functions: whether functions of the user's own are among them.
        has_shared: whether several of the products reach one parameter.
    """

    waiting: dict[Node, Side]
    at_once: tuple[Node, ...]
    spent: tuple[Node, ...]
    has_functions: bool
    has_shared: bool


def node_of(tensor: Tensor) -> Node:
    """The node that a tensor's gradient goes to.

    Args:
        tensor: that requires one.
    """
    return get_gradient_edge(tensor).node


def find_cut(roots: Sequence[Node], inputs: Iterable[Node]) -> Cut:
    """Cut a backward in two.

    Args:
        roots: distinct nodes of the outputs.
        inputs: nodes of the stage's inputs.

    Raises:
        CantBeSplit: if something in it can't, or nothing can wait.
    """
    nodes, shape = _walk(roots, inputs)
    plan = plan_cut(shape)
    packed = tuple([waiting.node for waiting in plan.waiting if _is_packed(nodes[waiting.node])])
    if packed:
        plan = plan_cut(shape._replace(packed=packed))
    if plan.refused is not None:
        raise CantBeSplit(plan.refused)

    def those(places: Iterable[int]) -> tuple[Node, ...]:
        return tuple([nodes[i] for i in places])

    waiting = {}
    for i, places, leaves, passed in plan.waiting:
        edges = nodes[i].next_functions
        there = tuple([GradientEdge(*edges[place]) for place in places])  # type: ignore[arg-type]
        function = PartialBackward(nodes[i], places) if kind_of(type(nodes[i])).is_function else None
        waiting[nodes[i]] = Side(places, there, those(leaves), those(passed), function)
    return Cut(waiting, those(plan.at_once), those(plan.spent), plan.has_functions, plan.has_shared)


def release(nodes: Iterable[Node]) -> None:
    """Let go of what nodes have saved for a backward that will not run again.

    Args:
        nodes: still in a graph that lives on.
    """
    for node in nodes:
        for saved in _saved(node):
            try:
                saved.register_hooks(_nothing, _gone)
            except RuntimeError:  # nothing is saved there, or hooks of somebody else's hold it
                continue


def _walk(roots: Sequence[Node], inputs: Iterable[Node]) -> tuple[list[Node], Shape]:
    """All nodes, and their shape; of what a backward in two halves takes longer than a whole one, this is the most."""
    nodes = list(roots)
    numbers: dict[Node | None, int] = {None: -1, **{node: i for i, node in enumerate(nodes)}}
    flat: list[type | int] = []
    for node in nodes:  # and those that are found on the way
        flat.append(type(node))
        for other, _ in node.next_functions:
            number = numbers.get(other)
            if number is None:
                assert other is not None
                number = numbers[other] = len(nodes)
                nodes.append(other)
            flat.append(number)
    found = tuple([numbers[node] for node in inputs if node in numbers])
    return nodes, Shape(tuple(flat), len(roots), found)


# -- what nodes have saved --------------------------------------------------------------------


def _saved(node: Node) -> Iterator[Any]:
    """Torch's handles of the tensors that a node has saved (documented under "Hooks for saved tensors")."""
    for name in kind_of(type(node)).saved:
        try:
            saved = getattr(node, name)
        except RuntimeError:  # released
            continue
        if isinstance(saved, tuple | list):
            yield from saved
        elif saved is not None:
            yield saved


def _is_packed(node: Node) -> bool:
    """Whether somebody's hooks hold what a node has saved: checkpointing recomputes for every backward that asks."""
    hooks = (saved.unpack_hook for saved in _saved(node))
    return any(hook is not None and not getattr(hook, "gives_what_was_saved", False) for hook in hooks)


def _nothing(_tensor: Tensor) -> None:
    """What is kept of a tensor that is no longer needed."""


def _gone(_kept: None) -> Tensor:
    raise RuntimeError("this part of the backward has run, and what it needed was let go of")
