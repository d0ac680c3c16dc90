"""What follows from the shape of a backward's graph alone: which nodes wait, and what is done with the others.

Nodes are numbers here, and what is found for a shape is kept, since the next micro-batch mostly has the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch.autograd.function import BackwardCFunction

from dynpipe_ds.splitting.functions import DECLARATION

_PRODUCTS = frozenset({
    "AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "AddbmmBackward0", "AddmvBackward0",
    "MvBackward0", "LinearBackward0", "ConvolutionBackward0", "GroupedMmBackward0",
})  # fmt: skip

_WHOLE = {
    "CheckpointFunctionBackward": "reentrant activation checkpointing",
    "CompiledFunctionBackward": "a compiled layer",
}

_KEPT_SHAPES = 64
"""Of stages whose graphs change with what they are given, the newest; a shape of 1,000 nodes takes about 0.1 MB."""

_KEPT_KINDS = 4096
"""Classes of nodes; a script may make new ones all the time."""

_SMALL = {
    "NativeLayerNormBackward0": {"bias", "weight", "result1", "result2"},
    "ScaledDotProductFlashAttentionForCpuBackward0": {"attn_mask", "logsumexp"},
}
"""What is not worth letting go of, a parameter or a few numbers for each row: that would take longer than keep it."""


class Kind(NamedTuple):
    """What can be said of all nodes of a class; asking each of them takes longer.

    Attributes:
        is_product: whether it is a product of matrices, or a function of somebody's own that is as good as one.
        is_leaf: whether it adds up a parameter's gradient.
        is_function: whether it is a function of somebody's own.
        leaves_gradients_alone: whether that function is known not to change its gradients in place.
        saved: attributes with what it saves for the backward.
    """

    is_product: bool
    is_leaf: bool
    is_function: bool
    leaves_gradients_alone: bool
    saved: tuple[str, ...]


@lru_cache(maxsize=_KEPT_KINDS)
def kind_of(cls: type) -> Kind:
    """What can be said of nodes of a class.

    Args:
        cls: of autograd's nodes.
    """
    name, is_function, prefix = cls.__name__, issubclass(cls, BackwardCFunction), "_raw_saved_"
    saved = [prefix + what for what in _attributes(cls, prefix) if what not in _SMALL.get(name, ())]
    declared: Any = cls._forward_cls if is_function else None  # type: ignore[attr-defined]
    alone = getattr(declared, "leaves_gradients_alone", False)
    is_product = name in _PRODUCTS or getattr(declared, DECLARATION, False)
    return Kind(is_product, hasattr(cls, "variable"), is_function, alone, tuple(saved))


def _attributes(cls: type, prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in dir(cls) if name.startswith(prefix)]


class Shape(NamedTuple):
    """A graph without its nodes.

    Attributes:
        flat: for each node its class, followed by the nodes that its edges go to; -1: to none.
        num_roots: outputs; they come first.
        inputs: those nodes that are inputs.
        packed: products that can't wait, since somebody's hooks hold what they have saved.
    """

    flat: tuple[type | int, ...]
    num_roots: int
    inputs: tuple[int, ...]
    packed: tuple[int, ...] = ()

    def rows(self) -> list[tuple[type, tuple[int, ...]]]:
        """Each node's class, and where its edges go."""
        found: list[tuple[type, list[int]]] = []
        for entry in self.flat:
            if isinstance(entry, int):
                found[-1][1].append(entry)
            else:
                found.append((entry, []))
        return [(cls, tuple(edges)) for cls, edges in found]


class Waiting(NamedTuple):
    """A product whose side waits; see :class:`~dynpipe_ds.splitting.graph.Side`."""

    node: int
    places: tuple[int, ...]
    leaves: tuple[int, ...]
    passed: tuple[int, ...]


class CutPlan(NamedTuple):
    """A cut without its nodes; see :class:`~dynpipe_ds.splitting.graph.Cut`.

    Attributes:
        refused: why there is none, if there is none; empty: nothing is to be told of it.
    """

    waiting: tuple[Waiting, ...] = ()
    at_once: tuple[int, ...] = ()
    spent: tuple[int, ...] = ()
    has_functions: bool = False
    has_shared: bool = False
    refused: str | None = None


@lru_cache(maxsize=_KEPT_SHAPES)
def plan_cut(shape: Shape) -> CutPlan:
    """Cut a backward in two.

    Args:
        shape: of its graph.
    """
    return _Planning(shape).plan()


class _Side(NamedTuple):
    node: int
    places: list[int]
    leaves: frozenset[int]
    waits: bool


class _Planning:
    """One graph, looked at from the inputs on.

    Args:
        shape: of the graph.
    """

    def __init__(self, shape: Shape) -> None:
        rows = shape.rows()
        self._edges = [edges for _, edges in rows]
        self._kinds = [kind_of(cls) for cls, _ in rows]
        self._names = {cls.__name__ for cls, _ in rows if issubclass(cls, BackwardCFunction)}
        self._roots, self._packed = range(shape.num_roots), frozenset(shape.packed)
        self._order = _children_first(self._edges, self._roots)
        self._trunk: set[int] = set(shape.inputs)
        self._sides: list[_Side] = []
        self._leaves: dict[int, frozenset[int]] = {}
        self._fixed: set[int] = set()  # nodes of sides that run a function of the user's own

    def plan(self) -> CutPlan:
        """The cut, or why there is none."""
        for node in self._order:
            if node not in self._trunk:
                self._look_at(node)
        if refused := sorted(self._names & _WHOLE.keys()):
            return CutPlan(refused=_WHOLE[refused[0]])
        waiting = {side.node: side for side in reversed(self._sides) if side.waits}
        at_once = _union(side.leaves for side in self._sides if not side.waits)
        at_once |= _union(self._leaves[root] for root in self._roots if root not in self._trunk)
        at_once |= self._mixed(waiting)
        _take_shared(waiting, at_once)
        if not waiting:
            return CutPlan(refused="")
        has_functions = any(kind.is_function and not kind.leaves_gradients_alone for kind in self._kinds)
        # What runs code of others may fail, and must then be able to run again.
        passed = {} if has_functions or self._packed else self._passed(waiting)
        spent = self._spent(waiting, at_once) - _union(passed.values())
        uses = Counter(leaf for side in waiting.values() for leaf in side.leaves)
        return CutPlan(
            tuple(
                Waiting(node, tuple(side.places), tuple(sorted(side.leaves)), tuple(passed.get(node, ())))
                for node, side in waiting.items()
            ),
            tuple(node for node in reversed(self._order) if node in at_once),  # as the other replicas have them
            tuple(sorted(spent)), has_functions, any(count > 1 for count in uses.values()),
        )

    def _look_at(self, node: int) -> None:
        """Find out whether a node is of the trunk, when all below it are known."""
        edges, kind = self._edges[node], self._kinds[node]
        aside = [place for place, other in enumerate(edges) if other >= 0 and other not in self._trunk]
        if any(other in self._trunk for other in edges):
            self._trunk.add(node)
            if aside:
                nodes = [edges[place] for place in aside]
                leaves = _union(self._leaves[other] for other in nodes)
                waits = kind.is_product and bool(leaves) and self._fixed.isdisjoint(nodes)
                self._sides.append(_Side(node, aside, frozenset(leaves), waits and node not in self._packed))
        else:
            below = [edges[place] for place in aside]
            self._leaves[node] = frozenset([node] if kind.is_leaf else _union(self._leaves[n] for n in below))
            if kind.is_function or not self._fixed.isdisjoint(below):
                self._fixed.add(node)

    def _mixed(self, waiting: dict[int, _Side]) -> set[int]:
        """Parameters of three or more uses, some of which reach them directly: added up later, they round otherwise.

        Two numbers have one sum. Of more, those that come from a product itself would come before those that take a
        way.
        """
        direct = Counter(self._edges[node][place] for node, side in waiting.items() for place in side.places)
        inner = Counter(other for node in self._leaves for other in self._edges[node] if other in direct)
        return _union(self._leaves[node] for node in inner if direct[node] + inner[node] > 2)

    def _passed(self, waiting: dict[int, _Side]) -> dict[int, list[int]]:
        """What has run, and is of no more use, when a product gets its gradient: what is above it."""
        position = {node: i for i, node in enumerate(self._order)}
        first: dict[int, int] = {}  # of the products below a node that which probably runs first
        passed: dict[int, list[int]] = {}
        for node in self._order:
            below = [other if other in waiting else first.get(other) for other in self._edges[node]]
            products = [product for product in below if product is not None]
            if products:
                first[node] = max(products, key=position.__getitem__)
                if node not in waiting and self._kinds[node].saved:
                    passed.setdefault(first[node], []).append(node)
        return passed

    def _spent(self, waiting: dict[int, _Side], at_once: set[int]) -> set[int]:
        return {
            node for node in self._order
            if self._kinds[node].saved
            and (node not in waiting if node in self._trunk else not self._leaves[node].isdisjoint(at_once))
        }  # fmt: skip


def _union(sets: Iterable[Iterable[int]]) -> set[int]:
    return set().union(*sets)


def _children_first(edges: Sequence[tuple[int, ...]], roots: Iterable[int]) -> list[int]:
    """All nodes; those below a node come before it."""
    expanded: set[int] = set()
    found: dict[int, None] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in expanded:
            stack.pop()
            found.setdefault(node)
        else:
            expanded.add(node)
            stack += [other for other in edges[node] if other >= 0 and other not in expanded]
    return list(found)


def _take_shared(waiting: dict[int, _Side], at_once: set[int]) -> None:
    """What shares a parameter with what is computed at once is computed at once, too: its uses are one sum."""
    while taken := [node for node, side in waiting.items() if not side.leaves.isdisjoint(at_once)]:
        for node in taken:
            at_once |= waiting.pop(node).leaves
