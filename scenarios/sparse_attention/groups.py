"""Rows sorted into groups, and groups laid out by size, so that attention runs on a few dense batches.

Letters: ``R`` rows (one a sample, position and head), ``G`` groups (one a sample, head and code), ``S``
slots (rows plus padding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Sizes are rounded up to a multiple of this, and of an eighth of their power of two: few different sizes,
# and at most an eighth of a large group is padding.
_LEAST_STEP = 16
_LARGEST_POWER = 40


def size_class(sizes: Tensor) -> Tensor:
    """Round group sizes up, so that groups of about the same size can be computed together.

    Args:
        sizes: rows of each group, int64.

    Returns:
        Slots of each group: 0 for an empty one.
    """
    powers = 2 ** torch.arange(_LARGEST_POWER, device=sizes.device)
    power = powers[torch.searchsorted(powers, sizes.clamp(min=1), right=True) - 1]
    step = (power // 8).clamp(min=_LEAST_STEP)
    return (sizes + step - 1) // step * step


@dataclass(frozen=True)
class Layout:
    """Where rows lie among the slots: groups one after the other, each followed by its padding.

    Attributes:
        slot_of_row: ``[R]``.
        row_of_slot: ``[S]``; padding repeats row 0.
        place_of_row: ``[R]``, how many rows of a row's own group come before it.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    place_of_row: Tensor


def lay_out(group_of_row: Tensor, sizes: Tensor, slots: Tensor, order: Tensor) -> Layout:
    """Sort rows by group, keeping their order within it, and give each its slot.

    Args:
        group_of_row: ``[R]``.
        sizes: ``[G]``, rows of each group.
        slots: ``[G]``, slots of each group, not fewer than rows.
        order: ``[G]``, the groups in the order in which they shall lie.
    """
    rows = torch.argsort(group_of_row, stable=True)
    group = group_of_row[rows]
    place = torch.arange(len(rows), device=rows.device) - (sizes.cumsum(0) - sizes)[group]
    ends = slots[order].cumsum(0)
    first_slot = torch.empty_like(slots).scatter_(0, order, ends - slots[order])
    slot = first_slot[group] + place
    return Layout(
        slot_of_row=torch.empty_like(rows).scatter_(0, rows, slot),
        row_of_slot=rows.new_zeros(int(ends[-1])).scatter_(0, slot, rows),
        place_of_row=torch.empty_like(rows).scatter_(0, rows, place),
    )


def runs(values: Tensor) -> list[tuple[list[int], int]]:
    """Count equal neighbours: rows of ``[n, k]`` as (row, number of times), without empty sizes."""
    distinct, counts = values.unique_consecutive(dim=0, return_counts=True)
    return [(row, n) for row, n in zip(distinct.tolist(), counts.tolist(), strict=True) if all(row)]
