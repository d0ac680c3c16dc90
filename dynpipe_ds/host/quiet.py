"""Imports DeepSpeed, by a command without its chatter; imports nothing else but the standard library."""

from __future__ import annotations

import contextlib
import logging
import sys

from dynpipe_ds._command_line import is_command_line


def import_deepspeed() -> None:
    """Import DeepSpeed; a command's log of it goes to stderr, errors only: it would begin on stdout, with a warning.

    Whatever may be the first to import DeepSpeed calls this before.
    """
    if not is_command_line():
        return
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401
