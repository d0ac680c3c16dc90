"""``DynamicPipelineModule``: DeepSpeed's ``PipelineModule`` whose stage boundaries can move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime import utils as ds_utils
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn

from dynpipe_ds.coupling import Coupling, find_couplings
from dynpipe_ds.decide.methods import PartitionMethod, profile_from_parameters
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.measure.recorder import BatchRecorder
from dynpipe_ds.migration.surroundings import Held, Surroundings
from dynpipe_ds.migration.transport import exchange
from dynpipe_ds.placement import Placement, check_boundaries
from dynpipe_ds.ranks.agreement import together

Layers = Mapping[int, nn.Module]
Copies = list[tuple[nn.Parameter, nn.Parameter]]


class DepartedLayer:
    """Stands in a rank's layer list for a live module that moved to another stage."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> Any:
        """Refuse to run."""
        raise RuntimeError(f"{self.__name__} lives on another stage and can't run here")


class DynamicPipelineModule(PipelineModule):  # type: ignore[misc]
    """A pipeline module that can be cut anew while it trains.

    Takes every argument of DeepSpeed's ``PipelineModule``, with the same meaning, and:

    Args:
        *args: arguments of ``PipelineModule``.
        profile: a :class:`PipelineProfile`, or the path of a saved one, for the first partition; without
            it, times are not known at construction and parameter counts stand in for them.
        pin: forbidden cut positions: ``c`` keeps layers ``c - 1`` and ``c`` on one stage, for example
            because one stashes a value on the module that the other or ``loss_fn`` reads.
        **kwargs: keyword arguments of ``PipelineModule``. ``partition_method`` takes, besides DeepSpeed's
            names: ``'profile'`` (the same as ``'optimal:time'``); ``'<partitioner>:<cost>'`` such as
            ``'diffusion:time'`` or ``'balanced:parameters'``; a list of S + 1 boundaries; or a callable
            ``(profile, num_stages) -> boundaries``.

    Raises:
        ValueError: if the method is unknown or gives bad boundaries.
    """

    def __init__(
        self,
        *args: Any,
        profile: PipelineProfile | str | Path | None = None,
        pin: Iterable[int] = (),
        **kwargs: Any,
    ) -> None:
        # Set before DeepSpeed's constructor, which calls _partition_layers.
        self.initial_profile = PipelineProfile.load(profile) if isinstance(profile, str | Path) else profile
        self.pinned_cuts = tuple(sorted(set(pin)))
        self.partition_method: PartitionMethod | None = None
        self.recorder: BatchRecorder | None = None
        self.surroundings: Surroundings | None = None
        self._is_dynamic = False
        self._layers: dict[int, nn.Module] = {}
        self.parts: list[int] = []
        super().__init__(*args, **kwargs)

    # -- the first partition ------------------------------------------------------------------

    def _partition_layers(self, method: Any = "uniform") -> None:
        self.partition_method = PartitionMethod.parse(method)
        if self.partition_method.is_deepspeed:
            super()._partition_layers(method=method)
            boundaries: Sequence[int] = [int(b) for b in self.parts]
            check_boundaries(
                boundaries,
                num_layers=self._num_layers,
                num_stages=self.num_stages,
                pinned=self.pinned_cuts,
                allow_empty=True,
            )
        else:
            pinned = {*self.pinned_cuts, *(cut for coupling in self.couplings() for cut in coupling.cuts())}
            plan = self.partition_method.plan(
                self._profile_for_construction(), self.num_stages, pinned=tuple(sorted(pinned))
            )
            boundaries = plan.boundaries
            if self.global_rank == 0:
                ds_utils.logger.info(f"Partitioning pipeline stages with {self.partition_method}: {plan}")
        self.parts = list(boundaries)
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def _profile_for_construction(self) -> PipelineProfile:
        if self.initial_profile is not None:
            if len(self.initial_profile.layers) != self._num_layers:
                raise ValueError(
                    f"the saved profile has {len(self.initial_profile.layers)} layers but the model has "
                    f"{self._num_layers}; pass the profile of this model, or none"
                )
            return self.initial_profile
        method = self.partition_method
        counts = self._count_layer_params() if method is None or method.needs_parameters else None
        return profile_from_parameters(
            counts or [1] * self._num_layers, names=self.layer_names(), num_stages=self.num_stages
        )

    def layer_names(self) -> list[str]:
        """Name of every layer of the model, on all stages: its class or function name."""
        return [_layer_name(spec) for spec in self._layer_specs]

    def couplings(self) -> list[Coupling]:
        """Function layers that leave something behind for a later layer or the loss, which no cut may separate."""
        readers = [] if self.loss_fn is None else [self.loss_fn]
        if type(self).get_additional_losses is not PipelineModule.get_additional_losses:
            readers.append(self.get_additional_losses)
        return find_couplings(self._layer_specs, self.layer_names(), readers)

    # -- becoming dynamic ---------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Which stage holds each layer now."""
        return Placement.from_boundaries(self.parts)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The present partition, ``S + 1`` boundaries."""
        return self.placement.boundaries

    def make_dynamic(self) -> Copies:
        """Prepare for layers that move; called once by the engine.

        Every occurrence of a tied layer gets weights of its own, also where DeepSpeed lets two on one
        stage share them: gradients are then summed in layer order whatever the cut, and a tied layer
        moves like any other.

        Returns:
            Pairs of (shared parameter, its new copy), for optimizers that hold the shared one.

        Raises:
            ValueError: on every rank, if layers share a parameter that is trained, or a tied layer can't be copied.
        """
        if self._is_dynamic:
            return []
        self._refuse_shared_parameters()
        self._is_dynamic = True
        device = torch.device(get_accelerator().current_device_name())
        self.surroundings, layers, copies, held = together(self._own_layers, device, ValueError)
        self.surroundings.agree_on_shared(held, self.layer_names())
        self.install(self.boundaries, layers)
        return copies

    def _own_layers(self) -> tuple[Surroundings, dict[int, nn.Module], Copies, list[Held]]:
        """This stage's layers, with copies of tied ones, and what they hold; can fail on one rank alone."""
        surroundings = Surroundings(self, self._layer_specs)
        copies: Copies = []
        layers: dict[int, nn.Module] = {}
        seen: set[str] = set()
        for layer, function in zip(self.local_indices(), self.forward_funcs, strict=True):
            spec = self._layer_specs[layer]
            if isinstance(spec, TiedLayerSpec):
                module = self.tied_modules[spec.key]
                if spec.key in seen:
                    original, module = module, surroundings.copy(layer, module)
                    copies += zip(original.parameters(), module.parameters(), strict=True)
                seen.add(spec.key)
                layers[layer] = module
            elif isinstance(function, nn.Module):
                layers[layer] = function
        return surroundings, layers, copies, surroundings.held_by(layers)

    def _refuse_shared_parameters(self) -> None:
        owners: dict[nn.Parameter, int] = {}
        for layer, spec in enumerate(self._layer_specs):
            for parameter in spec.parameters() if isinstance(spec, nn.Module) else ():
                if not parameter.requires_grad:
                    continue
                first = owners.setdefault(parameter, layer)
                if first != layer:
                    raise ValueError(
                        f"layers {first} and {layer} ({_layer_name(spec)}) share a parameter, which would become "
                        "two when one of them moves; give both a TiedLayerSpec with the same key"
                    )

    def local_indices(self) -> range:
        """Indices of the layers on this stage."""
        return range(self._local_start, self._local_stop)

    def local_layers(self) -> dict[int, nn.Module]:
        """The live modules on this stage by layer index; function layers are left out."""
        return dict(self._layers)

    def layer_of_parameter(self) -> dict[nn.Parameter, int]:
        """Layer index of every parameter on this stage."""
        return {p: layer for layer, module in self._layers.items() for p in module.parameters()}

    def install(self, placement: Placement | Sequence[int], layers: Layers) -> None:
        """Make this stage consist of the given layers.

        Args:
            placement: that of the whole pipeline, or its ``S + 1`` boundaries.
            layers: the modules of this stage by layer index.

        Raises:
            ValueError: if a stage would hold several ranges of layers.
        """
        old, parts = self._layers, Placement.of(placement).boundaries
        for layer in self.local_indices():
            self._modules.pop(str(layer), None)
        self.tied_modules.clear()
        self.forward_funcs: list[Any] = []
        self.fwd_map: dict[str, int] = {}
        self.parts = list(parts)
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])
        self._layers = dict(layers)
        for layer in self.local_indices():
            self._register_layer(layer)
        for layer in old.keys() - layers.keys():  # DeepSpeed's list must not keep a departed layer alive
            if isinstance(self._layer_specs[layer], nn.Module):
                self._layer_specs[layer] = DepartedLayer(_layer_name(self._layer_specs[layer]))
        self._mark_tied_copies()
        self.is_checkpointable_results: list[bool] = []
        self.is_checkpointable_results_interval = None
        self._precompute_checkpointable_values()

    def _register_layer(self, layer: int) -> None:
        spec, module = self._layer_specs[layer], self._layers.get(layer)
        if module is None:  # a function
            self.forward_funcs.append(spec)
        elif isinstance(spec, TiedLayerSpec):
            if spec.key in self.tied_modules:
                self.add_module(str(layer), module)
            else:
                self.tied_modules[spec.key] = module
                self.tied_weight_attrs[spec.key] = spec.tied_weight_attr
            self.forward_funcs.append(module if spec.forward_fn is None else partial(spec.forward_fn, module))
        else:
            if not isinstance(spec, LayerSpec):
                self._layer_specs[layer] = module
            self.forward_funcs.append(module)
            self.fwd_map[str(layer)] = len(self.forward_funcs) - 1
            self.add_module(str(layer), module)

    # -- tied layers --------------------------------------------------------------------------

    def tied_layers(self) -> dict[str, list[int]]:
        """Indices of the layers that share each tied key, over all stages."""
        keys: dict[str, list[int]] = {}
        for layer, spec in enumerate(self._layer_specs):
            if isinstance(spec, TiedLayerSpec):
                keys.setdefault(spec.key, []).append(layer)
        return dict(sorted(keys.items()))

    def tied_weights(self, layer: int) -> list[nn.Parameter]:
        """The tied parameters of one local tied layer, in the order of its spec.

        Args:
            layer: global index of a tied layer on this stage.
        """
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
        offset, first_layer = self.micro_offset + 1, self._local_start

        def run(*inputs: Any) -> Any:
            x = inputs[0] if len(inputs) == 1 else inputs
            for local in range(start, stop):
                self.curr_layer = first_layer + local
                if self.seed_layers:
                    seed = self.base_seed * offset + self.curr_layer
                    (self.seed_fn or ds_utils.set_random_seed)(seed)
                if self.recorder is None:
                    x = self.forward_funcs[local](x)
                else:
                    x = self.recorder.run(self.curr_layer, self.forward_funcs[local], x)
            return x

        return run


def _layer_name(spec: Any) -> str:
    if isinstance(spec, LayerSpec):
        return str(spec.typename.__name__)
    if isinstance(spec, nn.Module):
        return type(spec).__name__
    return str(getattr(spec, "__name__", type(spec).__name__))
