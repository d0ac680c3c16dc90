"""DeepSpeed's pipeline module, with layers that can be exchanged."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn

from dynpipe_ds.host.parts import whole_layers
from dynpipe_ds.host.seeds import seed_streams
from dynpipe_ds.host.specs import LayerSpec, TiedLayerSpec, layer_name, tied_key
from dynpipe_ds.measure.recorder import BatchRecorder
from dynpipe_ds.migration.transport import exchange
from dynpipe_ds.owning import Replica, building
from dynpipe_ds.placement import Placement

Layers = Mapping[int, nn.Module]


class DepartedLayer:
    """Stands in a rank's layer list for a live module that moved to another stage."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> Any:
        """Refuse to run."""
        raise RuntimeError(f"{self.__name__} lives on another stage and can't run here")


def layer_anew(spec: Any, layer: int, build: Callable[[int], nn.Module]) -> nn.Module | None:
    """A layer that is on no stage any more, as it was at the start; ``None`` for a function.

    Args:
        spec: of the layer.
        layer: its index.
        build: builds a layer that has a ``LayerSpec``.

    Raises:
        ValueError: if nobody can build it.
    """
    if isinstance(spec, DepartedLayer):
        raise ValueError(
            f"layer {layer} ({spec.__name__}) was given as a live module, which has moved, so that it can't be built "
            "anew; give a LayerSpec"
        )
    if isinstance(spec, nn.Module):
        return spec
    return build(layer) if isinstance(spec, LayerSpec) else None


class MovableModule(PipelineModule):  # type: ignore[misc]
    """A pipeline module whose layers can be exchanged once it is dynamic; base of the one that users build.

    Args:
        *args: arguments of ``PipelineModule``.
        **kwargs: keyword arguments of ``PipelineModule``.
    """

    is_absent = False  # a newcomer's, which holds no layer until it is a stage of the job

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Set before DeepSpeed's constructor, which asks for the first partition.
        self.recorder: BatchRecorder | None = None
        self._is_dynamic = False
        self._layers: dict[int, nn.Module] = {}
        self.parts: list[int] = []
        self._whole_layers: tuple[int, ...] | None = None
        self.twinned: list[int] = []  # a newcomer's: parameter groups that hold what single replicas of the job own
        self._compiled: dict[int, Any] = {}  # function layers, as the recipe of compile() makes them
        self._recipe: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # arguments of torch.compile
        self.offsets: dict[int, int] = {}  # micro-batches of the present batch that are seeded as others
        self.owned: dict[int, tuple[str, ...]] = {}  # names of what single replicas own, by layer, once it is dynamic
        super().__init__(*args, **kwargs)

    # -- building -----------------------------------------------------------------------------

    def whole_layers(self) -> tuple[int, ...]:
        """For each layer the index that it, or the layer that it is a part of, would have if none were cut."""
        if self._whole_layers is None:
            self._whole_layers = whole_layers(self._layer_specs)
        return self._whole_layers

    def _build(self) -> None:
        given: Any = self.seed_fn
        base, wholes = self.base_seed, self.whole_layers()
        if wholes[-1:] != (len(wholes) - 1,):  # parts of a layer are built as the layer would be, with its seed
            self.seed_fn: Any = lambda seed: (given or seed_streams)(base + wholes[seed - base])
        try:
            with building(self.replica):
                super()._build()
        finally:
            self.seed_fn = given

    @property
    def replica(self) -> Replica:
        """Which data-parallel replica of its stage this rank is."""
        return Replica(self._grid.get_data_parallel_id(), self._grid.get_data_parallel_world_size())

    # -- the first partition ------------------------------------------------------------------

    @abstractmethod
    def _first_partition(self, method: Any, deepspeeds: Callable[[], list[int]]) -> Sequence[int]:
        """Boundaries to begin with: by ``partition_method``, or as DeepSpeed's own method gives them."""

    def _partition_layers(self, method: Any = "uniform") -> None:
        with building(self.replica):  # some methods build layers, to count their parameters
            self._set_parts(self._first_partition(method, partial(self._deepspeeds_partition, method)))

    def _deepspeeds_partition(self, method: Any) -> list[int]:
        super()._partition_layers(method=method)
        return [int(b) for b in self.parts]  # it leaves numpy's

    def _set_parts(self, boundaries: Sequence[int]) -> None:
        self.parts = list(boundaries)
        start = self.parts[-1] if self.is_absent else self.parts[self.stage_id]
        self._set_bounds(start=start, stop=self.parts[self.stage_id + 1])

    def layer_names(self) -> list[str]:
        """Name of every layer of the model, on all stages: its class or function name."""
        return [layer_name(spec) for spec in self._layer_specs]

    def layer_specs(self) -> list[Any]:
        """What every layer of the model is built of; a live module that is on another stage by now has a stand-in."""
        return list(self._layer_specs)

    @property
    def _adds_losses(self) -> bool:
        """Whether a subclass has losses of its own besides the loss function's."""
        return type(self).get_additional_losses is not PipelineModule.get_additional_losses

    @property
    def placement(self) -> Placement:
        """Which stage holds each layer now."""
        return Placement.from_boundaries(self.parts)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The present partition, ``S + 1`` boundaries."""
        return self.placement.boundaries

    # -- layers -------------------------------------------------------------------------------

    def local_indices(self) -> range:
        """Indices of the layers on this stage."""
        return range(self._local_start, self._local_stop)

    def local_layers(self) -> dict[int, nn.Module]:
        """The live modules on this stage by layer index; function layers are left out."""
        return dict(self._layers)

    def layer_of_parameter(self) -> dict[nn.Parameter, int]:
        """Layer index of every parameter on this stage."""
        return {p: layer for layer, module in self._layers.items() for p in module.parameters()}

    def install(self, placement: Placement, layers: Layers) -> None:
        """Make this stage consist of the given layers.

        Raises:
            ValueError: if a stage would hold several ranges of layers.
        """
        old, boundaries = self._layers, placement.boundaries
        for layer in self.local_indices():
            self._modules.pop(str(layer), None)
        self.tied_modules.clear()
        self.forward_funcs: list[Any] = []
        self.fwd_map: dict[str, int] = {}
        self._set_parts(boundaries)
        self._layers = dict(layers)
        for layer in self.local_indices():
            self._register_layer(layer)
        for layer in old.keys() - layers.keys():  # DeepSpeed's list must not keep a departed layer alive
            if isinstance(self._layer_specs[layer], nn.Module):
                self._layer_specs[layer] = DepartedLayer(layer_name(self._layer_specs[layer]))
        self._mark_tied_copies()
        self.is_checkpointable_results: list[bool] = []
        self.is_checkpointable_results_interval = None
        self._precompute_checkpointable_values()

    def _register_layer(self, layer: int) -> None:
        spec, module = self._layer_specs[layer], self._layers.get(layer)
        if module is None:
            self.forward_funcs.append(self._function(layer))
        elif isinstance(spec, TiedLayerSpec):
            if spec.key in self.tied_modules:
                self.add_module(str(layer), module)
            else:
                self.tied_modules[spec.key] = module
                self.tied_weight_attrs[spec.key] = spec.tied_weight_attr
            self.forward_funcs.append(
                module if spec.forward_fn is None else self._as_compiled(partial(spec.forward_fn, module))
            )
        else:
            if not isinstance(spec, LayerSpec):
                self._layer_specs[layer] = module
            self.forward_funcs.append(module)
            self.fwd_map[str(layer)] = len(self.forward_funcs) - 1
            self.add_module(str(layer), module)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's: compile every layer, modules in place. Layers that arrive later are compiled like them.

        Args:
            *args: arguments of ``torch.compile``.
            **kwargs: its keyword arguments.
        """
        super().compile(*args, **kwargs)
        self._recipe = args, kwargs
        self._compiled.clear()

    def _function(self, layer: int) -> Any:
        """A layer without a module, compiled once on this rank if layers are."""
        if layer not in self._compiled:
            self._compiled[layer] = self._as_compiled(self._layer_specs[layer])
        return self._compiled[layer]

    def _as_compiled(self, function: Any) -> Any:
        if self._recipe is None:
            return function
        args, kwargs = self._recipe
        options = kwargs.get("options")  # torch takes items out of it
        return torch.compile(function, *args, **kwargs if options is None else {**kwargs, "options": dict(options)})

    # -- tied layers --------------------------------------------------------------------------

    def tied_layers(self) -> dict[str, list[int]]:
        """Indices of the layers that share each tied key, over all stages."""
        keys: dict[str, list[int]] = {}
        for layer, spec in enumerate(self._layer_specs):
            key = tied_key(spec)
            if key is not None:
                keys.setdefault(key, []).append(layer)
        return dict(sorted(keys.items()))

    def tied_weights(self, layer: int) -> list[nn.Parameter]:
        """The tied parameters of one local tied layer, in the order of its spec."""
        names = self._layer_specs[layer].tied_weight_attr
        return [self._recursive_getattr(self._layers[layer], name) for name in names]

    def _mark_tied_copies(self) -> None:
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False
        for layers in self.tied_layers().values():
            for layer in layers[1:]:
                if layer in self._layers:
                    for weight in self.tied_weights(layer):
                        weight.ds_pipe_replicated = True  # type: ignore[attr-defined]

    def _synchronize_tied_weights(self) -> None:
        if not self._is_dynamic:
            super()._synchronize_tied_weights()
            return
        for layers in self.tied_layers().values():
            first, owner = layers[0], self.stage_owner(layers[0])
            others = sorted({self.stage_owner(layer) for layer in layers} - {owner})
            mine = [layer for layer in layers if layer in self._layers]
            for i in range(len(self._layer_specs[first].tied_weight_attr)):
                self._copy_from_first([self.tied_weights(layer)[i].data for layer in mine], owner, others)

    def _copy_from_first(self, weights: list[Tensor], owner: int, others: list[int]) -> None:
        if not weights:
            return
        rank_of = self._grid.stage_to_global
        if self.stage_id == owner:
            exchange({rank_of(stage_id=s): [weights[0].contiguous()] for s in others}, {})
        else:
            exchange({}, {rank_of(stage_id=owner): [weights[0]]})
        for weight in weights[1:]:
            weight.copy_(weights[0])

    # -- running ------------------------------------------------------------------------------

    def forward(self, forward_input: Any) -> Any:
        """Run this stage's layers.

        As DeepSpeed's, except that with ``seed_layers`` a layer's seed follows from its global index also
        under activation checkpointing, and that layers none of whose inputs requires a gradient are not
        given to reentrant checkpointing, which would cut them off from autograd.

        Args:
            forward_input: a tensor or a tuple of tensors.

        Returns:
            What the last of them returns.
        """
        if not self._is_dynamic:
            return super().forward(forward_input)
        self.micro_offset += 1
        num_layers, interval = len(self.forward_funcs), self.activation_checkpoint_interval
        if interval == 0:
            return self._block(0, num_layers)(forward_input)
        x, start = forward_input, 0
        while start < num_layers:
            stop = min(start + interval, num_layers)
            inputs = x if isinstance(x, tuple) else (x,)
            if not self._checkpoint_keeps_gradients(inputs):
                stop = start + 1
                x = self._block(start, stop)(*inputs)
            elif not self._is_checkpointable(self.forward_funcs[start:stop]):
                x = self._block(start, stop)(*inputs)
            else:
                layer, recorder = self._local_start + start, self.recorder
                with nullcontext() if recorder is None else recorder.checkpoint(layer, inputs):
                    x = self.activation_checkpoint_func(self._block(start, stop), *inputs)
            start = stop
        return x

    def _checkpoint_keeps_gradients(self, inputs: tuple[Any, ...]) -> bool:
        if self.activation_checkpoint_func is checkpointing.non_reentrant_checkpoint:
            return True
        return any(isinstance(t, Tensor) and t.requires_grad for t in inputs)

    def _block(self, start: int, stop: int) -> Any:
        first_layer, wholes = self._local_start, self.whole_layers()
        offset = self.offsets.get(int(self.micro_offset), int(self.micro_offset)) + 1

        def run(*inputs: Any) -> Any:
            x = inputs[0] if len(inputs) == 1 else inputs
            for local in range(start, stop):
                self.curr_layer = first_layer + local
                if self.seed_layers:
                    seed = self.base_seed * offset + wholes[self.curr_layer]
                    (self.seed_fn or seed_streams)(seed)
                if self.recorder is None:
                    x = self.forward_funcs[local](x)
                else:
                    x = self.recorder.run(self.curr_layer, self.forward_funcs[local], x)
            return x

        return run


def registration_order(module: MovableModule, layers: Mapping[int, Sequence[nn.Parameter]]) -> list[nn.Parameter]:
    """A stage's parameters in the order in which they will be registered once it consists of other layers.

    Args:
        module: of the stage, as it is.
        layers: parameters of each layer then.
    """
    tied: dict[str, int] = {}  # the first layer of every key is registered among the tied ones
    for layer in sorted(layers):
        key = tied_key(module._layer_specs[layer])
        if key is not None:
            tied.setdefault(key, layer)
    replaced = {str(layer) for layer in module.local_indices()}
    found = list(module._parameters.values())
    for name, part in module._modules.items():
        if part is module.tied_modules:
            found += [p for layer in tied.values() for p in layers[layer]]
        elif name not in replaced and part is not None:
            found += part.parameters()
    found += [p for layer in sorted(layers) if layer not in tied.values() for p in layers[layer]]
    return list(dict.fromkeys(p for p in found if p is not None))
