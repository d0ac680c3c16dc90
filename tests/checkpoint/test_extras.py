"""All that decisions rest on is plain in a checkpoint, and the same when it is read back."""

from __future__ import annotations

import pytest

from dynpipe_ds.checkpoint.extras import common_state, rank_state, restore
from dynpipe_ds.checkpoint.plain import plain
from dynpipe_ds.decide import Balancer
from tests.checkpoint.fakes import make_run
from tests.decide.test_speeds import play


@pytest.mark.parametrize(
    ("slow", "section"), [({}, {}), ({1: 1.5}, {}), ({1: 1.5}, {"stage_speeds": [1.0, 0.5, 1.0, 1.0]})]
)
def test_what_was_measured_of_workers_is_kept(slow: dict[int, float], section: dict[str, object]) -> None:
    balancer, _ = play(slow, num_batches=12, **section)
    assert (balancer.speeds is not None) == bool(slow), "profiles as measured and at unit speed differ"
    first, second = make_run(**section), make_run(**section)
    first.balancer = balancer
    stored = plain(common_state(first), "common.pt")
    restore(second, stored, plain(rank_state(first), "rank_0.pt"), same_stages=True)
    assert isinstance(second.balancer, Balancer)
    assert second.balancer.state_dict() == balancer.state_dict()
