"""Which worker holds whose copy: another node's first, so that the loss of a machine is no loss of state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def neighbours(nodes: Sequence[str]) -> tuple[int, ...]:
    """The rank that holds each rank's copy.

    Every rank holds one copy of another's. Ranks in a row, node by node, send to the rank that is as many places
    further as the fullest node has ranks: if no node has more than half of all, that is always another node's. If one
    has more, as few copies as possible stay on it. On a single node it is the next rank.

    Args:
        nodes: name of each rank's node.

    Returns:
        By rank; a permutation without fixed points, empty for a world of one rank, which has no neighbour.
    """
    size = len(nodes)
    if size < 2:
        return ()
    first = {node: nodes.index(node) for node in set(nodes)}
    row = sorted(range(size), key=lambda rank: (first[nodes[rank]], rank))
    shift = max(Counter(nodes).values()) % size or 1
    chosen = {rank: row[(place + shift) % size] for place, rank in enumerate(row)}
    return tuple(chosen[rank] for rank in range(size))


def share_is_safe(nodes: Sequence[str], replicas: Sequence[int]) -> bool:
    """Whether what all replicas of a stage have alike outlives any worker, or node if there are several.

    Args:
        nodes: name of each rank's node.
        replicas: ranks of the stage.
    """
    several_nodes = len(set(nodes)) > 1
    return len({nodes[rank] for rank in replicas} if several_nodes else replicas) > 1
