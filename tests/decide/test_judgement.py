"""What is enough where layers vary, and nothing is ever certain."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.evidence import noise_of
from dynpipe_ds.decide.history import Gains, History
from dynpipe_ds.decide.judgement import Prospect, judge
from dynpipe_ds.partition import Plan
from tests.decide.synthetic import profile

SCATTER = [0.05, -0.05, 0.04, -0.06, 0.06, -0.04, 0.05, -0.05]
ERROR = noise_of(SCATTER) / math.sqrt(len(SCATTER))


@pytest.mark.parametrize(("mean", "moves"), [(0.6 * ERROR, True), (0.4 * ERROR, False)])
def test_half_of_the_error_of_the_average_is_enough(mean: float, moves: bool) -> None:
    """A move that is expected to pay and does not costs no more than itself."""
    rng, config = np.random.default_rng(3), DynamicPipelineConfig(enabled=True, rebalance_every="auto")
    history = History(config)
    for _ in range(20):
        newest = profile((rng.uniform(0.8, 1.2, 9) / 100).tolist(), (0, 3, 9))
        history.append(newest, newest)
    assert history.varies
    by_batch = [gain + mean for gain in SCATTER]
    prospect = Prospect(1.0, 1.0 - mean, Gains(by_batch, min(by_batch)))
    decision = judge(Plan((0, 4, 9), 0.06, 0.06), newest, history, config, 0.01, prospect)
    assert decision.saved_s > decision.cost_s and decision.rebalance == moves, decision.reason
