"""Imports DeepSpeed without its chatter; imports nothing else but the standard library."""

from __future__ import annotations

import contextlib
import logging
import sys


def import_deepspeed_quietly() -> None:
    """Import DeepSpeed so that its log goes to stderr, errors only: it would begin on stdout, with a warning."""
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401
