"""Write a model folder that ``transformers`` loads, every rank its own part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from dynpipe_ds.checkpoint import CheckpointError
from dynpipe_ds.checkpoint.folder import partial_folder, publish
from dynpipe_ds.hf.folder import INDEX_FILE, SINGLE_FILE
from dynpipe_ds.hf.save_adapters import save_adapters
from dynpipe_ds.hf.target import TOKENIZER, alone, begin, copy_companions, pretrained_layers
from dynpipe_ds.ranks.agreement import anywhere, gather, together

# What belongs to a model beside its weights, its configuration and its tokenizer.
_COMPANIONS = ("generation_config.json", "configuration_*.py", "modeling_*.py")


@dataclass(frozen=True)
class Shard:
    """One file of weights.

    Attributes:
        rank: who writes it.
        names: the weights in it.
        file: its name.
    """

    rank: int
    names: tuple[str, ...]
    file: str


def plan_shards(sizes: Sequence[Sequence[tuple[str, int]]], *, max_shard_bytes: int) -> list[Shard]:
    """Decide which rank writes which weight into which file.

    Args:
        sizes: names and bytes of what each rank holds, by rank. What several hold (tied weights) is written by
            the first.
        max_shard_bytes: most bytes of a file, unless a single weight is larger.

    Returns:
        The files, in the order of their numbers.
    """
    groups: list[tuple[int, list[str]]] = []
    seen: set[str] = set()
    for rank, held in enumerate(sizes):
        room = 0
        for name, size in held:
            if name in seen:
                continue
            seen.add(name)
            if not groups or groups[-1][0] != rank or size > room:
                groups.append((rank, []))
                room = max_shard_bytes
            groups[-1][1].append(name)
            room -= size
    if len(groups) == 1:
        return [Shard(groups[0][0], tuple(groups[0][1]), SINGLE_FILE)]
    name_of = "model-{:05d}-of-{:05d}.safetensors".format
    return [Shard(r, tuple(names), name_of(i, len(groups))) for i, (r, names) in enumerate(groups, start=1)]


def save_pretrained(
    engine: Any, path: str | Path, *, source: str | Path | None = None, max_shard_bytes: int = 5 << 30
) -> None:
    """Write the model as one folder that ``from_pretrained`` of ``transformers`` loads; collective over all ranks.

    Each stage writes its own layers; no rank gathers the model. The folder appears when it is complete. Layers with
    adapters (``adapter=`` of :func:`~dynpipe_ds.hf.causal_lm_layers`) are written as ``peft`` does it: the adapters
    alone, for ``PeftModel.from_pretrained`` on the model that they were trained on.

    Args:
        engine: trains layers of :func:`~dynpipe_ds.hf.causal_lm_layers`.
        path: a folder that does not exist or is empty, on a file system that all ranks share.
        source: the folder that the model came from, for its tokenizer and generation settings.
        max_shard_bytes: most bytes of a file; adapters are one file.

    Raises:
        CheckpointError: on every rank, if any rank can't write.
    """
    target = Path(path).expanduser()
    device = engine.device

    def failed(message: str) -> CheckpointError:
        return CheckpointError(f"the model was not saved to {target}: {message}")

    if anywhere(any(layer.adapters is not None for layer in pretrained_layers(engine)), device):
        save_adapters(engine, target, source=source, failed=failed)
        return
    weights = together(lambda: _local_weights(engine), device, failed)
    sizes = gather([(name, part.nbytes) for name, part in weights.items()])
    shards = plan_shards(sizes, max_shard_bytes=max_shard_bytes)
    first = dist.get_rank() == 0
    together(lambda: begin(target) if first else None, device, failed)
    together(lambda: _write(weights, shards, partial_folder(target)), device, failed)
    together(lambda: _write_rest(engine, shards, sizes, partial_folder(target), source), device, failed)
    together(lambda: publish(target) if first else None, device, failed)


def _local_weights(engine: Any) -> dict[str, Tensor]:
    """This rank's share: the layers of its stage on the first replica, elsewhere what this replica alone has."""
    layers = pretrained_layers(engine)
    is_first, found = engine.mpu.get_data_parallel_rank() == 0, {}
    for piece in (piece for layer in layers for piece in layer.pieces()):
        if piece.rows is not None and piece.is_whole:
            raise ValueError(
                f"{piece.full} is one replica's own rows of a weight that {type(layers[0].family).__name__}'s files "
                "hold in one: save a checkpoint instead"
            )
        if is_first or piece.rows is not None:
            found[piece.stored] = piece.part
    return found


def _write(weights: dict[str, Tensor], shards: Sequence[Shard], folder: Path) -> None:
    rank = dist.get_rank()
    for shard in shards:
        if shard.rank == rank:
            tensors = {name: alone(weights[name]) for name in shard.names}
            save_file(tensors, folder / shard.file, metadata={"format": "pt"})


def _write_rest(
    engine: Any, shards: Sequence[Shard], sizes: Sequence[Sequence[tuple[str, int]]], folder: Path,
    source: str | Path | None,
) -> None:  # fmt: skip
    """Write index, configuration and companions, on the first rank; every file of weights must be in sight."""
    if dist.get_rank() != 0:
        return
    if not shards:
        raise ValueError("no layer of the model comes from causal_lm_layers")
    unseen = [shard.file for shard in shards if not (folder / shard.file).is_file()]
    if unseen:
        raise FileNotFoundError(f"{', '.join(unseen)} was written by another node but is not here: use a shared folder")
    layer = pretrained_layers(engine)[0]
    config = layer.family.config.__class__.from_dict(layer.family.config.to_dict())
    config.dtype = next(layer.parameters()).dtype
    config.architectures = [layer.family.architecture]
    config.save_pretrained(folder)
    if len(shards) > 1:
        total = sum(dict(item for held in sizes for item in held).values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: shard.file for shard in shards for name in shard.names},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    copy_companions(source, folder, (*TOKENIZER, *_COMPANIONS))
