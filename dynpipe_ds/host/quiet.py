"""Keeps DeepSpeed from writing between a command's results; imports nothing else but the standard library."""

from __future__ import annotations

import contextlib
import logging
import sys

from dynpipe_ds._command_line import is_command_line


def keep_deepspeed_quiet() -> None:
    """In a command, import DeepSpeed so that its log goes to stderr, errors only: it would begin on stdout.

    Whatever may be the first to import DeepSpeed calls this before; in a script of the user's nothing happens.
    """
    if not is_command_line():
        return
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401
