"""The folder that a model or its adapters are saved to."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from dynpipe_ds.checkpoint.folder import start
from dynpipe_ds.hf.layers import PretrainedLayer

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def pretrained_layers(engine: Any) -> list[PretrainedLayer]:
    """The layers of this rank that know where their weights stand in a model folder."""
    return [module for module in engine.module.modules() if isinstance(module, PretrainedLayer)]


def begin(target: Path) -> None:
    """Make a place to write into; raises ``FileExistsError`` if the folder holds something already."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty folder: give another name, or remove it")
    start(target)


def alone(tensor: Tensor) -> Tensor:
    """A copy on the CPU with storage of its own."""
    return tensor.detach().cpu().contiguous().clone()


def copy_companions(source: str | Path | None, folder: Path, patterns: Iterable[str]) -> None:
    """Copy files that belong to a model.

    Args:
        source: folder that has them; ``None``: there is none.
        folder: takes them.
        patterns: of their names.
    """
    for pattern in patterns if source is not None else ():
        for file in Path(source).expanduser().glob(pattern):  # type: ignore[arg-type]
            shutil.copyfile(file, folder / file.name)
