"""Where the backward of a micro-batch can be cut in two, as autograd's graph of it says.

Seen from the outputs, the graph has a trunk, the nodes from which an input is reached, and sides, which leave it for
parameters. Of a matrix product on the trunk the side waits: its gradient takes as long as the trunk's, and nobody needs
it before the optimizer's step. All other sides, those of norms, of functions of the user's own, of what is
recomputed, are cheap or can't be run twice: they are computed along with the trunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

_PRODUCTS = frozenset({
    "AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "AddbmmBackward0", "AddmvBackward0",
    "MvBackward0", "LinearBackward0", "ConvolutionBackward0", "GroupedMmBackward0",
})  # fmt: skip

_WHOLE = {
    "CheckpointFunctionBackward": "reentrant activation checkpointing",
    "CompiledFunctionBackward": "a compiled layer",
}


class CantBeSplit(Exception):
    """Raised before anything is added up: this backward must run whole; the text says why, empty if it needs none."""


@dataclass(frozen=True)
class Side:
    """What leaves a product for parameters.

    Attributes:
        places: which of the product's gradients go there.
        edges: where they go.
        leaves: nodes of the parameters that are reached.
    """

    places: tuple[int, ...]
    edges: tuple[GradientEdge, ...]
    leaves: frozenset[Node]


@dataclass(frozen=True)
class Cut:
    """A backward in two halves.

    Attributes:
        waiting: products and their sides, which are the second half.
        at_once: nodes of the parameters whose gradients the first half computes.
        spent: nodes that nobody needs after the first half.
        has_functions: whether functions of the user's own are among them.
    """

    waiting: dict[Node, Side]
    at_once: tuple[Node, ...]
    spent: tuple[Node, ...]
    has_functions: bool


def node_of(tensor: Tensor) -> Node:
    """The node that a tensor's gradient goes to.

    Args:
        tensor: that requires one.
    """
    return torch.autograd.graph.get_gradient_edge(tensor).node


def find_cut(roots: Sequence[Node], inputs: Iterable[Node]) -> Cut:
    """Cut a backward in two.

    Args:
        roots: nodes of the outputs.
        inputs: nodes of the stage's inputs.

    Raises:
        CantBeSplit: if something in it can't, or nothing can wait.
    """
    below = _below(roots)
    trunk: set[Node] = set(inputs)
    sides: list[tuple[Node, Side, bool]] = []
    leaves: dict[Node, frozenset[Node]] = {}
    fixed: set[Node] = set()  # nodes of sides that run a function of the user's own
    names: set[str] = set()
    has_functions = False
    for node, edges in below.items():  # those below it come first
        kind = _kind(type(node))
        if kind.is_function:
            names.add(type(node).__name__)
            has_functions = has_functions or not kind.leaves_gradients_alone
        if node in trunk:
            continue
        aside = [place for place, (other, _) in enumerate(edges) if other is not None and other not in trunk]
        if len(aside) < len(edges) and any(other in trunk for other, _ in edges):
            trunk.add(node)
            if aside:
                side = _side(edges, aside, leaves)
                waits = kind.is_product and bool(side.leaves) and not any(edge.node in fixed for edge in side.edges)
                sides.append((node, side, waits and not _is_packed(node)))
        else:
            leaves[node] = frozenset([node]) if kind.is_leaf else _all_leaves([edges[i][0] for i in aside], leaves)
            if kind.is_function or any(edges[i][0] in fixed for i in aside):
                fixed.add(node)
    if refused := sorted(names & _WHOLE.keys()):
        raise CantBeSplit(_WHOLE[refused[0]])
    waiting = {node: side for node, side, waits in reversed(sides) if waits}
    at_once = set().union(*(side.leaves for _, side, waits in sides if not waits))
    at_once |= set().union(*(leaves[root] for root in roots if root not in trunk))
    at_once |= _mixed(waiting, below, leaves)
    _take_shared(waiting, at_once)
    if not waiting:
        raise CantBeSplit("")
    spent = [n for n in below if (n not in waiting if n in trunk else not leaves[n].isdisjoint(at_once))]
    ordered = tuple(n for n in reversed(below) if n in at_once)  # as the other replicas have them
    return Cut(waiting, ordered, tuple(spent), has_functions)


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


# -- looking at the graph ---------------------------------------------------------------------

Edges = tuple[tuple[Node | None, int], ...]


class _Kind(NamedTuple):
    """What can be said of all nodes of a class; asking each of them takes longer."""

    is_product: bool
    is_leaf: bool
    is_function: bool
    leaves_gradients_alone: bool


@cache
def _kind(cls: type) -> _Kind:
    is_function = issubclass(cls, BackwardCFunction)
    return _Kind(
        cls.__name__ in _PRODUCTS, hasattr(cls, "variable"), is_function,
        is_function and getattr(cls._forward_cls, "leaves_gradients_alone", False),  # type: ignore[attr-defined]
    )


def _below(roots: Sequence[Node]) -> dict[Node, Edges]:
    """All nodes with their edges; those below a node come before it."""
    known: dict[Node, Edges] = {}
    found: dict[Node, Edges] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        edges = known.get(node)
        if edges is None:
            edges = known[node] = node.next_functions
            stack += [other for other, _ in edges if other is not None and other not in known]
        else:
            stack.pop()
            found.setdefault(node, edges)
    return found


def _side(edges: Edges, aside: Sequence[int], leaves: dict[Node, frozenset[Node]]) -> Side:
    nodes: list[Node] = [edges[place][0] for place in aside]  # type: ignore[misc]
    there = tuple(GradientEdge(node, edges[place][1]) for node, place in zip(nodes, aside, strict=True))
    return Side(tuple(aside), there, _all_leaves(nodes, leaves))


def _all_leaves(nodes: Sequence[Any], leaves: dict[Node, frozenset[Node]]) -> frozenset[Node]:
    if len(nodes) == 1:
        return leaves[nodes[0]]
    return frozenset().union(*(leaves[node] for node in nodes))


def _mixed(
    waiting: dict[Node, Side], below: dict[Node, Edges], leaves: dict[Node, frozenset[Node]]
) -> set[Node]:
    """Parameters that three or more uses reach, some directly and some not: added up later, they would round otherwise.

    Two numbers have one sum. Of more, those that come from a product itself would come before those that take a way.
    """
    direct = Counter(edge.node for side in waiting.values() for edge in side.edges)
    inner = Counter(other for node in leaves for other, _ in below[node] if other is not None and other in direct)
    return set().union(*(leaves[node] for node in inner if direct[node] + inner[node] > 2))


def _take_shared(waiting: dict[Node, Side], at_once: set[Node]) -> None:
    """What shares a parameter with what is computed at once is computed at once, too: its uses are one sum."""
    while taken := [node for node, side in waiting.items() if not side.leaves.isdisjoint(at_once)]:
        for node in taken:
            at_once |= waiting.pop(node).leaves


# -- what nodes have saved --------------------------------------------------------------------


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _saved(node: Node) -> Iterator[Any]:
    """Torch's handles of the tensors that a node has saved (documented under "Hooks for saved tensors")."""
    for name in _saved_names(type(node)):
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
