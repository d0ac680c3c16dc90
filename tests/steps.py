"""How much a function does, by the lines of Python that it runs: the same on every machine, unlike seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def lines_run(function: Callable[[], Any]) -> int:
    """Call a function and count the lines, calls and returns of Python code in it.

    Args:
        function: what to count.
    """
    num_lines, before = 0, sys.gettrace()

    def count(*_: Any) -> Any:
        nonlocal num_lines
        num_lines += 1
        return count

    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(before)
    return num_lines
