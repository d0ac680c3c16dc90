"""All ranks or none: checks that every rank makes before anything irreversible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def first_error(error: BaseException | None, device: torch.device) -> str | None:
    """Tell every rank whether any rank failed; collective over all ranks.

    Args:
        error: what went wrong on this rank, if anything.
        device: where the communication back-end works.

    Returns:
        ``None`` if no rank failed; otherwise the same text on every rank, naming ranks and errors.
    """
    failed = torch.tensor([int(error is not None)], device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    return _all_errors(error) if failed.item() else None


def _all_errors(error: BaseException | None) -> str:
    """What went wrong on all ranks together."""
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}")
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None)


def together(action: Callable[[], T], device: torch.device, failure: Callable[[str], Exception]) -> T:
    """Do something on every rank; if it fails on one, fail on all; collective over all ranks.

    Args:
        action: this rank's part.
        device: where the communication back-end works.
        failure: makes the error that every rank raises of the text that names ranks and errors.

    Returns:
        What the action returned.

    Raises:
        Exception: what ``failure`` made, on every rank, if any rank's action raised.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    message = first_error(error, device)
    if message is not None:
        raise failure(message) from error
    return result


def same_everywhere(
    values: Sequence[int], what: str, device: torch.device, *, error: Exception | None = None
) -> None:
    """Check that all ranks hold the same numbers; collective over all ranks.

    Args:
        values: this rank's numbers; their count may differ between ranks.
        what: name for the message.
        device: where the communication back-end works.
        error: what kept this rank from having any, if something did.

    Raises:
        Exception: the error, on this rank.
        ValueError: on every rank, if some rank holds other numbers or had an error.
    """
    # A polynomial hash keeps the message at one number whatever the count.
    digest = 0
    for value in (len(values), *values):
        digest = (digest * 1_000_003 + int(value) + 1) % (1 << 61)
    ends = torch.tensor([int(error is not None), digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    failed, high, low = ends.tolist()
    if failed:
        messages = _all_errors(error)
        if error is not None:
            raise error
        raise ValueError(f"{what}: choosing them failed elsewhere: {messages}")
    if high == -low:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(values))
    raise ValueError(
        f"the ranks disagree on {what}: "
        + ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(everyone))
        + "; every rank must decide the same from the same inputs"
    )
