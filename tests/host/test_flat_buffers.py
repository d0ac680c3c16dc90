"""Flat buffers after a move: what stays, where it lies, and that the old ones can be gone back to."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from dynpipe_ds.host.optimizers.flat_buffers import GroupBuffers, building
from dynpipe_ds.migration.shards import FlatLayout

SIZE = 32  # elements of a parameter: a whole number of cache lines
KINDS = ("weights", "master", "exp_avg", "gradients")


def parameter(number: int, size: int = SIZE) -> nn.Parameter:
    return nn.Parameter(torch.full((size // 2, 2), float(number)))


def coming(count: int, size: int = SIZE) -> list[nn.Parameter]:
    """Parameters on their way, not yet received."""
    return [nn.Parameter(torch.empty(size // 2, 2)) for _ in range(count)]


def without(buffers: GroupBuffers, *leaving: int) -> list[nn.Parameter]:
    return [p for i, p in enumerate(buffers.members) if i not in leaving]


def receive(buffers: GroupBuffers, parameters: list[nn.Parameter], numbers: list[int]) -> None:
    for parameter, number in zip(parameters, numbers, strict=True):
        buffers.receive(parameter)
        parameter.data.fill_(number)
        start = buffers.layout.places[parameter].offset
        buffers.master[start:][: parameter.numel()].fill_(number + 0.25)
        buffers.moments["exp_avg"][start:][: parameter.numel()].fill_(number + 0.5)


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
    new = old.after(without(old, 0, 3))
    assert new.members == old.members[1:3] and numbers(new) == [2, 3]
    assert start(new) == [p + 4 * SIZE for p in start(old)]


def test_memory_is_given_back() -> None:
    buffers = group(list(range(12)))
    for num_left, is_in_place in ((8, True), (4, True), (3, False)):
        before = start(buffers)
        new = buffers.after(buffers.members[:num_left])
        assert numbers(new) == list(range(num_left))
        assert (start(new) == before) == is_in_place
        buffers = new


def test_layers_that_come_are_received_in_place() -> None:
    """The first time larger buffers are made, with room for more; then nothing that stays moves."""
    buffers, places = group([10, 11, 12, 13]), []
    for front, back in (([9], []), ([], [14]), ([], [15])):
        arriving = coming(1)
        new = buffers.after([*arriving[: len(front)], *buffers.members, *arriving[len(front) :]])
        receive(new, arriving, [*front, *back])
        buffers = new
        places.append(start(buffers))
    assert numbers(buffers) == [9, 10, 11, 12, 13, 14, 15]
    assert all(a == b for a, b in pairwise(places)), "kept where it was"


def test_the_old_buffers_stay_valid() -> None:
    """Also where room is taken and padding changes, until the move is agreed on."""
    old = group([1, 2, 3, 4, 5], size=SIZE)
    first = old.after(without(old, 0))
    before = copy.deepcopy([t.clone() for t in tensors(first)])
    arriving = coming(1)
    second = first.after([*arriving, *without(first, 3)])
    receive(second, arriving, [9])
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), before, strict=True))
    assert start(second) == start(old) and numbers(second) == [9, 2, 3, 4]


@pytest.mark.parametrize("size", [SIZE, 6])
def test_one_end_can_change_both_ways(size: int) -> None:
    """A tied layer may come first in the group while others leave there: their memory is still being sent."""
    old = group([1, 2, 3], size)
    before = [t.clone() for t in tensors(old)]
    arriving = coming(1, size)
    new = old.after([*arriving, *without(old, 0)])
    receive(new, arriving, [7])
    assert numbers(new, size) == [7, 2, 3]
    assert all(torch.equal(a, b) for a, b in zip(tensors(old), before, strict=True))


def test_what_leaves_and_comes_in_the_middle_is_copied_once() -> None:
    old = group([1, 2, 3, 4])
    before = [t.clone() for t in tensors(old)]
    arriving = coming(2)
    new = old.after([old.members[0], *arriving, *old.members[2:]])
    receive(new, arriving, [8, 9])
    assert numbers(new) == [1, 8, 9, 3, 4]
    assert all(torch.equal(a, b) for a, b in zip(tensors(old), before, strict=True))
    assert numbers(old.after(without(old, 1))) == [1, 3, 4]
    everything = coming(1)
    new = old.after(everything)
    receive(new, everything, [5])
    assert numbers(new) == [5]


def test_padding_is_zero() -> None:
    members = [nn.Parameter(torch.full((n,), float(n))) for n in (32, 31, 33)]
    weights = torch.cat([p.detach() for p in members])
    old = GroupBuffers(members, weights, weights.clone(), {}, None)
    new = old.after(without(old, 2))
    assert new.weights.numel() == 64 and new.weights.data_ptr() == weights.data_ptr()
    assert float(weights[63]) == 33.0, "until the move is agreed on"
    new.clear_padding()
    assert float(new.weights[63]) == float(new.master[63]) == 0.0 and float(new.weights[62]) == 31.0


def test_alignment_is_kept() -> None:
    """Kernels choose by it: a buffer begins where a newly made one could."""
    members = [nn.Parameter(torch.full((n,), float(n))) for n in (3, 32, 32)]
    weights = torch.cat([p.detach() for p in members] + [torch.zeros(1)])
    old = GroupBuffers(members, weights, weights.clone(), {}, None)
    new = old.after(without(old, 0))
    assert new.weights.data_ptr() % 64 == new.master.data_ptr() % 64 == 0
    assert new.weights.tolist() == [32.0] * 64


def test_weights_of_another_type_are_received_elsewhere() -> None:
    old = group([1])
    strange = nn.Parameter(torch.empty(16, 2, dtype=torch.bfloat16))
    place = strange.data_ptr()
    old.after([*old.members, strange]).receive(strange)
    assert strange.data_ptr() == place


# -- shared out by replicas ---------------------------------------------------------------------


def shared(members: list[nn.Parameter], rank: int, num_ranks: int, alignment: int = 1) -> GroupBuffers:
    """What one of several replicas holds; every element of the whole state tells where it is."""
    layout = FlatLayout({p: p.numel() for p in members}, tuple(range(num_ranks)), 2, alignment)
    whole = torch.zeros(3, layout.share * num_ranks)  # weights, master weights, moments; zero between parameters
    for parameter in members:
        place = layout.places[parameter]
        whole[:, place.offset :][:, : place.num_elements] = parameter.detach() + torch.tensor([[0.0], [0.25], [0.5]])
    weights, master, moment = whole
    mine = slice(rank * layout.share, (rank + 1) * layout.share)
    state = master[mine].clone(), {"exp_avg": moment[mine].clone()}
    return GroupBuffers(members, weights, *state, None, 2, alignment, layout.ranks, rank)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_replicas_that_exchange_their_runs_have_their_new_shares(num_ranks: int, alignment: int) -> None:
    sizes = (5, 12, 1, 7, 30, 3)
    members = [nn.Parameter(torch.arange(size) + 100.0 * i) for i, size in enumerate(sizes)]
    for leaving in ((0,), (5,), (1, 3), (0, 1, 2), ()):
        stay = [p for i, p in enumerate(members) if i not in leaving]
        olds = [shared(members, rank, num_ranks, alignment) for rank in range(num_ranks)]
        news = [old.after(stay) for old in olds]
        for run in olds[0].runs_to(news[0].layout):
            if run.source != run.destination:
                for key, target in news[run.destination].state.items():
                    source = olds[run.source].state[key][run.read_at :][: run.num_elements]
                    target[run.write_at :][: run.num_elements].copy_(source)
        for rank, new in enumerate(news):
            new.clear_padding()
            expected = shared(stay, rank, num_ranks, alignment)
            assert torch.equal(new.weights, expected.weights)
            for key, value in expected.state.items():
                assert torch.equal(new.state[key], value), "padding is zero, too"


def test_complete_state_is_written_to_the_shares_that_hold_it() -> None:
    members = [nn.Parameter(torch.full((n,), float(n))) for n in (5, 6, 9)]
    new = nn.Parameter(torch.arange(7.0))
    for rank in range(2):
        old = shared(members, rank, 2)
        buffers = old.after([members[0], new, members[2]])
        buffers.write(new, {"exp_avg": torch.arange(7.0) * 10})
        place = buffers.layout.places[new]
        assert torch.equal(buffers.weights[place.offset :][:7], new.detach())
        for piece in place.pieces():
            if piece.rank == rank:
                part = slice(piece.position, piece.position + piece.stop - piece.start)
                wanted = torch.arange(piece.start, piece.stop).float()
                assert torch.equal(buffers.master[part], wanted), "without a state of its own: the weights"
                assert torch.equal(buffers.moments["exp_avg"][part], wanted * 10)


def test_a_constructor_gets_finished_buffers_and_other_threads_their_own() -> None:
    """A snapshot's thread may copy the same weights meanwhile."""
    made = group([1, 2])

    def masters() -> list[Tensor]:
        weights = _flatten_dense_tensors(made.members)  # type: ignore[no-untyped-call]
        return [weights.clone(), made.weights.clone(), torch.zeros_like(input=weights), torch.zeros_like(weights)]

    with building([made]), ThreadPoolExecutor(1) as threads:
        mine, theirs = masters(), threads.submit(masters).result()
    assert [mine[i] is made.master for i in (0, 1)] == [True, True] and mine[3] is made.gradients
    assert not mine[2].any() and mine[2] is not made.gradients
    assert torch.equal(theirs[0], made.weights) and torch.equal(theirs[1], made.weights)
    assert all(t is not made.master and t is not made.gradients for t in theirs)
    assert "clone" not in vars(Tensor) and made.weights.clone() is not made.master


def test_functions_of_torch_are_its_own_again_after_an_error() -> None:
    before = torch.zeros, torch.zeros_like, Tensor.clone, torch._C._nn.flatten_dense_tensors
    with pytest.raises(MemoryError), building([group([1])]):
        raise MemoryError
    assert (torch.zeros, torch.zeros_like, Tensor.clone, torch._C._nn.flatten_dense_tensors) == before
