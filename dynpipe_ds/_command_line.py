"""How this process was started; imports nothing but the standard library."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path


def is_entry() -> bool:
    """Whether this process was started as ``dynpipe`` or ``python -m dynpipe_ds``."""
    return _is_program() or _module() == "dynpipe_ds"


def is_command_line() -> bool:
    """Whether this process was started as ``dynpipe`` or ``python -m dynpipe_ds``, or by that."""
    return is_entry() or _module().startswith("dynpipe_ds.cli.")


def _is_program() -> bool:
    return bool(sys.argv) and Path(sys.argv[0]).stem == "dynpipe"


def _module() -> str:
    """The module that ``python -m`` runs; empty if it runs none."""
    return next((module for flag, module in pairwise(sys.orig_argv) if flag == "-m"), "")
