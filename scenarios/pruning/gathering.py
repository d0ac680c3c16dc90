"""DynMo's own way to the k largest: every rank sends its k largest to the first rank, which picks.

What is sent grows with the model and arrives at one rank: the reference for ``selection.py`` in tests and in
``benchmarks/pruning_selection``, not used in training.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from scenarios.pruning.selection import Masks, Scores, flatten

# A position is layer * _LAYER + element within the layer.
_LAYER = 2**40


def keep_largest_by_gathering(scores: Scores, keep: int, group: dist.ProcessGroup | None = None) -> Masks:
    """Mark the ``keep`` largest numbers of all ranks (DynMo, Algorithm 1); collective over ``group``.

    Ties go to the first by position, as in ``selection.keep_largest``, whose arguments and result these are.
    """
    numbers, positions = flatten(scores, torch.device("cpu")), _positions(scores)
    order = numbers.sort(descending=True, stable=True).indices[:keep]
    if group is None:
        kept = torch.ones_like(order, dtype=torch.bool)
    else:
        kept = _pick_at_first(numbers[order], positions[order], keep, group)
    mask = torch.zeros_like(numbers, dtype=torch.bool)
    mask[order[kept]] = True
    parts = [part for _, parts in sorted(scores.items()) for part in parts]
    pieces = iter(mask.split([part.numel() for part in parts]))
    return {layer: [next(pieces) for _ in scores[layer]] for layer in sorted(scores)}


def _positions(scores: Scores) -> Tensor:
    counts = {layer: sum(part.numel() for part in parts) for layer, parts in sorted(scores.items())}
    ranges = [layer * _LAYER + torch.arange(count) for layer, count in counts.items()]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def _pick_at_first(numbers: Tensor, positions: Tensor, keep: int, group: dist.ProcessGroup) -> Tensor:
    """Gather candidates, let the first rank of the group pick, and scatter its answer."""
    first, size = dist.get_global_rank(group, 0), dist.get_world_size(group)
    picks = dist.get_rank(group) == 0
    longest = torch.tensor(numbers.numel())
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    length = int(longest)
    padding = length - numbers.numel()
    numbers = torch.cat((numbers, torch.full((padding,), -1.0)))
    positions = torch.cat((positions, torch.full((padding,), torch.iinfo(torch.int64).max)))
    all_numbers = [torch.empty(length) for _ in range(size)] if picks else None
    all_positions = [torch.empty(length, dtype=torch.int64) for _ in range(size)] if picks else None
    dist.gather(numbers, all_numbers, dst=first, group=group)
    dist.gather(positions, all_positions, dst=first, group=group)
    answers = None
    if all_numbers is not None and all_positions is not None:
        by_position = torch.cat(all_positions).sort(stable=True).indices
        by_number = torch.cat(all_numbers)[by_position].sort(descending=True, stable=True).indices
        answer = torch.zeros(size * length, dtype=torch.uint8)
        answer[by_position[by_number[:keep]]] = 1
        answers = list(answer.view(size, length))
    kept = torch.empty(length, dtype=torch.uint8)
    dist.scatter(kept, answers, src=first, group=group)
    return kept[: length - padding].bool()
