"""Runs that are pushed to their end and back: they can be run, keep their caps, and are shorter most often."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from dynpipe_ds.planning import justified as module
from dynpipe_ds.planning import least_seconds
from dynpipe_ds.planning.justified import justified
from dynpipe_ds.planning.listing import Listing, Policy, list_order, work_of
from dynpipe_ds.planning.runs import Places, Ran, Wires, Work
from dynpipe_ds.schedule import Op
from dynpipe_ds.simulation import Workload, simulate
from dynpipe_ds.simulation.timetable import Timetable
from tests.planning.test_planner import POLICIES, workloads


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("share", [None, 0.0, 0.3, 1.5], ids="between halves: {}".format)
def test_what_was_pushed_runs_and_keeps_its_caps(times: int, share: float | None) -> None:
    """From all kinds of runs, within tight caps and wide ones, whatever is held for weight gradients; all is run."""
    for workload in workloads(seed=1):
        count, caps = workload.num_micro_batches, [times * size for size in workload.activation_bytes]
        if share is not None:
            workload = replace(workload, weight_bytes=[int(share * size) for size in workload.activation_bytes])
        work = work_of(workload, caps)
        for policy in POLICIES[::6]:
            found = justified(list_order(work, policy), work, 0.5)
            result = simulate(workload, found.order(count))
            assert result.makespan_s <= found.seconds * (1 + 1e-12)
            assert all(stage.peak_activation_bytes <= cap for stage, cap in zip(result.stages, caps, strict=True))
            assert result.makespan_s >= least_seconds(workload, caps) * (1 - 1e-12)
            for ran, whole in zip(found.ran, found.whole, strict=True):
                assert ran.count(Op.FORWARD) == ran.count(Op.BACKWARD) == count
                assert ran.count(Op.BACKWARD_WEIGHT) in (0, count - len(whole))


def backwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Op], ...]]:
    """What comes of each run from the end to the beginning."""
    seen, real = [], module.run_backwards

    def noting(work: Work, places: Places, patience: float, ran: Ran, wires: Wires) -> None:
        real(work, places, patience, ran, wires)
        seen.append(Listing(0.0, ran, 0).ran)

    monkeypatch.setattr(module, "run_backwards", noting)
    return seen


def test_seen_from_the_end_no_stage_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients come first there, and could fill a stage before the backward that frees memory."""
    seen = backwards(monkeypatch)
    for size in (0, 1, 2, 3, 4, 7):
        for cap in (4, 6, 9):
            workload = Workload(
                [1.0] * 3, [2.0] * 3, 6, weight_s=[1.0] * 3, activation_bytes=[4] * 3, weight_bytes=[size] * 3,
            )
            work = work_of(workload, [cap] * 3)
            justified(list_order(work, POLICIES[0]), work, 0.5)
            for ran in seen.pop():
                assert ran.count(Op.FORWARD) == ran.count(Op.BACKWARD) == 6, (size, cap)


def test_a_frozen_stage_may_train_after_all() -> None:
    num_frozen = 0
    for workload in workloads(seed=4, each=8):
        num_frozen += workload.frozen_boundaries > 0
        work = work_of(workload, workload.activation_bytes)
        found = justified(list_order(work, POLICIES[1]), work, 0.75)
        for frozen in range(workload.frozen_boundaries + 1):
            Timetable(found.order(workload.num_micro_batches), frozen)
    assert num_frozen > 15


def uneven(seed: int, num_stages: int, count: int) -> tuple[Workload, list[int]]:
    """Stages that differ by a tenth or so; as much memory as 1F1B needs on the first one."""
    rng = np.random.default_rng(seed)
    seconds = rng.lognormal(0.0, 0.15, (num_stages, 1))
    workload = Workload(
        seconds, 2 * seconds, count, weight_s=seconds, activation_bytes=[1] * num_stages, activation_link_s=0.05,
        gradient_link_s=0.05,
    )
    return workload, [num_stages] * num_stages


def pushed(workload: Workload, caps: list[int], policy: Policy) -> tuple[Listing, Listing]:
    """A run, and the shortest of it and of three that it leads to."""
    work = work_of(workload, caps)
    first = last = best = list_order(work, policy)
    for patience in (0.35, 0.75, 1.0):
        last = justified(last, work, patience)
        best = min(best, last, key=lambda one: one.seconds)
    return first, best


@pytest.mark.parametrize(("num_stages", "count"), [(8, 24), (16, 32)])
def test_most_runs_get_shorter(num_stages: int, count: int) -> None:
    """Also with other seconds than they were planned for: by chance, the gain would be gone."""
    gains, gains_otherwise = [], []
    rng = np.random.default_rng(0)
    for seed in range(6):
        workload, caps = uneven(seed, num_stages, count)
        first, best = pushed(workload, caps, Policy(prefers_forwards=True, patience=0.15, depth=1.5))
        gains.append(1 - best.seconds / first.seconds)
        factor = rng.lognormal(0.0, 0.05, (num_stages, count))
        other = replace(
            workload, forward_s=workload.forward_s * factor, backward_s=workload.backward_s * factor,
            weight_s=workload.weight_s * factor,
        )
        before_s, after_s = (simulate(other, one.order(count)).makespan_s for one in (first, best))
        gains_otherwise.append(1 - after_s / before_s)
    assert sum(gain > 0 for gain in gains) >= 5 and fmean(gains) > 0.01, gains
    assert fmean(gains_otherwise) > 0.7 * fmean(gains), gains_otherwise
