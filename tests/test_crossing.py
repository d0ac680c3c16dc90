"""How a stage tells the next one what it is about to send."""

from __future__ import annotations

import pytest
import torch

from dynpipe_ds.crossing import META_SIZE, Crossing, Links, distinct


def test_one_tensor() -> None:
    crossing = Crossing.of(torch.zeros(2, 3, requires_grad=True))
    assert crossing.places is None and crossing.flags == (True,)
    assert crossing.layouts[0].shape == (2, 3) and crossing.layouts[0].dtype == torch.float32
    assert Crossing.decode(crossing.encode()) == crossing


def test_a_tuple_of_many_kinds() -> None:
    twice = torch.zeros(2, 4, 3, dtype=torch.float16).mT
    tensors = (
        torch.zeros(2, 3, 4, dtype=torch.bfloat16, requires_grad=True), torch.zeros((), dtype=torch.int64),
        torch.zeros(5, dtype=torch.bool), torch.zeros(0, 7, dtype=torch.float64), twice,
        torch.zeros(4, 1).expand(4, 6), twice, torch.zeros(8)[3:],
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    )  # fmt: skip
    crossing = Crossing.of(tensors)
    assert crossing.places == (0, 1, 2, 3, 4, 5, 4, 6, 7) and crossing.flags == (True, *(False,) * 7)
    assert [layout.offset for layout in crossing.layouts] == [0, 0, 0, 0, 0, 0, 3, 0]
    assert [layout.stride for layout in crossing.layouts[4:6]] == [(12, 1, 3), (1, 0)]
    assert Crossing.decode(crossing.encode()) == crossing
    packed = crossing.pack(distinct(tensors))
    assert all(a is b for a, b in zip(packed, tensors, strict=True))
    alone = Crossing.of(tensors[:1])
    assert alone.places == (0,) and Crossing.decode(alone.encode()) == alone


def test_what_follows_in_the_message_is_ignored() -> None:
    numbers = Crossing.of(torch.zeros(3)).encode()
    padded = numbers + [0] * (META_SIZE - len(numbers))
    assert Crossing.decode(padded) == Crossing.decode(numbers)


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the 60 tensors between two stages need 302 numbers .* more than 256"):
        Crossing.of(tuple(torch.zeros(1, 1) for _ in range(60))).encode()


def test_stand_ins_are_of_the_same_kinds() -> None:
    tensors = (torch.randn(3, 1, requires_grad=True).expand(3, 4), torch.ones(4, 6)[:, 1:3])
    crossing = Crossing.of(tensors)
    stand_in = crossing.stand_in(torch.device("cpu"))
    assert Crossing.of(stand_in) == crossing
    assert all(tensor.is_leaf and not tensor.any() for tensor in stand_in)


def test_a_refusal_names_the_first_tensor_that_differs() -> None:
    same, links = torch.zeros(2), Links()
    told, found = Crossing.of((same, torch.zeros(2, 3))), Crossing.of((same, torch.zeros(3, 2).t()))
    links.refuse("it", told, found)
    assert links.refusals[0].startswith(
        "it was float32 [2, 3] with strides [3, 1] in the first micro-batch of the batch and is float32 [2, 3] with "
        "strides [1, 2] in a later one; build the module with dynamic_shape=True"
    )
    links.refuse("it", told, Crossing.of((same,)))
    assert "and is missing in a later one" in links.refusals[1]
