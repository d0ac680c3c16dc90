"""The files that DeepSpeed writes for a checkpoint: where they are, how they are written, what is read from them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from torch import Tensor, nn

from dynpipe_ds.checkpoint import folder
from dynpipe_ds.checkpoint.full_disk import naming_full_disk, stored_bytes
from dynpipe_ds.checkpoint.manifest import FileEntry
from dynpipe_ds.checkpoint.plain import plain
from dynpipe_ds.host.optimizers.flat import FlatOptimizer
from dynpipe_ds.host.pipeline import Pipeline

# Entries of DeepSpeed's file that it takes in itself and does not hand to the user.
_TAKEN = ("module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd")
_OF_FLAT, _MASTERS, _BASE = "optimizer_state_dict", "single_partition_of_fp32_groups", "base_optimizer_state"
_OF_FLAT_OPTIMIZERS = ("loss_scaler", "dynamic_loss_scale", "overflow")


def not_covered(pipeline: Pipeline) -> list[str]:
    """What an engine trains with that checkpoints of a dynamic pipeline don't cover."""
    found = {
        "tensor parallelism": pipeline.engine.grid.get_slice_parallel_world_size() > 1,
        '"checkpoint": {"use_node_local_storage": true}': pipeline.engine.use_node_local_storage(),
        "a checkpoint writer that finishes later": pipeline.engine.checkpoint_engine.is_decoupled(),
        "DeepSpeed's own MoE layers": pipeline.engine.has_moe_layers,
        "optimizer state on NVMe": pipeline.engine.zero_nvme_offload_optimizer(),
    }
    return [name for name, present in found.items() if present]


# -- writing ----------------------------------------------------------------------------------


class RecordingWriter:
    """Stands in for DeepSpeed's checkpoint engine during a save: notes what is written, with its checksum.

    Args:
        inner: DeepSpeed's checkpoint engine, which does the writing.
        root: the checkpoint's folder; paths are noted relative to it.
        twins: indices of parameter groups of what single replicas own, which has files of its own.
    """

    def __init__(self, inner: Any, root: Path, twins: Collection[int] = ()) -> None:
        self.inner = inner
        self._root = root
        self._twins = twins
        self.entries: dict[str, FileEntry] = {}
        """Size and checksum of each file, by path relative to the checkpoint."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file.

        Raises:
            CheckpointError: if it holds what could not be loaded again, or if there is no room for it.
        """
        file = Path(path)
        if file.name.startswith("layer_"):
            state_dict = {key: compact(value) for key, value in state_dict.items()}
        if self._twins and _OF_FLAT in state_dict:
            state_dict = {**state_dict, _OF_FLAT: _without(self._twins, state_dict[_OF_FLAT])}
        stored = plain(state_dict, f"{file.name}: ")
        with naming_full_disk(file, lambda: stored_bytes(stored)):
            self.inner.save(stored, path)
            self.entries[str(file.relative_to(self._root))] = folder.fingerprint(file)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        os.makedirs(path, exist_ok=exist_ok)

    def preserves_storage_sharing(self) -> bool:
        """DeepSpeed need not copy every tensor: :meth:`save` copies those that share a buffer."""
        return False


@contextmanager
def recording(pipeline: Pipeline, root: Path) -> Iterator[RecordingWriter]:
    """Let what an engine writes within be noted."""
    own = pipeline.engine.checkpoint_engine
    optimizer = pipeline.engine.stage_optimizer
    twins = () if optimizer is None else tuple(optimizer.groups.twins)
    pipeline.engine.checkpoint_engine = writer = RecordingWriter(own, root, twins)
    try:
        yield writer
    finally:
        pipeline.engine.checkpoint_engine = own


def write_files(
    pipeline: Pipeline, save_dir: Path, name: str, *, tag: str, client_state: dict[str, Any], exclude_frozen: bool
) -> None:
    """The steps of DeepSpeed's ``save_checkpoint``, without the barriers that a failing rank never reaches.

    Args:
        pipeline: the engine, while it is :func:`recording`.
        save_dir: folder of all checkpoints.
        name: of the folder in it to write into.
        tag: what the checkpoint will be called.
        client_state: the user's own values.
        exclude_frozen: whether to leave out parameters that need no gradient.
    """
    own = pipeline.engine.checkpoint_engine.inner
    own.create(CheckpointCommitInfo(tag=tag, save_dir=str(save_dir), save_latest=False))
    pipeline.engine._save_checkpoint(
        str(save_dir), name, client_state=client_state, exclude_frozen_parameters=exclude_frozen
    )
    if pipeline.engine.save_zero_checkpoint:
        pipeline.engine._save_zero_checkpoint(str(save_dir), name)
    own.commit(CheckpointCommitInfo(tag=tag, save_dir=str(save_dir), save_latest=False))


def compact(value: Any) -> Any:
    """A tensor in memory of its own, on the host; ``torch.save`` would write a view's whole buffer.

    Args:
        value: a tensor; anything else stays as it is.
    """
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cpu" or value.layout is not torch.strided:
        return value.detach().to("cpu", copy=True)
    alone = value.untyped_storage().nbytes() == value.nbytes
    return value.detach() if alone else value.detach().clone()


def _without(twins: Collection[int], flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flat optimizer's state, in which some parameter groups have no elements."""
    masters, base = list(flat[_MASTERS]), flat[_BASE]
    for i in twins:
        masters[i] = masters[i].detach().new_empty(0)
    if not isinstance(base, dict):  # "elastic_checkpoint"
        base = [_emptied(state) if i in twins else state for i, state in enumerate(base)]
    else:
        places = {base["param_groups"][i]["params"][0] for i in twins}
        states = {k: _emptied(state) if k in places else state for k, state in base["state"].items()}
        base = {**base, "state": states}
    return {**flat, _MASTERS: masters, _BASE: base}


def _emptied(state: Mapping[str, Any]) -> dict[str, Any]:
    moments = {k for k, value in state.items() if isinstance(value, Tensor) and value.dim()}
    return {k: value.new_empty(0) if k in moments else value for k, value in state.items()}


# -- where what is ----------------------------------------------------------------------------


def model_file(pipeline: Pipeline, save_dir: Path, tag: str) -> Path:
    """The file of this stage with all but its layers, and without ZeRO its optimizer's state."""
    return Path(pipeline.engine._get_ckpt_name(str(save_dir), tag))


def optimizer_file(pipeline: Pipeline, save_dir: Path, tag: str) -> Path:
    """The file of this rank's share of a flat optimizer's state."""
    return Path(pipeline.engine._get_zero_ckpt_name(str(save_dir), tag))


def layer_file(pipeline: Pipeline, target: Path, layer: int) -> Path:
    """The file of one layer of this stage."""
    return Path(pipeline.engine.module.ckpt_layer_path(str(target), layer - pipeline.engine.module._local_start))


def saved_parameters(pipeline: Pipeline) -> list[list[nn.Parameter]]:
    """The parameters of every group, in the order in which the optimizer's state is saved."""
    wrapper = pipeline.engine.optimizer
    if isinstance(pipeline.engine.stage_optimizer, FlatOptimizer):
        groups: Any = wrapper.bf16_groups if pipeline.engine.using_bf16_optimizer else wrapper.bit16_groups
    else:
        groups = [group["params"] for group in pipeline.engine.stage_optimizer.groups.optimizer.param_groups]
    return [list(members) for members in groups]


# -- reading ----------------------------------------------------------------------------------


def take_worlds(pipeline: Pipeline, checkpoint: Mapping[str, Any], *, module_only: bool) -> None:
    """Tell an engine how many ranks the checkpoint that it loaded was saved by."""
    pipeline.engine.loaded_checkpoint_dp_world_size = checkpoint["dp_world_size"]
    if not module_only:
        pipeline.engine.loaded_checkpoint_mp_world_size = checkpoint["mp_world_size"]


def take_counters(pipeline: Pipeline, checkpoint: Mapping[str, Any], *, with_scheduler: bool) -> None:
    """Put back an engine's counters, and the state of what follows them."""
    engine = pipeline.engine
    if with_scheduler and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
    if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None and "random_ltd" in checkpoint:
        engine.random_ltd_scheduler.load_state_dict(checkpoint["random_ltd"])
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        engine.training_dataloader.data_sampler.load_state_dict(checkpoint["data_sampler"])
    engine.global_steps = checkpoint["global_steps"]
    engine.global_samples = checkpoint.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.skipped_steps = checkpoint["skipped_steps"]


def take_weights(pipeline: Pipeline) -> None:
    """Renew the master weights of a flat optimizer from the model's."""
    pipeline.engine.optimizer._restore_from_bit16_weights()


def take_settings(pipeline: Pipeline, stored: Mapping[str, Any]) -> None:
    """Put back what a flat optimizer keeps besides its parameters' state."""
    pipeline.engine.optimizer.clip_grad = stored.get("clip_grad", pipeline.engine.optimizer.clip_grad)
    for name in _OF_FLAT_OPTIMIZERS:
        if name in stored and hasattr(pipeline.engine.optimizer, name):
            setattr(pipeline.engine.optimizer, name, stored[name])


def client_values(
    checkpoint: Mapping[str, Any], *, module_only: bool, scheduler: bool, optimizer: bool
) -> dict[str, Any]:
    """The user's own values, and what DeepSpeed's ``load_checkpoint`` hands back with them.

    Args:
        checkpoint: content of :func:`model_file`.
        module_only: whether nothing but weights is loaded.
        scheduler: whether the learning-rate scheduler's state is taken in.
        optimizer: whether the optimizer's state is asked for.
    """
    taken = {"module"} if module_only else set(_TAKEN)
    taken |= {"lr_scheduler"} if scheduler else set()
    taken |= {"optimizer"} if optimizer else set()
    return {key: value for key, value in checkpoint.items() if key not in taken}
