"""The versions that are supported: the one place that says so.

``setup.py`` and the Makefile read this file without importing the package, so it imports nothing but the standard
library.
"""

from __future__ import annotations

import re

LEAST_PYTHON = "3.10"
LEAST_TORCH = "2.4"
LEAST_DEEPSPEED = "0.19.3"
"""The first release whose gradients are right; ``docs/limits.md`` says what was run."""

TESTED_SERIES = "0.19"
NEXT_SERIES = "0.20"
TESTED_DEEPSPEED = "0.19.8"
"""The release that the suite runs on."""

DEEPSPEED_RANGE = f"deepspeed>={LEAST_DEEPSPEED},<{NEXT_SERIES}"


def is_older(version: str, least: str) -> bool:
    """Whether a version comes before another.

    Args:
        version: such as ``"2.13.0+cpu"``; what follows the numbers does not count.
        least: such as ``"2.4"``.
    """
    return _numbers(version) < _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()
