"""Reading a checkpoint into any partition of any number of stages and replicas.

Every rank first reads and checks what it needs and all vote; only then does anything change: the layers move
to the wanted partition, take their stored weights, and the optimizer takes the state of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import nn

from dynpipe_ds.checkpoint import folder
from dynpipe_ds.checkpoint.check import check_layers, check_optimizer
from dynpipe_ds.checkpoint.extras import restore, restore_attributes, stored_profile
from dynpipe_ds.checkpoint.foreign import describe_model, infer_manifest
from dynpipe_ds.checkpoint.manifest import MANIFEST_FILE, CheckpointError, Manifest, named_parameters, parameter_key
from dynpipe_ds.checkpoint.owned import Rows
from dynpipe_ds.checkpoint.regroup import Regrouped, describe_layers, is_compiled_otherwise, regrouped
from dynpipe_ds.checkpoint.save import COMMON_FILE, rank_file
from dynpipe_ds.host.files import client_values, take_counters, take_settings, take_weights, take_worlds
from dynpipe_ds.host.optimizer_files import (
    Reader,
    group_settings,
    parameter_states,
    stage_state_dict,
    template_state,
)
from dynpipe_ds.host.optimizers.flat import FlatOptimizer
from dynpipe_ds.host.optimizers.restore import restore_state
from dynpipe_ds.migration.transaction import MigrationError, Transaction
from dynpipe_ds.placement import Placement, check_boundaries
from dynpipe_ds.ranks.agreement import from_first, greatest, together
from dynpipe_ds.telling import log

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """What of a checkpoint is taken in.

    Attributes:
        strict: whether the names of tensors must agree.
        optimizer_states: whether the optimizer's state is.
        scheduler_states: whether the learning-rate scheduler's is.
        module_only: whether nothing but weights is.
    """

    strict: bool = True
    optimizer_states: bool = True
    scheduler_states: bool = True
    module_only: bool = False


class Loading:
    """One checkpoint that is being read, on one rank.

    Args:
        run: that takes it in.
        root: its folder.
        wanted: what of it is taken in.
        stays: whether layers stay where they are.
    """

    def __init__(self, run: Run, root: Path, wanted: Wanted, *, stays: bool = False) -> None:
        self._run, self._stage = run, run.stage
        self._root, self._reader = root, Reader(root)
        self._wanted, self._stays = wanted, stays
        has_optimizer = run.stage.optimizer is not None
        self._with_optimizer = has_optimizer and wanted.optimizer_states and not wanted.module_only

    def run(self) -> tuple[str, dict[str, Any]]:
        """Carry it out; collective over all ranks.

        Returns:
            The path of DeepSpeed's file for this stage, and the user's values in it.

        Raises:
            CheckpointError: on every rank, with the same text; nothing has changed then, unless it says so.
        """
        self._manifest = self._find_manifest()
        self._verify()
        self._regroup()
        manifest = self._manifest
        self._same_stages = manifest.num_stages == self._stage.num_stages and self._regrouped is None
        self._together(self._check)
        partition: tuple[int, ...] = self._from_first(self._choose_partition)
        self._together(lambda: self._read(partition))
        try:
            self._run.move_layers(Placement.from_boundaries(partition))
        except MigrationError as error:
            raise CheckpointError(f"loading {self._root} failed, nothing was changed: {error}") from error
        self._take_in()
        return str(self._root / manifest.model_files[self._home]), self._client_state()

    # -- votes --------------------------------------------------------------------------------

    def _together(self, action: Callable[[], T], *, harmless: bool = True) -> T:
        return together(action, self._stage.device, lambda text: self._failure(text, harmless=harmless))

    def _failure(self, message: str, *, harmless: bool) -> CheckpointError:
        changed = "nothing was changed" if harmless else "weights or optimizer state are half loaded: load again"
        return CheckpointError(f"loading checkpoint {self._root} failed, {changed} ({message})")

    def _from_first(self, action: Callable[[], T]) -> T:
        """What the first rank finds, on every rank."""
        found = self._together(lambda: action() if dist.get_rank() == 0 else None)
        result: T = from_first(lambda: found)  # type: ignore[assignment]
        return result

    # -- reading and checking, on which nothing depends yet -----------------------------------

    def _find_manifest(self) -> Manifest:
        manifest = self._from_first(self._read_manifest)
        if manifest is not None:
            return manifest
        layers = describe_model(self._stage)
        return self._from_first(
            lambda: infer_manifest(self._root, self._reader, layers, present=self._stage.partition)
        )

    def _read_manifest(self) -> Manifest | None:
        if not folder.find(self._root):
            there = folder.named_checkpoints(self._root.parent)
            raise CheckpointError(f"there is no folder {self._root}; its parent holds {there}")
        file = self._root / MANIFEST_FILE
        if not file.is_file():
            return None
        try:
            return Manifest.loads(file.read_text(encoding="utf-8"))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} can't be used: {error}") from error

    def _verify(self) -> None:
        try:
            self._together(self._verify_share)
        except CheckpointError as error:
            others = self._from_first(lambda: folder.named_checkpoints(self._root.parent))
            others = [name for name in others if name != self._root.name]
            if not others:
                raise
            raise CheckpointError(f"{error}; {self._root.parent} also holds {others}: pass one as tag") from error

    def _verify_share(self) -> None:
        """Check some of the files; all ranks together check each once."""
        ranks = dist.get_world_size()
        by_size = sorted(self._manifest.files.items(), key=lambda item: -item[1].num_bytes)
        for path, entry in by_size[dist.get_rank() :: ranks]:
            folder.verify(self._root / path, entry)

    def _regroup(self) -> None:
        """If layers are cut or compiled otherwise than those of the checkpoint, see it with the present ones."""
        self._regrouped: Regrouped | None = None
        differs = self._manifest.is_ours and self._manifest.wholes != self._stage.module.whole_layers()
        if differs or greatest(int(is_compiled_otherwise(self._manifest, self._stage)), self._stage.device):
            present = describe_layers(self._stage)
            if self._manifest.wholes[-1] == present[-1].whole:
                self._regrouped = regrouped(self._manifest, present)
                self._manifest = self._regrouped.manifest

    def _check(self) -> None:
        check_layers(self._manifest, self._stage, self._root, strict=self._wanted.strict)
        if self._with_optimizer:
            check_optimizer(self._manifest, self._stage, self._root)

    def _choose_partition(self) -> tuple[int, ...]:
        stage, balancer = self._stage, self._run.balancer
        if self._stays:
            return stage.partition
        if self._same_stages:
            return check_boundaries(
                self._manifest.partition, num_layers=len(self._manifest.layers), num_stages=stage.num_stages,
                pinned=balancer.pinned, allow_empty=True,
            )
        if not self._manifest.is_ours or self._regrouped is not None or self._run.config.rebalance_every == "never":
            return stage.partition
        profile = stored_profile(self._reader.read(COMMON_FILE), self._run.config)
        if profile is None:
            return stage.partition
        return balancer.choose(stage.partition, profile, heed_memory=False).boundaries

    def _read(self, partition: tuple[int, ...]) -> None:
        """Everything this rank will need in the wanted partition."""
        manifest, stage = self._manifest, self._stage.stage_id
        first, stop = partition[stage], partition[stage + 1]
        found = self._regrouped
        sources = {i: (i,) if found is None else found.sources[i] for i in range(first, stop)}
        old_stages = sorted({manifest.placement.stage_of(old) for layer in sources.values() for old in layer})
        self._home = stage if self._same_stages else (old_stages or [manifest.num_stages - 1])[0]
        self._replica = self._stage.pipeline.replica % manifest.num_replicas
        self._checkpoint = self._reader.read(manifest.model_files[self._home])
        self._weights = {
            layer: self._reader.read(file) if found is None else found.weights(layer, self._reader.read)
            for layer in range(first, stop)
            if (file := manifest.layers[layer].file) is not None
        }
        module = self._stage.module
        rows = Rows(manifest, module.owned, module.replica, self._reader.read)
        stored_weights = self._weights
        self._weights = {layer: rows.weights(layer, weights) for layer, weights in stored_weights.items()}
        if self._with_optimizer:
            self._states = parameter_states(manifest, self._reader, range(first, stop))
            for layer, weights in stored_weights.items():
                known = {name: self._states.get(parameter_key(layer, name), {}) for name in weights}
                of_layer = rows.states(layer, weights, known)
                self._states |= {parameter_key(layer, name): state for name, state in of_layer.items()}
            self._settings = group_settings(manifest, self._reader, self._home)
            flat = manifest.optimizer.kind == "flat"
            self._template = template_state(manifest, self._reader, self._home) if flat else {}
        if manifest.is_ours and not self._wanted.module_only:
            self._common = self._reader.read(COMMON_FILE)
            self._rank_state = self._reader.read(rank_file(self._home, self._replica))
            stored: dict[int, Any] = {}
            for old in old_stages:
                stored |= self._reader.read(rank_file(old, self._replica))["attributes"]
            self._attributes = stored if found is None else {i: found.attributes(i, stored) for i in sources}

    # -- the point of no return ---------------------------------------------------------------

    def _take_in(self) -> None:
        before = named_parameters(self._stage.local_layers())
        self._together(self._load_layers, harmless=False)
        self._stage.module._synchronize_tied_weights()
        self._announce_parameters(before)
        self._together(self._load_optimizer, harmless=False)
        self._stage.settle()
        self._run.profiler.sizes_changed()
        self._load_counters()

    def _load_layers(self) -> None:
        layers = self._stage.local_layers()
        for i, weights in self._weights.items():
            layers[i].load_state_dict(weights, strict=self._wanted.strict)
            for name, parameter in layers[i].named_parameters():
                parameter.requires_grad_(self._manifest.layers[i].trainable.get(name, parameter.requires_grad))
        if self._manifest.is_ours and not self._wanted.module_only:
            restore_attributes(layers, self._attributes)

    def _announce_parameters(self, before: Mapping[str, nn.Parameter]) -> None:
        """Tell the optimizer of parameters that took another shape or were frozen; collective over replicas."""
        stage, optimizer = self._stage, self._stage.optimizer
        if optimizer is None:
            return
        after = named_parameters(stage.local_layers())
        index = optimizer.groups.index
        departed = [p for key, p in before.items() if after.get(key) is not p]
        arrived = {
            p: index[before[key]]
            for key, p in after.items()
            if key in before and before[key] is not p and before[key] in index
        }
        changed = bool(departed) or stage.has_news

        def take_in() -> None:
            stage.pipeline.name_parameters()
            if changed:
                optimizer.prepare(departed, arrived)

        try:
            Transaction(optimizer, stage.device, "telling the optimizer of the loaded parameters").run(
                take_in, stage.pipeline.name_parameters, {}
            )
        except MigrationError as error:
            raise self._failure(str(error), harmless=False) from error

    def _load_optimizer(self) -> None:
        pipeline, optimizer = self._stage.pipeline, self._stage.optimizer
        if optimizer is None:
            return
        flat = isinstance(optimizer, FlatOptimizer)
        if not self._with_optimizer:
            if flat:
                take_weights(pipeline)
            return
        parameters = named_parameters(self._stage.local_layers())
        states = {parameters[key]: state for key, state in self._states.items() if key in parameters}
        restore_state(optimizer, states, self._settings, self._template)
        if flat:
            take_settings(pipeline, stage_state_dict(self._manifest, self._reader, self._home))

    def _load_counters(self) -> None:
        pipeline, checkpoint = self._stage.pipeline, self._checkpoint
        take_worlds(pipeline, checkpoint, module_only=self._wanted.module_only)
        if self._wanted.module_only:
            return
        take_counters(pipeline, checkpoint, with_scheduler=self._wanted.scheduler_states)
        if self._manifest.is_ours:
            restore(
                self._run, self._common, self._rank_state, same_stages=self._same_stages,
                same_layers=self._regrouped is None,
            )

    def _client_state(self) -> dict[str, Any]:
        """What DeepSpeed's ``load_checkpoint`` hands back as the user's values."""
        found = client_values(
            self._checkpoint, module_only=self._wanted.module_only, scheduler=self._wanted.scheduler_states,
            optimizer=self._wanted.optimizer_states,
        )
        if self._with_optimizer and self._manifest.optimizer.kind == "plain":
            found["optimizer"] = self._checkpoint["optimizer"]
        return found


def latest_tag(load_dir: str) -> str | None:
    """The tag that ``latest`` names, the same on every rank; collective.

    Returns:
        The tag; ``None``, with a warning, if there is no such file.

    Raises:
        CheckpointError: on every rank, if the file can't be read or is empty, as the end of the machine may leave it.
    """
    tag, problem = from_first(lambda: _find_latest(load_dir))
    if problem:
        raise CheckpointError(f"{load_dir}/latest can't be used: {problem}")
    return tag


def _find_latest(load_dir: str) -> tuple[str | None, str]:
    """The tag, if there is the file, and what is wrong with it."""
    try:
        tag, there = folder.read_latest(load_dir), folder.named_checkpoints(Path(load_dir))
    except (OSError, ValueError) as error:
        return None, str(error)
    if tag is None:
        log.warning(f"there is no {load_dir}/latest to name a checkpoint; pass a tag to load one of {there}")
    return tag, f"it is empty; pass one of {there} as tag" if tag == "" else ""
