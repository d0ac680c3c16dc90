"""All ranks or none: checks that every rank makes before anything irreversible.

``device`` is where the communication back-end works, ``group`` who takes part (``None``: all ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_FAILED = 2**62
"""Greater than all news."""


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank has, by rank; collective over the ranks of a group."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def from_first(find: Callable[[], T]) -> T:
    """What the first rank finds, on every rank; collective over all ranks.

    Args:
        find: called on the first rank only; must not raise, or the others would wait for it.
    """
    box: list[Any] = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    found: T = box[0]
    return found


def anywhere(condition: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether something is true on any rank; collective over the ranks of a group."""
    return bool(greatest(int(condition), device, group))


def greatest(number: int, device: torch.device, group: dist.ProcessGroup | None = None) -> int:
    """The greatest of the numbers that the ranks have; collective over the ranks of a group."""
    box = torch.tensor([number], device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
    return int(box.item())


def first_error(
    error: BaseException | None, device: torch.device, group: dist.ProcessGroup | None = None
) -> str | None:
    """Tell every rank whether any rank failed; collective over the ranks of a group.

    Returns:
        ``None`` if no rank failed; otherwise the same text on every rank, naming ranks and errors.
    """
    return _all_errors(error, group) if anywhere(error is not None, device, group) else None


def _all_errors(error: BaseException | None, group: dist.ProcessGroup | None = None) -> str:
    mine = None if error is None else f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    return "; ".join(text for text in gather(mine, group) if text is not None)


def together(
    action: Callable[[], T], device: torch.device, failure: Callable[[str], Exception],
    group: dist.ProcessGroup | None = None,
) -> T:
    """Do something on every rank; if it fails on one, fail on all; collective over the ranks of a group.

    Args:
        action: this rank's part; must not communicate, or the others could wait for a rank that failed.
        device: where the communication back-end works.
        failure: makes the error that every rank raises of the text that names ranks and errors.
        group: who takes part; ``None``: all ranks.

    Returns:
        What the action returned.

    Raises:
        Exception: what ``failure`` made, on every rank, if any rank's action raised.
    """
    return together_with_news(lambda: (action(), 0), device, failure, group)[0]


def together_with_news(
    action: Callable[[], tuple[T, int]], device: torch.device, failure: Callable[[str], Exception],
    group: dist.ProcessGroup | None = None,
) -> tuple[T, int]:
    """As :func:`together`, and tell the others a small number in the same message.

    Args:
        action: returns its result, and the number.
        device: as there.
        failure: as there.
        group: as there.

    Returns:
        What this rank's action returned, and the greatest of the ranks' numbers.
    """
    error: Exception | None = None
    news = _FAILED
    try:
        result, news = action()
    except Exception as caught:
        error = caught
    news = greatest(news, device, group)
    if news == _FAILED:
        raise failure(_all_errors(error, group)) from error
    return result, news


def disagreement(
    values: Sequence[int], what: str, device: torch.device, error: Exception | None = None
) -> str | None:
    """Compare numbers over all ranks; collective over all ranks.

    Args:
        values: this rank's numbers; their count may differ between ranks.
        what: name for the message.
        device: where the communication back-end works.
        error: what kept this rank from having any, if something did.

    Returns:
        ``None`` if all ranks hold the same; otherwise the same text on every rank.
    """
    # A polynomial hash keeps the message at one number whatever the count.
    digest = 0
    for value in (len(values), *values):
        digest = (digest * 1_000_003 + int(value) + 1) % (1 << 61)
    ends = torch.tensor([int(error is not None), digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    failed, high, low = ends.tolist()
    if failed:
        return f"{what}: choosing them failed ({_all_errors(error)})"
    if high == -low:
        return None
    return (
        f"the ranks disagree on {what}: "
        + ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(gather(list(values))))
        + "; every rank must decide the same from the same inputs"
    )


def same_everywhere(values: Sequence[int], what: str, device: torch.device) -> None:
    """Check that all ranks hold the same numbers; collective over all ranks.

    Args:
        values: this rank's numbers; their count may differ between ranks.
        what: name for the message.
        device: where the communication back-end works.

    Raises:
        ValueError: on every rank, if some rank holds other numbers.
    """
    problem = disagreement(values, what, device)
    if problem is not None:
        raise ValueError(problem)


def difference_of_replicas(values: Sequence[str], what: str, stage: int) -> str | None:
    """Compare texts over the replicas of each stage; collective over all ranks.

    Args:
        values: this rank's texts.
        what: name for the message.
        stage: of this rank.

    Returns:
        ``None`` if the replicas of every stage hold the same; otherwise the same text on every rank.
    """
    everyone = gather((stage, list(values)))
    first: dict[int, int] = {}
    for rank, (its_stage, theirs) in enumerate(everyone):
        other = first.setdefault(its_stage, rank)
        if everyone[other][1] != theirs:
            pairs = zip_longest(everyone[other][1], theirs, fillvalue="nothing more")
            mine, yours = next((a, b) for a, b in pairs if a != b)
            return (
                f"ranks {other} and {rank} are replicas of stage {its_stage} but differ in {what}: rank {other} has "
                f"{mine} where rank {rank} has {yours}; do the same on every replica"
            )
    return None
