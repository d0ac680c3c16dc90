"""Checkpoints that fit any partition, saved and loaded in front of DeepSpeed's own way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynpipe_ds.checkpoint.folder import DiskSync, read_latest
from dynpipe_ds.checkpoint.load import Loading, Wanted, latest_tag
from dynpipe_ds.checkpoint.manifest import MANIFEST_FILE, CheckpointError
from dynpipe_ds.checkpoint.names import agree_on_place, tag_problem
from dynpipe_ds.checkpoint.save import Saving, refuse_unsupported
from dynpipe_ds.ranks.agreement import together

if TYPE_CHECKING:
    from dynpipe_ds.run import Run


_NOTHING_TO_PUSH = DiskSync("", [])


class Checkpoints:
    """What this run knows of checkpoints.

    Attributes:
        last: newest complete checkpoint that this run saved or loaded; ``None`` before the first one.
    """

    def __init__(self) -> None:
        self.last: str | None = None
        self._in_hand: Path | None = None
        self._disk = _NOTHING_TO_PUSH

    def newest(self) -> str | None:
        """The newest complete one, also while another is being saved or loaded."""
        complete = self._in_hand is not None and (self._in_hand / MANIFEST_FILE).is_file()
        return str(self._in_hand) if complete else self.last

    def save(
        self, run: Run, save_dir: str, tag: Any, client_state: dict[str, Any], *,
        save_latest: bool, exclude_frozen_parameters: bool,
    ) -> None:
        """Save one; see :meth:`~dynpipe_ds.DynamicPipelineEngine.save_checkpoint`. Collective over all ranks."""
        if not save_dir:
            raise ValueError(f"save_dir = {save_dir!r}: must name a folder")
        refuse_unsupported(run.stage.pipeline)
        name = f"global_step{run.stage.pipeline.num_steps}" if tag is None else str(tag)
        target = Path(save_dir) / name
        with self._handling(run, target, "saved"):
            run.notice_frozen_layers()  # what is stored of a parameter and of its optimizer state must agree
            earlier, self._disk = self._disk, _NOTHING_TO_PUSH
            self._disk = Saving(
                run, Path(save_dir), name, client_state, exclude_frozen_parameters=exclude_frozen_parameters,
                earlier=earlier,
            ).run(save_latest=save_latest)
            if not exclude_frozen_parameters:  # else it does not hold all
                run.landmarks.note(str(target))
        self.last = str(target)

    def wait_for_disk(self, run: Run) -> None:
        """Wait until the newest checkpoint is on the disk of every rank; collective.

        Raises:
            CheckpointError: on every rank, naming the files that could not be pushed there.
        """
        disk, self._disk = self._disk, _NOTHING_TO_PUSH
        with run.stage.guard.naming_lost_ranks("a checkpoint was pushed to the disk"):
            together(disk.wait, run.stage.device, CheckpointError)

    def load(self, run: Run, load_dir: str, tag: Any, wanted: Wanted) -> tuple[str | None, dict[str, Any] | None]:
        """Load one; see :meth:`~dynpipe_ds.DynamicPipelineEngine.load_checkpoint`. Collective over all ranks."""
        refuse_unsupported(run.stage.pipeline)
        # Every rank looks for itself before all agree, so that it can name the checkpoint if they never do.
        expected = tag
        with suppress(OSError, ValueError):
            expected = tag if tag is not None else read_latest(load_dir)
        with self._handling(run, Path(load_dir) / str(expected or "latest"), "loaded"):
            name = latest_tag(load_dir) if tag is None else str(tag)
            if name is None:
                return None, None
            root = Path(load_dir) / name
            agree_on_place(root, tag_problem(name))
            result = Loading(run, root, wanted).run()
            run.snapshots.start_afresh()
            run.landmarks.forget()
            if wanted == Wanted():  # else there is more now than it holds
                run.landmarks.note(str(root))
        self.last = str(root)
        return result

    @contextmanager
    def _handling(self, run: Run, target: Path, what: str) -> Iterator[None]:
        """While a checkpoint is saved or loaded, it is the newest one as soon as it is complete."""
        self._in_hand = target
        try:
            with run.stage.guard.naming_lost_ranks(f"checkpoint {target.name} was {what}"):
                yield
        finally:
            self._in_hand = None
