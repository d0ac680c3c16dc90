"""The rows of bytes in which a message travels: one for each tensor, before them one that tells of what kinds they are.

The label of a message stands in the telling row, or behind its first tensor where nothing is told.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dynpipe_ds.messages.crossing import FIRST_BYTES, Crossing, Told
from dynpipe_ds.messages.labels import LABEL_BYTES
from dynpipe_ds.messages.layouts import Layout

_LENGTH = struct.Struct("<q")
_NOTHING = b"null"


def rows_of(label: bytes, told: Told | None, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """What travels for a message; copies.

    Args:
        label: of the message.
        told: the kinds of the tensors; ``None``: the receiver knows them.
        tensors: of any layout.
        device: that rows are sent from.
    """
    if told is None:
        return list(_filled(tensors, label, device))
    return [*_telling(label + _text(told), device), *_filled(tensors, b"", device)]


def told_in(row: bytes, receive: Callable[[int], bytes]) -> Crossing | None:
    """What a telling row says.

    Args:
        row: of ``FIRST_BYTES``.
        receive: gets that many bytes more, which follow where the text is longer.
    """
    (size,) = _LENGTH.unpack_from(row, LABEL_BYTES)
    begin = LABEL_BYTES + _LENGTH.size
    text = row[begin : begin + size]
    if size > len(text):
        text += receive(size - len(text))
    return None if text == _NOTHING else Crossing.decode(text)


class Room:
    """Memory for the tensors of a message, and the rows in which they come."""

    def __init__(self, crossing: Crossing, is_told: bool, device: torch.device) -> None:
        self.crossing, self.is_told = crossing, is_told
        self.tensors: list[Tensor] = []
        self.rows: list[Tensor] = []
        self._packed: list[tuple[Layout, Tensor, Tensor]] = []
        tail = 0 if is_told else LABEL_BYTES
        for layout in crossing.layouts:
            tensor, row = layout.room(device, tail if layout.message_bytes else 0)
            self.tensors.append(tensor)
            if row.numel():
                self.rows.append(row)
                self._packed.append((layout, row[: layout.message_bytes], tensor))
                tail = 0
        if tail:
            self.rows.append(torch.empty(tail, dtype=torch.uint8, device=device))

    @property
    def label(self) -> Tensor:
        """Behind the first tensor."""
        return self.rows[0][-LABEL_BYTES:]

    def unpacked(self) -> list[Tensor]:
        """The tensors, once all has come."""
        for layout, row, tensor in self._packed:
            layout.unpack(row, tensor)
        return self.tensors


def _filled(tensors: Sequence[Tensor], label: bytes, device: torch.device) -> Iterator[Tensor]:
    """A row for each tensor that has elements, the first one with the label behind."""
    for tensor in tensors:
        if tensor.numel():
            message = Layout.of(tensor).message(tensor)
            row = torch.empty(message.numel() + len(label), dtype=torch.uint8, device=device)
            row[: message.numel()].copy_(message)
            if label:
                row[message.numel() :].copy_(_bytes(label))
            label = b""
            yield row
    if label:
        yield _bytes(label).to(device)


def _telling(text: bytes, device: torch.device) -> list[Tensor]:
    """One row of fixed size, and another one if the text is longer."""
    row = _bytes(text.ljust(FIRST_BYTES, b"\0")).to(device)
    return [row] if row.numel() == FIRST_BYTES else [row[:FIRST_BYTES], row[FIRST_BYTES:]]


def _text(told: Told) -> bytes:
    text = _NOTHING if told.crossing is None else told.crossing.encode()
    return _LENGTH.pack(len(text)) + text


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
