"""The mode that lasting tensors are made in.

Tensors that are made inside ``torch.inference_mode()`` can't be trained, nor changed outside it. What an engine makes
when it is called there (layers that arrive, optimizer state that is loaded) must therefore be made outside.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def ordinary_mode() -> AbstractContextManager[None]:
    """A context as outside of ``torch.inference_mode()`` and ``torch.no_grad()``, wherever it is entered."""
    mode: AbstractContextManager[None] = torch.inference_mode(False)
    return mode


def in_ordinary_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run in :func:`ordinary_mode`.

    Args:
        function: one that makes tensors that outlast the call.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ordinary_mode():
            return function(*args, **kwargs)

    return run
