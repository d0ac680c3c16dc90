"""Reads journals: a run as it was told so far, also while it trains."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dynpipe_ds.events import RebalanceEvent, RepackEvent
from dynpipe_ds.journal.lines import FILE, FORMAT, FORMAT_VERSION, profile_of, stages_of
from dynpipe_ds.measure.profile import PipelineProfile, StageProfile

_WHAT_IT_IS = (
    'give the folder that "journal" names in the section "dynamic_pipeline", or one that holds it; a journal begins '
    "with the first batch"
)


@dataclass(frozen=True)
class BatchTold:
    """One batch.

    Attributes:
        batch: its number, from 0.
        loss: as ``train_batch`` returned it; ``None`` where that was not one number.
        seconds: on the first rank, from its beginning to that of the next, but for what the script does in between:
            with profiling, deciding and moving.
    """

    batch: int
    loss: float | None
    seconds: float


@dataclass(frozen=True)
class CompiledTold:
    """A batch in which layers were compiled (``torch.compile``), so that its profile was left out.

    Attributes:
        batch: its number, from 0; the first one after a move has that of the move.
        seconds: that compiling took on the slowest rank.
    """

    batch: int
    seconds: float


@dataclass(frozen=True)
class ProfileTold:
    """What was measured in a profiled batch.

    Attributes:
        batch: its number, from 0.
        boundaries: that it ran on.
        order: ``"1F1B"`` or ``"planned"``.
        layer_s: forward and backward seconds of a micro-batch, of each layer.
        stages: the S stages.
    """

    batch: int
    boundaries: tuple[int, ...]
    order: str
    layer_s: array[float]
    stages: tuple[StageProfile, ...]

    @property
    def limiting_stage(self) -> int:
        """The stage that computes longest, so that others wait for it."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].busy_s)

    @property
    def bubble_ratio(self) -> float:
        """Measured idle share, mean over the stages."""
        return sum(stage.bubble_ratio for stage in self.stages) / len(self.stages)


class Journal:
    """A run as its journal tells it.

    A process that begins to write says from which batch on. What was told of this batch and later ones is then
    forgotten: the run was continued from a checkpoint, or begun again.

    Args:
        file: the journal.

    Attributes:
        file: as given.
        about: what the newest start tells: ``layers``, ``samples_a_batch``, ``num_ranks``, ``device``, ``began``
            (seconds since 1970) and ``settings``, the keys of the section that are not as by default.
        batches: those told, in order.
        profiles: the same of profiled batches.
        compiled: batches in which layers were compiled.
        moves: changes of partition.
        repacks: re-packings.
        resumed_at: batches at which a process went on.
        began: when a job began that has told of no batch yet, seconds since 1970; ``None``: none did. All else is then
            of the run before it, which the job may continue or replace.
        has_ended: whether the process that wrote last ended in order.
        speeds: relative speeds of the workers by which decisions are made; ``None``: all alike.
        pinned: cuts that no partition may have.
        num_unreadable: lines that were cut off or that this version does not know.
    """

    def __init__(self, file: str | Path) -> None:
        self.file = Path(file)
        self._position, self._torn = 0, b""
        self._forget()

    def _forget(self) -> None:
        self.about: dict[str, Any] = {}
        self.batches: list[BatchTold] = []
        self.profiles: list[ProfileTold] = []
        self.compiled: list[CompiledTold] = []
        self.moves: list[RebalanceEvent] = []
        self.repacks: list[RepackEvent] = []
        self.resumed_at: list[int] = []
        self.speeds: tuple[float, ...] | None = None
        self.pinned: tuple[int, ...] = ()
        self.num_unreadable = 0
        self.began: float | None = None
        self.has_ended = False
        self._sizes: dict[str, list[int]] = {}
        self._newest: Mapping[str, Any] | None = None

    # -- reading ------------------------------------------------------------------------------

    def update(self) -> bool:
        """Read what was added since the last time.

        Returns:
            Whether anything was.
        """
        size = self.file.stat().st_size
        if size < self._position:  # another file by the same name
            self._position, self._torn = 0, b""
            self._forget()
        if size == self._position:
            return False
        with self.file.open("rb") as opened:
            opened.seek(self._position)
            added = opened.read()
        self._position += len(added)
        *whole, self._torn = (self._torn + added).split(b"\n")  # the last line may still be written
        for text in filter(None, whole):
            self._take(text)
        return bool(whole)

    def _take(self, text: bytes) -> None:
        try:
            told = json.loads(text)
            kind = told["kind"]
            self._takers()[kind](told)
            self.has_ended = kind == "end"
            if not self.has_ended:
                self.began = float(told["began"]) if kind == "begin" else None
        except (ValueError, KeyError, TypeError, IndexError):
            self.num_unreadable += 1

    def _takers(self) -> Mapping[str, Callable[[Mapping[str, Any]], None]]:
        return {
            "begin": _nothing, "end": _nothing, "start": self._take_start, "batch": self._take_batch,
            "profile": self._take_profile,
            "compiled": lambda told: self.compiled.append(CompiledTold(told["batch"], told["seconds"])),
            "move": lambda told: self.moves.append(_event(RebalanceEvent, told)),
            "repack": lambda told: self.repacks.append(_event(RepackEvent, told)),
        }  # fmt: skip

    def _take_start(self, told: Mapping[str, Any]) -> None:
        if told["format"] != FORMAT or told["version"] != FORMAT_VERSION:
            raise ValueError(f"version {told['version']}")
        batch, has_more = told["batch"], bool(self.batches or self.profiles)
        if batch == 0:
            self._forget()
        self.batches = [each for each in self.batches if each.batch < batch]
        self.profiles = [each for each in self.profiles if each.batch < batch]
        self.compiled = [each for each in self.compiled if each.batch < batch]
        self.moves = [each for each in self.moves if each.batch <= batch]
        self.repacks = [each for each in self.repacks if each.batch <= batch]
        if batch and has_more:
            self.resumed_at.append(batch)
        self.about = dict(told)

    def _take_batch(self, told: Mapping[str, Any]) -> None:
        loss = told["loss"]
        self.batches.append(BatchTold(told["batch"], None if loss is None else float(loss), told["seconds"]))

    def _take_profile(self, told: Mapping[str, Any]) -> None:
        self._sizes = told.get("sizes", self._sizes)
        layer_s = array("d", map(sum, zip(*told["layers"].values(), strict=True)))
        profile = ProfileTold(told["batch"], tuple(told["boundaries"]), told["order"], layer_s, stages_of(told))
        self.profiles.append(profile)
        self._newest = told
        if "speeds" in told:
            self.speeds = None if told["speeds"] is None else tuple(told["speeds"])
        self.pinned = tuple(told.get("pinned", self.pinned))

    # -- what follows -------------------------------------------------------------------------

    def compiled_after(self, move: RebalanceEvent) -> float:
        """What layers took to compile where a move has brought them: in the first batch after it.

        Args:
            move: one of :attr:`moves`.

        Returns:
            Seconds of the slowest rank; 0 where nothing was compiled.
        """
        return sum(each.seconds for each in self.compiled if each.batch == move.batch)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is told yet."""
        return not self.batches and not self.profiles

    @property
    def silent_s(self) -> float:
        """Seconds since the file was written the last time."""
        return max(0.0, time.time() - self.file.stat().st_mtime)

    @property
    def last_profile(self) -> PipelineProfile | None:
        """What decisions rested on after the newest profiled batch: smoothed, halves of backwards where known."""
        told = self._newest
        return None if told is None else profile_of(told, told["smoothed"], self._sizes, self.about["layers"])

    @property
    def partitions(self) -> list[tuple[int, tuple[int, ...]]]:
        """The first profiled batch of, and boundaries: every partition that one ran on."""
        found: list[tuple[int, tuple[int, ...]]] = []
        for profile in self.profiles:
            if not found or found[-1][1] != profile.boundaries:
                found.append((profile.batch, profile.boundaries))
        return found


def _nothing(told: Mapping[str, Any]) -> None:
    """Of a line whose kind says it all."""


def _event(kind: Any, told: Mapping[str, Any]) -> Any:
    return kind(**{
        field.name: tuple(value) if isinstance(value := told[field.name], list) else value for field in fields(kind)
    })  # fmt: skip


def find_journals(folder: str | Path) -> list[Path]:
    """The journals of a folder: in it, or in folders within; the one that was written last comes first.

    Args:
        folder: where to look; the path of a journal stands for itself.

    Returns:
        Paths of files.

    Raises:
        ValueError: when there is none, with the remedy.
    """
    path = Path(folder)
    if path.is_file():
        return [path]
    found = sorted(_under(path), key=lambda file: file.stat().st_mtime, reverse=True)
    if not found:
        what = f"no {FILE} in it" if path.is_dir() else "no such folder"
        raise ValueError(f"{folder}: {what}; {_WHAT_IT_IS}")
    return found


def _under(path: Path) -> Iterator[Path]:
    """In a folder, and two folders deep: a job with several runs has a folder for each."""
    for pattern in ("", "*/", "*/*/"):
        yield from path.glob(pattern + FILE)


def read_journal(folder: str | Path) -> Journal:
    """Read the journal in a folder, of several that which was written last.

    Args:
        folder: as the section's key ``journal`` says, or one that holds it; or the path of a journal.

    Returns:
        The run so far.

    Raises:
        ValueError: when there is no journal, or it tells nothing that this version can read; with the remedy.
    """
    journal = Journal(find_journals(folder)[0])
    journal.update()
    if journal.is_empty:
        raise ValueError(f"{journal.file}: tells of no batch that this version can read; {_WHAT_IT_IS}")
    return journal
