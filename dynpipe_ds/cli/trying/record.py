"""The file of one process of the script: one event a line, written at once."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

WHERE_ARE_YOU = signal.SIGUSR2
"""Asks a process to write its stacks."""


class Record:
    """What this process tells the command."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.written: BaseException | None = None  # the last error that was
        self._open()
        os.register_at_fork(after_in_child=self._open)  # a script may import DeepSpeed once and fork its ranks

    def _open(self) -> None:
        name = f"{os.uname().nodename}-{os.getpid()}"
        self._stream: TextIO = (self._folder / f"{name}.events").open("a", encoding="utf-8")
        self._stacks = (self._folder / f"{name}.stacks").open("w", encoding="utf-8")
        faulthandler.register(WHERE_ARE_YOU, self._stacks)
        self.say("started", program=" ".join(sys.argv))

    def say(self, event: str, **values: Any) -> None:
        """Write an event with what JSON can hold."""
        self._stream.write(json.dumps({"event": event, **values}) + "\n")
        self._stream.flush()

    def error(self, error: BaseException) -> None:
        """Write an error, once; leaving a script on purpose is none."""
        if error is self.written or isinstance(error, (SystemExit, KeyboardInterrupt)):
            return
        self.written = error
        self.say("error", type=type(error).__name__, text=str(error), at_s=time.time())

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Write an error that leaves the block."""
        try:
            yield
        except BaseException as error:
            self.error(error)
            raise
