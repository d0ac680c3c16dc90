"""A function of somebody's own that can be asked for a part of its gradients.

Autograd runs such a function whole, whatever part of it a backward needs: ``ctx.needs_input_grad`` says what the
forward's arguments required. One whose backward computes no more than that says, and declares so, is asked for the
gradient of its input in the first half and for those of its parameters in the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DECLARATION = "backward_can_be_split"
"""Attribute of an autograd function that declares it, true."""


class PartialBackward:
    """Asks a function's node for some of its gradients at a time.

    Args:
        node: of a function that declares it.
        places: which of its edges wait for the second half.
    """

    def __init__(self, node: Any, places: Sequence[int]) -> None:
        self._node = node
        self._whole: tuple[bool, ...] = self._node.needs_input_grad
        # There is an edge for each argument that is a tensor, and it leads somewhere if that requires a gradient.
        required = [i for i, needed in enumerate(self._whole) if needed]
        edges = [place for place, (other, _) in enumerate(node.next_functions) if other is not None]
        arguments = dict(zip(edges, required, strict=True))
        self._late = [arguments[place] for place in places]

    def begin(self) -> None:
        """From now on, ask for what does not wait."""
        self._node.needs_input_grad = tuple(needed and i not in self._late for i, needed in enumerate(self._whole))

    def restore(self) -> None:
        """From now on, ask for everything."""
        self._node.needs_input_grad = self._whole

    def compute(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute what has waited.

        Args:
            gradients: of the function's outputs; ``None``: zeros.

        Returns:
            A gradient for each of the places.
        """
        self._node.needs_input_grad = tuple(i in self._late for i in range(len(self._whole)))
        metadata = self._node._input_metadata
        found = self._node.apply(*(
            torch.zeros(about.shape, dtype=about.dtype, device=about.device) if gradient is None else gradient
            for gradient, about in zip(gradients, metadata, strict=True)
        ))  # fmt: skip
        found = found if isinstance(found, tuple) else (found,)
        return [found[i] for i in self._late]
