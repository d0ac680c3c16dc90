"""Seconds that batches take at least."""

from __future__ import annotations

import numpy as np
import pytest

from dynpipe_ds.planning import least_seconds
from dynpipe_ds.planning.bounds import least_batches_s
from dynpipe_ds.planning.memory import activation_caps
from dynpipe_ds.simulation import Workload
from tests.planning.test_together import half, random_profile


@pytest.mark.parametrize("num_frozen", [0, 5])
@pytest.mark.parametrize("speeds", [None, [1.0, 0.7, 1.3, 1.0]], ids=["workers alike", "one slower"])
def test_many_batches_at_once_are_bounded_as_each_by_itself(num_frozen: int, speeds: list[float] | None) -> None:
    """Of other numbers of micro-batches and other links; with an empty stage; with caps and without."""
    rng, num_capped = np.random.default_rng(num_frozen), 0
    batches = [half(random_profile(seed, 14, 5 + seed % 2, num_frozen)) for seed in range(4)]
    for _ in range(20):
        cuts = (0, *np.sort(rng.integers(0, 15, 3)).tolist(), 14)
        caps = None
        if rng.random() < 0.7:
            newest = batches[-1]
            worker_bytes = sum(newest.state_bytes()) + int(rng.uniform(1, 3) * sum(newest.activation_bytes()))
            caps = activation_caps(newest, cuts, worker_bytes)
            num_capped += 1
        one_by_one = [least_seconds(Workload.from_profile(batch, cuts, speeds=speeds), caps) for batch in batches]
        assert least_batches_s(batches, cuts, caps, speeds) == pytest.approx(one_by_one, rel=1e-12)
    assert 0 < num_capped < 20
