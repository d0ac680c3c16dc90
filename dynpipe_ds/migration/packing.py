"""A layer as bytes and tensors, and back.

The skeleton (classes, attributes, flags, hooks) is pickled; every strided tensor in it is replaced by
a number and travels apart, so that large layers go through bounded buffers and land on the device
they came from. What arrives is the layer as it was, not as its ``LayerSpec`` would build it. What
travels with a layer is pickled by itself: the receiver reads it before any tensor has come.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynpipe_ds.migration.transport import memory_order

# Attributes that DeepSpeed's optimizer wrappers put on a parameter. They point into flat buffers,
# process groups and the optimizer itself; the new owner's optimizer makes its own.
WRAPPER_ATTRIBUTES = frozenset({
    "_hp_mapping", "_hp_grad", "_dp_group", "_index_in_param_group", "_zero_optimizer", "cpu_data",
    "get_full_hp_param", "get_full_hp_grad", "set_full_hp_param", "set_full_hp_grad",
    "load_hp_checkpoint_state", "grad_accum", "param_idx_in_group",
})

_HOOK_TABLES = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")


class PackingError(RuntimeError):
    """Something in a layer can't be carried to another process."""


@dataclass(frozen=True)
class TensorSpec:
    """How to recreate an empty tensor that a received one fits in.

    Attributes:
        shape: its sizes.
        stride: its strides, dense: kernels choose by layout, so another one could mean other bits.
        dtype: its element type.
        on_host: whether it lives in host memory (else on the stage's accelerator).
        is_parameter: whether it is an ``nn.Parameter``.
        requires_grad: its flag.
        attributes: user attributes of a parameter, for example ``original_name``.
        hooks: tensor hooks of a parameter that could be carried.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    is_parameter: bool
    requires_grad: bool
    attributes: dict[str, Any] = field(default_factory=dict)
    hooks: tuple[Any, ...] = ()

    def empty(self, device: torch.device) -> Tensor:
        """Allocate a tensor of this kind.

        Args:
            device: the receiving stage's device, used unless the tensor lives in host memory.
        """
        where = torch.device("cpu") if self.on_host else device
        data = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=where)
        if not self.is_parameter:
            return data.requires_grad_(self.requires_grad)
        parameter = nn.Parameter(data, requires_grad=self.requires_grad)
        for name, value in self.attributes.items():
            setattr(parameter, name, value)
        for hook in self.hooks:
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        return parameter


class LayerTensors(NamedTuple):
    """Tensors that a skeleton refers to; its indices count through both lists.

    Attributes:
        own: the layer's parameters and buffers, which are needed to put it together.
        extra: those that only what travels with it refers to, its optimizer state.
    """

    own: list[Tensor]
    extra: list[Tensor]


@dataclass(frozen=True)
class Package:
    """A pickled skeleton and the tensors that were taken out of it.

    Attributes:
        skeleton: pickled object graph, tensors replaced by their index.
        tensors: the tensors; detached, and contiguous by taking their dimensions in the order in which
            they lie in memory.
        warnings: what could not be carried, one sentence each.
    """

    skeleton: bytes
    tensors: LayerTensors
    warnings: tuple[str, ...] = ()


class _Tensors:
    """The tensors that were taken out of what is pickled, each once."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []
        self._index: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        number = self._index.setdefault(id(tensor), len(self.sources))
        if number == len(self.sources):
            self.sources.append(tensor)  # keeps the id alive
        return number

    def dense(self) -> list[Tensor]:
        return [
            t.detach() if t.is_contiguous() else t.detach().permute(memory_order(_dense_stride(t))).contiguous()
            for t in self.sources
        ]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, tensors: _Tensors) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> Any:
        return self._tensors.number(obj) if isinstance(obj, Tensor) and obj.layout == torch.strided else None

    def reducer_override(self, obj: Any) -> Any:
        # The ranks run the same script, so what its __main__ defines at module level is there on
        # the other side: by reference, or isinstance() would fail on the copy.
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            if getattr(sys.modules["__main__"], obj.__qualname__, None) is obj:
                return NotImplemented
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: LayerTensors) -> None:
        super().__init__(file)
        self._tensors = [*tensors.own, *tensors.extra]

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _pickled(value: Any, tensors: _Tensors) -> bytes:
    file = io.BytesIO()
    _Pickler(file, tensors).dump(value)
    return file.getvalue()


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides, without the gaps and repetitions of a slice or an expanded tensor."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def _carries(value: Any) -> bool:
    if isinstance(value, bool | int | float | str | bytes | None):
        return True
    try:
        _pickled(value, _Tensors())
    except Exception:  # noqa: BLE001 - whatever pickling raises, the answer is no
        return False
    return True


@contextmanager
def _without_foreign_hooks(layer: nn.Module, name: str) -> Iterator[list[str]]:
    """Take hooks that can't be pickled off the layer while it is packed; name them."""
    lost: list[str] = []
    saved: list[tuple[OrderedDict[int, Any], dict[int, Any]]] = []
    for path, module in layer.named_modules():
        for table_name in _HOOK_TABLES:
            table = getattr(module, table_name, None)
            if not table or _carries(table):
                continue
            saved.append((table, dict(table)))
            for key, hook in list(table.items()):
                if not _carries(hook):
                    del table[key]
                    where = f"{name}.{path}" if path else name
                    lost.append(f"{table_name[1:-1]} {hook!r} of {where} can't be pickled and stays behind")
    try:
        yield lost
    finally:
        for table, entries in saved:
            table.clear()
            table.update(entries)


def _tensor_spec(source: Tensor, name: str, lost: list[str]) -> TensorSpec:
    is_parameter = isinstance(source, nn.Parameter)
    attributes: dict[str, Any] = {}
    hooks: list[Any] = []
    if is_parameter:
        for key, value in vars(source).items():
            if key in WRAPPER_ATTRIBUTES or key == "ds_pipe_replicated":
                continue
            if _carries(value):
                attributes[key] = value
            else:
                lost.append(f"attribute {key!r} of a parameter of {name} can't be pickled and stays behind")
        for hook in (source._backward_hooks or {}).values():
            if _carries(hook):
                hooks.append(hook)
            else:
                lost.append(f"tensor hook {hook!r} of {name} can't be pickled and stays behind")
    return TensorSpec(
        shape=tuple(source.shape),
        stride=_dense_stride(source),
        dtype=source.dtype,
        on_host=source.device.type == "cpu",
        is_parameter=is_parameter,
        requires_grad=source.requires_grad and source.is_leaf,
        attributes=attributes,
        hooks=tuple(hooks),
    )


def pack(layer: nn.Module | None, name: str, extra: Any = None) -> Package:
    """Take a layer apart for the journey; the layer itself is left as it is.

    Args:
        layer: the layer, or ``None`` for a function layer.
        name: what to call it in messages, for example ``"layer 7 (Block)"``.
        extra: anything that travels with it (its optimizer state).

    Returns:
        The package; its tensors share memory with the layer's where they are contiguous.

    Raises:
        PackingError: if an attribute can't be pickled, naming layer, reason and remedy.
    """
    tensors, lost = _Tensors(), []
    with _without_foreign_hooks(layer, name) if layer is not None else _nothing_lost() as hooks_lost:
        try:
            body = _pickled(layer, tensors)
        except Exception as error:
            raise PackingError(
                f"{name} holds something that can't be carried to another process ({error}); give its class "
                "a __getstate__ that leaves that out, or forbid cuts around the layer with pinned_cuts"
            ) from error
        lost += hooks_lost
    _refuse_without_data(tensors.sources, name)
    num_own = len(tensors.sources)
    companion = _pickled(extra, tensors)
    # As plain tuples: objects are pickled much more slowly.
    specs = [tuple(vars(_tensor_spec(source, name, lost)).values()) for source in tensors.sources]
    skeleton = join([cloudpickle.dumps((num_own, specs)), body, companion])
    dense = tensors.dense()
    return Package(skeleton, LayerTensors(dense[:num_own], dense[num_own:]), tuple(lost))


def _refuse_without_data(sources: Sequence[Tensor], name: str) -> None:
    for source in sources:
        if source.is_meta:
            raise PackingError(
                f"{name} holds a tensor of shape {tuple(source.shape)} on the meta device, which has no data to carry; "
                "give it data before the layer moves, or forbid cuts around the layer with pinned_cuts"
            )


@contextmanager
def _nothing_lost() -> Iterator[list[str]]:
    yield []


def join(parts: Sequence[bytes]) -> bytes:
    """Several byte strings as one.

    Args:
        parts: what :func:`cut` gives back.
    """
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def cut(data: bytes) -> list[bytes]:
    """The byte strings that :func:`join` put together.

    Args:
        data: what it made of them.
    """
    parts, position = [], 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 8], "little")
        parts.append(data[position + 8 : position + 8 + size])
        position += 8 + size
    return parts


def empty_tensors(skeleton: bytes, device: torch.device) -> LayerTensors:
    """Allocate the tensors that a package's skeleton refers to.

    Args:
        skeleton: ``Package.skeleton`` of the sender.
        device: device of the receiving stage.
    """
    num_own, specs = pickle.loads(cut(skeleton)[0])
    tensors = [TensorSpec(*spec).empty(device) for spec in specs]
    return LayerTensors(tensors[:num_own], tensors[num_own:])


def unpack(skeleton: bytes, tensors: LayerTensors) -> nn.Module | None:
    """Put a layer together from its skeleton and its received tensors.

    Args:
        skeleton: ``Package.skeleton`` of the sender.
        tensors: from :func:`empty_tensors`; its own must be filled.

    Returns:
        The layer; ``None`` for a function layer.
    """
    layer: nn.Module | None = _Unpickler(io.BytesIO(cut(skeleton)[1]), tensors).load()
    if layer is not None:
        _reserve_hook_numbers(layer)
    return layer


def unpack_extra(skeleton: bytes, tensors: LayerTensors) -> Any:
    """What travelled with a layer.

    Args:
        skeleton: ``Package.skeleton`` of the sender.
        tensors: those of :func:`empty_tensors`; they need not be filled yet.
    """
    return _Unpickler(io.BytesIO(cut(skeleton)[2]), tensors).load()


def _reserve_hook_numbers(layer: nn.Module) -> None:
    """Hooks are numbered by process: a new one must not get the number of one that was carried."""
    names = (*_HOOK_TABLES, *_HOOK_FLAGS)
    tables = (getattr(module, name, None) or () for module in layer.modules() for name in names)
    taken = max((number for table in tables for number in table), default=-1)
    RemovableHandle.next_id = max(RemovableHandle.next_id, taken + 1)


def warn_lost(messages: tuple[str, ...]) -> None:
    """Warn once about each thing a migration had to leave behind.

    Args:
        messages: ``Package.warnings``.
    """
    for message in messages:
        warnings.warn(message, stacklevel=3)
