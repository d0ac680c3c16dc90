"""The same training in several ways, all in one world of ranks: which are said to give the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.distributed.models import Run, run_and_digest
from tests.distributed.ranks import run_ranks

CUTS = [(0, 4, 8), (0, 1, 8), (0, 7, 8)]
MOVES_OF_TWO = {1: (0, 1, 8), 2: (0, 7, 8), 3: (0, 3, 8)}


@dataclass(frozen=True)
class Trained:
    """What all ranks saw of one run.

    Attributes:
        losses: by rank.
        layers: digests of every layer, by replica.
        rates: learning rates at the end, by rank.
    """

    losses: list[list[float]]
    layers: list[dict[str, str]]
    rates: list[list[float]]


def train_each(rank: int, runs: Sequence[Run]) -> list[tuple[list[float], dict[str, str], list[float]]]:
    """One run after the other, each by an engine of its own."""
    return [run_and_digest(rank, run) for run in runs]


def train_ways(*runs: Run, replicas: int = 1) -> list[Trained]:
    """Train all runs in one world.

    Args:
        *runs: of the same number of stages.
        replicas: of each stage.
    """
    by_rank = run_ranks(train_each, runs[0].num_stages * replicas, runs)
    return [_trained(run, [rank[way] for rank in by_rank], replicas) for way, run in enumerate(runs)]


def _trained(run: Run, by_rank: list[tuple[list[float], dict[str, str], list[float]]], replicas: int) -> Trained:
    layers = [  # rank = stage * replicas + replica
        {layer: value for rank in by_rank[replica::replicas] for layer, value in rank[1].items()}
        for replica in range(replicas)
    ]
    assert all(len(replica) == run.num_blocks + 2 for replica in layers)
    return Trained([losses for losses, _, _ in by_rank], layers, [rates for _, _, rates in by_rank])


def assert_same_bits(first: Trained, *others: Trained) -> None:
    """Losses, layers with their optimizer state, and learning rates."""
    for loss in first.losses[0]:
        assert loss == loss, "a loss is not a number, so equality shows nothing"
    for other in others:
        assert other.losses == first.losses, "losses differ"
        assert other.layers == first.layers, "layers differ"
        assert other.rates == first.rates, "learning rates differ"


def compare(run: Run, moves: dict[int, tuple[int, ...]], replicas: int = 1) -> None:
    """Train with and without moves; both must agree on everything."""
    assert_same_bits(*train_ways(run, replace(run, moves=moves), replicas=replicas))


def at_cuts(run: Run) -> list[Run]:
    """Static runs at several cuts, and one that moves."""
    static = [replace(run, first=cut) for cut in CUTS]
    return [*static, replace(static[0], moves=MOVES_OF_TWO)]
