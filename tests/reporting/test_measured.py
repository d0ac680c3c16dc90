"""Timelines of trained batches: from every stage's own marks back to one clock."""

from __future__ import annotations

import numpy as np
import pytest

from dynpipe_ds.measure.recorder import BACKWARD, FORWARD, LOAD, REDUCE, STEP, TRANSFER, WEIGHT
from dynpipe_ds.planning import plan_order
from dynpipe_ds.reporting.measured import Marks, measured_timeline
from dynpipe_ds.schedule import Instruction, Op, Order, order_of
from dynpipe_ds.simulation import Interval, Workload, simulate

KINDS = {"forward": FORWARD, "backward": BACKWARD, "weight": WEIGHT}
OPS = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_WEIGHT: "weight"}


def marks_of(timeline: tuple[Interval, ...], order: Order, stage: int, start_s: float) -> list[Marks]:
    """What a stage's recorder would have noted of a simulated batch, on a clock that began at some moment."""
    own = {(i.kind, i.payload, i.micro_batch): i for i in timeline if i.stage == stage and i.kind != "message"}
    marks, now_s = [[(TRANSFER, -start_s)]], 0.0
    for op, m in order.stages[stage]:
        if op in OPS:
            done = own[OPS[op], "", m]
            assert done.start_s == pytest.approx(now_s)
            marks.append([(KINDS[OPS[op]], done.seconds / 4), (KINDS[OPS[op]], done.seconds * 3 / 4)])
            now_s = done.end_s
            continue
        payload = "activation" if op in (Op.SEND_ACTIVATION, Op.RECV_ACTIVATION) else "gradient"
        got = own.get(("recv", payload, m)), own.get(("wait", payload, m))
        seconds = 0.0 if op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT) else sum(i.seconds for i in got if i is not None)
        marks.append([(TRANSFER, seconds)])
        now_s += seconds
    return [*marks, [(REDUCE, 0.25)], [(STEP, 0.5)]]


@pytest.mark.parametrize("seed", [0, 1, 2, 4])  # each direction of each boundary has a message that is waited for
@pytest.mark.parametrize("is_planned", [False, True])
def test_clocks_are_set_by_messages(seed: int, is_planned: bool) -> None:
    """A simulated batch, cut into marks on clocks that began seconds apart, becomes what it was."""
    rng = np.random.default_rng(seed)
    count, stages = 6, 4
    backward_s = rng.uniform(1, 3, stages)
    workload = Workload(
        rng.uniform(0.5, 1.5, stages).tolist(), backward_s.tolist(), count, weight_s=(backward_s / 2).tolist(),
        activation_link_s=0.3, gradient_link_s=0.3, activation_bytes=[1] * stages,
    )
    order = plan_order(workload).order if is_planned else order_of("1f1b", count, stages)
    timeline = simulate(workload, order, timeline=True).timeline
    starts_s = [0.0, *rng.uniform(-5, 5, stages - 1)]
    measured = measured_timeline(order, [marks_of(timeline, order, s, starts_s[s]) for s in range(stages)])

    def of(found: tuple[Interval, ...]) -> dict[tuple[int, str, int, str], tuple[float, float]]:
        return {(i.stage, i.kind, i.micro_batch, i.payload): i[3:5] for i in found if i.kind not in ("step", "message")}

    expected = of(timeline)
    found = {key: times for key, times in of(measured).items() if key in expected or times[1] - times[0] > 1e-9}
    assert found.keys() == expected.keys()
    for key, times in expected.items():
        assert found[key] == pytest.approx(times), key
    sent = {(i.stage, i.payload, i.micro_batch): i for i in timeline if i.kind == "message"}
    for message in (i for i in measured if i.kind == "message"):
        simulated = sent[message.stage, message.payload, message.micro_batch]
        assert message.start_s == pytest.approx(simulated.start_s), "sent when it was ready"
        assert message.end_s >= simulated.end_s - 1e-9, "taken no sooner than it arrived"
    steps = [i.seconds for i in measured if i.kind == "step"]
    assert steps == pytest.approx([0.25, 0.5] * stages)


def test_a_frozen_stage_gets_no_gradients() -> None:
    """Its clock is set by activations alone, as if they took no time."""
    order = Order.parse("F0 SA0 RG0 B0 | RA0 F0 B0 SG0")
    none = [(TRANSFER, 0.0)]
    first = [[(TRANSFER, 1.0)], [(LOAD, 0.5)], [(FORWARD, 1.0)], none, none, none, [(STEP, 1.0)]]
    second = [
        [(TRANSFER, 9.0)], [(TRANSFER, 0.5)], [(LOAD, 0.5)], [(FORWARD, 2.0)], [(BACKWARD, 4.0)], none, [(STEP, 1.0)]
    ]  # fmt: skip
    assert measured_timeline(order, [first, second]) == (
        Interval(0, "load", -1, 0.0, 0.5), Interval(0, "forward", 0, 0.5, 1.5), Interval(0, "step", -1, 1.5, 2.5),
        Interval(1, "wait", 0, 1.0, 1.5, "activation"), Interval(1, "load", -1, 1.5, 2.0),
        Interval(1, "forward", 0, 2.0, 4.0), Interval(1, "backward", 0, 4.0, 8.0), Interval(1, "step", -1, 8.0, 9.0),
        Interval(0, "message", 0, 1.5, 1.5, "activation"),
    )  # fmt: skip


def test_what_a_whole_backward_finds_undone_is_of_no_micro_batch() -> None:
    """W's of earlier micro-batches run before a backward that can't be split; its own W has nothing left to do."""
    order = Order.parse("F0 F1 B0 B1 W0 W1")
    marks = [[(TRANSFER, 0.0)], [(FORWARD, 1.0)], [(FORWARD, 1.0)], [(BACKWARD, 1.0)], [(WEIGHT, 1.0), (BACKWARD, 2.0)],
             [(TRANSFER, 0.0)], [(TRANSFER, 0.0)]]  # fmt: skip
    assert [i[1:3] for i in measured_timeline(order, [marks])] == [
        ("forward", 0), ("forward", 1), ("backward", 0), ("weight", -1), ("backward", 1)
    ]  # fmt: skip


def test_marks_of_another_order_are_no_timeline() -> None:
    """Rather an error than a wrong picture."""
    marks = [[(TRANSFER, 0.0)], [(FORWARD, 1.0)], [(BACKWARD, 1.0)], [(FORWARD, 1.0)]]
    with pytest.raises(StopIteration):
        measured_timeline(Order(1, ((Instruction(Op.FORWARD, 0), Instruction(Op.BACKWARD, 0)),)), [marks])
