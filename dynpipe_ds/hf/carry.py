"""What passes from layer to layer of a causal language model.

The stream alone in the plain case, a tuple otherwise. Rotary angles and masks ``[seq, seq]`` are not
among it: every block makes them anew of positions and padding, which are far smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Activation = Tensor | tuple[Tensor, ...]


@dataclass
class Carry:
    """The parts of an activation by name.

    Attributes:
        stream: residual stream ``[batch, seq, hidden]``; token ids ``[batch, seq]`` before the embedding,
            logits ``[batch, seq, vocab]`` after the head.
        padding: 1 for tokens, 0 for padding, ``[batch, seq]``, or ``None``.
        positions: position of every token, int64 ``[batch, seq]``, or ``None`` for 0, 1, 2, …
        routing: what routers have added up so far, float32, or ``None``.
    """

    stream: Tensor
    padding: Tensor | None = None
    positions: Tensor | None = None
    routing: Tensor | None = None

    def position_ids(self) -> Tensor:
        """Position of every token, ``[batch, seq]`` or ``[1, seq]``."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.stream.shape[1], device=self.stream.device)[None]


@dataclass(frozen=True)
class Layout:
    """Which parts an activation has, in the order of :class:`Carry`; the same in all layers.

    Attributes:
        padding: whether a padding mask comes with the inputs.
        positions: whether positions come with the inputs.
        routing: shape of what routers add up; ``None`` if there are no routers or their loss does not count.
    """

    padding: bool = False
    positions: bool = False
    routing: tuple[int, ...] | None = None

    def begin(self, inputs: Activation) -> Carry:
        """Name the parts of the model's inputs; raises ``ValueError`` if there are more or fewer."""
        parts = inputs if isinstance(inputs, tuple) else (inputs,)
        names = ["token ids", *["attention_mask"] * self.padding, *["position_ids"] * self.positions]
        if len(parts) != len(names):
            raise ValueError(
                f"the inputs have {len(parts)} parts but the layers were made for {len(names)} ({', '.join(names)}): "
                "set attention_mask= and position_ids= of causal_lm_layers to what the data has"
            )
        if self.routing is not None:
            parts = (*parts, torch.zeros(self.routing, device=parts[0].device))
        return self.unpack(parts)

    def unpack(self, activation: Activation) -> Carry:
        """Name the parts of an activation between two layers."""
        parts = activation if isinstance(activation, tuple) else (activation,)
        return Carry(
            parts[0],
            padding=parts[1] if self.padding else None,
            positions=parts[1 + self.padding] if self.positions else None,
            routing=parts[-1] if self.routing is not None else None,
        )

    def pack(self, carry: Carry) -> Activation:
        """Make an activation of its parts."""
        parts = (carry.stream, carry.padding, carry.positions, carry.routing)
        present = tuple(part for part in parts if part is not None)
        return present if len(present) > 1 else present[0]
