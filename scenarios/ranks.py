"""Which rank this process is, before ranks have found each other, and what it says; only the standard library."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NoReturn

ASKED, ENDED, LISTENS = "SCENARIOS_ASKED", "ended", "listens-"
"""How ranks and :mod:`scenarios.launch`, which has started them, know of each other: by files in a folder, which the
environment variable ``SCENARIOS_ASKED`` names. A file of that name is there once the ranks are asked to end,
``listens-<process id>`` once a rank takes SIGTERM for that, ``ended`` once one ends because of it. It then ends with
exit code 0, for any other makes the launcher print a stack."""

_hears_warnings = False


def is_rank() -> bool:
    """Whether a launcher has started this process as one of its ranks."""
    return "RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ


def rank() -> int:
    """This process's rank; 0 without a launcher."""
    return int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def num_ranks() -> int:
    """Ranks over all machines; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1")))


def is_entry() -> bool:
    """Whether this process was started as ``python -m scenarios.…``, not by a program that imports ``scenarios``."""
    return any(option == "-m" and module.startswith("scenarios.") for option, module in pairwise(sys.orig_argv))


def end_as_asked(number: int, leave: Callable[[int], NoReturn] = sys.exit) -> NoReturn:
    """End this rank because a signal asked for it, all being well.

    Args:
        number: the signal's.
        leave: ends the process.
    """
    folder = os.environ.get(ASKED)
    if folder is not None:
        (Path(folder) / ENDED).touch()
    sys.stdout.flush()
    leave(128 + number if folder is None else 0)


def end_quietly() -> None:
    """Before there is anything to save, let SIGTERM end a rank, and Ctrl-C any process, without a stack."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            shown(kind, error, where)

    sys.excepthook = show
    folder = os.environ.get(ASKED)
    if folder is not None and is_rank():
        # Not by an exception: what is imported meanwhile might catch it.
        signal.signal(signal.SIGTERM, lambda number, _frame: end_as_asked(number, os._exit))
        (Path(folder) / f"{LISTENS}{os.getpid()}").touch()
        if (Path(folder) / ASKED).exists():  # at once: while Python shuts down, the signal that may come would kill
            end_as_asked(signal.SIGTERM, os._exit)


def check_installed() -> None:
    """End with one line where the extra is not installed that these entries need."""
    missing = [name for name in ("hydra", "omegaconf", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"error: {', '.join(missing)} can't be imported: pip install -e '.[scenarios]' in this repository")


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
