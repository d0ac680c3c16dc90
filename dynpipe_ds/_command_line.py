"""How this process was started; imports nothing but the standard library."""

from __future__ import annotations

import signal
import sys
from itertools import pairwise
from pathlib import Path


def is_entry() -> bool:
    """Whether this process was started as ``dynpipe`` or ``python -m dynpipe_ds``."""
    return _is_program() or _module() == "dynpipe_ds"


def is_command_line() -> bool:
    """Whether this process was started as ``dynpipe`` or ``python -m dynpipe_ds``, or by that."""
    return is_entry() or _module().startswith("dynpipe_ds.cli.")


def interrupts_end_quietly() -> None:
    """Let Ctrl-C end this process at once and without a stack, as is right while it only imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupts_raise() -> None:
    """Take :func:`interrupts_end_quietly` back: from here on a command has to clear up."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_program() -> bool:
    return bool(sys.argv) and Path(sys.argv[0]).stem == "dynpipe"


def _module() -> str:
    """The module that ``python -m`` runs; empty if it runs none."""
    return next((module for flag, module in pairwise(sys.orig_argv) if flag == "-m"), "")
