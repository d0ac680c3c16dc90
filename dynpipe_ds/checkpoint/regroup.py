"""A checkpoint of a model whose layers are cut or compiled otherwise: what it holds, by the layers of the present one.

A part has the tensors of its whole layer, by the same names (:mod:`dynpipe_ds.host.parts`). So for every tensor that is
stored there is one present layer that owns it: of those that belong to the same whole layer the one with the module
that the tensor is in. What ``torch.compile`` makes of a module puts a step of its own into names (``_orig_mod``), which
counts for nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dynpipe_ds.checkpoint.manifest import LayerEntry, Manifest, parameter_key
from dynpipe_ds.migration.compiled import WRAPPED
from dynpipe_ds.ranks.agreement import gather

if TYPE_CHECKING:
    from dynpipe_ds.stage import Stage

Plain = dict[str, Any]


@dataclass(frozen=True)
class PresentLayer:
    """What the present model says of one layer.

    Attributes:
        name: its name.
        whole: index that it, or the layer that it is a part of, would have if none were cut.
        tensors: names in its ``state_dict``.
        modules: paths of its modules.
    """

    name: str
    whole: int
    tensors: frozenset[str]
    modules: frozenset[str]

    @cached_property
    def by_plain_name(self) -> dict[str, str]:
        """Names of tensors and paths of modules by what they are in a layer in which nothing is compiled."""
        modules = sorted(self.modules, reverse=True)  # of a wrapper and what is in it, the wrapper comes last
        return {plain_name(name): name for name in (*modules, *self.tensors)}

    def name_of(self, stored: str) -> str:
        """What a stored tensor or module is called here."""
        return self.by_plain_name.get(plain_name(stored), stored)


def plain_name(name: str) -> str:
    """A name without the steps that ``torch.compile`` has put into it."""
    return ".".join(step for step in name.split(".") if step != WRAPPED)


def is_compiled_otherwise(manifest: Manifest, stage: Stage) -> bool:
    """Whether tensors of a layer of this rank have other names than those stored, for no other reason."""
    return any(
        (here := frozenset(layer.state_dict())) != (there := manifest.layers[i].tensors.keys())
        and frozenset(map(plain_name, here)) == frozenset(map(plain_name, there))
        for i, layer in stage.local_layers().items() if i < len(manifest.layers)
    )  # fmt: skip


def describe_layers(stage: Stage) -> list[PresentLayer]:
    """All layers of the present model; collective over all ranks."""
    mine = {
        i: (frozenset(layer.state_dict()), frozenset(path for path, _ in layer.named_modules()))
        for i, layer in stage.local_layers().items()
    }
    everything = {i: facts for part in gather(mine) for i, facts in part.items()}
    nothing = frozenset[str]()
    names, wholes = stage.module.layer_names(), stage.module.whole_layers()
    return [
        PresentLayer(name, whole, *everything.get(i, (nothing, nothing)))
        for i, (name, whole) in enumerate(zip(names, wholes, strict=True))
    ]


@dataclass(frozen=True)
class Regrouped:
    """A checkpoint seen with the layers of the present model.

    Args:
        stored: the manifest as written.
        manifest: the same, with the present layers and their parameters; its partition is still the stored one.
        present: the layers of the present model.
        owner: the present layer that a tensor of a stored layer belongs to.
        sources: for each present layer the stored ones that it takes from.
    """

    stored: Manifest
    manifest: Manifest
    present: Sequence[PresentLayer]
    owner: Callable[[int, str], int]
    sources: tuple[tuple[int, ...], ...]

    def weights(self, layer: int, read: Callable[[str], Mapping[str, Any]]) -> Plain:
        """What a present layer loads.

        Args:
            layer: its index.
            read: gives the content of a file.
        """
        name_of = self.present[layer].name_of
        return {
            name_of(key): value
            for source in self.sources[layer]
            if (file := self.stored.layers[source].file) is not None
            for key, value in read(file).items()
            if self.owner(source, key) == layer
        }

    def attributes(self, layer: int, stored: Mapping[int, Mapping[str, Plain]]) -> dict[str, Plain]:
        """The attributes of a present layer's modules, out of those of the layers that it takes from.

        What is kept by the names of tensors, or lists such names, is cut and joined with them; anything else that a
        layer has as a whole goes to each of its parts, and comes from the first of them.

        Args:
            layer: its index.
            stored: by stored layer.
        """
        found: dict[str, Plain] = {}
        for source in self.sources[layer]:
            for path, values in stored.get(source, {}).items():
                if path and self.owner(source, f"{path}.") != layer:
                    continue
                mine = found.setdefault(self.present[layer].name_of(path), {})
                for name, value in values.items():
                    part = self._part(layer, source, path, value)
                    mine[name] = _joined(mine[name], part) if name in mine else part
        return found

    def _part(self, layer: int, source: int, path: str, value: Any) -> Any:
        if path or not value or not isinstance(value, dict | tuple | list):
            return value
        known = self.stored.layers[source].tensors.keys() | self.stored.layers[source].trainable.keys()
        if not all(isinstance(name, str) and name in known for name in value):
            return value
        name_of = self.present[layer].name_of
        mine = {name: name_of(name) for name in value if self.owner(source, name) == layer}
        return {mine[name]: value[name] for name in mine} if isinstance(value, dict) else type(value)(mine.values())


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        return {**second, **first}
    if isinstance(first, tuple | list) and type(first) is type(second):
        return type(first)(dict.fromkeys([*first, *second]))
    return first


def regrouped(manifest: Manifest, present: Sequence[PresentLayer]) -> Regrouped:
    """See a checkpoint with the layers of another model of the same parameters.

    Args:
        manifest: as written.
        present: the layers of the model that takes it in.

    Returns:
        What it holds for them. Where whole layers differ, too, their numbers do not fit: that is for
        :func:`~dynpipe_ds.checkpoint.check.check_layers` to say.
    """
    parts: dict[int, list[int]] = {}
    for i, layer in enumerate(present):
        parts.setdefault(layer.whole, []).append(i)

    def owner(source: int, key: str) -> int:
        candidates = parts.get(manifest.wholes[source], [source])
        return max(candidates, key=lambda i: (_nearness(present[i], key), -i)) if len(candidates) > 1 else candidates[0]

    layers: list[LayerEntry] = [LayerEntry(layer.name, None, {}, {}) for layer in present]
    sources: list[list[int]] = [[] for _ in present]
    for source, entry in enumerate(manifest.layers):
        for i in parts.get(manifest.wholes[source], []):
            def of_layer(found: Mapping[str, Any], source: int = source, i: int = i) -> Plain:
                return {present[i].name_of(k): value for k, value in found.items() if owner(source, k) == i}

            mine = replace(
                layers[i],
                file=layers[i].file or entry.file,
                tensors=layers[i].tensors | of_layer(entry.tensors),
                trainable=layers[i].trainable | of_layer(entry.trainable),
                owned=layers[i].owned | of_layer(entry.owned),
            )
            layers[i] = mine
            sources[i].append(source)

    def renamed(key: str | None) -> str | None:
        if key is None:
            return None
        source, _, name = key.partition("/")
        layer = owner(int(source), name)
        return parameter_key(layer, present[layer].name_of(name))

    changed = replace(
        manifest,
        layers=tuple(layers),
        slots=tuple(
            tuple(replace(slot, parameter=renamed(slot.parameter)) for slot in slots) for slots in manifest.slots
        ),
        aliases={str(renamed(key)): str(renamed(source)) for key, source in manifest.aliases.items()},
    )
    return Regrouped(manifest, changed, present, owner, tuple(map(tuple, sources)))


def _nearness(layer: PresentLayer, key: str) -> int:
    """How much of a tensor's path a layer has: more than all of it where it has the tensor."""
    key, known = plain_name(key), layer.by_plain_name
    if known.get(key) in layer.tensors:
        return len(key) + 1
    path = key.rpartition(".")[0]
    while path and known.get(path) not in layer.modules:
        path = path.rpartition(".")[0]
    return len(path)
