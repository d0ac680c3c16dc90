"""A local model folder, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class PretrainedFolder:
    """Configuration and weights of a model, as ``save_pretrained`` of ``transformers`` or the hub lays them out.

    Only the configuration and the list of names are read at first; each weight when it is asked for.

    Args:
        path: a local folder with ``config.json`` and ``model.safetensors``, or shards and their index.
        attn_implementation: ``"sdpa"``, ``"eager"``, ``"flash_attention_2"``, …; ``None`` for the default of
            ``transformers``.
        experts_implementation: ``"grouped_mm"``, ``"eager"``, …; ``None`` for its default.

    Attributes:
        path: the folder.
        config: its ``PreTrainedConfig``.
        bytes_read: size of all weights read on this rank so far.

    Raises:
        ValueError: if the folder, its configuration or a file of weights is missing, or holds no safetensors.
    """

    def __init__(
        self, path: str | Path, *, attn_implementation: str | None = None, experts_implementation: str | None = None
    ) -> None:
        self.path = Path(path).expanduser()
        self.config = _read_config(self.path)
        if attn_implementation is not None:
            self.config._attn_implementation = attn_implementation
        if experts_implementation is not None:
            self.config._experts_implementation = experts_implementation
        self.bytes_read = 0
        self._files = _list_weights(self.path)

    def names(self) -> list[str]:
        """Names of all weights in the folder, sorted."""
        return sorted(self._files)

    def find(self, names: Iterable[str]) -> str | None:
        """Look for weights.

        Args:
            names: of weights, in the order in which they are looked for.

        Returns:
            The first that the folder holds; ``None`` if it holds none.
        """
        return next((name for name in names if name in self._files), None)

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Read the shapes of weights from the files' headers.

        Args:
            names: that the folder holds.

        Returns:
            The shapes by name.

        Raises:
            ValueError: if a file is cut off or lacks a weight that the index says it has.
        """
        found = {}
        for file, wanted in self._by_file(names).items():
            with open_weights(self.path / file) as reader:
                missing = set(wanted).difference(reader.keys())
                if missing:
                    raise ValueError(
                        f"{self.path / file} lacks {min(missing)}, which {INDEX_FILE} says it has: the folder is "
                        "incomplete, copy it again"
                    )
                for name in wanted:
                    found[name] = tuple(reader.get_slice(name).get_shape())
        return found

    def read_into(self, targets: dict[str, Tensor], rows: Mapping[str, range] | None = None) -> None:
        """Copy weights into tensors, one at a time, converting their type.

        Args:
            targets: tensors of the right shape by the name of a weight.
            rows: which rows of a weight are read, by name; all of those that it does not name.
        """
        rows = rows or {}
        for file, names in self._by_file(targets).items():
            with open_weights(self.path / file) as reader, torch.no_grad():
                for name in names:
                    part = rows.get(name)
                    weight: Tensor = (
                        reader.get_tensor(name) if part is None else reader.get_slice(name)[part.start : part.stop]
                    )
                    targets[name].copy_(weight)
                    self.bytes_read += weight.nbytes

    def _by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._files[name], []).append(name)
        return by_file


def open_weights(file: Path) -> Any:
    """Open a file of safetensors.

    Args:
        file: its path.

    Raises:
        ValueError: if it is none.
    """
    try:
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}; copy it again") from error


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    if not path.is_dir():
        raise ValueError(f"the model folder {path} does not exist: download the model first, nothing is fetched here")
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} holds no config.json: give the folder that save_pretrained wrote")
    values = json.loads(file.read_text(encoding="utf-8"))
    if values.get("model_type") == "llama_moe":
        from dynpipe_ds.hf.llama_moe import LlamaMoEConfig

        return LlamaMoEConfig.from_dict(values)
    return AutoConfig.from_pretrained(path, local_files_only=True)


def _list_weights(path: Path) -> dict[str, str]:
    """File of every weight by name."""
    index = path / INDEX_FILE
    if index.is_file():
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = {file for file in files.values() if not (path / file).is_file()}
        if missing:
            raise ValueError(
                f"{path} lacks {', '.join(sorted(missing))}, which {INDEX_FILE} names: copy the whole folder to "
                "every node"
            )
        return files
    single = path / SINGLE_FILE
    if not single.is_file():
        raise ValueError(
            f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}: convert other formats with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    with open_weights(single) as reader:
        return dict.fromkeys(reader.keys(), SINGLE_FILE)
