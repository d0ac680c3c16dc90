"""A job that survives being interrupted: checkpoints of both runs, of the same moment, in its output folder.

    <output_dir>/checkpoints/job.json              names the complete one, and the settings that it belongs to
    <output_dir>/checkpoints/static/batches_14_14   the runs' checkpoints, after so many batches of each
    <output_dir>/checkpoints/dynamic/batches_14_14

A moment counts once ``job.json``, replaced by a rename, names it; only then does the one before it go.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynpipe_ds import CheckpointError
from dynpipe_ds.ranks import together
from scenarios.begun import JOB, Job, as_values, check, checkpoints_of, in_words, read, split_blocks_begun
from scenarios.compare import Contender
from scenarios.settings import Settings


def begun_with(settings: Settings) -> bool | None:
    """What an interrupted run in the output folder has decided on ``model.split_blocks``; collective over all ranks.

    Args:
        settings: the job.

    Returns:
        Its value; ``None`` where there is no such run, or one that :meth:`JobCheckpoints.resume` will refuse.
    """
    box = [split_blocks_begun(settings) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


class InterruptedRunError(Exception):
    """The run was asked to end (SIGTERM), and its state is saved."""


class JobCheckpoints:
    """Saves the runs of a job from time to time, and finds them again.

    All methods but the constructor are collective over all ranks.

    Args:
        settings: the job.
        contenders: its runs.

    Attributes:
        newest: the folder, once there is something in it to go on from.
    """

    def __init__(self, settings: Settings, contenders: Sequence[Contender]) -> None:
        self._settings = settings
        self._contenders = contenders
        self._folder = checkpoints_of(settings)
        self._saved_after = 0
        self.newest: str | None = None
        self._asked_to_end = False
        self._first = dist.get_rank() == 0
        self._device: torch.device = contenders[0].engine.device

    # -- going on -----------------------------------------------------------------------------

    def resume(self) -> dict[str, int] | None:
        """Load the checkpoint in the output folder, if an interrupted run has left one.

        Returns:
            Batches that each run has trained, by its name; ``None`` for a fresh start.

        Raises:
            ValueError: on every rank, if it is of a run with other settings or can't be loaded; with the remedy.
        """
        if not self._settings.run.resume:
            self.discard()
            return None
        stored = self._find()
        if stored is None:
            return None
        self._check(stored)
        try:
            for contender in self._contenders:
                contender.load(self._folder, stored["tag"])
        except CheckpointError as error:
            raise ValueError(f"{error}; start anew with run.resume=false, or with another output_dir") from error
        trained = self._trained()
        self._saved_after = min(trained.values())
        self.newest = str(self._folder)
        return trained

    def discard(self) -> None:
        """Remove all checkpoints of the job.

        Raises:
            ValueError: on every rank, if the file that names them can't be removed.
        """
        together(self._remove, self._device, lambda message: ValueError(
            f"{self._folder / JOB} can't be removed ({message}): the next run would be continued from there"
        ))  # fmt: skip

    def _remove(self) -> None:
        if not self._first:
            return
        file = self._folder / JOB
        if file.exists():  # first, since without it the others count for nothing
            file.unlink()
        for contender in self._contenders:
            shutil.rmtree(self._folder / contender.label, ignore_errors=True)
        with contextlib.suppress(OSError):  # it may hold something of the user's
            self._folder.rmdir()

    def _find(self) -> dict[str, Any] | None:
        """What the first rank reads, on every rank."""
        file = self._folder / JOB
        box = [together(lambda: read(file) if self._first else None, self._device, lambda message: ValueError(
            f"{file} can't be used ({message}); start anew with run.resume=false, or with another output_dir"
        ))]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _check(self, stored: Mapping[str, Any]) -> None:
        """Refuse to go on as another job."""
        shape = self._contenders[0].data.shape
        check(stored, Job(
            settings=self._settings, num_stages=self._num_stages, num_replicas=shape.num_replicas, samples=shape.samples
        ))  # fmt: skip

    @property
    def _num_stages(self) -> int:
        return len(self._contenders[0].engine.partition) - 1

    # -- saving -------------------------------------------------------------------------------

    def listen(self) -> None:
        """Let SIGTERM end the run at the end of a turn, with its state saved; not collective."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._note_signal)

    def _note_signal(self, _number: int, _frame: object) -> None:
        self._asked_to_end = True

    def after_turn(self) -> None:
        """Save if it is time to, or if any rank was asked to end.

        Called where all ranks have ended a window of one run, and nothing is timed. A checkpoint that can't be
        written is warned about; training goes on, and the earlier one stays.

        Raises:
            InterruptedRunError: on every rank, if any was asked to end.
        """
        trained = self._trained()
        least = min(trained.values())
        if least == self._settings.run.batches:
            return
        ending = torch.tensor([int(self._asked_to_end)], device=self._device)
        dist.all_reduce(ending, op=dist.ReduceOp.MAX)
        every = self._settings.run.save_every
        due = every and least == max(trained.values()) and least - self._saved_after >= every
        complaint = self._save() if due or ending.item() else None
        if complaint is not None and self._first:
            warnings.warn(complaint, stacklevel=2)
        if ending.item():
            saved = complaint or f"saved in {self._folder}: the same command continues it"
            raise InterruptedRunError(f"stopped after {in_words(trained)}; {saved}")

    def _trained(self) -> dict[str, int]:
        """How many batches each run has trained, by its name."""
        return {contender.label: len(contender.measured.losses) for contender in self._contenders}

    def _save(self) -> str | None:
        """Save all runs, then let the moment count; returns what went wrong, the same on every rank."""
        now = self._description()
        tag = "batches_" + "_".join(map(str, now["trained"].values()))
        try:
            for contender in self._contenders:
                contender.save(self._folder, tag)
            together(lambda: self._publish(tag, now), self._device, CheckpointError)
        except CheckpointError as error:
            return str(error)
        self._saved_after = min(now["trained"].values())
        self.newest = str(self._folder)
        return None

    def _publish(self, tag: str, now: Mapping[str, Any]) -> None:
        """Let the moment count, and remove all others."""
        if not self._first:
            return
        _replace(self._folder / JOB, json.dumps({"tag": tag, **now}, indent=1) + "\n")
        for contender in self._contenders:
            for other in (self._folder / contender.label).iterdir():
                if other.name != tag:
                    shutil.rmtree(other, ignore_errors=True)

    def _description(self) -> dict[str, Any]:
        """Say which job this is and how far it is, as values that JSON can hold."""
        shape = self._contenders[0].data.shape
        return {
            "settings": as_values(self._settings),
            "num_stages": self._num_stages,
            "samples": shape.samples,
            "trained": self._trained(),
        }


def _replace(file: Path, text: str) -> None:
    """Write a file so that it has either its old content or its new one, whatever happens."""
    partial = file.with_name(f".{file.name}.partial")
    with open(partial, "w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(partial, file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
