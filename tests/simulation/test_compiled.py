"""Loops as machine code: the same plans and timetables to the bit, and Python where Numba is missing or fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dynpipe_ds.measure.profile import PipelineProfile, smooth
from dynpipe_ds.planning import compile_planning, plan_batch, plan_order
from dynpipe_ds.schedule import Order, order_of
from dynpipe_ds.simulation import Workload, simulate
from dynpipe_ds.simulation.compiled import compile_loops, given, interpret_loops, is_compiled
from dynpipe_ds.simulation.timetable import Timetable
from tests.planning.test_planner import workloads
from tests.planning.test_together import half, random_profile


@pytest.fixture(autouse=True)
def in_python() -> Iterator[None]:
    """Loops run in Python before and after."""
    interpret_loops()
    yield
    interpret_loops()


def compiled() -> None:
    pytest.importorskip("numba")
    assert compile_planning() and is_compiled()


def cases() -> Iterator[tuple[PipelineProfile, dict[str, Any]]]:
    """Frozen layers, links, batches that vary, few and many computations to look at."""
    for seed in range(24):
        rng = np.random.default_rng(seed)
        num_stages, num_micro_batches = int(rng.integers(1, 9)), int(rng.integers(1, 17))
        num_layers = num_stages * int(rng.integers(1, 5))
        num_frozen = num_layers // 3 if seed % 3 == 0 else 0
        batches = [half(random_profile(seed + k, num_layers, num_micro_batches, num_frozen)) for k in range(3)]
        given = {
            "candidates": [[round(i * num_layers / num_stages) for i in range(num_stages + 1)]],
            "activation_link_s": float(rng.choice([0.0, 0.2])), "effort": int(rng.choice([0, 3_000, 30_000])),
            "varying": batches if seed % 2 else [],
        }  # fmt: skip
        yield (smooth(batches, "mean") if seed % 2 else batches[0]), given


def plans() -> list[tuple[Any, ...]]:
    found = []
    for profile, options in cases():
        plan = plan_batch(profile, **options)
        planned = plan.planned
        ran = planned.order, planned.varying_s, planned.is_1f1b
        found.append((plan.placement, plan.seconds, plan.num_computations, *ran))
    return found


def test_plans_are_the_same_to_the_bit() -> None:
    in_python = plans()
    compiled()
    assert plans() == in_python
    assert sum(not is_1f1b for *_, is_1f1b in in_python) > 10


def test_caps_may_be_as_large_as_they_like() -> None:
    workload = Workload([1.0, 2.0], [2.0, 3.0], 4, weight_s=[1.0, 1.0], activation_bytes=[3, 3])
    in_python = plan_order(workload, 10**30)
    compiled()
    assert plan_order(workload, 10**30).order == in_python.order == plan_order(workload, 10**6).order


def test_timetables_say_the_same_whenever_they_were_made() -> None:
    """One that Python made is run as machine code, and the reverse."""
    each = list(workloads(seed=3, each=2))

    def made() -> list[Timetable]:
        return [
            Timetable(order_of("1f1b", workload.num_micro_batches, workload.num_stages), workload.frozen_boundaries)
            for workload in each
        ]

    def told(timetables: list[Timetable]) -> list[tuple[Any, ...]]:
        return [
            (timetable.makespan_s(workload), timetable.peak_bytes(workload), timetable.simulation(workload))
            for timetable, workload in zip(timetables, each, strict=True)
        ]

    before = made()
    in_python = told(before)
    compiled()
    after = made()
    assert told(before) == told(after) == in_python
    interpret_loops()
    assert told(after) == in_python


def test_a_stage_that_waits_for_ever_is_named() -> None:
    compiled()
    with pytest.raises(ValueError, match="stage 0 waits for ever in RG0"):
        Timetable(Order.parse("F0 SA0 RG0 B0 F1 SA1 RG1 B1 | RA0 F0 RA1 F1 B0 SG0 B1 SG1"))


def test_without_numba_python_plans(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not compile_planning() and not is_compiled()
    assert isinstance(given(np.zeros(2)), list) and not caplog.records
    assert simulate(Workload([1.0], [2.0], 2)).makespan_s == 6.0


class Broken:
    """A Numba that can't be used."""

    @staticmethod
    def njit(*_args: object, **_options: object) -> object:
        raise TypeError("no machine code today")


class WithoutFolder:
    """A Numba that finds no folder to keep machine code in, and leaves functions as they are."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def njit(self, function: Any = None, *, cache: bool = False) -> Any:
        self.asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return function


def test_a_numba_that_fails_stops_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "numba", Broken())
    assert not compile_planning() and not is_compiled()
    assert "planning stays in Python" in caplog.text and "no machine code today" in caplog.text
    assert len(plans()) == 24


def test_nothing_has_to_be_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = WithoutFolder()
    monkeypatch.setitem(sys.modules, "numba", numba)
    assert compile_loops(lambda: None) and is_compiled()
    assert True in numba.asked and False in numba.asked
