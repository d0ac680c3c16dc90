"""Replay on two real ranks: layers last as long as told, and where they are changes nothing."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.replay.case import Case, Result
from benchmarks.replay.run import Replay
from tests.distributed.ranks import run_ranks

MICRO_BATCHES, BATCHES, LAYER_MS = 2, 6, 2.0
# By parameters, what pruning leaves decides and not the clock.
CASES = (
    ("model:freezing:6", "static uniform", 0.0), ("model:freezing:6", "optimal:time", 1.0),
    ("model:pruning:6", "static uniform", 0.0), ("model:pruning:6", "balanced:parameters", 0.0),
)


def _replay(rank: int) -> list[tuple[Result, dict[int, bytes]]]:
    found = []
    for trace, method, link_ms in CASES:
        replay = Replay(Case(trace, method, 2, MICRO_BATCHES, BATCHES, LAYER_MS, every=1, link_ms=link_ms))
        result = replay.run()
        layers = replay.engine.local_layers()
        found.append((result, {i: layer.weight.detach().numpy().tobytes() for i, layer in layers.items()}))
    return found


def test_replay_waits_as_told_moves_layers_and_keeps_the_bits() -> None:
    first, second = run_ranks(_replay, 2)
    weights = [own | theirs for (_, own), (_, theirs) in zip(first, second, strict=True)]
    for static_run in (0, 2):
        static, dynamic = first[static_run][0], first[static_run + 1][0]
        _check_busy(static)
        assert static.losses == dynamic.losses
        assert weights[static_run] == weights[static_run + 1] and len(weights[static_run]) == 8
        assert not static.moves and dynamic.moves, static.case
        theirs = second[static_run + 1][0]
        assert [move.boundaries for move in dynamic.moves] == [move.boundaries for move in theirs.moves]
    largest = max(map(len, weights[0].values()))
    assert max(map(len, weights[2].values())) < 0.5 * largest, "the parameters were not pruned"


def _check_busy(result: Result) -> None:
    """A stage computes at least as long as its layers were told; how much longer is up to the machine."""
    told, parts = result.case.load_trace(), result.boundaries_by_batch()
    for batch in range(BATCHES):
        seconds = told.at(batch, BATCHES).seconds
        for busy_s, (low, high) in zip(result.stages_s[batch], pairwise(parts[batch]), strict=True):
            assert busy_s >= 0.99 * MICRO_BATCHES * sum(seconds[low:high]) > 0
