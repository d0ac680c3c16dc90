"""What a checkpoint says of itself: its partition, the layout of DeepSpeed's files, and their checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor, nn

from dynpipe_ds.placement import Placement

MANIFEST_FILE = "dynamic_pipeline.json"
EXTRAS_FOLDER = "dynamic_pipeline"
FORMAT = "dynpipe_ds checkpoint"
FORMAT_VERSION = 1
OWNED_VERSION = 2
"""Of checkpoints in which single replicas own parameters: earlier releases would give all of them the first one's."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on every rank with the same text."""


@dataclass(frozen=True)
class TensorForm:
    """What must agree for a stored tensor to fit.

    Attributes:
        dtype: torch's name of it, for example ``"float32"``.
        shape: its sizes.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Form of a tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class LayerEntry:
    """One layer of the model.

    Attributes:
        name: class or function name.
        file: file of its ``state_dict``, relative to the checkpoint; ``None`` for a function.
        tensors: form of every tensor in it, by key.
        trainable: ``requires_grad`` of its parameters, by name in the layer.
        owned: of each parameter of which every replica owned rows, the files with them, by replica.
    """

    name: str
    file: str | None
    tensors: dict[str, TensorForm]
    trainable: dict[str, bool]
    owned: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Slot:
    """One place in a stage's optimizer, in the order of its parameter groups.

    Attributes:
        parameter: ``"<layer>/<name in the layer>"``; ``None`` for a group's placeholder.
        group: index of its parameter group.
        deepspeed_name: what DeepSpeed's ``param_slice_mappings`` call it.
    """

    parameter: str | None
    group: int
    deepspeed_name: str


@dataclass(frozen=True)
class OptimizerEntry:
    """The optimizer that wrote the state.

    Attributes:
        kind: ``"plain"`` (a state entry a parameter), ``"flat"`` (ZeRO-1, bf16) or ``"none"``.
        name: class of the basic optimizer.
        num_groups: parameter groups.
    """

    kind: str
    name: str
    num_groups: int


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of one file.

    Attributes:
        num_bytes: its size.
        sha256: of the whole file, or, if ``of_index``, of the zip archive's table of contents.
        of_index: the archive holds a CRC-32 of each of its records, which its writer computed anyway, and
            the table of contents repeats them: its hash covers all.
    """

    num_bytes: int
    sha256: str
    of_index: bool


@dataclass(frozen=True)
class Manifest:
    """Everything that is needed to find a parameter's weights and optimizer state in DeepSpeed's files.

    Attributes:
        tag: the checkpoint's tag.
        partition: ``S + 1`` boundaries.
        num_replicas: data-parallel replicas of each stage.
        layers: by index.
        optimizer: its kind.
        slots: of every stage's optimizer, by stage.
        model_files: DeepSpeed's ``mp_rank_*`` file, by stage.
        optimizer_files: DeepSpeed's ``*zero_pp_rank_*`` files, by stage and replica; of flat optimizers.
        files: size and checksum, by path; empty for a checkpoint that plain DeepSpeed wrote.
        versions: what wrote it.
        aliases: parameters without a slot, and those that hold the same optimizer state (plain DeepSpeed keeps
            tied layers of one stage once).
        whole_layers: for each layer the index that it, or the layer that it is a part of, would have if none were cut
            into parts; empty: none is.
    """

    tag: str
    partition: tuple[int, ...]
    num_replicas: int
    layers: tuple[LayerEntry, ...]
    optimizer: OptimizerEntry
    slots: tuple[tuple[Slot, ...], ...]
    model_files: tuple[str, ...]
    optimizer_files: tuple[tuple[str, ...], ...]
    files: dict[str, FileEntry] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    whole_layers: tuple[int, ...] = ()

    @property
    def wholes(self) -> tuple[int, ...]:
        """:attr:`whole_layers`, also where none is cut."""
        return self.whole_layers or tuple(range(len(self.layers)))

    @property
    def placement(self) -> Placement:
        """Which stage of those that wrote it held each layer."""
        return Placement.from_boundaries(self.partition)

    @property
    def num_stages(self) -> int:
        """Number of stages that wrote it."""
        return self.placement.num_stages

    @property
    def is_ours(self) -> bool:
        """Whether it was read from a manifest, not inferred from plain DeepSpeed's files."""
        return bool(self.files)

    @property
    def owned_keys(self) -> frozenset[str]:
        """Parameters of which every replica owned rows, as :func:`parameter_key` names them."""
        return frozenset(parameter_key(i, name) for i, layer in enumerate(self.layers) for name in layer.owned)

    def dumps(self) -> str:
        """Return JSON text that :meth:`loads` reads back, with a checksum of its own."""
        version = OWNED_VERSION if self.owned_keys else FORMAT_VERSION
        head = {"format": FORMAT, "version": version, "sha256": _digest(vars(self))}
        # One line a field: json's indentation would be written by Python code, ten times as slow.
        lines = (
            f"{json.dumps(key)}: {json.dumps(value, default=vars, allow_nan=False)}"
            for key, value in {**head, **vars(self)}.items()
        )
        return "{" + ",\n".join(lines) + "}\n"

    @classmethod
    def loads(cls, text: str) -> Manifest:
        """Read what :meth:`dumps` wrote.

        Raises:
            ValueError: if it is anything else, cut short or changed.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f'it has no "format": "{FORMAT}"')
        version = data.pop("version", None)
        if version not in (FORMAT_VERSION, OWNED_VERSION):
            known = f"{FORMAT_VERSION} and {OWNED_VERSION}"
            raise ValueError(f"its version is {version!r} and this release reads {known}")
        if data.pop("sha256", None) != _digest(data):
            raise ValueError("its checksum does not fit its content: it was changed or damaged")
        return TypeAdapter(Manifest).validate_python(data)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=vars).encode()).hexdigest()


def parameter_key(layer: int, name: str) -> str:
    """Name of a parameter that does not depend on where its layer lives."""
    return f"{layer}/{name}"


def named_parameters(layers: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """Parameters of some layers by :func:`parameter_key`."""
    return {
        parameter_key(layer, name): parameter
        for layer, module in layers.items()
        for name, parameter in module.named_parameters()
    }


def tensor_forms(state: Mapping[str, Any]) -> dict[str, TensorForm]:
    """Form of every tensor of a ``state_dict``; anything else (``_extra_state``) is left out."""
    return {key: TensorForm.of(value) for key, value in state.items() if isinstance(value, Tensor)}
