"""The engine's two methods for checkpoints, in front of DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from dynpipe_ds.checkpoint.folder import DiskSync, read_latest
from dynpipe_ds.checkpoint.load import Loading, latest_tag
from dynpipe_ds.checkpoint.manifest import MANIFEST_FILE, CheckpointError
from dynpipe_ds.checkpoint.names import agree_on_place, tag_problem
from dynpipe_ds.checkpoint.save import Saving, refuse_unsupported
from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.modes import in_ordinary_mode
from dynpipe_ds.ranks.agreement import together
from dynpipe_ds.ranks.fatal import naming_lost_ranks, no_way_back
from dynpipe_ds.ranks.heartbeat import Heartbeat


class CheckpointingEngine(PipelineEngine):  # type: ignore[misc]
    """A pipeline engine whose checkpoints fit any partition; base of the dynamic engine."""

    dynamic_config: DynamicPipelineConfig
    last_checkpoint: str | None
    _heartbeat: Heartbeat | None = None
    _disk: DiskSync | None = None
    _in_hand: Path | None = None

    @in_ordinary_mode
    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: dict[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's ``save_checkpoint``, with the partition, and complete or not there; collective.

        When it returns, the checkpoint survives the end of any process. Threads then push it to the disk, so that
        it survives the end of the machine as well; :meth:`wait_for_disk` waits for them, and so does the next save.

        Args:
            save_dir: folder of all checkpoints.
            tag: name of this one, the same on every rank; by default ``global_step<n>``.
            client_state: values of the user's own, handed back by :meth:`load_checkpoint`.
            save_latest: let the file ``latest`` name it.
            exclude_frozen_parameters: leave out parameters that need no gradient.

        Returns:
            ``True``.

        Raises:
            ValueError: on every rank, if the tag can't name a checkpoint there.
            CheckpointError: on every rank, if any could not do its part; earlier checkpoints are untouched.
        """
        client_state = client_state or {}
        if not self.dynamic_config.enabled:
            saved: bool = super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
            return saved
        if not save_dir:
            raise ValueError(f"save_dir = {save_dir!r}: must name a folder")
        refuse_unsupported(self)
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        target = Path(save_dir) / name
        with self._handling(target, "saved"):
            self._notice_frozen_layers()  # what is stored of a parameter and of its optimizer state must agree
            earlier, self._disk = self._disk, None
            self._disk = Saving(
                self, save_dir, name, client_state, exclude_frozen_parameters=exclude_frozen_parameters,
                earlier=earlier,
            ).run(save_latest=save_latest)
        self.last_checkpoint = str(target)
        return True

    def wait_for_disk(self) -> None:
        """Wait until the newest checkpoint is on the disk of every rank; collective.

        Raises:
            CheckpointError: on every rank, naming the files that could not be pushed there.
        """
        disk, self._disk = self._disk, None
        with self._naming_lost_ranks("a checkpoint was pushed to the disk"):
            together(lambda: disk.wait() if disk is not None else None, self.device, CheckpointError)

    def _naming_lost_ranks(self, while_what: str) -> AbstractContextManager[None]:
        """Name whoever ended, and the newest complete checkpoint, if communication breaks down inside."""
        return naming_lost_ranks(self._heartbeat, while_what, self._newest_checkpoint)

    def _no_way_back(self, doing: str) -> AbstractContextManager[None]:
        """End all ranks if something fails inside that can't be undone."""
        return no_way_back(self._heartbeat, doing, self._newest_checkpoint)

    def _newest_checkpoint(self) -> str | None:
        complete = self._in_hand is not None and (self._in_hand / MANIFEST_FILE).is_file()
        return str(self._in_hand) if complete else self.last_checkpoint

    @contextmanager
    def _handling(self, target: Path, what: str) -> Iterator[None]:
        """While a checkpoint is saved or loaded, it is the newest one as soon as it is complete."""
        self._in_hand = target
        try:
            with self._naming_lost_ranks(f"checkpoint {target.name} was {what}"):
                yield
        finally:
            self._in_hand = None

    @in_ordinary_mode
    def load_checkpoint(
        self, load_dir: str, tag: Any = None, load_module_strict: bool = True, load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True, load_module_only: bool = False, custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As DeepSpeed's ``load_checkpoint``, for any partition, number of stages and replicas; collective.

        Args:
            load_dir: folder of all checkpoints.
            tag: name of one; by default what the file ``latest`` names.
            load_module_strict: whether the names of tensors must agree.
            load_optimizer_states: whether to take in the optimizer's state.
            load_lr_scheduler_states: whether to take in the learning-rate scheduler's.
            load_module_only: take in weights only.
            custom_load_fn: not supported by pipelines.

        Returns:
            Path of DeepSpeed's file for this stage and the user's values; ``(None, None)`` if there is no
            tag and no ``latest``.

        Raises:
            ValueError: on every rank, if the tag can't name a checkpoint.
            CheckpointError: on every rank, if it is damaged or does not fit; nothing has changed then.
        """
        if not self.dynamic_config.enabled or self.load_universal_checkpoint():
            found: tuple[str | None, dict[str, Any] | None] = super().load_checkpoint(
                load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
                load_module_only, custom_load_fn,
            )
            return found
        refuse_unsupported(self)
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn is not supported by pipelines: leave it out")
        # Every rank looks for itself before all agree, so that it can name the checkpoint if they never do.
        expected = tag
        with suppress(OSError, ValueError):
            expected = tag if tag is not None else read_latest(load_dir)
        with self._handling(Path(load_dir) / str(expected or "latest"), "loaded"):
            name = latest_tag(load_dir) if tag is None else str(tag)
            if name is None:
                return None, None
            agree_on_place(Path(load_dir) / name, tag_problem(name))
            result = Loading(
                self, load_dir, name, strict=load_module_strict, optimizer_states=load_optimizer_states,
                scheduler_states=load_lr_scheduler_states, module_only=load_module_only,
            ).run()
        self.last_checkpoint = str(Path(load_dir) / name)
        return result
