"""Flat buffers after a move: what stays, where it lies, and that the old ones can be gone back to."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from dynpipe_ds.host.optimizers.flat_buffers import GroupBuffers
from dynpipe_ds.host.optimizers.groups import Entry

SIZE = 32  # elements of a parameter: a whole number of cache lines
KINDS = ("weights", "master", "exp_avg", "gradients")


def parameter(number: int, size: int = SIZE) -> nn.Parameter:
    return nn.Parameter(torch.full((size // 2, 2), float(number)))


def entry(number: int, size: int = SIZE, key: str = "exp_avg") -> Entry:
    """A parameter on its way, its tensors not yet received."""
    state = {"master": torch.empty(size), key: torch.empty(size), "step": torch.tensor(3.0)}
    return Entry(nn.Parameter(torch.empty(size // 2, 2)), 0, state)


def receive(entries: list[Entry], numbers: list[int]) -> None:
    for e, number in zip(entries, numbers, strict=True):
        e.parameter.data.fill_(number)
        e.state["master"].fill_(number + 0.25)
        e.state["exp_avg"].fill_(number + 0.5)


def group(numbers: list[int], size: int = SIZE) -> GroupBuffers:
    members = [parameter(n, size) for n in numbers]
    used = len(numbers) * size
    weights = torch.zeros(used + used % 2)
    weights[:used] = torch.cat([p.detach().view(-1) for p in members])
    return GroupBuffers(members, weights, weights + 0.25, {"exp_avg": weights + 0.5}, torch.zeros_like(weights))


def tensors(buffers: GroupBuffers) -> list[Tensor]:
    assert buffers.gradients is not None
    return [buffers.weights, buffers.master, *buffers.moments.values(), buffers.gradients]


def numbers(buffers: GroupBuffers, size: int = SIZE) -> list[float]:
    """Which parameter lies where; the same in all buffers."""
    count = len(buffers.members)
    found = [t[: count * size].view(count, size) for t in tensors(buffers)]
    assert all(bool((row == row[0]).all()) for kind in found for row in kind)
    weights, master, moment, gradients = ([float(row[0]) for row in kind] for kind in found)
    assert master == [w + 0.25 for w in weights] and moment == [w + 0.5 for w in weights]
    assert gradients == [0.0] * count
    return weights


def start(buffers: GroupBuffers) -> list[int]:
    return [t.data_ptr() for t in tensors(buffers)]


def test_layers_leave_without_a_copy() -> None:
    old = group([1, 2, 3, 4])
    new = old.after({old.members[0], old.members[3]}, [], [])
    assert new is not None and new.members == old.members[1:3] and numbers(new) == [2, 3]
    assert start(new) == [p + 4 * SIZE for p in start(old)]


def test_memory_is_given_back() -> None:
    buffers = group(list(range(12)))
    for num_left, is_in_place in ((8, True), (4, True), (3, False)):
        before = start(buffers)
        new = buffers.after({*buffers.members[num_left:]}, [], [])
        assert new is not None and numbers(new) == list(range(num_left))
        assert (start(new) == before) == is_in_place
        buffers = new


def test_layers_that_come_are_received_in_place() -> None:
    """The first time larger buffers are made, with room for more; then nothing that stays moves."""
    buffers, places = group([10, 11, 12, 13]), []
    for front, back in (([9], []), ([], [14]), ([], [15])):
        coming = [entry(n) for n in (*front, *back)]
        new = buffers.after(set(), coming[: len(front)], coming[len(front) :])
        assert new is not None
        receive(coming, [*front, *back])
        buffers = new
        places.append(start(buffers))
    assert numbers(buffers) == [9, 10, 11, 12, 13, 14, 15]
    assert all(a == b for a, b in pairwise(places)), "kept where it was"


def test_the_old_buffers_stay_valid() -> None:
    """Also where room is taken and padding changes, until the move is agreed on."""
    old = group([1, 2, 3, 4, 5], size=SIZE)
    first = old.after({old.members[0]}, [], [])
    assert first is not None
    before = copy.deepcopy([t.clone() for t in tensors(first)])
    coming = [entry(9)]
    second = first.after({first.members[3]}, coming, [])
    assert second is not None
    receive(coming, [9])
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), before, strict=True))
    assert start(second) == start(old) and numbers(second) == [9, 2, 3, 4]


@pytest.mark.parametrize("size", [SIZE, 6])
def test_one_end_can_change_both_ways(size: int) -> None:
    """A tied layer may come first in the group while others leave there: their memory is still being sent."""
    old = group([1, 2, 3], size)
    before = [t.clone() for t in tensors(old)]
    coming = [entry(7, size)]
    new = old.after({old.members[0]}, coming, [])
    assert new is not None
    receive(coming, [7])
    assert numbers(new, size) == [7, 2, 3]
    assert all(torch.equal(a, b) for a, b in zip(tensors(old), before, strict=True))


def test_padding_is_zero() -> None:
    members = [nn.Parameter(torch.full((n,), float(n))) for n in (32, 31, 33)]
    weights = torch.cat([p.detach() for p in members])
    old = GroupBuffers(members, weights, weights.clone(), {}, None)
    new = old.after({members[2]}, [], [])
    assert new is not None and new.weights.numel() == 64 and new.weights.data_ptr() == weights.data_ptr()
    assert float(weights[63]) == 33.0, "until the move is agreed on"
    new.clear_padding()
    assert float(new.weights[63]) == float(new.master[63]) == 0.0 and float(new.weights[62]) == 31.0


def test_alignment_is_kept() -> None:
    """Kernels choose by it: a buffer begins where a newly made one could."""
    members = [nn.Parameter(torch.full((n,), float(n))) for n in (3, 32, 32)]
    weights = torch.cat([p.detach() for p in members] + [torch.zeros(1)])
    new = GroupBuffers(members, weights, weights.clone(), {}, None).after({members[0]}, [], [])
    assert new is not None and new.weights.data_ptr() % 64 == new.master.data_ptr() % 64 == 0
    assert new.weights.tolist() == [32.0] * 64


def test_what_does_not_fit_is_left_to_the_slow_way() -> None:
    old = group([1, 2, 3])
    assert old.after({old.members[1]}, [], []) is None, "leaves from the middle"
    assert old.after(set(old.members), [], []) is None, "nothing left"
    assert old.after(set(), [], [entry(4, key="momentum_buffer")]) is None, "another optimizer's state"
    strange = Entry(nn.Parameter(torch.empty(16, 2, dtype=torch.bfloat16)), 0, entry(4).state)
    assert old.after(set(), [], [strange]) is None, "another type"
    coming = [entry(5)]
    new = old.after(set(old.members), coming, [])
    assert new is not None
    receive(coming, [5])
    assert numbers(new) == [5]
