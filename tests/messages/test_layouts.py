"""A tensor that is put together from its layout and its message lies as the first one did."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dynpipe_ds.messages.layouts import Layout, contiguous_stride, same_memory

CPU = torch.device("cpu")
TAIL = 16  # bytes behind a message

# With the number of elements that travel.
TENSORS: dict[str, tuple[Tensor, int]] = {
    "plain": (torch.randn(2, 3, 4), 24),
    "one number": (torch.randn(()), 1),
    "channels_last": (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), 120),
    "permuted": (torch.randn(2, 3, 4, 5, 6).permute(3, 1, 4, 0, 2), 720),
    "later rows": (torch.randn(5, 3)[2:], 9),
    "slice": (torch.randn(4, 6)[:, 1:4], 12),
    "slice of a transposed tensor": (torch.randn(6, 8).t()[::2, 1:3], 8),
    "every second": (torch.randn(9)[::2], 5),
    "expanded": (torch.randn(3, 1).expand(3, 5), 3),
    "one number, repeated": (torch.randn(1).expand(2, 3, 4), 1),
    "expanded slice": (torch.randn(4, 2, 1)[1:, :1].expand(3, 1, 3), 3),
    "overlapping": (torch.arange(20.0).unfold(0, 5, 2), 19),
    "odd strides of size 1": (torch.randn(6).as_strided((2, 1, 3), (3, 99, 1)), 6),
    "nothing": (torch.zeros(0, 7), 0),
    "nothing, expanded": (torch.zeros(3, 1, 0).expand(3, 4, 0), 0),
    "integers": (torch.arange(24).view(4, 6).t(), 24),
    "booleans": ((torch.arange(24) % 3 == 0).view(4, 6)[:, 2:], 16),
}


@pytest.mark.parametrize("name", TENSORS)
def test_there_and_back(name: str) -> None:
    tensor, num_elements = TENSORS[name]
    layout = Layout.of(tensor)
    message, (arrived, row) = layout.message(tensor), layout.room(CPU, TAIL * bool(tensor.numel()))
    inbox = row[: layout.message_bytes]
    assert message.is_contiguous() and message.dtype == inbox.dtype == torch.uint8
    assert message.shape == inbox.shape == (num_elements * tensor.element_size(),)
    assert row.numel() == inbox.numel() + TAIL * bool(tensor.numel())
    row.fill_(255)
    inbox.copy_(message)
    layout.unpack(inbox, arrived)
    assert torch.equal(arrived, tensor) and arrived.stride() == tensor.stride()
    assert Layout.of(arrived) == layout == Layout.of(layout.zeros(CPU)) and not layout.zeros(CPU).any()
    line, size = 64, tensor.element_size()
    assert tensor.numel() == 0 or arrived.data_ptr() % line == tensor.storage_offset() * size % line
    assert layout.is_plain == (name in ("plain", "one number", "nothing"))


def test_what_is_conjugated_or_negated_when_it_is_read() -> None:
    numbers = torch.randn(4, 6, dtype=torch.complex64)
    for tensor in (numbers.conj(), numbers.conj()[:, 1:4], numbers.conj().imag):
        layout = Layout.of(tensor)
        message, (arrived, row) = layout.message(tensor), layout.room(CPU)
        row.copy_(message)
        layout.unpack(row, arrived)
        assert torch.equal(arrived, tensor) and arrived.stride() == tensor.stride()


def test_dense_tensors_are_not_copied() -> None:
    for name in ("plain", "channels_last", "permuted", "later rows", "expanded", "overlapping"):
        tensor = TENSORS[name][0]
        assert Layout.of(tensor).message(tensor).data_ptr() == tensor.data_ptr(), name


@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3), (2, 0, 3), (1, 1)])
def test_strides_of_new_tensors(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_same_memory_is_no_view() -> None:
    tensor = torch.randn(4, 6)[:, 1:3]
    other = same_memory(tensor)
    assert other.data_ptr() == tensor.data_ptr() and other.stride() == tensor.stride() and not other._is_view()


def test_slices_of_one_tensor_travel_alike() -> None:
    rows = torch.randn(10, 5)
    assert len({Layout.of(rows[i : i + 2]) for i in range(9)}) == 1, "micro-batches that are parts of the data"
    assert Layout.of(rows[:1]) == Layout.of(rows[:1].as_strided((1, 5), (99, 1))), "no element depends on it"
    others = [rows[:, :3], rows[:, :3].clone(), rows.t()[:3], rows.t()[:3].contiguous(), rows[:3, :3].int()]
    assert len({Layout.of(tensor) for tensor in others}) == len(others)
