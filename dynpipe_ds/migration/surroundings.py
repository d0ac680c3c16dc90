"""What the layers of a model share with each other and with the script around them.

Found at the start, when all ranks still have the same layer list, and asked whenever layers move.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynpipe_ds.host.specs import arguments, is_buildable, tied_key
from dynpipe_ds.migration.bound import values_of
from dynpipe_ds.migration.callables import named
from dynpipe_ds.migration.hooks import DepartedHooks
from dynpipe_ds.migration.names import Names, Values
from dynpipe_ds.migration.packing import make_room, pack, unpack
from dynpipe_ds.migration.references import Path, shared_by, spell
from dynpipe_ds.migration.transport import flat_view
from dynpipe_ds.owning import Replica, building
from dynpipe_ds.telling import warn

if TYPE_CHECKING:
    from dynpipe_ds.host.pipeline import Pipeline

# Of the pipeline module: they lead to layers that only this rank has.
_OF_THIS_RANK = ("_layer_specs", "_layers", "forward_funcs", "tied_modules", "fwd_map", "recorder", "surroundings")


class Held(NamedTuple):
    """A part of a layer that other layers may hold, too.

    Attributes:
        layer: index of the layer.
        owner: the same as text; for tied layers, which count as one, their key.
        path: of the part.
        is_trained: whether it is a parameter that is trained.
    """

    layer: int
    owner: str
    path: Path
    is_trained: bool


class Surroundings:
    """What has a name on every rank besides the layers.

    Args:
        module: the pipeline module, with its layers built as DeepSpeed builds them.
        specs: its layer list.
        replica: which replica of its stage this rank is.
    """

    def __init__(self, module: nn.Module, specs: Sequence[Any], replica: Replica) -> None:
        self._module = module
        self.replica = replica
        live = [spec for spec in specs if isinstance(spec, nn.Module)]
        self._specs = [None if isinstance(spec, nn.Module) else spec for spec in specs]
        self._live = shared_by(live)
        self._made_here = dict(_made_here(specs))
        self._start: dict[Path, Values] = {}
        self.shared_paths: list[Path] = []
        self.hooks = DepartedHooks()

    def names(self, layers: Iterable[nn.Module], pipeline: Pipeline | None = None, *, in_place: bool = True) -> Names:
        """What has a name now.

        Args:
            layers: those of this rank.
            pipeline: DeepSpeed's engine, as soon as there is one.
            in_place: whether parts of layers that the arguments hold, too, stay the same objects.
        """
        roots = {
            "shared": self._live, "specs": self._specs, "made here": self._made_here, "pipeline": self._module,
        }
        leaves = {} if pipeline is None else {"engine": pipeline.engine, "grid": pipeline.engine.grid}
        hidden = [getattr(self._module, name, None) for name in _OF_THIS_RANK]
        owned = [part for layer in layers for part in layer.modules()]
        return Names(
            roots, leaves, owned=[*owned, *hidden], shared=self.shared_paths, start=self._start,
            trees={"specs": self._specs} if in_place else None,
        )

    def agree_on_shared(self, held_here: Sequence[Held], layer_names: Sequence[str]) -> None:
        """Find what several layers hold as a part of themselves; collective over all ranks.

        Raises:
            ValueError: on every rank, if a parameter that is trained is among it.
        """
        everything: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everything, list(held_here))
        holders: dict[Path, dict[str, int]] = {}
        trained: set[Path] = set()
        for held in everything:
            for layer, owner, path, is_trained in held:
                holders.setdefault(path, {}).setdefault(owner, layer)
                trained |= {path} if is_trained else set()
        several = {path: list(owners.values()) for path, owners in holders.items() if len(owners) > 1}
        for path in sorted(several.keys() & trained, key=spell):
            first, second = sorted(several[path])[:2]
            raise ValueError(
                f"layers {first} ({layer_names[first]}) and {second} ({layer_names[second]}) both hold {spell(path)}, "
                "which is trained: every stage trains a copy of its own then, in DeepSpeed too, and what a layer finds "
                "would depend on its stage; give every layer its own, freeze it, or tie layers with TiedLayerSpec"
            )
        self.shared_paths = sorted((path for path in several if not str(path[0]).startswith("layer ")), key=spell)

    def held_by(self, layers: Mapping[int, nn.Module]) -> list[Held]:
        """Modules, parameters and buffers of layers that have a name, or that several of them hold."""
        names = Names({"shared": self._live, "specs": self._specs})
        owners: dict[int, dict[str, int]] = {}
        parts: dict[int, tuple[Path, Any]] = {}
        for layer, module in layers.items():
            tied = tied_key(self._specs[layer])
            owner = str(layer) if tied is None else f"tied {tied}"
            for where, part in _parts(module):
                owners.setdefault(id(part), {}).setdefault(owner, layer)
                parts.setdefault(id(part), ((f"layer {layer}", ("attr", where)), part))
        found = []
        for key, (local, part) in parts.items():
            path = names.of_part(part)
            if path is not None or len(owners[key]) > 1:
                is_trained = isinstance(part, nn.Parameter) and part.requires_grad
                found += [Held(layer, owner, path or local, is_trained) for owner, layer in owners[key].items()]
        return found

    def check(self, layers: Mapping[int, nn.Module], layer_names: Sequence[str], pipeline: Pipeline) -> None:
        """Pack each layer once, and drop it: what can't move is refused before training.

        Raises:
            PackingError: naming layer and attribute.
        """
        names = self.names(layers.values(), pipeline)
        for spec in self._specs:
            for argument in arguments(spec):
                path = names.of(argument)
                if path is not None and not isinstance(argument, Tensor):
                    self._start.setdefault(path, values_of(argument, path in self.shared_paths))
        first: dict[int, tuple[str, str]] = {}
        kept = []
        for layer, module in layers.items():
            name = f"layer {layer} ({layer_names[layer]})"
            package = pack(
                module, name, names=names, device=pipeline.device, has_template=self.has_template(layer), is_trial=True
            )
            kept.append(package)  # and so the ids in it
            for value, where in package.encoder.unnamed():
                other, there = first.setdefault(id(value), (name, where))
                if other != name:
                    warn(
                        f"{other} at {there} and {name} at {where} hold the same {type(value).__name__}, which has no "
                        "name on other ranks, so each has its own once one of them has moved; pass it to their "
                        "LayerSpecs as an argument"
                    )
                    break

    def copy(self, layer: int, module: nn.Module) -> nn.Module:
        """A second module like the first, bound to what the first is bound to."""
        names = self.names([module], in_place=False)
        package = pack(module, f"layer {layer}", names=names, has_template=self.has_template(layer))
        device = next((t.device for t in package.tensors.own if t.device.type != "cpu"), torch.device("cpu"))
        tensors, _ = make_room(package.head, device)
        for target, source in zip(tensors.own, package.tensors.own, strict=True):
            flat_view(target).copy_(source.view(-1))
        made = unpack(package.body, tensors, names=names, build=partial(self.build, layer)).layer
        assert made is not None
        return made

    def leave(self, layers: Mapping[int, nn.Module | None]) -> None:
        """Let go of layers that have moved to other stages."""
        for layer, module in layers.items():
            if module is not None:
                self.hooks.keep(layer, module)
                self._to_host(module)

    def _to_host(self, module: nn.Module) -> None:
        """Give the accelerator's memory back where the layer list's arguments keep a layer that is elsewhere now."""
        on_device = [t for t in (*module.parameters(), *module.buffers()) if t.device.type not in ("cpu", "meta")]
        if on_device:
            names = Names({"shared": self._live, "specs": self._specs})
            for tensor in on_device:
                if names.of_part(tensor) is not None:
                    tensor.data = tensor.data.cpu()

    def check_frozen(self, layers: Mapping[int, nn.Module]) -> None:
        """Refuse that a parameter that several layers hold is trained.

        Raises:
            ValueError: naming it.
        """
        shared = self.names(()).shared
        for layer, module in layers.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and id(parameter) in shared:
                    raise ValueError(
                        f"{name} of layer {layer} is {spell(shared[id(parameter)])}, which other layers hold too, so "
                        "it can't be trained: every stage would train a copy of its own; give every layer its own"
                    )

    def has_template(self, layer: int) -> bool:
        """Whether every rank can build a layer."""
        return is_buildable(self._specs[layer])

    def build(self, layer: int) -> nn.Module:
        """A layer as its spec makes it; random numbers drawn here leave no trace."""
        spec: Any = self._specs[layer]
        numbers, more = random.getstate(), np.random.get_state()
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        try:
            with torch.random.fork_rng(devices=devices), building(self.replica):
                made: nn.Module = spec.build()
        finally:
            random.setstate(numbers)
            np.random.set_state(more)
        return made


def _made_here(specs: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Classes of live layers, and functions in them, that were made inside a function: every rank made its own."""
    for layer, spec in enumerate(specs):
        for path, part in spec.named_modules() if isinstance(spec, nn.Module) else ():
            for name, value in ({"__class__": type(part), **vars(part)}).items():
                # A function with variables may refer to this rank's layer.
                is_free = isinstance(value, FunctionType) and not value.__closure__
                if (isinstance(value, type) or is_free) and named(value.__module__, value.__qualname__) is not value:
                    yield f"{layer}.{path}.{name}", value


def _parts(module: nn.Module) -> Iterable[tuple[str, Any]]:
    yield from module.named_modules()
    yield from module.named_parameters()
    yield from module.named_buffers()
