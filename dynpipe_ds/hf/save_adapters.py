"""Write adapters as ``peft`` does: one file for the whole model, and what it takes to put them there again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from dynpipe_ds.checkpoint.folder import partial_folder, publish
from dynpipe_ds.hf.adapters import WEIGHTS_FILE
from dynpipe_ds.hf.folder import open_weights
from dynpipe_ds.hf.target import TOKENIZER, alone, begin, copy_companions, pretrained_layers
from dynpipe_ds.ranks.agreement import gather, together


def save_adapters(
    engine: Any, target: Path, *, source: str | Path | None, failed: Callable[[str], Exception]
) -> None:
    """Write the adapters of all stages; collective over all ranks.

    Each stage writes a file of its own, which the first rank then puts together.

    Args:
        engine: trains layers with adapters.
        target: a folder that does not exist or is empty, on a file system that all ranks share.
        source: the folder that the model came from, for its tokenizer.
        failed: makes the error that every rank raises.
    """
    device, first = engine.device, dist.get_rank() == 0
    together(lambda: begin(target) if first else None, device, failed)
    written = gather(together(lambda: _write(engine, partial_folder(target)), device, failed))
    parts = [name for name in written if name is not None]
    together(lambda: _finish(engine, partial_folder(target), parts, source) if first else None, device, failed)
    together(lambda: publish(target) if first else None, device, failed)


def _write(engine: Any, folder: Path) -> str | None:
    """Write what this rank has; returns the file's name, if there is one."""
    if engine.mpu.get_data_parallel_rank() != 0:
        return None
    tensors = {
        name: alone(part) for layer in pretrained_layers(engine) for name, part in layer.adapter_pieces().items()
    }
    name = f"rank_{dist.get_rank():05d}.safetensors"
    if tensors:
        save_file(tensors, folder / name)
    return name if tensors else None


def _finish(engine: Any, folder: Path, parts: list[str], source: str | Path | None) -> None:
    unseen = [name for name in parts if not (folder / name).is_file()]
    if unseen:
        raise FileNotFoundError(f"{', '.join(unseen)} was written by another node but is not here: use a shared folder")
    tensors: dict[str, Tensor] = {}
    for name in parts:
        with open_weights(folder / name) as reader:
            tensors |= {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
        (folder / name).unlink()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    adapters = next(layer.adapters for layer in pretrained_layers(engine) if layer.adapters is not None)
    config = copy.deepcopy(adapters.config)
    config.inference_mode = True  # until someone asks for training
    config.base_model_name_or_path = config.base_model_name_or_path or (None if source is None else str(source))
    config.save_pretrained(str(folder))
    copy_companions(source, folder, TOKENIZER)
