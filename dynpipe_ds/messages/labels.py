"""What every message says of itself, so that another one than planned is noticed: batch, order, kind and micro-batch.

A label also says whether its sender still computes. A stage that can't finish a batch sends the rest of it all the same
and computes nothing, so that nobody waits; whoever reads that in a label does likewise.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dynpipe_ds.messages.traffic import Kind, Message

_LABEL = struct.Struct("<IIHHI")  # batch, order, kind, whether it is dropped, micro-batch
LABEL_BYTES = _LABEL.size


@dataclass
class Stamp:
    """What the labels of a batch on one stage have in common.

    Attributes:
        batch: number of the schedule since the start.
        digest: of its order.
        is_dropped: whether this stage, or one that it has heard from, has given the batch up: no rank can take the
            optimizer's step, and what is sent from now on is there to be taken, not to be computed with.
    """

    batch: int = 0
    digest: int = 0
    is_dropped: bool = False

    def label(self, message: Message) -> bytes:
        """What travels with a message."""
        return _LABEL.pack(self.batch, self.digest, message.kind, self.is_dropped, message.micro_batch)

    def read(self, message: Message, label: bytes) -> str | None:
        """Take note of what came, and say what it is if it is not the planned message."""
        batch, digest, number, is_dropped, micro_batch = _LABEL.unpack(label)
        self.is_dropped |= bool(is_dropped)
        if (batch, digest, number, micro_batch) == (self.batch, self.digest, *message):
            return None
        what = {int(kind): kind.name.lower() for kind in Kind}.get(number, f"message of kind {number}")
        text = f"the {what} of micro-batch {micro_batch} came where {message} was planned"
        if batch != self.batch:
            text += f" (of schedule {batch} instead of {self.batch})"
        return f"{text} (by another order)" if digest != self.digest else text
