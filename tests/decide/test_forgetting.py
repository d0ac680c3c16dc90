"""Layers take other times from now on: what was profiled before is no reason to move."""

from __future__ import annotations

import pickle

from tests.decide.synthetic import UNEQUAL, controller, profile

EQUAL = [0.01] * 8
CUT = (0, 4, 8)


def test_only_new_profiles_count() -> None:
    decider = controller(rebalance_every=1, min_gain=0.0)
    for batch in range(5):
        decider.observe(profile(UNEQUAL, CUT, batch=batch))
    assert decider.is_ready and decider.due(4)
    decider.forget_profiles()
    assert not decider.is_ready and not decider.due(4)
    assert decider.smoothed() is not None, "for who must choose now"
    decisions = []
    for batch in range(5, 5 + 4):
        assert decider.wants_profile(batch), "every batch for a while"
        decider.observe(profile(EQUAL, CUT, batch=batch))
        decisions.append(decider.decide(batch, CUT))
    made = [found for found in decisions if found is not None]
    assert made and not any(decision.rebalance for _, decision in made), "the old times would move a layer"


def test_without_forgetting_they_would_move_a_layer() -> None:
    decider = controller(rebalance_every=1, min_gain=0.0)
    for batch in range(5):
        decider.observe(profile(UNEQUAL, CUT, batch=batch))
    found = decider.decide(4, CUT)
    assert found is not None and found[1].rebalance


def test_a_checkpoint_between_keeps_nothing_of_the_old_ones() -> None:
    decider, later = (controller(rebalance_every=1) for _ in range(2))
    for batch in range(5):
        decider.observe(profile(UNEQUAL, CUT, batch=batch))
    decider.forget_profiles()
    decider.observe(profile(EQUAL, CUT, batch=5))
    later.load_state_dict(pickle.loads(pickle.dumps(decider.state_dict())), same_stages=True)
    assert later.smoothed() == decider.smoothed()
    assert later.is_ready == decider.is_ready
    assert later.newest == decider.newest
