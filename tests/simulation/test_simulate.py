"""The simulator: hand-computed batches, closed forms, and the fast way against the reference."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from deepspeed.runtime.pipe import schedule as theirs

from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.schedule import Instruction, Op, Order, order_of
from dynpipe_ds.simulation import (
    Interval,
    ScheduleName,
    Simulation,
    Workload,
    bubble_ratio_1f1b,
    chimera_bubble_ratio,
    equal_stages_s,
    flow_line_s,
    makespans,
    predicted_batches_s,
    simulate,
    streams_of,
)
from dynpipe_ds.simulation.streams import run_order
from dynpipe_ds.simulation.timetable import Timetable
from tests.simulation.workloads import SIZES, random_workload

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def reference(workload: Workload, schedule: ScheduleName) -> Simulation:
    return simulate(workload, order_of(schedule, workload.num_micro_batches, workload.num_stages))


def intervals(simulation: Simulation, stage: int) -> list[tuple[str, int, float, float]]:
    return [i[1:5] for i in simulation.timeline if i.stage == stage and i.kind != "message"]


# -- computed by hand -----------------------------------------------------------------------------


def test_two_stages_two_micro_batches() -> None:
    """1F1B, forward 1 and backward 2: 9 seconds, as (M + S - 1)(f + b)."""
    result = simulate(Workload([1.0, 1.0], [2.0, 2.0], 2, activation_bytes=[10, 7]), timeline=True)
    assert intervals(result, 0) == [
        ("forward", 0, 0, 1), ("forward", 1, 1, 2), ("wait", 0, 2, 4), ("backward", 0, 4, 6),
        ("wait", 1, 6, 7), ("backward", 1, 7, 9),
    ]
    assert intervals(result, 1) == [
        ("wait", 0, 0, 1), ("forward", 0, 1, 2), ("backward", 0, 2, 4), ("forward", 1, 4, 5), ("backward", 1, 5, 7),
    ]
    assert (result.makespan_s, result.batch_s) == (9, 9)
    first, last = result.stages
    assert (first.fill_s, first.busy_s, first.waiting_s, first.transfer_s, first.drain_s) == (0, 6, 3, 0, 0)
    assert (last.fill_s, last.busy_s, last.waiting_s, last.transfer_s, last.drain_s) == (1, 6, 0, 0, 2)
    assert (first.peak_micro_batches, first.peak_activation_bytes) == (2, 20)
    assert (last.peak_micro_batches, last.peak_activation_bytes) == (1, 7)
    assert first.bubble_ratio == last.bubble_ratio == result.bubble_ratio == pytest.approx(1 / 3)


def test_one_micro_batch_passes_links_and_stages_one_after_the_other() -> None:
    workload = Workload(
        [1.0, 3.0], [2.0, 4.0], 1, activation_link_s=0.5, gradient_link_s=0.25, step_s=[1.0, 8.0]
    )
    for schedule in SCHEDULES:
        result = simulate(workload, schedule)
        assert result.makespan_s == 1 + 0.5 + 3 + 4 + 0.25 + 2
        assert result.stages[1].fill_s == 1.5 and result.stages[1].drain_s == pytest.approx(2.25)
        assert result.batch_s == 8.5 + 8, "the last stage may step before its gradient, of 0.25, has been received"


def test_unequal_stages() -> None:
    """The second stage is slow in the forward."""
    workload = Workload([1.0, 3.0], [1.0, 1.0], 2)
    result = simulate(workload, timeline=True)
    assert intervals(result, 0) == [
        ("forward", 0, 0, 1), ("forward", 1, 1, 2), ("wait", 0, 2, 5), ("backward", 0, 5, 6),
        ("wait", 1, 6, 9), ("backward", 1, 9, 10),
    ]
    gpipe = simulate(workload, "gpipe", timeline=True)
    assert gpipe.timeline[2] == Interval(0, "wait", 0, 2, 8, "gradient"), "a send is over at once"
    assert gpipe.makespan_s == 1 + 3 + 3 + 1 + 1 + 1


def test_messages_share_the_wire() -> None:
    """A slow link carries one message at a time: they leave at 1, 3, 5 and arrive at 3, 5, 7."""
    result = simulate(Workload([1.0, 1.0], [0.0, 0.0], 3, activation_link_s=2.0), "gpipe")
    assert result.stages[1].fill_s == 3 and result.makespan_s == 8
    assert result.stages[1].transfer_s == 2 and result.stages[1].waiting_s == 0
    timeline = simulate(
        Workload([1.0, 1.0], [0.0, 0.0], 3, activation_link_s=2.0), "gpipe", timeline=True
    ).timeline
    assert [i[3:5] for i in timeline if i.kind == "recv"] == [(1, 3), (4, 5), (6, 7)]


def test_a_delay_of_one_message() -> None:
    """Only micro-batch 1 travels slowly; the last stage waits for it while stage 0 has work."""
    delays = [[0.0, 4.0, 0.0]]
    result = simulate(Workload([1.0, 1.0], [1.0, 1.0], 3, activation_link_s=delays))
    # Stage 1: F0 1-2, B0 2-3; activation 1 leaves stage 0 after its forward, at 2, and arrives at 6.
    assert result.stages[1].transfer_s == 3
    assert result.makespan_s == 11


def test_a_frozen_stage_gets_no_gradients() -> None:
    """Stage 0 is frozen: it never waits for stage 1 but to hand over activations."""
    layers = tuple(LayerProfile("l", 1.0, b, 1, 4, 4, 8, 5) for b in (0.0, 0.0, 1.0))
    profile = PipelineProfile(0, (0, 1, 2, 3), 4, layers, ())
    workload = Workload.from_profile(profile)
    assert workload.frozen_boundaries == 2
    assert simulate(workload).makespan_s == 2 + 4 * 2
    waits = [i for i in simulate(workload, timeline=True).timeline if i.payload == "gradient"]
    assert waits == []


# -- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages, num_micro_batches", SIZES)
def test_equal_stages(num_stages: int, num_micro_batches: int) -> None:
    for schedule, (f, b) in product(SCHEDULES, ((1.0, 2.0), (1.0, 1.0), (2.0, 0.5))):
        result = simulate(Workload([f] * num_stages, [b] * num_stages, num_micro_batches), schedule)
        assert result.makespan_s == equal_stages_s(num_stages, num_micro_batches, f, b)
        assert result.bubble_ratio == pytest.approx(bubble_ratio_1f1b(num_stages, num_micro_batches))
        for stage, outcome in enumerate(result.stages):
            assert outcome.fill_s == stage * f and outcome.drain_s == stage * b


def test_flow_line() -> None:
    assert flow_line_s([0.5] * 4, 8) == equal_stages_s(4, 8, 0.25, 0.25) == 5.5
    assert flow_line_s([1.0, 3.0], 5) == 4 * 3.0 + 4.0
    assert flow_line_s([1.0, 3.0], 1) == flow_line_s([2.0, 2.0], 1) == 4.0


@pytest.mark.parametrize("num_stages, num_micro_batches", SIZES)
def test_memory_in_flight(num_stages: int, num_micro_batches: int) -> None:
    """1F1B holds min(M, S - s) micro-batches, GPipe all; never more than DeepSpeed has buffers for."""
    workload = Workload([1.0] * num_stages, [2.0] * num_stages, num_micro_batches)
    for run in (simulate, reference):
        held = [s.peak_micro_batches for s in run(workload, "1f1b").stages]
        assert held == [min(num_micro_batches, num_stages - s) for s in range(num_stages)]
        held = [s.peak_micro_batches for s in run(workload, "gpipe").stages]
        assert held == [num_micro_batches] * num_stages
    buffers = [theirs.TrainSchedule(num_micro_batches, num_stages, s).num_pipe_buffers() for s in range(num_stages)]
    assert all(s.peak_micro_batches <= b for s, b in zip(simulate(workload).stages, buffers, strict=True))


def test_chimera() -> None:
    """Both forms of the paper, and less idle time than 1F1B."""
    for stages, micro_batches in ((2, 2), (4, 4), (8, 8), (8, 32), (32, 32)):
        ratio = chimera_bubble_ratio(stages, micro_batches)
        assert ratio == pytest.approx((stages - 2) / (2 * micro_batches + stages - 2))
        ratio = chimera_bubble_ratio(stages, micro_batches, forward_s=1, backward_s=2)
        assert ratio == pytest.approx((stages - 2) / (3 * micro_batches / 2 + stages - 2))
        assert ratio < bubble_ratio_1f1b(stages, micro_batches)
    with pytest.raises(ValueError, match="num_stages = 3: Chimera pairs two directions, it must be even"):
        chimera_bubble_ratio(3, 4)


# -- the fast way is the reference ----------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_waves_equal_streams(schedule: ScheduleName) -> None:
    rng = np.random.default_rng(1)
    for (num_stages, num_micro_batches), varying in product(SIZES, (False, True)):
        workload = random_workload(rng, num_stages, num_micro_batches, varying=varying)
        fast, slow = simulate(workload, schedule), reference(workload, schedule)
        assert fast == slow, "bit for bit"
        timed = simulate(workload, schedule, timeline=True)
        assert (timed.makespan_s, timed.batch_s, timed.stages) == (fast.makespan_s, fast.batch_s, fast.stages)
        for outcome in fast.stages:
            assert outcome.busy_s + outcome.idle_s == pytest.approx(fast.makespan_s)


def test_many_pipelines_at_once() -> None:
    rng = np.random.default_rng(2)
    forward_s, backward_s = rng.random((6, 5)), rng.random((6, 5))
    links = rng.random((4, 7))
    for schedule in SCHEDULES:
        together = makespans(
            forward_s, backward_s, 7, activation_link_s=links, gradient_link_s=links[:, :1],
            frozen_boundaries=1, schedule=schedule,
        )
        alone = [
            simulate(
                Workload(f, b, 7, activation_link_s=links, gradient_link_s=links[:, 0], frozen_boundaries=1),
                schedule,
            ).makespan_s
            for f, b in zip(forward_s.tolist(), backward_s.tolist(), strict=True)
        ]
        assert together.tolist() == alone


def test_bounds() -> None:
    """Never below any stage's work; where all stages spend the same share of their
    time in the forward, and links take none, never above the flow line.
    """
    rng = np.random.default_rng(3)
    for num_stages, num_micro_batches in SIZES:
        workload = random_workload(rng, num_stages, num_micro_batches, varying=False)
        seconds = (workload.forward_s + workload.backward_s)[:, 0].tolist()
        assert num_micro_batches * max(seconds) <= simulate(workload).makespan_s + 1e-9
        third = np.array(seconds) / 3
        no_links = Workload(third.tolist(), (2 * third).tolist(), num_micro_batches)
        assert simulate(no_links).makespan_s <= flow_line_s(seconds, num_micro_batches) * (1 + 1e-12)


def test_the_timeline_adds_up() -> None:
    workload = random_workload(np.random.default_rng(4), 4, 6, varying=True)
    for schedule in SCHEDULES:
        result = simulate(workload, schedule, timeline=True)
        for stage, outcome in enumerate(result.stages):
            own = [i for i in result.timeline if i.stage == stage and i.kind != "message"]
            assert all(a.end_s <= b.start_s for a, b in zip(own, own[1:], strict=False)), "one thing at a time"
            busy_s = sum(i.seconds for i in own if i.kind in ("forward", "backward"))
            assert busy_s == pytest.approx(outcome.busy_s)
            assert [i.micro_batch for i in own if i.kind == "forward"] == list(range(6))
            assert own[-1].kind == "step" and own[-1].seconds == pytest.approx(outcome.step_s)


def test_every_message_is_in_the_timeline() -> None:
    """From where it is ready to where it is used; also where links take no time, and none over a frozen boundary."""
    for link_s in (0.0, 0.5):
        workload = Workload([1.0] * 3, [2.0] * 3, 4, activation_link_s=link_s, frozen_boundaries=1)
        timeline = simulate(workload, timeline=True).timeline
        computed = {i[:3]: i for i in timeline if i.kind in ("forward", "backward")}
        messages = {(i.payload, i.stage, i.micro_batch): i for i in timeline if i.kind == "message"}
        sent = {("activation", stage, m) for stage in (0, 1) for m in range(4)}
        assert messages.keys() == sent | {("gradient", 2, m) for m in range(4)}
        for (payload, stage, m), message in messages.items():
            kind, step = ("forward", 1) if payload == "activation" else ("backward", -1)
            assert computed[stage, kind, m].end_s <= message.start_s
            assert message.end_s <= computed[stage + step, kind, m].start_s
            assert message.seconds == (link_s if payload == "activation" else 0)
    assert timeline[-12:] == tuple(sorted(messages.values(), key=lambda message: message.start_s))


def test_speed() -> None:
    rng = np.random.default_rng(5)
    workload = random_workload(rng, 24, 96, varying=True)
    simulate(workload)
    started = time.process_time()
    simulate(workload)
    assert time.process_time() - started < 0.1
    large = Workload(rng.random(1024).tolist(), rng.random(1024).tolist(), 4096)
    started = time.process_time()
    simulate(large)
    assert time.process_time() - started < 60


# -- from a profile -------------------------------------------------------------------------------


def profile_of(forward_s: list[float], backward_s: list[float], num_micro_batches: int = 3) -> PipelineProfile:
    layers = tuple(LayerProfile("l", f, b, 1, 4, 4, 8, 5) for f, b in zip(forward_s, backward_s, strict=True))
    return PipelineProfile(0, (0, 1, len(layers)), num_micro_batches, layers, ())


def predicted(profile: PipelineProfile, partitions: Iterable[Sequence[int]], **kwargs: Any) -> list[float]:
    return predicted_batches_s([(profile, boundaries) for boundaries in partitions], **kwargs)


def test_a_profile_and_a_partition() -> None:
    profile = profile_of([1.0, 2.0, 3.0], [2.0, 2.0, 4.0])
    workload = Workload.from_profile(profile, [0, 2, 3], speeds=[1.0, 0.5])
    assert workload.forward_s.tolist() == [[3.0], [6.0]] and workload.backward_s.tolist() == [[4.0], [8.0]]
    assert workload.activation_bytes == (10, 5) and workload.num_micro_batches == 3
    assert Workload.from_profile(profile, num_micro_batches=9).num_micro_batches == 9
    assert not workload.weight_s.any() and workload.weight_bytes == (10, 5)
    halves = zip(profile.layers, [1.0, 0.5, 3.0], [0.0, 0.25, 0.5], strict=True)
    layers = [replace(layer, weight_s=weight_s, split_s=split_s) for layer, weight_s, split_s in halves]
    split = Workload.from_profile(
        replace(profile, layers=layers), [0, 2, 3], speeds=[1.0, 0.5], weight_bytes=[1, 2, 4]
    )
    assert split.weight_s.tolist() == [[1.5], [6.0]] and split.weight_bytes == (3, 4)
    assert split.split_s.tolist() == [[0.25], [1.0]] and split.backward_s.tolist() == [[4.0], [8.0]]
    assert split.stage_seconds(1).input_s == [3.0] * 3, "8 s and 1 s for the split, without 6 s of W"
    found = predicted(profile, [(0, 1, 3), (0, 2, 3)])
    assert found == [simulate(Workload.from_profile(profile, cut)).makespan_s for cut in ((0, 1, 3), (0, 2, 3))]
    with pytest.raises(ValueError, match="must rise from 0 to the number of layers, 3"):
        predicted(profile, [(0, 1, 2)])


def test_predictions_with_frozen_layers_and_speeds() -> None:
    profile = profile_of([1.0, 1.0, 1.0], [0.0, 2.0, 2.0])
    cuts = [(0, 1, 3), (0, 2, 3)]
    workloads = [Workload.from_profile(profile, cut, speeds=[1.0, 2.0]) for cut in cuts]
    assert [workload.frozen_boundaries for workload in workloads] == [1, 0]
    found = predicted(profile, cuts, speeds=[1.0, 2.0])
    assert found == [simulate(workload).makespan_s for workload in workloads]


def test_recorded_profile_round_trip(tmp_path: Path) -> None:
    """A saved profile simulates as the one in memory."""
    profile = profile_of([0.1, 0.2, 0.3], [0.2, 0.1, 0.3])
    profile.save(tmp_path / "profile.json")
    loaded = PipelineProfile.load(tmp_path / "profile.json")
    assert simulate(Workload.from_profile(loaded)) == simulate(Workload.from_profile(profile))


# -- refusals -------------------------------------------------------------------------------------


def test_an_order_of_ones_own() -> None:
    """One micro-batch after the other: nothing overlaps, so the seconds add up."""
    serial = Order.parse("F0 SA0 RG0 B0 F1 SA1 RG1 B1 | RA0 F0 B0 SG0 RA1 F1 B1 SG1")
    workload = Workload([1.0, 3.0], [2.0, 4.0], 2, activation_link_s=0.5, activation_bytes=[10, 7])
    result = simulate(workload, serial)
    assert result.makespan_s == 2 * (1 + 0.5 + 3 + 4 + 2) and not result.timeline
    assert [stage.peak_micro_batches for stage in result.stages] == [1, 1]
    assert simulate(workload, serial, timeline=True).timeline
    assert streams_of("gpipe", 2, 2) == [list(stream) for stream in order_of("gpipe", 2, 2).stages]


def test_a_split_backward() -> None:
    """By hand. Stage 1 gives the gradient back after B and computes those of its weights at the end."""
    workload = Workload(
        [1.0, 1.0], [2.0, 2.0], 2, weight_s=[0.5, 1.0], activation_bytes=[10, 7], weight_bytes=[9, 3]
    )
    order = Order.parse("F0 SA0 F1 SA1 RG0 B0 RG1 B1 | RA0 F0 B0 SG0 RA1 F1 B1 SG1 W0 W1")
    result = simulate(workload, order, timeline=True)
    assert intervals(result, 0) == [
        ("forward", 0, 0, 1), ("forward", 1, 1, 2), ("wait", 0, 2, 3), ("backward", 0, 3, 5), ("backward", 1, 5, 7),
    ]
    assert intervals(result, 1) == [
        ("wait", 0, 0, 1), ("forward", 0, 1, 2), ("backward", 0, 2, 3), ("forward", 1, 3, 4), ("backward", 1, 4, 5),
        ("weight", 0, 5, 6), ("weight", 1, 6, 7),
    ]
    assert result.makespan_s == result.batch_s == 7 and simulate(workload).makespan_s == 9
    first, last = result.stages
    assert (first.busy_s, first.waiting_s, first.drain_s) == (6, 1, 0)
    assert (last.fill_s, last.busy_s, last.waiting_s, last.drain_s) == (1, 6, 0, 0), "a weight gradient is work"
    assert (first.peak_micro_batches, first.peak_activation_bytes) == (2, 20)
    assert (last.peak_micro_batches, last.peak_activation_bytes) == (2, 3 + 7), "W0 is open while F1 runs"


def test_bytes_between_b_and_w() -> None:
    """More may be held then than before B; a whole backward leaves nothing."""
    order = Order.parse("F0 B0 W0 F1 B1")
    for weight_bytes, peak in (((), 10), ([25], 25), ([3], 10)):
        workload = Workload([1.0], [[3.0, 2.0]], 2, weight_s=1.0, activation_bytes=[10], weight_bytes=weight_bytes)
        result = simulate(workload, order, timeline=True)
        assert result.stages[0].peak_activation_bytes == peak
        assert [i.seconds for i in result.timeline] == [1, 2, 1, 1, 2]


def test_split_backwards_add_up() -> None:
    """Whatever the order, busy and idle seconds make the makespan, and the timeline says the same."""
    rng = np.random.default_rng(6)
    for (num_stages, num_micro_batches), varying in product(SIZES, (False, True)):
        base = random_workload(rng, num_stages, num_micro_batches, varying=varying)
        workload = Workload(
            base.forward_s, base.backward_s, num_micro_batches, weight_s=base.backward_s * rng.random((num_stages, 1)),
            activation_link_s=base.activation_link_s, step_s=base.step_s.tolist(),
        )
        streams = [list(stream) for stream in order_of("1f1b", num_micro_batches, num_stages).stages]
        for stream in streams:  # each W at some place after its B, in order
            at = 0
            for m in range(num_micro_batches):
                at = int(rng.integers(max(at, stream.index((Op.BACKWARD, m))) + 1, len(stream) + 1))
                stream.insert(at, Instruction(Op.BACKWARD_WEIGHT, m))
        order = Order(num_micro_batches, tuple(map(tuple, streams)))
        result = simulate(workload, order, timeline=True)
        work_s = (workload.forward_s + workload.backward_s).mean(axis=1) * num_micro_batches
        for stage, outcome in enumerate(result.stages):
            assert outcome.busy_s == pytest.approx(work_s[stage])
            assert outcome.busy_s + outcome.idle_s == pytest.approx(result.makespan_s)
            own = [i for i in result.timeline if i.stage == stage and i.kind == "weight"]
            assert [i.micro_batch for i in own] == list(range(num_micro_batches))
            seconds = workload.stage_seconds(stage).weight_s
            assert [i.seconds for i in own] == pytest.approx(seconds)
            assert outcome.peak_micro_batches == order.in_flight(stage)
        timetable = Timetable(order)
        assert timetable.makespan_s(workload) == result.makespan_s
        assert timetable.peak_bytes(workload) == tuple(stage.peak_activation_bytes for stage in result.stages)
        assert timetable.simulation(workload) == simulate(workload, order)


def test_orders_that_do_not_fit_are_refused() -> None:
    workload = Workload([1.0, 1.0], [1.0, 1.0], 2)
    serial = "RA0 F0 B0 SG0 RA1 F1 B1 SG1"
    late = Order.parse("F0 SA0 RG0 B0 F1 SA1 RG1 B1 | RA0 F0 RA1 F1 B0 SG0 B1 SG1")
    with pytest.raises(ValueError, match="stage 0 waits for ever in recv_gradient of micro-batch 0"):
        simulate(workload, late)
    crossed = Order.parse(f"F1 SA1 F0 SA0 RG0 B0 RG1 B1 | {serial}")
    with pytest.raises(ValueError, match="activation over boundary 0: micro-batch 1 meets micro-batch 0"):
        simulate(workload, crossed)
    with pytest.raises(ValueError, match="an order of 1 stages and 2 micro-batches for a workload of 2 and 2"):
        run_order(workload, order_of("1f1b", 2, 1))
    with pytest.raises(ValueError, match="schedule = '2f2b': must be '1f1b' or 'gpipe'"):
        simulate(workload, "2f2b")  # type: ignore[arg-type]


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_micro_batches = 0: must be >= 1"):
        Workload([1.0], [1.0], 0)
    with pytest.raises(ValueError, match="forward_s = 1.0: need one number, or one row, for each stage"):
        Workload(1.0, 1.0, 1)
    with pytest.raises(ValueError, match=r"backward_s has shape \(3,\): need one number, 2 numbers, or 2 rows of 4"):
        Workload([1.0, 1.0], [1.0] * 3, 4)
    with pytest.raises(ValueError, match=r"activation_link_s has shape \(1, 3\)"):
        Workload([1.0, 1.0], [1.0] * 2, 4, activation_link_s=[[1.0] * 3])
    with pytest.raises(ValueError, match="gradient_link_s: all seconds must be finite and >= 0"):
        Workload([1.0, 1.0], [1.0] * 2, 4, gradient_link_s=-1.0)
    with pytest.raises(ValueError, match=r"activation_bytes = \(1,\): need one number >= 0 for each of 2 stages"):
        Workload([1.0, 1.0], [1.0] * 2, 4, activation_bytes=[1])
    with pytest.raises(ValueError, match=r"weight_bytes = \(1, -1\): need one number >= 0 for each of 2 stages"):
        Workload([1.0, 1.0], [1.0] * 2, 4, weight_bytes=[1, -1])
    with pytest.raises(ValueError, match=r"weight_s of stage 1 is 2.5, its backward_s 2.0 with split_s: must"):
        Workload([1.0, 1.0], [3.0, 2.0], 4, weight_s=2.5)
    with pytest.raises(ValueError, match="frozen_boundaries = 2: 2 stages have 1 boundaries"):
        Workload([1.0, 1.0], [1.0] * 2, 4, frozen_boundaries=2)
    with pytest.raises(ValueError, match="schedule = 'zero': must be '1f1b' or 'gpipe'"):
        simulate(Workload([1.0], [1.0], 1), "zero")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="schedule = 'zero'"):
        simulate(Workload([1.0], [1.0], 1), "zero", timeline=True)  # type: ignore[arg-type]
