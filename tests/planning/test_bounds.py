"""Seconds that batches take at least."""

from __future__ import annotations

import numpy as np
import pytest

from dynpipe_ds.planning import least_seconds
from dynpipe_ds.planning.bounds import least_batches_s
from dynpipe_ds.planning.memory import activation_caps
from dynpipe_ds.simulation import Workload
from tests.planning.test_together import random_profile


@pytest.mark.parametrize("num_frozen", [0, 5])
@pytest.mark.parametrize("speeds", [None, [1.0, 0.7, 1.3, 1.0]], ids=["workers alike", "one slower"])
def test_many_batches_at_once_are_bounded_as_each_by_itself(num_frozen: int, speeds: list[float] | None) -> None:
    """Of other numbers of micro-batches and other links; with an empty stage; with caps and without."""
    rng, partitions, caps = np.random.default_rng(num_frozen), [], []
    shares = [*rng.uniform(0.0, 0.6, 12).tolist(), 0.0, 1.2]
    batches = [random_profile(seed, 14, 5 + seed % 2, num_frozen) for seed in range(4)]
    for _ in range(20):
        cuts = (0, *np.sort(rng.integers(0, 15, 3)).tolist(), 14)
        partitions.append(cuts)
        newest = batches[-1]
        worker_bytes = sum(newest.state_bytes()) + int(rng.uniform(1, 3) * sum(newest.activation_bytes()))
        caps.append(activation_caps(newest, cuts, worker_bytes) if rng.random() < 0.7 else None)
    assert None in caps and any(caps)
    whole_s = [[layer.backward_s for layer in batch.layers] for batch in batches]
    split = [
        batch.with_seconds(weight_s=(np.array(shares) * seconds).tolist())
        for batch, seconds in zip(batches, whole_s, strict=True)
    ]
    held = {batch.activation_bytes()[0] for batch in batches}
    assert len(held) == 1, "else one by one they would have other room"
    one_by_one = [
        [least_seconds(Workload.from_profile(batch, cuts, speeds=speeds), room) for batch in split]
        for cuts, room in zip(partitions, caps, strict=True)
    ]
    found = least_batches_s(batches, partitions, caps, shares, speeds=speeds)
    assert found == [pytest.approx(seconds, rel=1e-12) for seconds in one_by_one]
