"""How a stage tells the next one what it is about to send."""

from __future__ import annotations

import pytest
import torch

from dynpipe_ds.messages.crossing import Crossing, Links
from dynpipe_ds.messages.values import CantCross


def test_one_tensor() -> None:
    crossing, tensors = Crossing.of(torch.zeros(2, 3, requires_grad=True))
    assert crossing.structure == 0 and crossing.flags == (True,) and len(tensors) == 1
    assert crossing.layouts[0].shape == (2, 3) and crossing.layouts[0].dtype == torch.float32
    assert Crossing.decode(crossing.encode()) == crossing


def test_a_tuple_of_many_kinds() -> None:
    twice = torch.zeros(2, 4, 3, dtype=torch.float16).mT
    value = (
        torch.zeros(2, 3, 4, dtype=torch.bfloat16, requires_grad=True), torch.zeros((), dtype=torch.int64),
        torch.zeros(5, dtype=torch.bool), torch.zeros(0, 7, dtype=torch.float64), twice,
        torch.zeros(4, 1).expand(4, 6), twice, torch.zeros(8)[3:],
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.zeros(3, dtype=torch.float8_e4m3fn),
    )  # fmt: skip
    crossing, tensors = Crossing.of(value)
    assert crossing.structure == ("tuple", 0, 1, 2, 3, 4, 5, 4, 6, 7, 8) and crossing.flags == (True, *(False,) * 8)
    assert [layout.offset for layout in crossing.layouts] == [0, 0, 0, 0, 0, 0, 3, 0, 0]
    assert [layout.stride for layout in crossing.layouts[4:6]] == [(12, 1, 3), (1, 0)]
    heard = Crossing.decode(crossing.encode())
    assert heard == crossing and [layout.offset for layout in heard.layouts][6] == 3
    packed = heard.pack(tensors)
    assert all(a is b for a, b in zip(packed, value, strict=True))
    alone, _ = Crossing.of(value[:1])
    assert alone.structure == ("tuple", 0) and Crossing.decode(alone.encode()) == alone


def test_what_must_be_told_again() -> None:
    still, wants = torch.zeros(2), torch.zeros(2, requires_grad=True)

    def is_told_again(value: object, may_want: bool = False) -> bool:
        crossing, _ = Crossing.of(value, may_want=may_want)
        assert Crossing.decode(crossing.encode()).again == crossing.again
        return crossing.again

    assert not is_told_again((still, None, [wants])) and not is_told_again((still, wants), may_want=True)
    assert is_told_again((still, 1)), "another number may follow"
    assert is_told_again(still, may_want=True), "another micro-batch may want a gradient"


def test_which_micro_batches_can_be_received() -> None:
    still, wants = torch.zeros(2), torch.zeros(2, requires_grad=True)
    values = ((wants, still), (still, still), (wants, wants))
    (told, _), (other, _), (more, _) = (Crossing.of(value) for value in values)
    assert told.covers(told) and not told.covers(more)
    (fewer, _), (shape, _), (place, _) = (
        Crossing.of(value) for value in ((still, still.clone()), (wants, torch.zeros(3)), (wants, [still]))
    )
    assert told.covers(fewer) and not told.covers(shape) and not told.covers(place) and not told.covers(other)
    assert told.wanting([1, 2]) == [1]  # type: ignore[list-item]


def test_zeros_are_of_the_same_kinds() -> None:
    value = {"a": torch.randn(3, 1, requires_grad=True).expand(3, 4), "b": [torch.ones(4, 6)[:, 1:3], None]}
    crossing, _ = Crossing.of(value)
    zeros = crossing.zeros(torch.device("cpu"))
    assert Crossing.of(crossing.pack(zeros))[0] == crossing
    assert all(tensor.is_leaf and not tensor.any() for tensor in zeros)


def test_what_cant_be_sent() -> None:
    with pytest.raises(CantCross, match=r"a value of type set \(at \[1\]\)"):
        Crossing.of((torch.zeros(2), {1}))


def test_a_refusal_names_what_differs() -> None:
    same = torch.zeros(2)
    (told, _), (found, _) = (Crossing.of((same, x)) for x in (torch.zeros(2, 3), torch.zeros(3, 2).t()))
    assert str(Links.difference("it", told, found)).startswith(
        "it was float32 [2, 3] with strides [3, 1] in the first micro-batch of the batch and is float32 [2, 3] with "
        "strides [1, 2] in a later one; build the module with dynamic_shape=True"
    )
    text = str(Links.difference("it", told, Crossing.of((same, None))[0]))
    assert "was (tensor 0, tensor 1) in the first micro-batch of the batch and is (tensor 0, None)" in text
    flagged = Crossing.of((same, torch.zeros(2, 3, requires_grad=True)))[0]
    assert "[3, 1] that wants a gradient in a later one" in str(Links.difference("it", told, flagged))
