"""Evaluation on the way leaves no trace in training, and gives the same bits whatever the partition."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.models import digest
from tests.distributed.ranks import run_ranks
from tests.scenarios.exactness import MODEL, Job, build
from tests.scenarios.test_resume_on_ranks import JOBS

DROPOUT = replace(MODEL, dropout=0.2)
COMMON = ["sparse_attention"]  # counts in every forward pass, and evaluation must not count


@dataclass
class Seen:
    """What one rank knows of a run."""

    losses: list[float]
    reports: list[Any]
    layers: dict[str, str]
    validations: list[dict[str, float]]


def train(job: Job, *, moves: bool, evaluate: bool) -> Seen:
    from scenarios.data import ValidationBatches
    from scenarios.validation import Validator

    run = build(job)
    tokens = np.random.default_rng(1).integers(job.model.vocab_size, size=16 * 16 + 1).astype(np.uint8)
    batches = ValidationBatches(tokens, run.data.shape, vocab_size=job.model.vocab_size)
    if evaluate:
        assert batches.num_micro_batches % run.data.shape.num_micro_batches, "the last batch is a smaller one"
        run.validator = Validator(run.engine, batches, every=2)
    boundaries = job.moves(run.engine.partition[-1]) if moves else {}
    for batch in range(job.num_batches):
        if batch in boundaries:
            run.engine.repartition(boundaries[batch])
        list(run.train_window([batch], timed=True))
    before = streams()
    if run.validator is not None:
        assert run.validator.evaluate() == run.measured.validations[-1]["loss"]
    assert streams() == before and run.engine.module.training
    return Seen(run.measured.losses, run.measured.reports, digest(run.engine), run.measured.validations)


def streams() -> tuple[Any, ...]:
    """Where the random streams of this process are."""
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def train_all(_rank: int, names: list[str], both: bool) -> dict[str, list[Seen]]:
    results = {}
    for name in names:
        job = replace(JOBS[name], model=MODEL if "cache" in name else DROPOUT, num_batches=6)
        evaluated = [train(job, moves=moves, evaluate=True) for moves in (True, False)[: 1 + both]]
        results[name] = [train(job, moves=False, evaluate=False), *evaluated]
    return results


@pytest.mark.parametrize(
    "names",
    [COMMON, pytest.param(list(JOBS), marks=pytest.mark.exhaustive)],
    ids=["common", "every_scenario"],
)
def test_evaluating_leaves_no_trace(names: list[str]) -> None:
    """Losses, reports, weights, optimizer state and random streams; with dropout, and a cache of whole batches."""
    ranks = run_ranks(train_all, 2, names, names != COMMON)
    for name in names:
        plain, moved, *static = zip(*(rank[name] for rank in ranks), strict=True)
        for left, *others in zip(plain, moved, *static, strict=True):
            for right in others:
                assert left.losses == right.losses and left.reports == right.reports, name
                assert right.validations == moved[0].validations and left.validations == [], name
        for run in (moved, *static):
            layers = [{item for rank in ranks for item in rank.layers.items()} for ranks in (plain, run)]
            assert layers[0] == layers[1], name
        found = moved[0].validations
        losses = [one["loss"] for one in found]
        assert [one["after"] for one in found] == [2, 4, 6]
        assert len(set(losses)) == 3 and all(np.isfinite(losses)), name
        assert [one["perplexity"] for one in found] == pytest.approx(np.exp(losses))


def evaluate_and_compute(_rank: int) -> tuple[float, float]:
    """Loss of the pipeline, and of its layers called one after the other on all of the data at once."""
    from scenarios.data import ValidationBatches
    from scenarios.validation import Validator

    run = build(Job("none", stages=1))
    tokens = np.random.default_rng(1).integers(64, size=16 * 16 + 1).astype(np.uint8)
    found = Validator(run.engine, ValidationBatches(tokens, run.data.shape, vocab_size=64)).evaluate()
    x = torch.from_numpy(tokens[:-1].astype(np.int64)).view(16, 16)
    labels = torch.from_numpy(tokens[1:].astype(np.int64)).view(16, 16)
    with torch.no_grad():
        for _, layer in sorted(run.engine.local_layers().items()):
            x = layer.eval()(x)
    return found, float(torch.nn.functional.cross_entropy(x.flatten(0, 1).double(), labels.flatten()))


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    """Although the last batch is smaller than the others."""
    ((found, expected),) = run_ranks(evaluate_and_compute, 1)
    assert found == pytest.approx(expected, rel=1e-5)
