"""Workers join a run that trains: the same bits as on any partition."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.configs import BF16, ZERO
from tests.distributed.models import Run
from tests.distributed.owned import Own, Shared
from tests.joining.runs import assert_same_bits, resized_by_environment
from tests.matrix import mostly

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "ZeRO-1": ZERO,
    "bf16 + ZeRO-1": {**BF16, **ZERO},
}
COMMON = {"gradient_clipping": 0.5, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}


@pytest.mark.parametrize("name", mostly(OPTIMIZERS, ["AdamW"]))
def test_one_more_and_two_more(name: str) -> None:
    run = Run(1, num_batches=7, dropout=0.1, tied=name != "AdamW", config={**COMMON, **OPTIMIZERS[name]})
    last = assert_same_bits(run, 1, {1: 2, 3: 4}, newcomers=3)
    assert len(last) == 4
    assert [event.joined_ranks for event in last[0].events] == [(1,), (1, 2)]


@pytest.mark.parametrize("name", mostly(OPTIMIZERS, ["ZeRO-1"]))
def test_two_four_one_three(name: str) -> None:
    run = Run(2, num_batches=8, tied=name != "AdamW", dropout=0.1, config={**COMMON, **OPTIMIZERS[name]})
    last = assert_same_bits(run, 2, {1: 4, 3: 1, 5: 3}, newcomers=4)
    assert [len(event.after) - 1 for event in last[0].events] == [4, 1, 3]


@pytest.mark.parametrize("name", mostly(OPTIMIZERS, ["bf16 + ZeRO-1"]))
def test_a_stage_joins_with_all_its_replicas(name: str) -> None:
    run = Run(2, num_batches=6, tied=True, config={**COMMON, **OPTIMIZERS[name]})
    last = assert_same_bits(run, 4, {2: 3}, newcomers=2)
    assert last[0].events[0].joined_ranks == (2, 3)


@pytest.mark.parametrize("name", mostly(OPTIMIZERS, ["ZeRO-1"]))
def test_what_replicas_own_moves_to_who_joins(name: str) -> None:
    run = Run(1, num_batches=5, special={1: Shared, 2: Own, 4: Shared}, config={**COMMON, **OPTIMIZERS[name]})
    assert_same_bits(run, 2, {2: 2}, newcomers=2)


def test_planned_orders_and_decisions_go_on() -> None:
    section = {"enabled": True, "rebalance_every": 2, "schedule": "planned"}
    run = Run(2, num_batches=9, config={**COMMON, "dynamic_pipeline": section})
    last = assert_same_bits(run, 2, {3: 3, 6: 2}, newcomers=1)
    assert len({outcome.partition for outcome in last}) == 1


def test_a_job_whose_door_is_in_the_environment_shrinks_around_who_joined() -> None:
    """Workers that have joined do not have the variable, and stay in a shrink; all ranks settle at the doors alike."""
    run = Run(1, num_batches=7, config=COMMON)
    last = assert_same_bits(run, 1, {1: 3, 3: 2, 5: 3}, newcomers=3, function=resized_by_environment)
    assert [len(event.after) - 1 for event in last[0].events] == [3, 2, 3]
