"""Orders as values: their text, their checks, and the ones that have names."""

from __future__ import annotations

import pickle

import pytest

from dynpipe_ds.schedule import Instruction, Op, Order, order_of


def test_1f1b_by_hand() -> None:
    order = order_of("1f1b", 2, 2)
    assert str(order) == "F0 SA0 F1 SA1 RG0 B0 RG1 B1 | RA0 F0 B0 SG0 RA1 F1 B1 SG1"
    assert order.stages[1][0] == Instruction(Op.RECV_ACTIVATION, 0)
    assert str(order_of("1f1b", 3, 1)) == "F0 B0 F1 B1 F2 B2"


def test_gpipe_by_hand() -> None:
    assert str(order_of("gpipe", 2, 2)) == "F0 SA0 F1 SA1 RG0 B0 RG1 B1 | RA0 F0 RA1 F1 B0 SG0 B1 SG1"


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_a_value(num_stages: int, num_micro_batches: int) -> None:
    order = order_of("1f1b", num_micro_batches, num_stages)
    assert (order.num_stages, order.num_micro_batches) == (num_stages, num_micro_batches)
    assert Order.parse(str(order)) == order and hash(Order.parse(str(order))) == hash(order)
    assert pickle.loads(pickle.dumps(order)) == order
    held = [order.in_flight(stage) for stage in range(num_stages)]
    assert held == [min(num_micro_batches, num_stages - stage) for stage in range(num_stages)]
    assert order_of("gpipe", num_micro_batches, num_stages).in_flight(0) == num_micro_batches


SPLIT = "F0 SA0 F1 SA1 RG0 B0 RG1 B1 | RA0 F0 B0 SG0 RA1 F1 W0 B1 SG1 W1"


def test_a_split_backward() -> None:
    """Stage 1 computes the gradients of its weights apart, stage 0 at once."""
    order = Order.parse(SPLIT)
    assert str(order) == SPLIT and Order.parse(str(order)) == order and pickle.loads(pickle.dumps(order)) == order
    assert order.stages[1][-1] == Instruction(Op.BACKWARD_WEIGHT, 1)
    assert (order.split(0), order.split(1)) == (frozenset(), frozenset({0, 1}))
    assert [order.in_flight(stage) for stage in (0, 1)] == [2, 2], "a micro-batch is held until its W"
    early = Order.parse(SPLIT.replace("RA1 F1 W0", "W0 RA1 F1"))
    assert early != order and early.in_flight(1) == 1


def test_some_layers_need_not_wait() -> None:
    order = Order.parse(f"{SPLIT} @ 2 1")
    assert order.late == (2, 1) and str(order) == f"{SPLIT} @ 2 1" and order != Order.parse(SPLIT)
    assert order.may_wait([0, 0, 0, 1, 1]) == [True, True, False, True, False]
    assert all(Order.parse(SPLIT).may_wait([0, 0, 1, 1, 1]))
    for late in ((1,), (1, -1)):
        with pytest.raises(ValueError, match="need a number of layers >= 0 for each of 2 stages"):
            Order(order.num_micro_batches, order.stages, late)


def test_some_micro_batches_may_be_split() -> None:
    order = Order.parse("F0 F1 F2 B0 B1 W1 B2")
    assert order.split(0) == {1} and order.in_flight(0) == 3
    assert Order.parse("F0 B0 F1 B1 W0 W1").in_flight(0) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 W0 B0", "stage 0 of 1 runs W0 before B0, which it needs"),
        ("F0 B0 W0 W0", "stage 0 of 1 runs W0 2 times"),
        ("F0 B0 W1", "stage 0 of 1 runs W1 1 times; it must run F, B of each of 1 micro-batches once"),
        ("F0 B0 F1 B1 W1 W0", "stage 0 of 1 runs W1 before W0: gradients of weights must be added up in the order"),
        ("F0 B0 F1 B1 W0", "stage 0 of 1 runs B1 before W0: gradients of weights must be added up in the order"),
        ("F0 B0 F0", "stage 0 of 1 runs F1 0 times; it must run F, B of each of 2 micro-batches once"),
        ("F0 B0 B0", "stage 0 of 1 runs B0 2 times"),
        ("F0 B0 | RA0 F0 B0 SG0", "stage 0 of 2 runs SA0 0 times; it must run F, B, SA, RG"),
        ("F0 SA0 RG0 B0 | RA0 F0 B0", "stage 1 of 2 runs SG0 0 times"),
        ("F0 SA0 RG0 B0 | F0 RA0 B0 SG0", "stage 1 of 2 runs F0 before RA0, which it needs"),
        ("B0 F0", "stage 0 of 1 runs B0 before F0, which it needs"),
        ("F0 X0", "'X0' is not an instruction; one reads F, B, W, SA"),
        ("", "an order of 0 micro-batches on 1 stages: both must be >= 1"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Order.parse(text)


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="schedule = 'zb': must be '1f1b' or 'gpipe'"):
        order_of("zb", 2, 2)  # type: ignore[arg-type]
