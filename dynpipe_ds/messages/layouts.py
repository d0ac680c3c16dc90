"""How a tensor lies in memory, so that a copy on another stage can lie alike.

Kernels choose by layout, and add up in an order that follows from it: a tensor that arrives in another layout gives
other bits. What crosses a boundary therefore arrives with the strides it had, and as far into a line of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

LINE_BYTES = 64  # torch's buffers begin at multiples of it


@dataclass(frozen=True, eq=False)
class Layout:
    """Kind of a tensor, and where its elements lie.

    Two are equal if one's elements, as they travel, can be received into the other: where a line begins, and strides
    that no element depends on, may differ, as they do where micro-batches are slices of one tensor.

    Attributes:
        shape: its sizes.
        stride: its strides, those of dimensions of size 1 included; any that torch allows.
        offset: elements between the begin of a line of memory and the first element.
        dtype: its element type.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._kind == other._kind

    def __hash__(self) -> int:
        return hash(self._kind)

    @property
    def _kind(self) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        steps = tuple(step if size > 1 else 0 for size, step in zip(self.shape, self.stride, strict=True))
        return self.shape, steps, self.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of a tensor."""
        offset = int(tensor.storage_offset()) % (LINE_BYTES // tensor.element_size())
        return cls(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)

    @property
    def is_plain(self) -> bool:
        """Whether the elements lie in a row, from the begin of a line."""
        return self.offset == 0 and self.stride == contiguous_stride(self.shape)

    @property
    def span(self) -> int:
        """Elements from the first to the last in memory, gaps between them included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def empty(self, device: torch.device) -> Tensor:
        """Allocate a tensor that lies so."""
        if not self.offset:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return self._in(torch.empty(self.offset + self.span, dtype=self.dtype, device=device))

    def zeros(self, device: torch.device) -> Tensor:
        """Allocate a tensor of zeros that lies so."""
        return self._in(torch.zeros(self.offset + self.span, dtype=self.dtype, device=device))

    def room(self, device: torch.device, tail: int = 0) -> tuple[Tensor, Tensor]:
        """Allocate a tensor that lies so, to be received.

        Args:
            device: where.
            tail: bytes that come behind it; without elements none may.

        Returns:
            The tensor, and a row of bytes for its :meth:`message` and the tail, which shares its memory unless there
            are gaps; then :meth:`unpack` copies.
        """
        size, begin = self.message_bytes, self.offset * self.dtype.itemsize
        has_gaps = self._has_gaps
        own = begin + self.span * self.dtype.itemsize
        memory = torch.empty(own if has_gaps else own + tail, dtype=torch.uint8, device=device)
        if has_gaps:
            return self._in(memory), torch.empty(size + tail, dtype=torch.uint8, device=device)
        return self._in(memory), memory[begin : begin + size + tail]

    def _in(self, memory: Tensor) -> Tensor:
        return _within(memory, self.offset, self.shape, self.stride, self.dtype)

    @property
    def message_bytes(self) -> int:
        """Bytes of a :meth:`message`."""
        return (prod(self._stored_shape) if self._has_gaps else self.span) * self.dtype.itemsize

    def message(self, tensor: Tensor) -> Tensor:
        """The elements as they travel: in one row, each once, without the gaps of a slice, as bytes.

        Returns:
            A row of bytes, since back-ends don't know all dtypes, that shares the tensor's memory; a copy where there
            are gaps, or where elements are conjugated or negated when they are read.
        """
        tensor = tensor.detach()
        if self._has_gaps:
            row = tensor.as_strided(self._stored_shape, self.stride).contiguous().view(-1)
        else:
            row = tensor.as_strided((self.span,), (1,))
        if row.is_conj() or row.is_neg():
            row = row.resolve_conj().resolve_neg()
        return row.view(torch.uint8)

    def unpack(self, message: Tensor, tensor: Tensor) -> None:
        """Put what arrived in a :meth:`message` of a tensor into the tensor."""
        if self._has_gaps:
            shape = self._stored_shape
            tensor.detach().as_strided(shape, self.stride).copy_(message.view(self.dtype).view(shape))

    @property
    def _stored_shape(self) -> tuple[int, ...]:
        """Sizes without the repetitions of an expanded tensor."""
        return tuple(size if step else min(size, 1) for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def _has_gaps(self) -> bool:
        return self.span > prod(self._stored_shape)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a new tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def same_memory(tensor: Tensor) -> Tensor:
    """Another tensor in a tensor's memory, of which autograd does not know that it is one."""
    return _within(tensor, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)


def _within(memory: Tensor, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), offset, tuple(shape), tuple(stride))
