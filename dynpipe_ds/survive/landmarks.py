"""Checkpoints that training can go back to in place, and what they do not hold of the moment when they were saved.

A checkpoint holds layers, optimizer state, streams and counters. To repeat the batches since with the same bits, a rank
must also know where its data was, what the script's objects between batches knew, and that nothing else has changed.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dynpipe_ds.checkpoint.plain import plain
from dynpipe_ds.host.optimizer_files import known_classes
from dynpipe_ds.host.rereading import Position
from dynpipe_ds.ranks.agreement import gather

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

_MOST = 2
"""One that some ranks may not have heard of yet, and the one before."""

Groups = dict[int, dict[str, int]]
"""By layer and name, the parameter group of each parameter."""


@dataclass
class Landmark:
    """A complete checkpoint, as one rank knows it.

    Attributes:
        path: of its folder.
        batch: batches that it has trained.
        groups: of the parameters of all layers.
        changes: how often the script had changed what can't be repeated.
        state: of what acts between batches, in the format of ``torch.save``.
        position: of this rank's data iterator; ``None`` if it can't go back.
        problem: why it can't be gone back to; empty if it can.
    """

    path: str
    batch: int
    groups: Groups
    changes: int
    state: bytes = b""
    position: Position | None = None
    problem: str = ""


class Landmarks:
    """The newest checkpoints of a run.

    Args:
        run: of this rank.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: list[Landmark] = []

    def note(self, path: str) -> None:
        """A checkpoint of the present state is complete; collective over all ranks.

        Args:
            path: of its folder.
        """
        run = self._run
        if not run.snapshots.is_on:
            return
        groups: Groups = {}
        for theirs in gather(self._groups()):
            groups |= theirs
        mark = Landmark(path, run.num_batches, groups, run.snapshots.num_changes)
        older = [one for one in self._known if one.path != path]
        self._known = [*older[1 - _MOST :], mark]
        self._look(mark)
        self._count()

    def forget(self) -> None:
        """What was trained before is of another past."""
        if self._known:
            self._known.clear()
            self._count()

    def expire(self, problem: str) -> None:
        """Checkpoints of earlier batches can't be gone back to any more.

        Args:
            problem: why.
        """
        for mark in self._known:
            if mark.batch < self._run.num_batches:
                mark.problem = mark.problem or problem

    def begin_batch(self) -> None:
        """A batch is about to begin: what the script did since it saved a checkpoint, or loaded one, counts as well."""
        for mark in self._known[-1:]:
            if mark.batch == self._run.num_batches:
                self._look(mark)

    def _look(self, mark: Landmark) -> None:
        pipeline = self._run.stage.pipeline

        def look_at_data() -> None:
            mark.position = pipeline.reading.position()

        buffer = io.BytesIO()
        try:
            torch.save(plain(self._run.repeating.state(), "what acts between batches: "), buffer)
            look_at_data()
        except Exception as error:  # noqa: BLE001 - objects of the user's may raise anything; training goes on
            mark.problem = f"{type(error).__name__}: {error}"
        mark.state, pipeline.reading.before = buffer.getvalue(), look_at_data

    def _count(self) -> None:
        self._run.stage.pipeline.reading.kept.count_from(min((mark.batch for mark in self._known), default=None))

    def _groups(self) -> Groups:
        optimizer = self._run.stage.optimizer
        index = {} if optimizer is None else optimizer.groups.index
        return {
            layer: {name: index[p] for name, p in module.named_parameters() if p in index}
            for layer, module in self._run.stage.local_layers().items()
        }

    # -- going back ---------------------------------------------------------------------------

    def newest_common(self) -> tuple[Landmark | None, str]:
        """The newest checkpoint that all ranks can go back to; collective over all ranks.

        Returns:
            As this rank knows it; else ``None`` and why not, the same on every rank.
        """
        everyone = gather([(mark.path, mark.batch, self._problem(mark)) for mark in self._known])
        if not any(everyone):
            return None, "this run has neither saved nor loaded a complete checkpoint"
        why = "the ranks that are left know of no common checkpoint"
        for mark in reversed(self._known):
            found = [dict(zip(("path", "batch", "problem"), one, strict=True)) for one in _same(mark, everyone)]
            if len(found) < len(everyone):
                continue
            problems = [f"rank {rank}: {one['problem']}" for rank, one in enumerate(found) if one["problem"]]
            if not problems:
                return mark, ""
            why = f"checkpoint {mark.path} does not serve ({'; '.join(problems)})"
            break
        return None, str(gather(why)[0])

    def _problem(self, mark: Landmark) -> str:
        if mark.changes != self._run.snapshots.num_changes:
            return "layers or micro-batches were changed since by the script, outside engine.between_batches"
        return mark.problem

    @staticmethod
    def state_of(mark: Landmark) -> dict[str, Any]:
        """What acted between batches knew then.

        Args:
            mark: the checkpoint.
        """
        with torch.serialization.safe_globals(known_classes()):
            found: dict[str, Any] = torch.load(io.BytesIO(mark.state), map_location="cpu", weights_only=True)
        return found

    # -- newcomers ----------------------------------------------------------------------------

    def plain(self) -> list[dict[str, Any]]:
        """What a newcomer takes over, as plain values."""
        return [
            {"path": mark.path, "batch": mark.batch, "groups": mark.groups, "state": mark.state,
             "problem": self._problem(mark)}
            for mark in self._known
        ]  # fmt: skip

    def adopt(self, known: Iterable[Mapping[str, Any]]) -> None:
        """Take over what :meth:`plain` gave; where this process's iterator would have been then is not known.

        Args:
            known: as given.
        """
        self._known = [Landmark(changes=self._run.snapshots.num_changes, **one) for one in known]
        self._count()


def _same(mark: Landmark, everyone: Iterable[list[tuple[str, int, str]]]) -> list[tuple[str, int, str]]:
    return [one for known in everyone for one in known if one[:2] == (mark.path, mark.batch)]
