"""What single replicas own, in files of its own: one for each layer and replica, with the optimizer's state.

Each holds that replica's rows of a whole. A run with as many replicas takes each file as it is. Any other run, also one
in which all replicas have the whole, cuts the rows anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dynpipe_ds.checkpoint.manifest import EXTRAS_FOLDER, CheckpointError, LayerEntry, Manifest, TensorForm
from dynpipe_ds.host.files import compact
from dynpipe_ds.host.optimizers.flat import Pieces
from dynpipe_ds.owning import Replica, is_owned

if TYPE_CHECKING:
    from dynpipe_ds.stage import Stage

Plain = dict[str, Any]
Read = Callable[[str], Any]
"""Gives the content of a file."""


def owned_file(layer: int, replica: int) -> str:
    """Where the rows of one replica are.

    Args:
        layer: global layer index.
        replica: which one.
    """
    return f"{EXTRAS_FOLDER}/layer_{layer:02d}-replica_{replica:03d}.pt"


def owned_content(stage: Stage, layer: nn.Module, *, exclude_frozen: bool) -> Plain:
    """What this replica owns of a layer, with the optimizer's state; nothing if it owns nothing.

    Args:
        stage: that has the layer.
        layer: of this stage.
        exclude_frozen: whether to leave out parameters that need no gradient.
    """
    owned = {
        name: parameter for name, parameter in layer.named_parameters()
        if is_owned(parameter) and (parameter.requires_grad or not exclude_frozen)
    }
    if not owned:
        return {}
    states = [] if stage.optimizer is None else stage.optimizer.export(list(owned.values()))
    return {
        "weights": {name: compact(parameter.detach()) for name, parameter in owned.items()},
        "optimizer": {
            name: {key: compact(value) for key, value in state.items()}
            for name, state in zip(owned, states, strict=False)
        },
    }


def whole_form(form: TensorForm, name: str, owned: Sequence[str] | Mapping[str, Any], count: int) -> TensorForm:
    """Form of the whole of which a tensor may be one replica's rows.

    Args:
        form: of the tensor.
        name: of the tensor, in its layer.
        owned: names of those that replicas own.
        count: number of replicas.
    """
    if name not in owned:
        return form
    return replace(form, shape=(form.shape[0] * count, *form.shape[1:]))


class Rows:
    """The rows that this rank needs of what replicas own in a checkpoint, or are to own from now on.

    Args:
        manifest: of the checkpoint, with the present layers.
        owned: names of what replicas own in the present model, by layer.
        replica: of this rank.
        read: reads a file of the checkpoint.
    """

    def __init__(
        self, manifest: Manifest, owned: Mapping[int, Sequence[str]], replica: Replica, read: Read
    ) -> None:
        self._manifest = manifest
        self._owned = owned
        self._replica = replica
        self._read = read

    def weights(self, layer: int, stored: Mapping[str, Any]) -> Plain:
        """What a present layer loads.

        Args:
            layer: its index.
            stored: what its file holds: all of what all replicas have, and the first one's rows of the rest.
        """
        names = {*self._entry(layer).owned, *self._owned.get(layer, ())} & stored.keys()
        cut = {name: _joined(self._cut(layer, name, self._parts(layer, name, stored[name]))) for name in names}
        return {**stored, **cut}

    def states(self, layer: int, stored: Mapping[str, Any], states: Mapping[str, Plain]) -> dict[str, Plain]:
        """The optimizer's state for what replicas own, or owned, of a present layer, by its name there.

        Args:
            layer: its index.
            stored: as for :meth:`weights`.
            states: by name, of what all replicas had: complete, as tensors or as ``Pieces``.

        Raises:
            CheckpointError: if state can't be cut by rows.
        """
        found = {}
        for name in sorted({*self._entry(layer).owned, *self._owned.get(layer, ())} & stored.keys()):
            parts = self._parts(layer, name, stored[name])
            if name in self._entry(layer).owned:
                theirs = [content["optimizer"].get(name, {}) for content in self._contents(layer, name)]
            else:
                theirs = [states.get(name, {})]
            found[name] = self._state(layer, name, parts, theirs)
        return {name: state for name, state in found.items() if state}

    def _entry(self, layer: int) -> LayerEntry:
        return self._manifest.layers[layer]

    def _here(self, layer: int, name: str) -> Replica:
        """Who has the rows that are wanted: this replica, or any that has the whole."""
        return self._replica if name in self._owned.get(layer, ()) else Replica()

    def _is_as_it_was(self, layer: int, name: str) -> bool:
        return len(self._entry(layer).owned.get(name, ("",))) == self._here(layer, name).count

    def _contents(self, layer: int, name: str) -> list[Any]:
        """The files of all replicas; of this one alone if it takes its own as it is."""
        files = self._entry(layer).owned[name]
        if self._is_as_it_was(layer, name):
            files = files[self._here(layer, name).index :][:1]
        return [self._read(file) for file in files]

    def _parts(self, layer: int, name: str, stored: Tensor) -> list[Tensor]:
        """The stored weights, in the order of their rows."""
        if name not in self._entry(layer).owned:
            return [stored]
        return [content["weights"][name] for content in self._contents(layer, name)]

    def _cut(self, layer: int, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """Of parts of a whole that follow each other, the rows that are wanted here."""
        if self._is_as_it_was(layer, name):
            return list(parts)
        rows = self._here(layer, name).rows(sum(len(part) for part in parts))
        cut, start = [], 0
        for part in parts:
            low, high = max(rows.start, start), min(rows.stop, start + len(part))
            if low < high:
                cut.append(part[low - start : high - start])
            start += len(part)
        return cut

    def _state(self, layer: int, name: str, parts: Sequence[Tensor], states: Sequence[Plain]) -> Plain:
        if self._is_as_it_was(layer, name):
            return {key: self._stored(_joined(_flat(states[0][key]))) for key in states[0]} if states else {}
        if any(state.keys() != states[0].keys() for state in states):
            raise CheckpointError(
                f"{self._what(layer, name)}: the replicas' files hold other state each, {[sorted(s) for s in states]}; "
                "load it with the number of replicas that it was saved with"
            )
        return {key: self._value(layer, name, key, parts, [s[key] for s in states]) for key in states[0]}

    def _value(self, layer: int, name: str, key: str, parts: Sequence[Tensor], values: Sequence[Any]) -> Any:
        tensors = [_joined(_flat(value)) for value in values]
        if not isinstance(tensors[0], Tensor) or tensors[0].numel() <= 1 < parts[0].numel():
            return tensors[0]  # a count of steps
        if [t.numel() for t in tensors] != [part.numel() for part in parts]:
            raise CheckpointError(
                f"{self._what(layer, name)}: its optimizer state {key!r} has {tensors[0].numel()} elements where the "
                f"parameter has {parts[0].numel()}, so it can't be cut by rows; load it with the number of replicas "
                "that it was saved with, or load_optimizer_states=False"
            )
        shaped = [tensor.view(part.shape) for tensor, part in zip(tensors, parts, strict=True)]
        return self._stored(_joined(self._cut(layer, name, shaped)))

    def _stored(self, value: Any) -> Any:
        """A value in the form in which this kind of optimizer takes it in."""
        is_flat = self._manifest.optimizer.kind == "flat" and isinstance(value, Tensor) and value.dim() > 0
        return Pieces((value.reshape(-1),)) if is_flat else value

    def _what(self, layer: int, name: str) -> str:
        return f"{name} of layer {layer} ({self._entry(layer).name}), which replicas own there or here"


def _flat(value: Any) -> list[Any]:
    return list(value.tensors) if isinstance(value, Pieces) else [value]


def _joined(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
