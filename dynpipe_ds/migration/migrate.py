"""Carrying out a change of partition: all ranks change, or none does.

Phases: pack what leaves, tell what comes, allocate for it, tell where its optimizer state shall lie, and vote; put the
layers together and take them into module and optimizer while weights and optimizer state travel, and vote. Until the
last vote every rank can go back. What fails while data travels can't be voted on, since others wait for it: that ends
all ranks (``fatal.py``).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from dynpipe_ds.host.module import registration_order
from dynpipe_ds.host.optimizers.groups import Entry
from dynpipe_ds.host.optimizers.stage_optimizer import NewBuffers, PlaceText
from dynpipe_ds.migration.decoding import DecodingError, Journal, undo
from dynpipe_ds.migration.moves import plan_moves
from dynpipe_ds.migration.packing import (
    LayerTensors,
    Package,
    empty_tensors,
    load,
    pack,
    unpack,
    unpack_extra,
)
from dynpipe_ds.migration.subject import Subject
from dynpipe_ds.migration.transaction import Transaction
from dynpipe_ds.migration.transport import Transfer, exchange_bytes
from dynpipe_ds.placement import Placement
from dynpipe_ds.telling import warn

PLACES_BYTES = 4 * 2**10
"""Size of the message that tells a sender where state shall lie; more follows if it is too short."""

_NEWS = 2


@dataclass
class _Coming:
    """What this rank is about to receive.

    Attributes:
        tensors: by layer, empty until the transfers.
        entries: optimizer's view of the parameters among them, by layer.
        buffers: what the optimizer prepared for them.
        places: where the optimizer's state of each parameter shall lie, by layer.
    """

    tensors: dict[int, LayerTensors]
    entries: dict[int, list[Entry]]
    buffers: NewBuffers
    places: dict[int, list[PlaceText | None]]

    @property
    def all_entries(self) -> list[Entry]:
        """Those of all layers."""
        return [entry for entries in self.entries.values() for entry in entries]


class Migration:
    """One change of partition on one rank.

    Args:
        stage: what is here of the model.
        target: the wanted placement, the same on every rank.
        buffer_bytes: largest transfer buffer for one partner.

    Raises:
        ValueError: if the target is of another number of layers, or no partition.
    """

    def __init__(self, stage: Subject, target: Placement, *, buffer_bytes: int) -> None:
        assert stage.optimizer is not None, "layers move with what an optimizer knows of them"
        self._stage = stage
        self._module = stage.module
        self._optimizer = stage.optimizer
        self._before: Placement = self._module.placement
        self._target = Placement.of(target, num_layers=self._before.num_layers)
        boundaries = self._before.boundaries, self._target.boundaries  # refused here if it can't be run
        self._what = "changing the partition from {} to {}".format(*boundaries)
        self._buffer_bytes = buffer_bytes
        self._old_layers: dict[int, nn.Module] = self._module.local_layers()
        moves = plan_moves(self._before, self._target)
        self._leaving = [m for m in moves if m.source == stage.stage_id]
        self._coming = [m for m in moves if m.destination == stage.stage_id]
        self._outgoing = self._by_rank((m.destination, m.layer) for m in self._leaving)
        self._incoming = self._by_rank((m.source, m.layer) for m in self._coming)
        self._names = self._module.surroundings.names(self._old_layers.values(), stage.pipeline)
        leaving = [self._old_layers[m.layer] for m in self._leaving if m.layer in self._old_layers]
        self._departed: list[nn.Parameter] = [p for layer in leaving for p in self._parameters(layer)]
        self._warnings: list[str] = []
        self._journal: Journal = []

    def run(self, *, has_news: bool = False) -> int | None:
        """Carry it out; collective over all ranks.

        Args:
            has_news: whether the optimizer has to be told of something on this rank before anything moves.

        Returns:
            Bytes that this rank sent or received, whichever is more; ``None`` on every rank, and nothing has moved, if
            any rank has news.

        Raises:
            MigrationError: on every rank, with the same text, if any rank could not do its part; module
                and optimizer are then as they were, bit for bit.
        """
        change = Transaction(self._optimizer, self._stage.device, self._what)
        packages: dict[int, Package] = {}
        error: Exception | None = None
        try:
            packages = self._pack()
        except Exception as caught:
            error = caught
        skeletons = self._exchange_skeletons(packages)  # a rank that failed sends none, and says so in the vote
        allocated: _Coming | None = None
        if not has_news and error is None and len(skeletons) == len(self._coming):
            try:
                allocated = self._allocate(skeletons)
            except Exception as caught:
                error = caught
        places = self._exchange_places(allocated)

        def get_ready() -> tuple[tuple[_Coming, Transfer, Transfer] | None, int]:
            if has_news:
                return None, _NEWS
            if error is not None:
                raise error
            if allocated is None or places is None:
                return None, 0  # the rank that did not send says why
            journeys = self._transfers(packages, allocated, places)
            return (allocated, *journeys), int(any(package.encoder.runs_code for package in packages.values()))

        ready, some_read = change.together_with_news(get_ready)
        if some_read == _NEWS:
            return None
        assert ready is not None
        coming, weights, states = ready
        weights.start()
        states.start()
        if some_read:
            weights.finish()

        def arrive() -> None:
            if not some_read:
                weights.finish()
            states.finish()

        change.run(
            lambda: self._take_in(skeletons, coming), self._put_back,
            {e.parameter: e.state for e in coming.all_entries if e.group is not None}, meanwhile=arrive,
        )
        self._module.surroundings.leave({m.layer: self._old_layers.get(m.layer) for m in self._leaving})
        for text in (*(text for package in packages.values() for text in package.warnings), *self._warnings):
            warn(text)
        sent, received = map(sum, zip(weights.num_bytes, states.num_bytes, strict=True))
        return max(sent, received)

    # -- phases -------------------------------------------------------------------------------

    def _pack(self) -> dict[int, Package]:
        names = self._module.layer_names()
        leaving = [move.layer for move in self._leaving]
        entries = {layer: self._entries(self._old_layers.get(layer)) for layer in leaving}
        return {
            layer: pack(
                self._old_layers.get(layer), f"layer {layer} ({names[layer]})", entries[layer],
                names=self._names, device=self._stage.device,
                has_template=self._module.surroundings.has_template(layer),
            )
            for layer in leaving
        }

    def _parameters(self, layer: nn.Module | None) -> list[nn.Parameter]:
        """A layer's own: what several layers share stays where it is."""
        return [] if layer is None else [p for p in layer.parameters() if id(p) not in self._names.shared]

    def _entries(self, layer: nn.Module | None) -> list[Entry]:
        parameters = self._parameters(layer)
        index = self._optimizer.groups.index
        states = self._optimizer.describe(parameters)
        return [Entry(p, index.get(p), state) for p, state in zip(parameters, states, strict=True)]

    def _by_rank(self, layers_of_stages: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
        """The layers that each rank gets from here, or gives."""
        partners: dict[int, list[int]] = {}
        for stage, layer in layers_of_stages:
            partners.setdefault(self._stage.pipeline.rank_of(stage), []).append(layer)
        return partners

    def _exchange_skeletons(self, packages: dict[int, Package]) -> dict[int, bytes]:
        going = {rank: [packages[i].skeleton for i in layers if packages] for rank, layers in self._outgoing.items()}
        received = exchange_bytes(
            {rank: pickle.dumps(skeletons) for rank, skeletons in going.items()},
            list(self._incoming), self._stage.device,
        )
        return {
            layer: skeleton
            for rank, layers in self._incoming.items()
            for layer, skeleton in zip(layers, load(received[rank]), strict=False)
        }

    def _allocate(self, skeletons: dict[int, bytes]) -> _Coming:
        tensors = {layer: empty_tensors(s, self._stage.device) for layer, s in skeletons.items()}
        entries: dict[int, list[Entry]] = {layer: unpack_extra(s, tensors[layer]) for layer, s in skeletons.items()}
        coming = _Coming(tensors, entries, NewBuffers(), {})
        if self._departed or coming.all_entries:
            leaving = {move.layer for move in self._leaving}
            layers = {i: list(layer.parameters()) for i, layer in self._old_layers.items() if i not in leaving}
            layers |= {layer: [entry.parameter for entry in arrived] for layer, arrived in entries.items()}
            order = registration_order(self._module, layers)
            coming.buffers = self._optimizer.make_buffers(self._departed, coming.all_entries, order)
            coming.places = {i: self._optimizer.places(arrived, coming.buffers) for i, arrived in entries.items()}
        return coming

    def _exchange_places(self, coming: _Coming | None) -> dict[int, list[PlaceText | None]] | None:
        """Where the state of what leaves shall lie, by layer; ``None`` if some receiver could not say."""
        if not self._optimizer.shares_out:
            return {}
        places = {} if coming is None else coming.places
        told = {rank: [places.get(i) for i in layers] for rank, layers in self._incoming.items()}
        received = exchange_bytes(
            {rank: pickle.dumps(places) for rank, places in told.items()}, list(self._outgoing), self._stage.device,
            first_bytes=PLACES_BYTES,
        )
        found: dict[int, list[PlaceText | None]] = {}
        for rank, layers in self._outgoing.items():
            found |= zip(layers, load(received[rank]), strict=True)
        return None if any(of_layer is None for of_layer in found.values()) else found

    def _transfers(
        self, packages: dict[int, Package], coming: _Coming, places: dict[int, list[PlaceText | None]]
    ) -> tuple[Transfer, Transfer]:
        """The journeys of the layers' own tensors and of their optimizer state."""
        going = {i: package.tensors for i, package in packages.items()}

        def tensors(of: Mapping[int, LayerTensors], ranks: dict[int, list[int]], part: str) -> dict[int, list[Tensor]]:
            return {rank: [t for i in layers for t in getattr(of[i], part)] for rank, layers in ranks.items()}

        def journey(sends: dict[int, list[Tensor]], receives: dict[int, list[Tensor]]) -> Transfer:
            return Transfer(sends, receives, buffer_bytes=self._buffer_bytes, device=self._stage.device)

        own = journey(tensors(going, self._outgoing, "own"), tensors(coming.tensors, self._incoming, "own"))
        parts = self._optimizer.parts(
            {rank: [pair for i in layers for pair in self._with_places(i, places)]
             for rank, layers in self._outgoing.items()},
            [entry for layers in self._incoming.values() for i in layers for entry in coming.entries[i]],
            coming.buffers,
        )
        sends, receives = tensors(going, self._outgoing, "extra"), tensors(coming.tensors, self._incoming, "extra")
        for lists, more in ((sends, parts.sends), (receives, parts.receives)):
            for rank, slices in more.items():
                lists[rank] = [*lists.get(rank, ()), *slices]
        return own, journey(sends, receives)

    def _with_places(
        self, layer: int, places: dict[int, list[PlaceText | None]]
    ) -> list[tuple[nn.Parameter, PlaceText | None]]:
        parameters = self._parameters(self._old_layers.get(layer))
        return list(zip(parameters, places.get(layer, [None] * len(parameters)), strict=True))

    def _unpack(self, skeletons: dict[int, bytes], tensors: dict[int, LayerTensors]) -> dict[int, nn.Module]:
        names, layers = self._module.layer_names(), {}
        for layer, skeleton in skeletons.items():
            name = f"layer {layer} ({names[layer]})"
            try:
                arrived = unpack(
                    skeleton, tensors[layer], names=self._names, device=self._stage.device,
                    build=partial(self._module.surroundings.build, layer), journal=self._journal,
                )
            except DecodingError as error:
                raise DecodingError(f"{name}: {error}") from error
            self._warnings += [f"{name}: {text}" for text in arrived.warnings]
            if arrived.layer is not None:
                layers[layer] = arrived.layer
        return layers

    def _take_in(self, skeletons: dict[int, bytes], coming: _Coming) -> None:
        leaving = {move.layer for move in self._leaving}
        kept = {layer: m for layer, m in self._old_layers.items() if layer not in leaving}
        layers = kept | self._unpack(skeletons, coming.tensors)
        self._module.install(self._target, dict(sorted(layers.items())))
        self._stage.pipeline.name_parameters()
        arrived = {e.parameter: e.group for e in coming.all_entries if e.group is not None}
        if self._departed or arrived:
            self._optimizer.prepare(self._departed, arrived, coming.buffers)

    def _put_back(self) -> None:
        undo(self._journal)
        self._module.install(self._before, self._old_layers)
        self._stage.pipeline.name_parameters()
