"""Optimizer state of single parameters, out of the files DeepSpeed writes by rank."""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from dynpipe_ds.checkpoint.manifest import CheckpointError, Manifest, Slot
from dynpipe_ds.host.optimizers.flat import Pieces
from dynpipe_ds.host.optimizers.groups import State


def _zero_stage(owner: Any, name: str) -> ZeroStageEnum:
    """Stands in for ``getattr``, by which Python before 3.11.4 pickles a member of an enum."""
    if owner is not ZeroStageEnum:
        raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r}) is not allowed")
    return ZeroStageEnum[name]


# What DeepSpeed's own files hold besides tensors and plain values. None of them runs code when it is read.
_DEEPSPEED_CLASSES: list[Any] = [
    DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, (_zero_stage, "builtins.getattr"),
]


def known_classes() -> list[Any]:
    """What may be read besides tensors and plain values, for ``torch.serialization.safe_globals``."""
    return list(_DEEPSPEED_CLASSES)


class Reader:
    """Reads each file of a checkpoint once; nothing but tensors, plain values and a few known classes.

    Args:
        root: the checkpoint's folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._contents: dict[str, Any] = {}

    def read(self, path: str) -> Any:
        """Content of a file, its tensors on the host, where possible mapped instead of read.

        Raises:
            CheckpointError: if it is missing, damaged or holds other objects.
        """
        if path not in self._contents:
            self._contents[path] = self._load(self.root / path)
        return self._contents[path]

    def _load(self, file: Path) -> Any:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        try:
            with torch.serialization.safe_globals(known_classes()):
                return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{file} holds objects that could run code when they are read, or is damaged; allow classes you trust "
                f"with torch.serialization.add_safe_globals([...]): {first_line(error)}"
            ) from error
        except Exception as error:
            raise CheckpointError(f"{file} is damaged or can't be read: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The line of a reading error that names the class, or else the first one."""
    text = str(error).strip()
    found = [line.strip() for line in text.splitlines() if re.search("global|Unsupported", line, re.I)]
    return (found or text.splitlines() or [type(error).__name__])[0]


def stage_state_dict(manifest: Manifest, reader: Reader, stage: int) -> Any:
    """The whole ``state_dict`` of one stage's optimizer, of its first replica."""
    if manifest.optimizer.kind == "flat":
        return reader.read(manifest.optimizer_files[stage][0])["optimizer_state_dict"]
    return reader.read(manifest.model_files[stage])["optimizer"]


def group_settings(manifest: Manifest, reader: Reader, stage: int) -> list[dict[str, Any]]:
    """Learning rate and the like of every parameter group, as one stage left them."""
    state = stage_state_dict(manifest, reader, stage)
    basic = state["base_optimizer_state"] if manifest.optimizer.kind == "flat" else state
    groups = basic["param_groups"] if isinstance(basic, dict) else [{} for _ in basic]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def template_state(manifest: Manifest, reader: Reader, stage: int) -> State:
    """What a group of a flat optimizer knows besides its parameters' moments, above all its count of steps.

    A stage whose layers are all frozen counts steps, too; later ones go on from there.

    Returns:
        State of one of its groups, moments as :class:`Pieces`; empty before the first step.
    """
    basic = stage_state_dict(manifest, reader, stage)["base_optimizer_state"]
    num_groups = len(basic["param_groups"]) if isinstance(basic, dict) else len(basic)
    found = (_group_state(basic, group) for group in range(num_groups))
    state = next((state for state in found if state), {})
    return {key: Pieces((value.view(-1),)) if _is_flat(value) else value for key, value in state.items()}


def parameter_states(manifest: Manifest, reader: Reader, layers: range) -> dict[str, State]:
    """Complete state of the parameters of some layers, put together from the files of all replicas.

    Returns:
        Named tensors (plain) or :class:`Pieces` (flat) and scalars, by key; of a flat optimizer with the fp32
        weights as ``"master"``. Parameters without state are left out, and those that single replicas owned.

    Raises:
        CheckpointError: if a file does not hold what the manifest says.
    """
    stored = {slot.parameter for slots in manifest.slots for slot in slots if slot.parameter is not None}
    sources = {key: key for key in stored - manifest.owned_keys} | manifest.aliases
    sources = {key: source for key, source in sources.items() if int(key.split("/")[0]) in layers}
    wanted = set(sources.values())
    read_stage = _flat_states if manifest.optimizer.kind == "flat" else _plain_states
    states: dict[str, State] = {}
    for stage, slots in enumerate(manifest.slots):
        if any(slot.parameter in wanted for slot in slots):
            states.update(read_stage(manifest, reader, stage, wanted))
    return {key: states[source] for key, source in sources.items() if source in states}


def _plain_states(manifest: Manifest, reader: Reader, stage: int, keys: set[str]) -> dict[str, State]:
    file = manifest.model_files[stage]
    state_dict = reader.read(file)["optimizer"]
    num_slots = sum(len(group["params"]) for group in state_dict["param_groups"])
    if num_slots != len(manifest.slots[stage]):
        raise CheckpointError(
            f"{reader.root / file} holds optimizer state for {num_slots} parameters and stage {stage} has "
            f"{len(manifest.slots[stage])}"
        )
    state = state_dict["state"]
    return {
        slot.parameter: state[i]
        for i, slot in enumerate(manifest.slots[stage])
        if slot.parameter in keys and slot.parameter is not None and i in state
    }


def _flat_states(manifest: Manifest, reader: Reader, stage: int, keys: set[str]) -> dict[str, State]:
    shards = [reader.read(file)["optimizer_state_dict"] for file in manifest.optimizer_files[stage]]
    states = {}
    for slot in manifest.slots[stage]:
        if slot.parameter is None or slot.parameter not in keys:
            continue
        state = _joined([_fragment(shard, slot) for shard in shards])
        expected = _num_elements(manifest, slot.parameter)
        found = state["master"].num_elements
        if found != expected:
            raise CheckpointError(
                f"{reader.root / manifest.optimizer_files[stage][0]} and its siblings hold {found} elements of "
                f"{slot.parameter}, which has {expected}"
            )
        states[slot.parameter] = state
    return states


def _num_elements(manifest: Manifest, key: str) -> int:
    layer, _, name = key.partition("/")
    return math.prod(manifest.layers[int(layer)].tensors[name].shape)


def _fragment(shard: Any, slot: Slot) -> State:
    """What one replica's file holds of a parameter; empty if nothing."""
    address = shard["param_slice_mappings"][slot.group].get(slot.deepspeed_name)
    if address is None:
        return {}
    flat_state = _group_state(shard["base_optimizer_state"], slot.group)
    state: State = {"master": shard["single_partition_of_fp32_groups"][slot.group]}
    state.update(flat_state)
    share = slice(address.start, address.start + address.numel)
    return {key: value.view(-1)[share] if _is_flat(value) else value for key, value in state.items()}


def _group_state(basic: Any, group: int) -> State:
    if not isinstance(basic, dict):  # "elastic_checkpoint"
        return dict(basic[group])
    parameter = basic["param_groups"][group]["params"][0]
    return dict(basic["state"].get(parameter, {}))


def _joined(fragments: list[State]) -> State:
    """Replicas hold consecutive pieces of the flat buffer, in the order of their ranks."""
    found = [fragment for fragment in fragments if fragment]
    if not found:
        return {"master": Pieces(())}
    return {
        key: Pieces(tuple(fragment[key] for fragment in found)) if _is_flat(value) else value
        for key, value in found[0].items()
    }


def _is_flat(value: Any) -> bool:
    """Whether it has a value an element, not a count of steps or the like."""
    return isinstance(value, Tensor) and value.dim() > 0
