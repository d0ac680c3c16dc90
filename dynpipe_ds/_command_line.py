"""Keeps what the command line prints its own; imports nothing but the standard library."""

from __future__ import annotations

import contextlib
import logging
import sys
from itertools import pairwise
from pathlib import Path


def is_command_line() -> bool:
    """Whether this process was started as ``dynpipe`` or ``python -m dynpipe_ds``, or by that."""
    program = Path(sys.argv[0]).stem if sys.argv else ""
    modules = [module for flag, module in pairwise(sys.orig_argv) if flag == "-m"]
    return program == "dynpipe" or any(m == "dynpipe_ds" or m.startswith("dynpipe_ds.cli.") for m in modules[:1])


def import_deepspeed_quietly() -> None:
    """Import DeepSpeed so that its log goes to stderr, errors only: it would begin on stdout, with a warning."""
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401
