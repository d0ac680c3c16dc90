"""One pipeline stage on one rank: its layers and its optimizer, and how they change between two batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.host.owned import check_still_owned
from dynpipe_ds.host.pipeline import Pipeline
from dynpipe_ds.migration.freeze import Change, check_replicas, rebuild_optimizer, trainable_flags
from dynpipe_ds.migration.hooks import remove_everywhere
from dynpipe_ds.migration.migrate import Migration
from dynpipe_ds.migration.packing import PackingError
from dynpipe_ds.migration.replace import ParameterReplacement, replace_parameters
from dynpipe_ds.migration.transaction import MigrationError
from dynpipe_ds.module import DynamicPipelineModule
from dynpipe_ds.placement import Placement
from dynpipe_ds.ranks.agreement import greatest, same_everywhere, together
from dynpipe_ds.ranks.cross_memory import cross_memory, give_up_cross_memory
from dynpipe_ds.ranks.guard import Guard


class Stage:
    """What is here of the model. Every change of it is one on all ranks, or on none.

    Args:
        pipeline: DeepSpeed's engine.
        module: its module, made dynamic.
        newest_checkpoint: finds the newest complete checkpoint that this run knows of.
        buffer_bytes: largest message in which layers travel.
        reads_memory: whether ranks of one machine read each other's memory, where the system lets them.

    Attributes:
        pipeline: as given.
        module: as given.
        guard: ends all ranks where a change can't be undone.
        optimizer: moves the optimizer's state; ``None`` before there is an optimizer.
        buffer_bytes: as given.
    """

    def __init__(
        self, pipeline: Pipeline, module: DynamicPipelineModule, newest_checkpoint: Callable[[], str | None], *,
        buffer_bytes: int, reads_memory: bool,
    ) -> None:
        self.pipeline = pipeline
        self.module = module
        self.guard = Guard(newest_checkpoint)
        self.optimizer: StageOptimizer | None = None
        self.buffer_bytes = buffer_bytes
        self._reads_memory = reads_memory
        self._trainable: list[tuple[int, bool]] = []

    def start(self) -> None:
        """Check what all ranks have, and begin; collective over all ranks.

        Raises:
            PackingError: on every rank, if a layer holds what can't travel.
            ValueError: on every rank, if the ranks differ in their partitions.
        """
        self.pipeline.start(self.module.layer_of_parameter, len(self.module.layer_names()))
        same_everywhere(self.partition, "the first partition", self.device)
        layers, names = self.local_layers(), self.module.layer_names()
        together(lambda: self.module.surroundings.check(layers, names, self.pipeline), self.device, PackingError)
        self._trainable = trainable_flags(self.module)

    def adopt_optimizer(self) -> None:
        """Learn to move the optimizer's state, if there is one; collective over all ranks."""
        if self.pipeline.has_optimizer:
            self.optimizer = self.pipeline.make_stage_optimizer()
            self.settle()

    # -- what it is ---------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where it computes and the communication back-end works."""
        return self.pipeline.device

    @property
    def stage_id(self) -> int:
        """Its number."""
        return self.pipeline.stage_id

    @property
    def num_stages(self) -> int:
        """S."""
        return self.pipeline.num_stages

    @property
    def partition(self) -> tuple[int, ...]:
        """The present boundaries, ``S + 1`` ints: stage s holds layers ``[p[s], p[s + 1])``."""
        return self.module.boundaries

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What gradients are summed in between micro-batches."""
        return self.pipeline.gradient_dtype

    def local_layers(self) -> dict[int, nn.Module]:
        """The live modules of this stage by global layer index; function layers are left out."""
        return self.module.local_layers()

    def state_bytes(self, parameter: nn.Parameter) -> int:
        """Bytes of optimizer state, master weights included, that this rank holds for a parameter."""
        return 0 if self.optimizer is None else self.optimizer.state_bytes(parameter)

    @property
    def has_news(self) -> bool:
        """Whether parameters were frozen, unfrozen or put in the place of others since the optimizer was told."""
        return self._change() is not Change.NONE

    def _change(self) -> Change:
        return Change.between(self._trainable, trainable_flags(self.module))

    def _unnoticed(self) -> Change:
        """What the other ranks need to know of, hooks that were removed included."""
        return Change.OTHER if self.module.surroundings.hooks.has_removed() else self._change()

    # -- how it changes -----------------------------------------------------------------------

    def move(self, placement: Placement) -> int | None:
        """Let layers and their optimizer state move; collective over all ranks.

        Args:
            placement: checked, the same on every rank.

        Returns:
            Bytes that this rank sent or received, whichever is more; ``None`` on every rank, and nothing has moved, if
            what was frozen on some rank has to be noticed first.

        Raises:
            MigrationError: on every rank, if moving failed; the old partition is then in force.
        """
        if self.optimizer is None and placement != self.module.placement:
            raise MigrationError(
                "layers can't move without an optimizer to tell: make it first, in deepspeed.initialize or by "
                "engine._configure_optimizer"
            )
        with self.guard.unless_undone("layers were moved", MigrationError):
            has_news = self._unnoticed() is not Change.NONE
            memory = cross_memory(is_allowed=self._reads_memory)
            try:
                migration = Migration(self, placement, buffer_bytes=self.buffer_bytes, memory=memory)
                num_bytes = migration.run(has_news=has_news)
            except MigrationError:
                give_up_cross_memory()  # in case it was this that failed
                raise
            if num_bytes is not None:
                self.settle()
        return num_bytes

    def replace(self, replacements: Sequence[ParameterReplacement]) -> None:
        """Give layers parameters of another shape, with their optimizer state; collective over all ranks.

        Raises:
            MigrationError: on every rank, with the same text, if any rank failed; nothing has changed then.
        """
        with self.guard.unless_undone("parameters were replaced", MigrationError):
            replace_parameters(self, replacements)
            self.settle()

    def notice_frozen_layers(self) -> Change:
        """Rebuild the optimizer where the user froze or unfroze layers since the last batch; collective.

        Returns:
            What has changed, the same on every rank.

        Raises:
            ValueError: on every rank, if the replicas of a stage differ in what they froze.
            MigrationError: on every rank, if any rank could not do its part; its optimizer is then as before.
        """
        if self.optimizer is None:
            return Change.NONE
        mine, surroundings, layers = self._change(), self.module.surroundings, self.local_layers()
        everywhere = Change(greatest(self._unnoticed(), self.device))
        if everywhere is Change.NONE:
            return everywhere
        remove_everywhere(surroundings.hooks, layers)
        together(lambda: self._check_changed(layers), self.device, ValueError)
        check_replicas(self)
        with self.guard.unless_undone("layers were frozen", MigrationError):
            rebuild_optimizer(self, has_changed=mine is not Change.NONE)
            if mine is not Change.NONE:
                self.settle()
        return everywhere

    def _check_changed(self, layers: dict[int, nn.Module]) -> None:
        self.module.surroundings.check_frozen(layers)
        check_still_owned(self.module)

    def settle(self) -> None:
        """Renew what is remembered of the layers after a change."""
        self.pipeline.forget_layers()
        self._trainable = trainable_flags(self.module)
