"""Noise of a series, and the batches that confirm a gain."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from dynpipe_ds.decide.evidence import EVIDENCE, USUAL, confirming_batches, evidence_for, noise_of


def test_noise_of_a_series() -> None:
    rng = random.Random(0)
    series = [rng.gauss(5.0, 0.3) for _ in range(2000)]
    assert noise_of(series) == pytest.approx(0.3, rel=0.1)
    stepped = [x + (10.0 if i > 1000 else 0.0) for i, x in enumerate(series)]
    assert noise_of(stepped) == pytest.approx(0.3, rel=0.1)
    assert noise_of([]) == noise_of([1.0]) == noise_of([2.0] * 9) == 0.0


def test_a_model_that_changes_fast_is_no_noise() -> None:
    """As much in one batch as in the next, or faster and faster."""
    rng = random.Random(1)
    noise = [rng.gauss(0.0, 0.01) for _ in range(200)]
    ramp = [0.1 * i + each for i, each in enumerate(noise)]
    curve = [0.001 * i**2 + each for i, each in enumerate(noise)]
    assert noise_of(ramp) == pytest.approx(0.01, rel=0.2) and noise_of(curve) == pytest.approx(0.01, rel=0.2)
    assert noise_of(noise) == pytest.approx(0.01, rel=0.15), "as before where nothing changes"
    assert noise_of([0.0, 1.0, 2.0]) > 1.0, "three values tell of no trend"


def test_few_differences_say_little() -> None:
    """What is usual counts, too, unless what is seen is less even if it is taken for noisier than it looks."""
    as_deviation = math.sqrt(math.pi) / 2  # of a difference of two
    mixed = math.sqrt((2 * USUAL**2 + (0.08 * as_deviation) ** 2) / 3)
    assert noise_of([1.0, 1.08], usual=USUAL) == pytest.approx(mixed, rel=1e-3)
    assert 5 * 0.001 * as_deviation < noise_of([1.0, 1.001], usual=USUAL) == noise_of([1.0, 1.001]) < 0.01
    assert noise_of([1.0, 1.08]) > 5 * 0.08 * as_deviation, "nothing is thought"
    rng = random.Random(3)
    for noise in (0.01, 0.2):
        many = [rng.gauss(1.0, noise) for _ in range(2000)]
        assert noise_of(many, usual=USUAL) == pytest.approx(noise, rel=0.1)
        few = [noise_of(many[i : i + 3], usual=USUAL) for i in range(0, 1998, 3)]
        assert min(noise, USUAL) < fmean(few) < max(noise, USUAL), "between both"


def test_a_step_that_was_known_is_no_noise() -> None:
    steps = [1.0, 1.01, 2.0, 2.01, 3.0, 3.01]
    assert noise_of(steps) > 0.1 > 0.05 > noise_of(steps, {2, 4})
    assert noise_of(steps, range(1, 6)) == noise_of(steps), "where all are known, they are all there is"
    assert noise_of([1.0, 1.5], {1}) == noise_of([1.0, 1.5])
    quiet = [1.0, 1.01] * 20
    assert noise_of(quiet, {len(quiet) - 1}) <= noise_of(quiet), "a change that was none takes nothing from the rest"


def test_a_wait_costs_no_more_than_a_mistake() -> None:
    assert evidence_for(saved_a_batch_s=0.1, cost_s=0.0) == 2
    assert evidence_for(saved_a_batch_s=0.1, cost_s=0.1) == 2
    assert evidence_for(saved_a_batch_s=0.1, cost_s=0.13) == 3
    assert evidence_for(saved_a_batch_s=0.1, cost_s=5.0) == 4


def test_confirming_batches() -> None:
    assert confirming_batches([0.0] * 9 + [0.3] * 2, 0.0, 0.05, 2) == 2
    assert confirming_batches([0.3] * 3, 0.0, 0.05, EVIDENCE) == 0
    assert confirming_batches([0.0] * 9 + [0.3] * 4, 0.0, 0.05, EVIDENCE) == 4
    assert confirming_batches([0.3] * 9 + [0.0], 0.0, 0.05, EVIDENCE) == 0
    assert confirming_batches([0.3] * 30, 0.34, 0.05, EVIDENCE) == 12  # 2 * 0.34 / 12 ** (1 / 3) < 0.3
    assert confirming_batches([0.05] * 30, 0.0, 0.05, EVIDENCE) == 0
