"""Appends what happens in a run to its journal: the first rank alone, one write a line, and no failure stops it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynpipe_ds.events import RebalanceEvent, RepackEvent
from dynpipe_ds.journal.lines import FILE, FORMAT, FORMAT_VERSION, line, number, told_profile, told_sizes
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.telling import warn

_MOST_WAITING = 10
"""Batches whose losses may wait on a device: reading one waits for all that the device was told."""


class JournalWriter:
    """Writes a journal; without a folder, nothing.

    Args:
        folder: of the journal; made where it is missing.
        about: gives what the first line tells of the job, when it is written: just before the first batch is told.
    """

    def __init__(self, folder: str | None, about: Callable[[], dict[str, Any]]) -> None:
        self._path = None if folder is None else Path(folder) / FILE
        self._about = about
        self._file: int | None = None
        self._closing: weakref.finalize[..., Any] | None = None
        self._has_failed = self._has_started = False
        self._waiting: list[tuple[int, Any, float]] = []
        self._farewell = [line("end", {})]
        self._told: dict[str, Any] = {}

    @property
    def _writes(self) -> bool:
        """After re-packing, another process may be the first."""
        return self._path is not None and not self._has_failed and dist.get_rank() == 0

    def begin(self) -> None:
        """Note that a job begins: what the journal told so far may be of another, until its first batch is told."""
        if self._writes:
            self._guarded(self._open)
            self._write("begin", {"began": int(time.time())})

    def batch(self, batch: int, loss: Any, seconds: float) -> None:
        """Note a batch.

        Args:
            batch: its number.
            loss: what ``train_batch`` returned; told if it is one number.
            seconds: that it took on this rank, with what was done after it.
        """
        if not self._writes:
            return
        on_device = isinstance(loss, torch.Tensor) and loss.device.type != "cpu"
        self._waiting.append((batch, loss.detach().clone() if on_device else loss, seconds))
        if not on_device or len(self._waiting) >= _MOST_WAITING:
            self.flush()

    def profile(self, measured: PipelineProfile, smoothed: PipelineProfile, **more: Any) -> None:
        """Note a profile.

        Args:
            measured: of one batch.
            smoothed: that decisions rest on.
            **more: what else decisions rest on, plain values; those that can be long are written where they change.
        """
        if not self._writes:
            return
        self.flush()
        self._start(measured.batch)
        values = {**told_profile(measured, smoothed), "order": more.pop("order")}
        rarely = {"sizes": told_sizes(measured), **more}
        values |= {name: value for name, value in rarely.items() if name not in self._told or self._told[name] != value}
        self._told |= rarely
        self._write("profile", values)

    def compiled(self, batch: int, seconds: float) -> None:
        """Note that ``torch.compile`` compiled layers in a batch, whose profile is left out.

        Args:
            batch: its number.
            seconds: that it took on the slowest rank.
        """
        if self._writes:
            self.flush()
            self._start(batch)
            self._write("compiled", {"batch": batch, "seconds": float(f"{seconds:.6g}")})

    def moved(self, event: RebalanceEvent) -> None:
        """Note a change of partition.

        Args:
            event: as callbacks get it.
        """
        self._event("move", event, event.batch)

    def repacked(self, event: RepackEvent) -> None:
        """Note that fewer workers go on.

        Args:
            event: as callbacks get it; nothing is written where the process leaves.
        """
        if event.released:
            self._farewell.clear()  # the job goes on without this process
        else:
            self._event("repack", event, event.batch)

    def _event(self, kind: str, event: RebalanceEvent | RepackEvent, batch: int) -> None:
        if self._writes:
            self.flush()
            self._start(batch)
            self._write(kind, dataclasses.asdict(event))

    def flush(self) -> None:
        """Write what waits for the device."""
        for told in self._waiting:
            self._start(told[0])
            self._guarded(partial(_write_whole, self._file, _batch_line(*told)))
        self._waiting.clear()

    # -- the file -----------------------------------------------------------------------------

    def _start(self, batch: int) -> None:
        """The line that begins what this process writes: a reader forgets what was told of this batch and later ones.

        So a run that is continued from a checkpoint, or begun again, needs no other file.
        """
        if self._has_started or self._has_failed:
            return
        self._has_started = True
        self._guarded(self._open)
        # To the second: a moment for people.
        versions = {"format": FORMAT, "version": FORMAT_VERSION, "began": int(time.time())}
        self._write("start", {**versions, "batch": batch, **self._about()})

    def _open(self) -> None:
        assert self._path is not None
        if self._file is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        end = os.lseek(self._file, 0, os.SEEK_END)
        if end and os.pread(self._file, 1, end - 1) != b"\n":
            os.write(self._file, b"\n")  # a process was killed within a line
        # At the end of the process, too: scripts need not destroy their engine.
        self._closing = weakref.finalize(self, _write_rest, self._file, self._waiting, self._farewell)

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        self._guarded(partial(_write_whole, self._file, line(kind, values)))

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do something to the file; a failure ends the journal, not the training."""
        if self._has_failed:
            return
        try:
            act()
        except OSError as error:
            self._has_failed = True
            warn(
                f"the journal {self._path} could not be written ({type(error).__name__}: {error}); training goes on "
                "without it"
            )

    def close(self) -> None:
        """Write what waits and that the job ends here, and let go of the file."""
        if self._closing is not None:
            self._closing()
        self._file, self._has_started = None, False


def _write_rest(file: int, waiting: list[tuple[int, Any, float]], farewell: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        for text in (*(_batch_line(*told) for told in waiting), *farewell):
            _write_whole(file, text)
    os.close(file)
    waiting.clear()


def _write_whole(file: int | None, text: bytes) -> None:
    if file is not None and os.write(file, text) != len(text):
        raise OSError("the disk is full")


def _batch_line(batch: int, loss: Any, seconds: float) -> bytes:
    return line("batch", {"batch": batch, "loss": _plain(loss), "seconds": float(f"{seconds:.6g}")})


def _plain(loss: Any) -> float | str | None:
    """A loss as JSON can hold it; ``None`` for what is not one number."""
    if isinstance(loss, torch.Tensor):
        return number(float(loss.item())) if loss.numel() == 1 else None
    return number(float(loss)) if isinstance(loss, int | float) else None
