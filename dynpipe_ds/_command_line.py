"""Whether this process is the command line; imports nothing but the standard library."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path


def is_command_line() -> bool:
    """Whether this process was started as ``dynpipe`` or ``python -m dynpipe_ds``, or by that."""
    program = Path(sys.argv[0]).stem if sys.argv else ""
    modules = [module for flag, module in pairwise(sys.orig_argv) if flag == "-m"]
    return program == "dynpipe" or any(m == "dynpipe_ds" or m.startswith("dynpipe_ds.cli.") for m in modules[:1])
