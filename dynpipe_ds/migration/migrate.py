"""Carrying out a change of partition: all ranks change, or none does.

Who gives layers away tells the heads of their skeletons, then the bodies, then lets weights and optimizer state travel.
Who gets some makes room as soon as it has the heads, and puts the layers together and takes them into module and
optimizer while their tensors travel. At the end all vote; until then every rank can go back. A rank that can't do its
part says so there, and meanwhile sends what it has promised, and lets come, without keeping it, what it was promised:
nobody waits for anybody in vain. Where replicas share out state, those that get some have to say first where it shall
lie, and all vote before it travels, too. What fails while data travels can't be voted on, since others wait for it:
that ends all ranks (``fatal.py``).
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from dynpipe_ds.host.module import registration_order
from dynpipe_ds.host.optimizers.groups import Entry, State
from dynpipe_ds.host.optimizers.stage_optimizer import NewBuffers, PlaceText
from dynpipe_ds.migration.decoding import DecodingError, Journal, undo
from dynpipe_ds.migration.moves import plan_moves
from dynpipe_ds.migration.packing import (
    LayerTensors,
    Package,
    Packing,
    load,
    make_room,
    unpack,
)
from dynpipe_ds.migration.subject import Subject
from dynpipe_ds.migration.transaction import NotYet, Transaction
from dynpipe_ds.migration.transport import Letters, MessageSizes, Transfer, exchange_bytes
from dynpipe_ds.placement import Placement
from dynpipe_ds.ranks.cross_memory import CrossMemory
from dynpipe_ds.telling import warn

T = TypeVar("T")


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

    @property
    def states(self) -> dict[nn.Parameter, State]:
        """Optimizer state of the parameters that the optimizer has."""
        return {entry.parameter: entry.state for entry in self.all_entries if entry.group is not None}


class _Leaving(NamedTuple):
    """What this rank is about to send.

    Attributes:
        packings: layers that are being taken apart.
        journey: of their tensors, and of their state unless the receivers have to say first where it shall lie.
    """

    packings: dict[int, Packing]
    journey: Transfer

    def finish(self) -> dict[int, Package]:
        """Take the layers apart to the end."""
        return {layer: packing.finish() for layer, packing in self.packings.items()}


class _Heads(NamedTuple):
    """What others have told of the layers that come.

    Attributes:
        heads: of their skeletons, by layer.
        sizes: of the messages that will come with them, by rank.
        offers: addresses in the other's memory, by rank.
    """

    heads: dict[int, bytes]
    sizes: dict[int, list[MessageSizes]]
    offers: dict[int, list[int]]


class _Attempts:
    """What this rank does by itself: after a failure it tries nothing more, and says why when all vote.

    Args:
        problem: what keeps it from trying at all.
    """

    def __init__(self, problem: Exception | None) -> None:
        self._problem = problem

    def __call__(self, action: Callable[[], T]) -> T | None:
        """Do something; ``None`` if it fails, or something has failed before."""
        if self._problem is None:
            try:
                return action()
            except Exception as caught:  # noqa: BLE001 - others wait for what this rank says of it
                traceback.clear_frames(caught.__traceback__)  # what was allocated, so that there is room to go on
                self._problem = caught
        return None

    def check(self) -> None:
        """Raise what has failed, if something has."""
        if self._problem is not None:
            raise self._problem


class Migration:
    """One change of partition on one rank.

    Args:
        stage: what is here of the model.
        target: the wanted placement, the same on every rank.
        buffer_bytes: largest transfer buffer for one partner.
        memory: which ranks read whose memory; nobody by default, so that all travels in messages.

    Raises:
        ValueError: if the target is of another number of layers, or no partition.
    """

    def __init__(
        self, stage: Subject, target: Placement, *, buffer_bytes: int, memory: CrossMemory | None = None
    ) -> None:
        assert stage.optimizer is not None, "layers move with what an optimizer knows of them"
        self._stage = stage
        self._module = stage.module
        self._optimizer = stage.optimizer
        self._before: Placement = self._module.placement
        self._target = Placement.of(target, num_layers=self._before.num_layers)
        boundaries = self._before.boundaries, self._target.boundaries  # refused here if it can't be run
        self._what = "changing the partition from {} to {}".format(*boundaries)
        self._buffer_bytes = buffer_bytes
        self._memory = memory
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
        try:
            return self._run(has_news=has_news)
        except NotYet:
            return None

    def _run(self, *, has_news: bool) -> int:
        change = Transaction(self._optimizer, self._stage.device, self._what)
        attempt = _Attempts(NotYet() if has_news else None)
        leaving = attempt(self._prepare_leaving) or _Leaving({}, self._transfer({}, {}))
        told = self._exchange_heads(leaving)  # a rank that failed tells nothing
        has_all = len(told.heads) == len(self._coming)
        packages = attempt(leaving.finish)
        letters = self._post_bodies(packages)
        coming = attempt(partial(self._allocate, told, leaving.journey)) if has_all else None
        bodies = self._read_bodies(letters)
        journey = leaving.journey
        if self._optimizer.shares_out:
            places = self._exchange_places(coming)

            def prepare_journey() -> Transfer:
                attempt.check()
                if coming is None or len(bodies) < len(self._coming):
                    return journey  # the rank that did not do its part says why
                return self._transfer(*self._tensors(leaving.packings, places, coming))

            journey = change.together(prepare_journey)
        elif coming is None:
            journey.drain(told.sizes)
        journey.start()
        if any(runs_code for _, runs_code in bodies.values()):
            journey.finish()

        def take_in() -> None:
            attempt.check()
            if coming is not None and len(bodies) == len(self._coming):
                self._take_in({i: body for i, (body, _) in bodies.items()}, coming)

        change.run(take_in, self._put_back, {} if coming is None else coming.states, journey=journey)
        assert packages is not None
        self._module.surroundings.leave({m.layer: self._old_layers.get(m.layer) for m in self._leaving})
        for text in (*(text for package in packages.values() for text in package.warnings), *self._warnings):
            warn(text)
        return max(journey.num_bytes)

    # -- phases -------------------------------------------------------------------------------

    def _prepare_leaving(self) -> _Leaving:
        packings = self._pack()
        sends = {} if self._optimizer.shares_out else self._tensors(packings, {}, None)[0]
        return _Leaving(packings, self._transfer(sends, {}))

    def _pack(self) -> dict[int, Packing]:
        names = self._module.layer_names()
        leaving = [move.layer for move in self._leaving]
        entries = {layer: self._entries(self._old_layers.get(layer)) for layer in leaving}
        return {
            layer: Packing(
                self._old_layers.get(layer), f"layer {layer} ({names[layer]})", entries[layer],
                names=self._names, device=self._stage.device,
                has_template=self._module.surroundings.has_template(layer),
            )
            for layer in leaving
        }

    def _parameters(self, layer: nn.Module | None) -> list[nn.Parameter]:
        """A layer's own: what several layers share stays where it is."""
        return [] if layer is None else [p for p in layer.parameters() if id(p) not in self._names.shared]

    def _entries(self, layer: nn.Module | None) -> list[tuple[nn.Parameter, int | None, State]]:
        """What the other side's :class:`Entry` objects are made of: tuples take less time to encode."""
        parameters = self._parameters(layer)
        index = self._optimizer.groups.index
        states = self._optimizer.describe(parameters)
        return [(p, index.get(p), state) for p, state in zip(parameters, states, strict=True)]

    def _by_rank(self, layers_of_stages: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
        """The layers that each rank gets from here, or gives."""
        partners: dict[int, list[int]] = {}
        for stage, layer in layers_of_stages:
            partners.setdefault(self._stage.pipeline.rank_of(stage), []).append(layer)
        return partners

    def _exchange_heads(self, leaving: _Leaving) -> _Heads:
        """What each rank tells the others of what it gives them."""
        packings, journey = leaving
        told = {
            rank: ([packings[i].head for i in layers], journey.message_sizes(rank), journey.offers(rank))
            if packings else None
            for rank, layers in self._outgoing.items()
        }
        received = exchange_bytes(
            {rank: pickle.dumps(what) for rank, what in told.items()}, self._incoming, self._stage.device
        )
        answers = {rank: answer for rank, data in received.items() if (answer := load(data)) is not None}
        heads = {
            layer: head for rank, (its, _, _) in answers.items()
            for layer, head in zip(self._incoming[rank], its, strict=True)
        }
        sizes, offers = ({rank: answer[place] for rank, answer in answers.items()} for place in (1, 2))
        return _Heads(heads, sizes, offers)

    def _allocate(self, told: _Heads, journey: Transfer) -> _Coming:
        rooms = {layer: make_room(head, self._stage.device) for layer, head in told.heads.items()}
        tensors = {layer: tensors for layer, (tensors, _) in rooms.items()}
        entries = {layer: [Entry(*entry) for entry in its] for layer, (_, its) in rooms.items()}
        coming = _Coming(tensors, entries, NewBuffers(), {})
        if self._departed or coming.all_entries:
            leaving = {move.layer for move in self._leaving}
            layers = {i: list(layer.parameters()) for i, layer in self._old_layers.items() if i not in leaving}
            layers |= {layer: [entry.parameter for entry in arrived] for layer, arrived in entries.items()}
            order = registration_order(self._module, layers)
            coming.buffers = self._optimizer.make_buffers(self._departed, coming.all_entries, order)
            coming.places = {i: self._optimizer.places(arrived, coming.buffers) for i, arrived in entries.items()}
        if not self._optimizer.shares_out:
            journey.receive(self._tensors({}, {}, coming)[1], told.offers)
        return coming

    def _post_bodies(self, packages: dict[int, Package] | None) -> Letters:
        """Tell the bodies of what leaves, and whether putting them together runs code, if all have been made."""
        told = {
            rank: packages and [(packages[i].body, packages[i].encoder.runs_code) for i in layers]
            for rank, layers in self._outgoing.items()
        }
        return Letters({rank: pickle.dumps(its) for rank, its in told.items()}, self._incoming, self._stage.device)

    def _read_bodies(self, letters: Letters) -> dict[int, tuple[bytes, bool]]:
        """The same of what comes, by layer; none from a rank that failed."""
        return {
            layer: body for rank, data in letters.read().items()
            for layer, body in zip(self._incoming[rank], load(data) or (), strict=False)
        }

    def _exchange_places(self, coming: _Coming | None) -> dict[int, list[PlaceText | None]]:
        """Where the state of what leaves shall lie, by layer; nothing of receivers that failed."""
        told = {
            rank: coming and [coming.places.get(i) for i in layers] for rank, layers in self._incoming.items()
        }
        received = exchange_bytes(
            {rank: pickle.dumps(places) for rank, places in told.items()}, self._outgoing, self._stage.device
        )
        return {
            layer: places for rank, data in received.items()
            for layer, places in zip(self._outgoing[rank], load(data) or (), strict=False)
        }

    def _tensors(
        self, packings: dict[int, Packing], places: dict[int, list[PlaceText | None]], coming: _Coming | None
    ) -> tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]]:
        """What travels: tensors of layers and slices of the optimizer's buffers, to ranks and from ranks.

        Args:
            packings: what leaves.
            places: where its state shall lie, if the receiver has to say so.
            coming: what comes.
        """
        going = self._outgoing if packings else {}
        sends = {rank: [t for i in layers for t in packings[i].tensors.all] for rank, layers in going.items()}
        receives = {} if coming is None else {
            rank: [t for i in layers for t in coming.tensors[i].all] for rank, layers in self._incoming.items()
        }
        entries = [] if coming is None else [
            entry for layers in self._incoming.values() for i in layers for entry in coming.entries[i]
        ]
        parts = self._optimizer.parts(
            {rank: [pair for i in layers for pair in self._with_places(i, places)] for rank, layers in going.items()},
            entries, NewBuffers() if coming is None else coming.buffers,
        )
        for lists, more in ((sends, parts.sends), (receives, parts.receives)):
            for rank, slices in more.items():
                lists.setdefault(rank, []).extend(slices)
        return sends, receives

    def _transfer(self, sends: dict[int, list[Tensor]], receives: dict[int, list[Tensor]]) -> Transfer:
        # Where replicas share out state, senders don't know with the heads what will lie where.
        memory = None if self._optimizer.shares_out else self._memory
        return Transfer(
            sends, receives, buffer_bytes=self._buffer_bytes, device=self._stage.device, memory=memory
        )

    def _with_places(
        self, layer: int, places: dict[int, list[PlaceText | None]]
    ) -> list[tuple[nn.Parameter, PlaceText | None]]:
        parameters = self._parameters(self._old_layers.get(layer))
        return list(zip(parameters, places.get(layer, [None] * len(parameters)), strict=True))

    def _unpack(self, bodies: dict[int, bytes], tensors: dict[int, LayerTensors]) -> dict[int, nn.Module]:
        names, layers = self._module.layer_names(), {}
        for layer, body in bodies.items():
            name = f"layer {layer} ({names[layer]})"
            try:
                arrived = unpack(
                    body, tensors[layer], names=self._names, device=self._stage.device,
                    build=partial(self._module.surroundings.build, layer), journal=self._journal,
                )
            except DecodingError as error:
                raise DecodingError(f"{name}: {error}") from error
            self._warnings += [f"{name}: {text}" for text in arrived.warnings]
            if arrived.layer is not None:
                layers[layer] = arrived.layer
        return layers

    def _take_in(self, bodies: dict[int, bytes], coming: _Coming) -> None:
        leaving = {move.layer for move in self._leaving}
        kept = {layer: m for layer, m in self._old_layers.items() if layer not in leaving}
        layers = kept | self._unpack(bodies, coming.tensors)
        self._module.install(self._target, dict(sorted(layers.items())))
        self._stage.pipeline.name_parameters()
        arrived = {e.parameter: e.group for e in coming.all_entries if e.group is not None}
        if self._departed or arrived:
            self._optimizer.prepare(self._departed, arrived, coming.buffers)

    def _put_back(self) -> None:
        undo(self._journal)
        self._module.install(self._before, self._old_layers)
        self._stage.pipeline.name_parameters()
