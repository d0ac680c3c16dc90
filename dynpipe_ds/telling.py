"""Warnings that stop nobody: an exception on one rank alone would part it from the others."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

Event = TypeVar("Event")

log = logging.getLogger("DeepSpeed")
"""DeepSpeed's own, whose handler writes on every rank: for what is no warning, and for other threads."""

listeners: list[Callable[[str], object]] = []
"""Told every warning, also those that the script's filters hide."""


def warn(message: str) -> None:
    """Warn in the name of the library; where warnings are errors, write the text to stderr instead.

    Args:
        message: what to tell.
    """
    text = f"dynamic_pipeline: {message}"
    for listener in listeners:
        listener(message)
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:
        print(text, file=sys.stderr, flush=True)


def tell_all(callbacks: Iterable[Callable[[Event], object]], event: Event, kind: str) -> None:
    """Tell a user's callbacks of what has happened; one that raises is named, and the others are told.

    Args:
        callbacks: of the user.
        event: what happened; there is no way back.
        kind: how they were given, such as ``"on_rebalance"``.
    """
    for callback in callbacks:
        try:
            callback(event)
        except Exception as error:  # noqa: BLE001 - the other ranks go on
            warn(f"the {kind} callback {callback!r} raised {type(error).__name__}: {error}; training goes on")
