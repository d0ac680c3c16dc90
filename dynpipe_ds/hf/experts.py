"""A block's experts in the hands of someone else, who computes them where and how he likes.

Families keep experts in different ways; here all of them are stacks, one row an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class ExpertStacks:
    """The experts of a block: gated MLPs, ``down @ (activation(gate @ row) * (up @ row))``.

    Attributes:
        weights: parameters by name, ``[E, out, in]`` each; without memory where a folder's will be read.
        gate_up: names of gate and up; a single name for a stack that has both, the gate's rows first.
        down: name of down.
        activation: elementwise.
    """

    weights: Mapping[str, nn.Parameter]
    gate_up: tuple[str, ...]
    down: str
    activation: Callable[[Tensor], Tensor]


MakeExperts = Callable[[ExpertStacks], nn.Module]
"""Makes a module that computes a block's experts in the block's place.

Its parameters have the names of the stacks and their values, or one replica's rows of them
(:func:`~dynpipe_ds.own_by_replica`). Its forward takes tokens ``[T, hidden]``, their chosen experts ``[T, K]`` (int64)
and the weights of these ``[T, K]`` (``None`` for 1), and adds the weighted answers up, ``[T, hidden]``.
"""
