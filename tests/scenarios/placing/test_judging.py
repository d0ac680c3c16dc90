"""What was searched is judged by batches that the next one may be like."""

from __future__ import annotations

import numpy as np
import pytest

from scenarios.moe.placing import Lanes, LayerModel
from scenarios.moe.placing.judging import MOST_CHANGE, judged, likely
from scenarios.moe.placing.traffic import Ints
from tests.scenarios.placing.cases import Table, any_owner, constants, skewed

MODELS = [LayerModel(constants(agg=agg), overlapped) for agg in ("chain", "sums") for overlapped in (False, True)]


def pair(num_ranks: int, num_experts: int, seed: int) -> tuple[Table, Table]:
    """The last batch and the one before it."""
    draw = np.random.default_rng(seed)
    usual = skewed(num_ranks, num_experts, seed)
    last, earlier = (draw.poisson(usual * draw.lognormal(0, 0.5, num_experts)).astype(float) for _ in range(2))
    return last, earlier


def static(num_ranks: int, num_experts: int) -> Ints:
    return np.array(Lanes.static(num_ranks, num_experts).owner)


def test_changes_of_experts_by_hand() -> None:
    """Expert 0 has doubled and expert 1 is as it was: either may double or halve; a source keeps its rows."""
    last, earlier = np.array([[40.0, 60.0], [0.0, 0.0]]), np.array([[20.0, 60.0], [0.0, 0.0]])
    first, *changed = likely(last, earlier)
    assert first is earlier
    shares = [[80, 60], [20, 60], [40, 120], [40, 30]]
    assert len(changed) == len(shares)
    for batch, (a, b) in zip(changed, shares, strict=True):
        np.testing.assert_allclose(batch, [[100 * a / (a + b), 100 * b / (a + b)], [0, 0]])


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(2, 2), (4, 8), (4, 32), (8, 8)])
def test_likely_batches_keep_rows_and_say_the_same_every_time(num_ranks: int, num_experts: int) -> None:
    last, earlier = pair(num_ranks, num_experts, 1)
    last[:, 0], earlier[:, 1] = 0.0, 0.0  # of these nobody knows how they change
    found = likely(last, earlier)
    assert len(found) <= 1 + 2 * 8 + 2
    for batch, again in zip(found, likely(last.copy(), earlier.copy()), strict=True):
        np.testing.assert_array_equal(batch, again)
    for batch in found[1:]:
        np.testing.assert_allclose(batch.sum(axis=1), last.sum(axis=1))
        assert batch[:, 0].sum() == 0 and np.isfinite(batch).all()


def test_a_batch_that_did_not_change_is_the_only_likely_one() -> None:
    last, _ = pair(4, 8, 0)
    for batch in likely(last, last):
        np.testing.assert_allclose(batch, last)


def test_no_change_is_believed_without_a_limit() -> None:
    last, earlier = np.array([[1000.0, 1000.0]]), np.array([[1.0, 1000.0]])
    assert max(batch[0, 0] / batch[0, 1] for batch in likely(last, earlier)[1:]) == pytest.approx(MOST_CHANGE)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_nothing_that_was_slower_than_static_is_taken(model: LayerModel) -> None:
    taken = 0
    for seed in range(12):
        last, earlier = pair(4, 8, seed)
        home = static(4, 8)
        others = [any_owner(4, 8, 100 * seed + each) for each in range(3)]
        found = judged(model, last, earlier, others[0], [home, *others[1:]])
        taken += not np.array_equal(found, home)
        for batch in (last, earlier):
            assert model.whole(model.parts(found, batch)) <= model.whole(model.parts(home, batch))
    assert model.overlapped or not taken, "random placements cost more than they save, unless transfers are hidden"


def test_copies_are_taken_if_they_pay_on_average_and_did_not_cost_in_the_earlier_batch() -> None:
    model = LayerModel(constants(agg="sums"), overlapped=False)
    home = static(4, 4)
    copied = np.array(Lanes.parse("4x4 0@1:1 0@2:2 0@3:3").owner)
    last, earlier = np.full((4, 4), 2000.0), np.full((4, 4), 2000.0)
    last[:, 0], earlier[:, 0] = 14000.0, 8000.0
    batches = likely(last, earlier)
    seconds = np.array([[model.whole(model.parts(each, batch)) for batch in batches] for each in (home, copied)])
    assert seconds[1, 0] < seconds[0, 0] and (seconds[1] / seconds[0]).mean() < 0.97
    assert np.array_equal(judged(model, last, earlier, copied, [home]), copied)
    assert np.array_equal(judged(model, last, np.full((4, 4), 2000.0), copied, [home]), home)
