"""How fast planning is said to be, and what follows from it."""

from __future__ import annotations

import pytest

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.orders import FIRST_S, SHARE_OF_TIME, Orders
from dynpipe_ds.decide.speeds import Speeds
from dynpipe_ds.planning import agree_on_pace, is_worth_compiling, pace
from tests.decide.pipelines import OnPaper


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_share_of_the_time_is_worth_more_where_planning_is_compiled(is_compiled: bool) -> None:
    slow = pace()
    agree_on_pace(is_compiled=is_compiled)
    assert (pace().computations_per_s > 4 * slow.computations_per_s) == is_compiled
    run, orders = OnPaper([0.01, 0.02, 0.03], (0, 1, 3)), Orders(DynamicPipelineConfig(enabled=True), Speeds(None))
    profile = run.measured(0, None)
    orders.observe(profile, None, is_trial=False)
    batch_s = max(stage.batch_s for stage in profile.stages)
    earned_s = FIRST_S + SHARE_OF_TIME * batch_s
    assert orders.effort == pytest.approx(pace().computations_per_s * earned_s)


def test_small_batches_are_not_worth_machine_code() -> None:
    assert not is_worth_compiling(4, 8) and is_worth_compiling(8, 16)
