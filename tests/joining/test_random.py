"""Random resizes, one after the other: the same bits, and nothing that grows with their number."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.distributed.models import Run
from tests.distributed.owned import Own, Shared
from tests.joining.runs import Outcome, assert_same_bits
from tests.joining.test_grow import COMMON, OPTIMIZERS

MOST, SHORT, LONG = 4, 7, 100

CASES: dict[str, dict[str, Any]] = {
    "AdamW": {}, "ZeRO-1": {"config": OPTIMIZERS["ZeRO-1"]},
    "bf16 + ZeRO-1, tied": {"config": OPTIMIZERS["bf16 + ZeRO-1"], "tied": True},
    "planned orders": {"config": {"dynamic_pipeline": {"rebalance_every": 3, "schedule": "planned"}}},
    "sharded experts": {"config": OPTIMIZERS["ZeRO-1"], "special": {1: Shared, 2: Own, 4: Shared}},
}


def steps(number: int, seed: int) -> dict[int, int]:
    """Another number of stages after each batch but the first, and the last number is the most."""
    draw, found, now = random.Random(seed), {}, 2
    for batch in range(1, number + 1):
        now = draw.choice([n for n in range(1, MOST + 1) if n != now])
        found[batch] = now
    return found


def assert_nothing_is_left(outcome: Outcome) -> None:
    """With the same number of stages a rank holds as much late as early, but for connections of who waits or ends.

    Each of the others that are about has one to the door and one to the place; a leak would grow with the resizes.
    """
    first: dict[int, tuple[int, ...]] = {}
    for num_stages, held in outcome.held[2:]:
        earlier = first.setdefault(num_stages, held)
        assert held[0] <= earlier[0] + 2 * MOST, (num_stages, earlier, held)
        assert all(now <= before + 2 for now, before in zip(held[1:], earlier[1:], strict=True)), (earlier, held)


def resize(name: str, number: int) -> None:
    case = CASES[name]
    run = Run(2, num_batches=number + 3, dropout=0.1, **{**case, "config": {**COMMON, **case.get("config", {})}})
    last = assert_same_bits(run, 2, steps(number, seed=len(name)), newcomers=MOST - 1, come_again=True)
    assert_nothing_is_left(last[0])


@pytest.mark.parametrize("name", ["AdamW"])
def test_a_few(name: str) -> None:
    resize(name, SHORT)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_a_hundred(name: str) -> None:
    resize(name, LONG)
