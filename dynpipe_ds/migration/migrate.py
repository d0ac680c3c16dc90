"""Carrying out a change of partition: all ranks change, or none does.

Phases, each ended by a vote of all ranks: pack what leaves; allocate for what comes; transfer it, put the
layers together and take them into module and optimizer. Until the last vote every rank can go back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from dynpipe_ds.agreement import together
from dynpipe_ds.migration.optimizer_state import State
from dynpipe_ds.migration.packing import Package, empty_tensors, pack, unpack, warn_lost
from dynpipe_ds.migration.plan import Move, plan_moves
from dynpipe_ds.migration.transport import exchange_bytes, exchange_tensors

T = TypeVar("T")


class MigrationError(RuntimeError):
    """A migration failed on some rank; every rank keeps the partition it had."""


@dataclass
class _Arrival:
    layer: nn.Module | None
    groups: list[int | None]
    states: list[State]


class Migration:
    """One change of partition on one rank.

    Args:
        engine: the dynamic pipeline engine.
        target: ``S + 1`` wanted boundaries, the same on every rank.
        buffer_bytes: largest transfer buffer for one partner.
    """

    def __init__(self, engine: Any, target: Sequence[int], *, buffer_bytes: int) -> None:
        self._engine = engine
        self._module = engine.module
        self._optimizer = engine.stage_optimizer
        self._before = self._module.boundaries
        self._target = tuple(target)
        self._buffer_bytes = buffer_bytes
        moves = plan_moves(self._before, self._target)
        self._leaving = [m for m in moves if m.source == engine.stage_id]
        self._coming = [m for m in moves if m.destination == engine.stage_id]
        self.bytes_sent = 0

    def run(self) -> None:
        """Carry it out; collective over all ranks.

        Raises:
            MigrationError: on every rank, with the same text, if any rank could not do its part; module
                and optimizer are then as they were, bit for bit.
        """
        packages = self._together(self._pack)
        skeletons = self._exchange_skeletons(packages)
        tensors = self._together(lambda: self._allocate(skeletons))
        self._transfer(packages, tensors)
        self._commit(skeletons, tensors)
        for package in packages.values():
            warn_lost(package.warnings)

    def _together(self, action: Callable[[], T]) -> T:
        """Do something on every rank; if it fails on one, fail on all."""
        return together(action, self._engine.device, lambda message: MigrationError(
            f"changing the partition from {self._before} to {self._target} failed and was "
            f"undone on every rank ({message})"
        ))

    # -- phases -------------------------------------------------------------------------------

    def _pack(self) -> dict[int, Package]:
        layers = self._module.local_layers()
        names = self._module.layer_names()
        return {
            move.layer: pack(
                layers.get(move.layer), f"layer {move.layer} ({names[move.layer]})",
                self._optimizer_entries(layers.get(move.layer)),
            )
            for move in self._leaving
        }

    def _optimizer_entries(self, layer: nn.Module | None) -> tuple[list[int | None], list[State]]:
        parameters = [] if layer is None else list(layer.parameters())
        index = self._optimizer.groups.index
        return [index.get(p) for p in parameters], [self._optimizer.export(p) for p in parameters]

    def _rank_of(self, stage: int) -> int:
        return int(self._engine.grid.stage_to_global(stage_id=stage))

    def _by_partner(self, moves: list[Move], *, destination: bool) -> dict[int, list[int]]:
        partners: dict[int, list[int]] = {}
        for move in moves:
            rank = self._rank_of(move.destination if destination else move.source)
            partners.setdefault(rank, []).append(move.layer)
        return partners

    def _exchange_skeletons(self, packages: dict[int, Package]) -> dict[int, bytes]:
        outgoing = self._by_partner(self._leaving, destination=True)
        incoming = self._by_partner(self._coming, destination=False)
        received = exchange_bytes(
            {rank: _join([packages[i].skeleton for i in layers]) for rank, layers in outgoing.items()},
            list(incoming), self._engine.device,
        )
        return {
            layer: skeleton
            for rank, layers in incoming.items()
            for layer, skeleton in zip(layers, _cut(received[rank]), strict=True)
        }

    def _allocate(self, skeletons: dict[int, bytes]) -> dict[int, list[Tensor]]:
        return {layer: empty_tensors(s, self._engine.device) for layer, s in skeletons.items()}

    def _transfer(self, packages: dict[int, Package], tensors: dict[int, list[Tensor]]) -> None:
        outgoing = self._by_partner(self._leaving, destination=True)
        incoming = self._by_partner(self._coming, destination=False)
        self.bytes_sent = sum(t.nbytes for package in packages.values() for t in package.tensors)
        exchange_tensors(
            {rank: [t for i in layers for t in packages[i].tensors] for rank, layers in outgoing.items()},
            {rank: [t for i in layers for t in tensors[i]] for rank, layers in incoming.items()},
            buffer_bytes=self._buffer_bytes, device=self._engine.device,
        )

    def _unpack(self, skeletons: dict[int, bytes], tensors: dict[int, list[Tensor]]) -> dict[int, _Arrival]:
        arrivals = {}
        for layer, skeleton in skeletons.items():
            module, (groups, states) = unpack(skeleton, tensors[layer])
            arrivals[layer] = _Arrival(module, groups, states)
        return arrivals

    # -- the point of no return ---------------------------------------------------------------

    def _commit(self, skeletons: dict[int, bytes], tensors: dict[int, list[Tensor]]) -> None:
        module = self._module
        old_layers = module.local_layers()

        def take_in() -> dict[nn.Parameter, State] | None:
            arrivals = self._unpack(skeletons, tensors)
            layers, departed, arrived, states = self._new_stage(old_layers, arrivals)
            module.install(self._target, layers)
            self._engine.name_parameters()
            if departed or arrived:
                self._optimizer.prepare(departed, arrived)
                return states
            return None

        try:
            states = self._together(take_in)
        except MigrationError:
            self._optimizer.rollback()
            module.install(self._before, old_layers)
            self._engine.name_parameters()
            raise
        if states is not None:
            self._optimizer.fill(states)

    def _new_stage(
        self, old_layers: dict[int, nn.Module], arrivals: dict[int, _Arrival]
    ) -> tuple[dict[int, nn.Module], list[nn.Parameter], dict[nn.Parameter, int], dict[nn.Parameter, State]]:
        leaving = {move.layer for move in self._leaving}
        kept = {layer: m for layer, m in old_layers.items() if layer not in leaving}
        came = {layer: a.layer for layer, a in arrivals.items() if a.layer is not None}
        departed = [p for layer in leaving if layer in old_layers for p in old_layers[layer].parameters()]
        arrived: dict[nn.Parameter, int] = {}
        states: dict[nn.Parameter, State] = {}
        for arrival in arrivals.values():
            parameters = [] if arrival.layer is None else list(arrival.layer.parameters())
            for parameter, group, state in zip(parameters, arrival.groups, arrival.states, strict=True):
                if group is not None:
                    arrived[parameter] = group
                    states[parameter] = state
        return dict(sorted({**kept, **came}.items())), departed, arrived, states


def _join(parts: list[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _cut(data: bytes) -> list[bytes]:
    parts, position = [], 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 8], "little")
        parts.append(data[position + 8 : position + 8 + size])
        position += 8 + size
    return parts

