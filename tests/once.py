"""What several cases of a matrix compare with, computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class Once(Generic[A, R]):
    """Calls a function once for all equal arguments, which need no hash.

    Args:
        function: what to compute.
    """

    def __init__(self, function: Callable[[A], R]) -> None:
        self.function = function
        self.known: list[tuple[A, R]] = []

    def __call__(self, argument: A) -> R:
        for other, found in self.known:
            if other == argument:
                return found
        self.known.append((argument, self.function(argument)))
        return self.known[-1][1]
