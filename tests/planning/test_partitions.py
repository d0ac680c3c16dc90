"""What the stages of partitions have to do, from sums that partitions share."""

from __future__ import annotations

import numpy as np
import pytest

from dynpipe_ds.measure.profile import smooth
from dynpipe_ds.partition.prepare import prepare
from dynpipe_ds.planning.listing import work_of
from dynpipe_ds.planning.memory import activation_caps, late_layers
from dynpipe_ds.planning.partitions import Partitions
from dynpipe_ds.simulation import Workload
from tests.planning.test_together import half, random_profile

NUM_LAYERS, NUM_STAGES = 14, 4


@pytest.mark.parametrize("num_frozen", [0, 5])
@pytest.mark.parametrize("share", [0.4, 1.0], ids="room for {} of the weight gradients".format)
def test_stages_are_those_of_each_workload_to_the_bit(num_frozen: int, share: float) -> None:
    """Of the mean and of each batch; workers of other speeds and memory, links, layers that have no room to wait."""
    rng = np.random.default_rng(num_frozen)
    batches = [half(random_profile(seed, NUM_LAYERS, 5, num_frozen)) for seed in range(3)]
    mean, start = smooth(batches, "mean"), (0, 4, 7, 11, NUM_LAYERS)
    speeds, links = [1.0, 0.7, 1.3, 1.0], ([0.1, 0.0, 0.3], [0.2, 0.1, 0.0])
    problem = prepare(mean.costs("time"), NUM_STAGES, current=start, speeds=speeds, allow_empty=True)
    activation_bytes = mean.activation_bytes()
    worker_bytes = [sum(mean.state_bytes()) + int(share * sum(activation_bytes)) + 1000 * stage for stage in range(4)]
    weight_bytes = [int(0.7 * held) for held in activation_bytes]
    partitions = Partitions(mean, problem, worker_bytes, start, weight_bytes, links, batches)
    num_late = 0
    for _ in range(40):
        inner = np.sort(rng.integers(0, NUM_LAYERS + 1, NUM_STAGES - 1)).tolist()
        cuts = (0, *inner, NUM_LAYERS)
        try:
            caps = activation_caps(mean, cuts, worker_bytes)
        except ValueError:
            continue
        late = late_layers(mean, cuts, caps, weight_bytes)
        num_late += bool(late)
        assert (partitions.caps(cuts), partitions.late(cuts, caps)) == (caps, late)
        for kind in {late, ()}:
            for work, batch in zip(partitions.works(cuts, kind, caps), [mean, *batches], strict=True):
                workload = Workload.from_profile(
                    batch, cuts, speeds=speeds, weight_bytes=weight_bytes, late=kind, activation_link_s=links[0],
                    gradient_link_s=links[1],
                )
                assert all(map(np.array_equal, work, work_of(workload, caps)))
    assert num_late > 5 or share == 1.0
