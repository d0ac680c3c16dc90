"""Which rank this process is, before ranks have found each other, and what it says; only the standard library."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from itertools import pairwise

_hears_warnings = False


def is_rank() -> bool:
    """Whether a launcher has started this process as one of its ranks."""
    return "RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ


def rank() -> int:
    """This process's rank; 0 without a launcher."""
    return int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def is_entry() -> bool:
    """Whether this process was started as ``python -m scenarios.…``, not by a program that imports ``scenarios``."""
    return any(option == "-m" and module.startswith("scenarios.") for option, module in pairwise(sys.orig_argv))


def quieten() -> None:
    """Let DeepSpeed's log pass errors only, and other ranks than the first none of its and torch's warnings.

    To be called before the first import of DeepSpeed, which logs already; its options have no say then.
    """
    logging.getLogger("DeepSpeed").addFilter(_is_worth_saying)
    if rank() > 0:
        warnings.filterwarnings("ignore", module=r"(torch|deepspeed)\b")


def hear_warnings() -> None:
    """From now on, let warnings of DeepSpeed's log pass on the first rank: they are about the job."""
    global _hears_warnings
    _hears_warnings = True


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or (_hears_warnings and rank() == 0)
