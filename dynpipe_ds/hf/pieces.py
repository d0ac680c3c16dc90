"""Weights as model folders store them, and where they go."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from dynpipe_ds.owning import owner_of


class Piece(NamedTuple):
    """A weight as model folders store it.

    Attributes:
        full: name of the parameter in the model.
        stored: name in files.
        part: of the parameter.
        rows: that the parameter has of a whole, if it is one replica's own.
    """

    full: str
    stored: str
    part: Tensor
    rows: range | None

    @property
    def is_whole(self) -> bool:
        """Whether it is not a part of the parameter, but all of it."""
        return self.stored == self.full


class Source(NamedTuple):
    """Where a weight of a folder goes.

    Attributes:
        target: takes it.
        rows: of it that are read; ``None`` for all.
    """

    target: Tensor
    rows: range | None = None


def rows_of(parameter: nn.Parameter) -> range | None:
    """The rows that a parameter has of a whole; ``None`` where it is the whole.

    Args:
        parameter: of a layer on this rank.
    """
    owner = owner_of(parameter)
    return None if owner is None else owner.rows(len(parameter) * owner.count)
