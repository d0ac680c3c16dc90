"""The k largest of numbers that are spread over ranks, exactly, by moving kilobytes.

The bits of a non-negative float32, read as an integer, order like the number. So the k-th largest is found
digit by digit from the top: every rank counts its numbers by their next digit, the histograms are added up,
and only numbers that share the digits found so far stay in the race (radix select; Alabi et al., *Fast
k-selection algorithms for graphics processing units*, 2012). Three rounds of at most 2^11 bins settle all
31 bits. The way of DynMo's Algorithm 1, which gathers candidates at one rank, is in ``gathering.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# By layer index: one 1-D tensor of non-negative numbers a weight of the layer.
Scores = Mapping[int, Sequence[Tensor]]
Masks = dict[int, list[Tensor]]

# (lowest bit, number of bits) of each digit of a non-negative float32, from the top.
_DIGITS = ((20, 11), (10, 10), (0, 10))


@dataclass(frozen=True)
class Threshold:
    """Where the cut falls.

    Attributes:
        bits: bit pattern of the k-th largest number; larger numbers are all kept.
        num_equal: how many of the numbers equal to it are kept, at least 1.
    """

    bits: int
    num_equal: int


def find_threshold(scores: Tensor, keep: int, group: dist.ProcessGroup | None) -> Threshold | None:
    """Find the ``keep``-th largest number of all ranks; collective over ``group``.

    Args:
        scores: this rank's numbers, float32, non-negative, 1-D; may be empty.
        keep: how many are to be kept in all, at least 1.
        group: the ranks that share the numbers; ``None`` for this process alone.

    Returns:
        The threshold, the same on all ranks; ``None`` if there are no more than ``keep`` numbers.
    """
    candidates, prefix, wanted = scores.view(torch.int32), 0, keep
    for shift, width in _DIGITS:
        digits = (candidates >> shift) & ((1 << width) - 1)
        counts = _add_up(torch.bincount(digits, minlength=1 << width), group).flip(0)
        from_top = counts.cumsum(0)
        if shift == _DIGITS[0][0] and int(from_top[-1]) <= keep:
            return None
        place = int(torch.searchsorted(from_top, wanted))
        wanted -= int(from_top[place] - counts[place])
        digit = (1 << width) - 1 - place
        candidates = candidates[digits == digit]
        prefix |= digit << shift
    return Threshold(prefix, wanted)


def keep_above(scores: Scores, threshold: Threshold, num_layers: int, group: dist.ProcessGroup | None,
               device: torch.device) -> Masks:
    """Mark what the threshold keeps; of numbers equal to it, the first by position; collective over ``group``.

    A position is the layer's index, then the weight's place in its layer, then the element's in its weight.

    Args:
        scores: this rank's numbers by layer; a layer is on one rank of the group.
        threshold: what :func:`find_threshold` has found.
        num_layers: layers of the whole model.
        group: the ranks that share the numbers; ``None`` for this process alone.
        device: where to communicate, also on a rank that has no numbers.

    Returns:
        Boolean masks in the shapes of ``scores``.
    """
    equal = torch.zeros(num_layers, dtype=torch.int64, device=device)
    for layer, parts in scores.items():
        equal[layer] = sum((part.view(torch.int32) == threshold.bits).sum() for part in parts)
    equal_of_layer = equal.clone()
    before = _add_up(equal, group).cumsum(0) - equal_of_layer
    masks: Masks = {}
    for layer, parts in scores.items():
        left = threshold.num_equal - before[layer]
        masks[layer] = []
        for part in parts:
            bits = part.view(torch.int32)
            ties = bits == threshold.bits
            masks[layer].append((bits > threshold.bits) | (ties & (ties.cumsum(0) <= left)))
            left = left - ties.sum()
    return masks


def keep_largest(scores: Scores, keep: int, num_layers: int, group: dist.ProcessGroup | None,
                 device: torch.device) -> tuple[Masks, Threshold | None]:
    """Mark the ``keep`` largest numbers of all ranks; collective over ``group``.

    Args:
        scores: this rank's numbers by layer, float32, non-negative, 1-D.
        keep: how many are to be kept in all.
        num_layers: as for :func:`keep_above`, like the next two.
        group: the ranks that share the numbers.
        device: where to communicate.

    Returns:
        Boolean masks in the shapes of ``scores``, and the threshold, which is the same on all ranks; ``None``
        where everything is kept or nothing.
    """
    if keep == 0:
        return all_masks(scores, False), None
    threshold = find_threshold(flatten(scores, device), keep, group)
    if threshold is None:
        return all_masks(scores, True), None
    return keep_above(scores, threshold, num_layers, group, device), threshold


def flatten(scores: Scores, device: torch.device) -> Tensor:
    """Put the numbers of all layers into one tensor, by position."""
    parts = [part for _, parts in sorted(scores.items()) for part in parts]
    return torch.cat(parts) if parts else torch.empty(0, device=device)


def all_masks(scores: Scores, value: bool) -> Masks:
    """Mark everything alike."""
    return {
        layer: [torch.full_like(part, value, dtype=torch.bool) for part in parts] for layer, parts in scores.items()
    }


def _add_up(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add up counts over the group, in place."""
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts
