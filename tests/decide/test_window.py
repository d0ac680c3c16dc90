"""How many batches foretell the next one the best: many around a mean that stays, few where layers change for good."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dynpipe_ds.decide.window import COMPARED, MANY, Window
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.planning import plan_batch
from tests.planning.test_together import half, random_profile

FEW = 2


def observed(batches: np.ndarray) -> Window:
    window = Window(FEW)
    for seconds in batches:
        window.observe([0.0, *np.cumsum(seconds)])
    return window


def around(seed: int, num_batches: int, usual: float = 1.0) -> np.ndarray:
    """Twelve layers whose seconds vary by a fifth; the first four take ``usual``."""
    random, means = np.random.default_rng(seed), np.array([usual] * 4 + [1.0] * 8)
    return means * random.lognormal(0.0, 0.2, (num_batches, 12))


def test_many_batches_where_layers_vary_around_what_stays() -> None:
    counts = [observed(around(seed, 40)).many for seed in range(20)]
    assert set(counts) <= set(MANY) and counts.count(16) > counts.count(8), counts


def test_few_where_layers_become_faster_step_by_step() -> None:
    falls = np.ones((40, 12))
    falls[:, :4] = np.linspace(1.0, 0.2, 40)[:, None]
    assert observed(falls).many is None
    noisy = [observed(falls * np.random.default_rng(seed).lognormal(0, 0.01, (40, 12))).many for seed in range(20)]
    assert noisy == [None] * 20


def test_few_after_a_change() -> None:
    for seed in range(20):
        window = observed(np.concatenate([around(seed, 30), around(seed + 100, 3, usual=0.2)]))
        assert window.many is None, "the newest two batches say that the model is not what it was"


def test_few_before_enough_was_foretold_and_after_a_restart() -> None:
    assert observed(around(1, FEW + COMPARED)).many is None
    window = observed(around(1, 40))
    window.restart()
    assert window.many is None
    for seconds in around(2, 40):
        window.observe([0.0, *np.cumsum(seconds)])
    assert window.many in MANY


def test_what_it_knows_outlives_a_checkpoint() -> None:
    window, other, batches = observed(around(3, 20)), Window(FEW), around(4, 12)
    other.load_state_dict(window.state_dict())
    for seconds in batches:
        for each in (window, other):
            each.observe([0.0, *np.cumsum(seconds)])
        assert window.many == other.many
    other.load_state_dict({})
    assert other.many is None


def test_a_plan_for_batches_that_vary_counts_what_their_mean_hides() -> None:
    """Where now the first half of the layers is dear and now the second, every batch takes longer than their mean."""
    mean = random_profile(5, 12, 8)
    batches = [scaled(mean, [1.5, 0.5]), scaled(mean, [0.5, 1.5])]
    start = (0, 4, 8, 12)
    without, alike, found = (
        plan_batch(half(mean), [start], varying=list(map(half, varying))).present
        for varying in ((), [mean] * 2, batches)
    )
    assert without is not None and alike is not None and found is not None
    assert alike.seconds <= without.seconds * 1.01 and found.seconds > 1.05 * max(without.seconds, alike.seconds)


def scaled(profile: PipelineProfile, factors: list[float]) -> PipelineProfile:
    layers = tuple(
        replace(layer, forward_s=layer.forward_s * factors[i >= 6], backward_s=layer.backward_s * factors[i >= 6])
        for i, layer in enumerate(profile.layers)
    )
    return replace(profile, layers=layers)
