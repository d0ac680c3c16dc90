"""A layer as bytes and tensors, and back.

What arrives is the layer as it was, not as its ``LayerSpec`` would build it. Its skeleton (classes, attributes, flags,
hooks) is encoded as plain values; every strided tensor in it is replaced by a number and travels apart, so that large
layers go through bounded buffers and land on the device they came from. What the layer does not own is bound to the
receiver's own (``names.py``). A skeleton has two parts: the head says which tensors there are and what travels with the
layer, so that the receiver can make room while the sender still encodes the body, from which the layer is put together.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynpipe_ds.messages.layouts import LINE_BYTES, Layout
from dynpipe_ds.messages.values import dtype_name, dtype_of
from dynpipe_ds.migration.bound import compare, values_of
from dynpipe_ds.migration.decoding import Decoder, DecodingError, Journal
from dynpipe_ds.migration.encoding import CantCarryError, Encoder, Taken
from dynpipe_ds.migration.glance import holds_only_registered
from dynpipe_ds.migration.hooks import NOT_CARRIED, hook_tables, hooks_of
from dynpipe_ds.migration.names import Names, no_names
from dynpipe_ds.migration.transport import memory_order

_dtype_name = cache(dtype_name)  # looking it up takes longer than all else that is asked of a tensor

_REMEDY = (
    "let a LayerSpec build it, define it at the level of a module, pass it to the LayerSpec as an argument, or give "
    "its class a __getstate__ that leaves it out"
)


class PackingError(RuntimeError):
    """Something in a layer can't be carried to another process."""


class TensorSpec(NamedTuple):
    """How to recreate an empty tensor that a received one fits in.

    Attributes:
        shape: its sizes.
        stride: its strides, dense: kernels choose by layout, so another one could mean other bits.
        dtype: name of its element type.
        on_host: whether it lives in host memory (else on the stage's accelerator).
        is_parameter: whether it is an ``nn.Parameter``.
        requires_grad: its flag.
        line_offset: elements between the last border of 64 bytes and its first: some kernels round by it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    on_host: bool
    is_parameter: bool
    requires_grad: bool
    line_offset: int

    @classmethod
    def of(cls, source: Tensor) -> TensorSpec:
        """The kind of a tensor."""
        data = _bare(source)
        return cls(
            tuple(data.shape), _dense_stride(data), _dtype_name(data.dtype), data.device.type == "cpu",
            type(source) is nn.Parameter, source.requires_grad and source.is_leaf,
            0 if data.is_meta or not data.numel() else data.data_ptr() % LINE_BYTES // data.element_size(),
        )

    def empty(self, device: torch.device) -> Tensor:
        """Allocate a tensor of this kind, on the receiving stage's device unless it lives in host memory."""
        layout = Layout(self.shape, self.stride, self.line_offset, dtype_of(self.dtype))
        data = layout.empty(torch.device("cpu") if self.on_host else device)
        if self.is_parameter:
            return nn.Parameter(data, requires_grad=self.requires_grad)
        return data.requires_grad_(self.requires_grad)


class LayerTensors(NamedTuple):
    """Tensors that a skeleton refers to; its indices count through both lists.

    Attributes:
        own: the layer's parameters and buffers.
        extra: those that only what travels with it refers to, its optimizer state.
    """

    own: list[Tensor]
    extra: list[Tensor]

    @property
    def all(self) -> list[Tensor]:
        """Both lists, in the order of their indices."""
        return [*self.own, *self.extra]


@dataclass(frozen=True)
class Package:
    """A skeleton and the tensors that were taken out of it.

    Attributes:
        head: kinds of the tensors, and what travels with the layer, as plain values.
        body: the layer as plain values, tensors replaced by their index.
        tensors: the tensors; detached, and contiguous by taking their dimensions in the order in which
            they lie in memory.
        warnings: what could not be carried, one sentence each.
        encoder: what was found on the way.
        sources: the tensors themselves, of both lists, in their order.
    """

    head: bytes
    body: bytes
    tensors: LayerTensors
    warnings: tuple[str, ...]
    encoder: Encoder
    sources: list[Tensor]


class Arrived(NamedTuple):
    """What was put together.

    Attributes:
        layer: the layer; ``None`` for a function layer.
        warnings: what did not come, or is something else here, one sentence each.
    """

    layer: nn.Module | None
    warnings: list[str]


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and containers: no class, no function, so that nothing received is run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def load(data: bytes) -> Any:
    """Plain values that were pickled; nothing received is run.

    Raises:
        UnpicklingError: if a class or a function is among them.
    """
    return _Plain(BytesIO(data)).load()


def _bare(tensor: Tensor) -> Tensor:
    """The tensor without what users put on it: attributes may have the names of methods (``bias.stride = 1``)."""
    return Tensor.detach(tensor)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides, without the gaps and repetitions of a slice or an expanded tensor."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def _dense(source: Tensor) -> Tensor:
    data = _bare(source)
    return data if data.is_contiguous() else data.permute(memory_order(_dense_stride(data))).contiguous()


def pack(
    layer: nn.Module | None, name: str, extra: Any = None, *, names: Names | None = None,
    device: torch.device | None = None, has_template: bool = False, is_trial: bool = False,
) -> Package:
    """Take a layer apart for the journey; the layer itself is left as it is.

    Args:
        layer: the layer, or ``None`` for a function layer.
        name: what to call it in messages, for example ``"layer 7 (Block)"``.
        extra: anything that travels with it (its optimizer state).
        names: what the receiver knows by name.
        device: of this stage; the receiver's takes its place.
        has_template: whether the receiver can build the layer, and so has what has no name.
        is_trial: whether it only asks whether the layer could travel now.

    Returns:
        The package; its tensors share memory with the layer's where they are contiguous.

    Raises:
        PackingError: if an attribute can't be carried, naming layer, attribute, reason and remedy.
    """
    return Packing(
        layer, name, extra, names=names, device=device, has_template=has_template, is_trial=is_trial
    ).finish()


class Packing:
    """A layer that is being taken apart, see :func:`pack`; first the head, then the body.

    The head comes first where it is plain at a glance which tensors the layer has, else with the body.

    Attributes:
        head: of the package.
        tensors: of the package.

    Raises:
        PackingError: as :func:`pack` does.
    """

    def __init__(
        self, layer: nn.Module | None, name: str, extra: Any = None, *, names: Names | None = None,
        device: torch.device | None = None, has_template: bool = False, is_trial: bool = False,
    ) -> None:
        self._layer, self._name, self._names = layer, name, names or no_names()
        self._found = Taken()
        self._num_own: int | None = None  # all that are found
        own = {id(t): (where, t) for where, t in _registered(layer) if id(t) not in self._names.shared}
        self._encoder = Encoder(self._found, self._names, device, own=own, may_build=has_template)
        self._encoded: tuple[Any, list[Any]] | None = None
        with self._explaining():
            if holds_only_registered(layer, self._names):
                for number, (key, (where, tensor)) in enumerate(own.items()):
                    self._found[key] = number, tensor, where
            else:
                self._encoded = self._encode_body()
            self._num_own = len(self._found)
            if not is_trial:
                _refuse_without_data(self._found, name)
            companion = Encoder(self._found, no_names(), own=self._found.keys()).encode(extra)
        self._sources = [source for _, source, _ in self._found.values()]
        specs = [tuple(TensorSpec.of(source)) for source in self._sources]
        dense = [] if is_trial else [_dense(source) for source in self._sources]
        self.head = pickle.dumps((self._num_own, specs, companion))
        self.tensors = LayerTensors(dense[: self._num_own], dense[self._num_own :])

    def finish(self) -> Package:
        """Encode the body, too.

        Raises:
            PackingError: as :func:`pack` does.
        """
        encoder, values = self._encoder, []
        with self._explaining():
            body, marks = self._encoded or self._encode_body()
        if len(self._found) != len(self._sources):
            unexpected = list(self._found.values())[len(self._sources)][2]
            raise PackingError(f"{self._name} holds a tensor at {unexpected} that was overlooked at a glance")
        for path, obj in encoder.bound.items():
            its = values_of(obj, path in self._names.shared.values())
            values.append((path, (its, self._names.changed(path, its))))
        described = body, marks, values, bool(encoder.built), bool(encoder.built_hooks)
        lost = tuple(f"{self._name}: {text}" for text in encoder.lost)
        return Package(self.head, pickle.dumps(described), self.tensors, lost, encoder, self._sources)

    def _encode_body(self) -> tuple[Any, list[Any]]:
        node = self._encoder.encode(self._layer)
        own = list(self._found.values())[: self._num_own]
        return node, [_marks(source, where, self._encoder) for _, source, where in own]

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except (CantCarryError, RecursionError) as error:
            raise PackingError(f"{self._name} can't be carried to another process: {error}; {_REMEDY}") from error


def _registered(layer: nn.Module | None) -> Iterable[tuple[str, Tensor]]:
    return () if layer is None else (*layer.named_parameters(), *layer.named_buffers())


def _marks(source: Tensor, where: str, encoder: Encoder) -> tuple[list[Any], list[Any]]:
    """What users put on a tensor: attributes, and hooks with their numbers."""
    attributes: list[Any] = []
    hooks: list[Any] = []
    for key, value in vars(source).items():
        if key in NOT_CARRIED:
            continue
        nodes = encoder.trial(value, f"{where}.{key}", f"attribute {key!r} of {where}", may_build=False)
        attributes += [(key, node) for node in nodes]
    for table, number, hook in hooks_of(source):
        nodes = encoder.trial(hook, f"the hook {hook!r}", f"tensor hook {hook!r} of {where}", may_build=True)
        hooks += [(table, number, node) for node in nodes]
    return attributes, hooks


def _refuse_without_data(tensors: Taken, name: str) -> None:
    for _, source, where in tensors.values():
        if source.is_meta:
            raise PackingError(
                f"{name} holds a tensor of shape {tuple(source.shape)} on the meta device at {where}, which has no "
                "data to carry; give it data before the layer moves, or forbid cuts around the layer with pinned_cuts"
            )


def make_room(head: bytes, device: torch.device) -> tuple[LayerTensors, Any]:
    """Allocate the tensors of a package.

    Args:
        head: ``Package.head`` of the sender.
        device: of this stage.

    Returns:
        The tensors, not yet filled, and what travels with the layer, which may refer to them.
    """
    num_own, specs, companion = load(head)
    tensors = [TensorSpec(*spec).empty(device) for spec in specs]
    return LayerTensors(tensors[:num_own], tensors[num_own:]), Decoder(tensors, no_names()).decode(companion)


def unpack(
    body: bytes, tensors: LayerTensors, *, names: Names | None = None, device: torch.device | None = None,
    build: Callable[[], nn.Module] | None = None, journal: Journal | None = None,
) -> Arrived:
    """Put a layer together from its body and its tensors.

    Args:
        body: ``Package.body`` of the sender.
        tensors: from :func:`make_room`; they may still travel unless the sender's encoder says that code is run.
        names: what this rank knows by name.
        device: of this stage.
        build: makes the layer as it was before training; called if something in it has no name.
        journal: notes what is changed on this rank.

    Raises:
        DecodingError: if something that the layer refers to is not here, or is something else here.
    """
    node, marks, values, must_build, may_build = load(body)
    names = names or no_names()
    problems: list[str] = []
    template = _template(build, must_build, problems) if must_build or may_build else _NOTHING
    decoder = Decoder(tensors.all, names, device, journal)
    layer = decoder.decode(node, *template)
    for number, (attributes, hooks) in enumerate(marks):
        _put_marks(tensors.own[number], decoder, number, attributes, hooks)
    for path, theirs in values:
        problems += compare(path, decoder.bound[path], theirs, names, device)
    if layer is not None:
        _reserve_hook_numbers(layer)
    return Arrived(layer, [*problems, *decoder.lost])


_NOTHING: tuple[nn.Module, ...] = ()


def _template(build: Callable[[], nn.Module] | None, is_needed: bool, problems: list[str]) -> tuple[nn.Module, ...]:
    try:
        if build is None:
            raise DecodingError("there is no LayerSpec to build it from")
        return (build(),)
    except Exception as error:
        if is_needed:
            raise DecodingError(f"the layer can't be built anew here ({type(error).__name__}: {error})") from error
        problems.append(f"hooks made by its class stay behind: it can't be built anew here ({error})")
        return _NOTHING


def _put_marks(tensor: Tensor, decoder: Decoder, number: int, attributes: list[Any], hooks: list[Any]) -> None:
    for key, node in attributes:
        setattr(tensor, key, decoder.decode(node))
    twin, is_trained = decoder.twins.get(number), tensor.requires_grad
    for table, old_number, node in hooks:
        candidates = list((getattr(twin, table, None) or {}).values())
        try:
            hook = decoder.hook(node, candidates)
        except DecodingError as error:
            decoder.lost.append(f"a tensor hook can't be carried and stays behind ({error})")
            continue
        register = Tensor.register_hook if table == "_backward_hooks" else Tensor.register_post_accumulate_grad_hook
        handle = register(Tensor.requires_grad_(tensor), hook)  # type: ignore[no-untyped-call]
        Tensor.requires_grad_(tensor, is_trained)  # one that was frozen keeps its hooks
        entries = getattr(tensor, table)
        entries[old_number] = entries.pop(handle.id)  # by which its handle knows it


def _reserve_hook_numbers(layer: nn.Module) -> None:
    """Hooks are numbered by process: a new one must not get the number of one that was carried."""
    taken = max((number for _, _, table in hook_tables(layer) for number in table), default=-1)
    RemovableHandle.next_id = max(RemovableHandle.next_id, taken + 1)
