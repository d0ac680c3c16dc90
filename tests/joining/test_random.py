"""Random resizes, one after the other: the same bits, and nothing that grows with their number."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from tests.distributed.models import Run
from tests.distributed.owned import Own, Shared
from tests.joining.runs import assert_same_bits
from tests.joining.test_grow import COMMON, OPTIMIZERS

SHORT, LONG, SETTLED = 7, 100, 20
KIB_EACH = 64
"""Most memory that a resize may add for good: what the run keeps of it, and what the allocator does not reuse."""

CASES: dict[str, dict[str, Any]] = {
    "AdamW": {}, "ZeRO-1": {"config": OPTIMIZERS["ZeRO-1"]},
    "bf16 + ZeRO-1, tied": {"config": OPTIMIZERS["bf16 + ZeRO-1"], "tied": True},
    "planned orders": {"config": {"dynamic_pipeline": {"rebalance_every": 3, "schedule": "planned"}}},
}


def steps(number: int, seed: int, *, start: int = 2, most: int = 4) -> dict[int, int]:
    """Another number of stages after each batch but the first, and the last number is the most.

    So nobody is left who comes again when the run is over, and would look for its door for ten minutes.
    """
    draw, found, now = random.Random(seed), {}, start
    for batch in range(1, number):
        now = draw.choice([n for n in range(1, most + 1 - (batch == number - 1)) if n != now])
        found[batch] = now
    return {**found, number: most}


def assert_nothing_is_left(held: Sequence[tuple[int, Counter[str]]]) -> None:
    """With the same number of stages a rank holds no more late than early, of each kind; memory grows with the record.

    Args:
        held: after every resize, the number of stages and what the rank held.
    """
    by_stages: dict[int, list[Counter[str]]] = {}
    for num_stages, found in held[2:]:
        by_stages.setdefault(num_stages, []).append(found)
    again = {num_stages: found for num_stages, found in by_stages.items() if len(found) > 1}
    assert again, "no number of stages came twice, so nothing was compared"
    for num_stages, found in again.items():
        early, late = found[: len(found) // 2], found[len(found) // 2 :]  # what is just being closed is in some of them
        counts = {kind: (max(e[kind] for e in early), min(f[kind] for f in late)) for kind in late[0]}
        more = {kind: (most, least) for kind, (most, least) in counts.items() if least > most}
        assert not more.keys() - {"guests", "KiB"}, (num_stages, more)
    added_kib = [late["KiB"] - early["KiB"] for (_, early), (_, late) in pairwise(held[SETTLED:])]
    print(f"from the {SETTLED}th resize on {sum(added_kib)} KiB more; guests: {[found['guests'] for _, found in held]}")
    assert sum(added_kib) <= KIB_EACH * len(added_kib)


def resize(run: Run, number: int, seed: int, *, replicas: int = 1, most: int = 4) -> None:
    plan = steps(number, seed, start=run.num_stages, most=most)
    newcomers = (most - 1) * replicas
    last = assert_same_bits(run, run.num_stages * replicas, plan, newcomers=newcomers, come_again=True)
    assert len(last) == most * replicas and len(last[0].events) == number
    assert_nothing_is_left(last[0].held)


def run_of(name: str, number: int, **options: Any) -> Run:
    case = {"num_stages": 2, "dropout": 0.1, **CASES.get(name, {}), **options}
    return Run(num_batches=number + 2, **{**case, "config": {**COMMON, **case.get("config", {})}})


@pytest.mark.parametrize("name", ["AdamW"])
def test_a_few(name: str) -> None:
    resize(run_of(name, SHORT), SHORT, seed=5)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_a_hundred(name: str) -> None:
    resize(run_of(name, LONG), LONG, seed=len(name))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_hundred_with_what_replicas_own() -> None:
    """Two replicas; as sharded experts, whose parameters are never the same on both."""
    special = {1: Shared, 2: Own, 4: Shared}
    run = run_of("", LONG, num_stages=1, special=special, config=OPTIMIZERS["ZeRO-1"])
    resize(run, LONG, seed=3, replicas=2, most=3)
