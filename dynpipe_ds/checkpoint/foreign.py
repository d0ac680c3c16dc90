"""Checkpoints of plain DeepSpeed: a manifest inferred from the files and the present model.

DeepSpeed writes neither its partition nor (without ZeRO) the names of the parameters that its optimizer state
belongs to. How many parameters each stage's optimizer holds shows where the stages were cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dynpipe_ds.checkpoint.manifest import (
    CheckpointError,
    LayerEntry,
    Manifest,
    OptimizerEntry,
    Slot,
    parameter_key,
    tensor_forms,
)
from dynpipe_ds.host.optimizer_files import Reader
from dynpipe_ds.host.specs import tied_key
from dynpipe_ds.ranks.agreement import gather

if TYPE_CHECKING:
    from dynpipe_ds.stage import Stage

REMEDY = "load it with plain DeepSpeed and the partition it was saved with, and save it from there"


@dataclass(frozen=True)
class LayerFacts:
    """What the present model says of one layer.

    Attributes:
        name: its name.
        parameters: name and parameter group of those that the optimizer holds.
        key: tied key, if it is tied.
    """

    name: str
    parameters: tuple[tuple[str, int], ...]
    key: str | None


def describe_model(stage: Stage) -> list[LayerFacts]:
    """Facts of all layers; collective over all ranks."""
    index = stage.optimizer.groups.index if stage.optimizer else {}
    mine = {
        i: tuple((name, index[p]) for name, p in layer.named_parameters() if p in index)
        for i, layer in stage.local_layers().items()
    }
    everything = {i: parameters for part in gather(mine) for i, parameters in part.items()}
    specs = stage.module._layer_specs
    return [
        LayerFacts(name, everything.get(i, ()), tied_key(specs[i]))
        for i, name in enumerate(stage.module.layer_names())
    ]


def infer_manifest(
    root: Path, reader: Reader, layers: Sequence[LayerFacts], *, present: Sequence[int]
) -> Manifest:
    """Say of plain DeepSpeed's files what a manifest would.

    Args:
        root: the checkpoint's folder.
        reader: of that folder.
        layers: facts of the present model.
        present: the present partition, preferred where layers without parameters leave a choice.

    Raises:
        CheckpointError: if the files are not such a checkpoint or don't fit the model.
    """
    model_files = sorted(file.name for file in root.glob("mp_rank_*_model_states.pt"))
    if not model_files:
        raise CheckpointError(f"{root} holds no mp_rank_*_model_states.pt: it is no checkpoint of DeepSpeed")
    optimizer_files = tuple(_optimizer_files(root, stage) for stage in range(len(model_files)))
    flat = all(optimizer_files)
    checkpoints = [reader.read(file) for file in model_files]
    if flat:
        sizes = [[len(names) for names in _flat_names(reader, files)] for files in optimizer_files]
    elif checkpoints[0].get("optimizer"):
        groups = [checkpoint["optimizer"]["param_groups"] for checkpoint in checkpoints]
        sizes = [[len(group["params"]) for group in stage] for stage in groups]
    else:
        sizes = []
    if sizes:
        partition = infer_partition(layers, [sum(stage) for stage in sizes], present, root)
    else:
        partition = _even(len(layers), len(model_files))
    slots = [_slots(layers, partition, stage) for stage in range(len(sizes))]
    kind = "flat" if flat else "plain" if sizes else "none"
    return Manifest(
        tag=root.name,
        partition=partition,
        num_replicas=len(optimizer_files[0]) or int(checkpoints[0]["dp_world_size"]),
        layers=tuple(_layer_entry(reader, root, layers, i) for i in range(len(layers))),
        optimizer=OptimizerEntry(kind, "", len(sizes[0]) if sizes else 0),
        slots=tuple(slots),
        model_files=tuple(model_files),
        optimizer_files=optimizer_files if flat else (),
        aliases=_aliases(layers, partition),
    )


def _even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    return tuple(round(stage * num_layers / num_stages) for stage in range(num_stages + 1))


def _optimizer_files(root: Path, stage: int) -> tuple[str, ...]:
    pattern = re.compile(rf"(bf16_)?zero_pp_rank_(\d+)_mp_rank_{stage:02d}_optim_states\.pt")
    found = {int(match[2]): file.name for file in root.iterdir() if (match := pattern.fullmatch(file.name))}
    return tuple(found[replica] for replica in sorted(found))


def _flat_names(reader: Reader, files: Sequence[str]) -> list[set[str]]:
    """Names in every group of one stage's optimizer; each replica's file knows those it holds a piece of."""
    mappings = [reader.read(file)["optimizer_state_dict"]["param_slice_mappings"] for file in files]
    return [set().union(*groups) for groups in zip(*mappings, strict=True)]


def infer_partition(
    layers: Sequence[LayerFacts], counts: Sequence[int], present: Sequence[int], root: Path
) -> tuple[int, ...]:
    """Find the boundaries that give every stage as many parameters as its optimizer holds.

    Args:
        layers: facts of all layers.
        counts: number of parameters, by stage.
        present: boundaries to prefer where layers without parameters leave a choice.
        root: the checkpoint's folder, for messages.

    Raises:
        CheckpointError: if there are none.
    """
    boundaries, last = [0], len(counts) - 1
    for stage, count in enumerate(counts):
        start = boundaries[-1]
        stops = [stop for stop in range(start, len(layers) + 1) if len(_held(layers, start, stop)) == count]
        if stage == last:
            stops = [stop for stop in stops if stop == len(layers)]
        if not stops:
            raise CheckpointError(
                f"{root} was written by plain DeepSpeed, with {list(counts)} parameters in its stages' optimizers, "
                f"which no partition of this model has; {REMEDY}"
            )
        preferred = present[stage + 1] if len(present) == len(counts) + 1 else stops[0]
        boundaries.append(preferred if preferred in stops else stops[0])
    return tuple(boundaries)


def _held(layers: Sequence[LayerFacts], start: int, stop: int) -> list[tuple[int, str, int, str]]:
    """Layer, name, group and DeepSpeed's name of the parameters of a stage, in DeepSpeed's order.

    DeepSpeed lists tied layers first, and one layer for all on the same stage that share a key.
    """
    tied: dict[str, int] = {}
    for i in range(start, stop):
        if (key := layers[i].key) is not None:
            tied.setdefault(key, i)
    order = [(i, f"tied_modules.{key}") for key, i in tied.items()]
    order += [(i, str(i)) for i in range(start, stop) if layers[i].key is None]
    return [(i, name, group, f"{prefix}.{name}") for i, prefix in order for name, group in layers[i].parameters]


def _slots(layers: Sequence[LayerFacts], partition: Sequence[int], stage: int) -> tuple[Slot, ...]:
    held = _held(layers, partition[stage], partition[stage + 1])
    by_group = sorted(held, key=lambda entry: entry[2])  # stable: keeps the order inside a group
    return tuple(Slot(parameter_key(i, name), group, theirs) for i, name, group, theirs in by_group)


def _aliases(layers: Sequence[LayerFacts], partition: Sequence[int]) -> dict[str, str]:
    """Parameters of tied layers that DeepSpeed kept once, because both were on one stage."""
    aliases: dict[str, str] = {}
    for start, stop in zip(partition, partition[1:], strict=False):
        first: dict[str, int] = {}
        for i in range(start, stop):
            key = layers[i].key
            if key is not None and first.setdefault(key, i) != i:
                for name, _ in layers[i].parameters:
                    aliases[parameter_key(i, name)] = parameter_key(first[key], name)
    return aliases


def _layer_entry(reader: Reader, root: Path, layers: Sequence[LayerFacts], i: int) -> LayerEntry:
    key = layers[i].key
    same = [i] if key is None else [i, *(j for j, layer in enumerate(layers) if layer.key == key)]
    for layer in same:  # a tied layer with a forward_fn has no file of its own
        files = sorted(root.glob(f"layer_{layer:02d}-*model_states.pt"))
        if files:
            return LayerEntry(layers[i].name, files[0].name, tensor_forms(reader.read(files[0].name)), {})
    if layers[i].parameters:
        raise CheckpointError(f"{root}/layer_{i:02d}-model_states.pt is missing")
    return LayerEntry(layers[i].name, None, {}, {})
