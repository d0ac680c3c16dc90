"""``DynamicPipelineModule``: DeepSpeed's ``PipelineModule`` whose stage boundaries can move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dynpipe_ds.coupling import Coupling, find_couplings
from dynpipe_ds.decide.methods import PartitionMethod, profile_from_parameters
from dynpipe_ds.host import accelerator
from dynpipe_ds.host.coordinates import alone
from dynpipe_ds.host.module import MovableModule
from dynpipe_ds.host.owned import agree_on_owned
from dynpipe_ds.host.specs import layer_name, tied_key
from dynpipe_ds.host.world import identity
from dynpipe_ds.joining.newcomer import newcomer
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.migration.surroundings import Held, Surroundings
from dynpipe_ds.placement import check_boundaries
from dynpipe_ds.ranks.agreement import together
from dynpipe_ds.telling import log

Copies = list[tuple[nn.Parameter, nn.Parameter]]


class DynamicPipelineModule(MovableModule):
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

    surroundings: Surroundings  # as soon as it is dynamic

    def __init__(
        self,
        *args: Any,
        profile: PipelineProfile | str | Path | None = None,
        pin: Iterable[int] = (),
        **kwargs: Any,
    ) -> None:
        # Set before DeepSpeed's constructor, which asks for the first partition.
        self.initial_profile = PipelineProfile.load(profile) if isinstance(profile, str | Path) else profile
        self.pinned_cuts = tuple(sorted(set(pin)))
        self.partition_method: PartitionMethod | None = None
        self.newcomer = newcomer(identity())
        if self.newcomer is not None:
            self.newcomer.begin()
            self.is_absent = True
            args, kwargs = (), alone(args, kwargs)
        super().__init__(*args, **kwargs)
        if self.newcomer is not None:
            self._grid.data_parallel_size = self.newcomer.job["num_sources"]  # until DeepSpeed has read sizes by it

    # -- the first partition ------------------------------------------------------------------

    def _first_partition(self, method: Any, deepspeeds: Callable[[], list[int]]) -> Sequence[int]:
        """Boundaries to begin with, the same on every rank.

        Raises:
            ValueError: if the method is unknown or gives bad boundaries.
        """
        self.partition_method = PartitionMethod.parse(method)
        if self.is_absent:
            return [0, self._num_layers]
        if self.partition_method.is_deepspeed:
            return check_boundaries(
                deepspeeds(),
                num_layers=self._num_layers,
                num_stages=self.num_stages,
                pinned=self.pinned_cuts,
                allow_empty=True,
            )
        pinned = {*self.pinned_cuts, *(cut for coupling in self.couplings() for cut in coupling.cuts())}
        plan = self.partition_method.plan(
            self._profile_for_construction(), self.num_stages, pinned=tuple(sorted(pinned))
        )
        if self.global_rank == 0:
            log.info(f"Partitioning pipeline stages with {self.partition_method}: {plan}")
        return plan.boundaries

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

    def couplings(self) -> list[Coupling]:
        """Function layers that leave something behind for a later layer or the loss, which no cut may separate."""
        readers = [] if self.loss_fn is None else [self.loss_fn]
        if self._adds_losses:
            readers.append(self.get_additional_losses)
        return find_couplings(self._layer_specs, self.layer_names(), readers)

    # -- becoming dynamic ---------------------------------------------------------------------

    def make_dynamic(self) -> Copies:
        """Prepare for layers that move; called once by the engine.

        Every occurrence of a tied layer gets weights of its own, also where DeepSpeed lets two on one
        stage share them: gradients are then summed in layer order whatever the cut, and a tied layer
        moves like any other.

        Returns:
            Pairs of (shared parameter, its new copy), for optimizers that hold the shared one.

        Raises:
            ValueError: on every rank, if layers share a parameter that is trained, a tied layer can't be copied, or a
                replica owns what it can't.
        """
        if self._is_dynamic:
            return []
        self._refuse_shared_parameters()
        self._is_dynamic = True
        device = accelerator.device()
        self.surroundings, layers, copies, held = together(self._own_layers, device, ValueError)
        self.surroundings.agree_on_shared(held, self.layer_names())
        self.install(self.placement, layers)
        if self.newcomer is None:
            self.owned = agree_on_owned(self)
        else:
            self.owned, self.twinned = self.newcomer.owned, self.newcomer.job["twinned"]
        return copies

    def _own_layers(self) -> tuple[Surroundings, dict[int, nn.Module], Copies, list[Held]]:
        """This stage's layers, with copies of tied ones, and what they hold; can fail on one rank alone."""
        surroundings = Surroundings(self, self._layer_specs, self.replica)
        copies: Copies = []
        layers: dict[int, nn.Module] = {}
        seen: set[str] = set()
        for layer, function in zip(self.local_indices(), self.forward_funcs, strict=True):
            key = tied_key(self._layer_specs[layer])
            if key is not None:
                module = self.tied_modules[key]
                if key in seen:
                    original, module = module, surroundings.copy(layer, module)
                    copies += zip(original.parameters(), module.parameters(), strict=True)
                seen.add(key)
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
                        f"layers {first} and {layer} ({layer_name(spec)}) share a parameter, which would become "
                        "two when one of them moves; give both a TiedLayerSpec with the same key"
                    )
