"""Going back to a snapshot: whoever holds a copy gives each rank what its place needs; collective over all ranks.

The ranks may be others than those that took it, in other places, and hold nothing themselves. Everything that can fail
is done before the last vote: copies are checked where they lie, travel, and are put together into new layers. Then
module and optimizer take them in, and the streams, counters and decisions go on from where they were.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dynpipe_ds.checkpoint.extras import restore as restore_extras
from dynpipe_ds.host.counters import take_engine_state
from dynpipe_ds.host.optimizer_files import known_classes
from dynpipe_ds.host.optimizers.flat import FlatOptimizer, Pieces
from dynpipe_ds.host.optimizers.groups import Entry, State
from dynpipe_ds.host.optimizers.restore import restore_state
from dynpipe_ds.migration.decoding import Journal, undo
from dynpipe_ds.migration.packing import LayerTensors, load, make_room, unpack
from dynpipe_ds.migration.transaction import Transaction
from dynpipe_ds.migration.transport import Transfer, exchange_bytes, flat_view
from dynpipe_ds.placement import Placement
from dynpipe_ds.ranks.agreement import gather, together
from dynpipe_ds.snapshots.capture import OWN, SHARD, SHARED, Place, Start
from dynpipe_ds.snapshots.inventory import Parcel, Part, Seat, Snapshot, newest_common, plan_restore
from dynpipe_ds.snapshots.shared_data import SnapshotError, share_data
from dynpipe_ds.snapshots.store import Copy

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

T = TypeVar("T")

_TAKEN = {Part.ALL: (OWN, SHARED, SHARD), Part.SHARED: (SHARED,), Part.SHARDS: (SHARD,)}


class _Told(NamedTuple):
    """What goes with a parcel's tensors, as plain values.

    Attributes:
        state: of the rank, in the format of ``torch.save``; empty unless it is asked for.
        layers: by index head and body, the starts of shares, and number and place of each tensor that goes along.
    """

    state: bytes
    layers: dict[int, tuple[tuple[bytes, ...], list[Start], list[tuple[int, Place]]]]


class _Arrived(NamedTuple):
    """A layer that is being put together.

    Attributes:
        body: of the replica whose buffers it takes.
        tensors: of it.
        entries: the optimizer's view of its parameters.
        spread: of each parameter, names of what flat optimizers keep in one row.
    """

    body: bytes
    tensors: LayerTensors
    entries: list[Entry]
    spread: list[set[str]]

    def states(self) -> Iterator[tuple[nn.Parameter, State]]:
        """State of the parameters that the optimizer has, moments of flat ones as pieces of a row."""
        for entry, spread in zip(self.entries, self.spread, strict=True):
            if entry.group is not None and entry.state:
                yield entry.parameter, {k: _in_pieces(v) if k in spread else v for k, v in entry.state.items()}


def newest(run: Run) -> int | None:
    """The newest batch to which all present ranks can go back; collective over all ranks.

    What is still on its way makes no copy go until the next snapshot is taken.

    Args:
        run: of this rank.
    """
    run.snapshots.store.hold()
    return newest_common(_everything(run))


def _everything(run: Run) -> list[Snapshot]:
    return [snapshot for held in gather(run.snapshots.inventory()) for snapshot in held]


def restore(run: Run, batch: int, boundaries: Sequence[int] | None = None, *, until: int | None = None) -> None:
    """Go back to a snapshot; collective over all ranks.

    Args:
        run: whose batches are then those of the snapshot; the batches since are to be trained again.
        batch: trained when it was taken.
        boundaries: of the stages from now on; ``None``: those of the snapshot.
        until: batches that will be trained again, up to this number; ``None``: those that were trained here.

    Raises:
        SnapshotError: on every rank, if a copy is damaged or not held, or micro-batches are; nothing has changed then.
    """
    run.snapshots.before_change()
    _Restoring(run, batch, boundaries).carry_out(run.num_batches if until is None else until)


class _Restoring:
    def __init__(self, run: Run, batch: int, boundaries: Sequence[int] | None) -> None:
        self._run, self._stage, self._batch = run, run.stage, batch
        pipeline = run.stage.pipeline
        self._rank = pipeline.rank
        seats = gather(Seat(pipeline.stage_id, pipeline.replica))
        self._seats = dict(enumerate(seats))
        self._inventory = _everything(run)
        held = [s for s in self._inventory if s.batch == batch]
        self._boundaries = tuple(boundaries or (held[0].boundaries if held else run.stage.partition))
        now = run.stage.num_stages, run.stage.module.replica.count
        self._same_stages = bool(held) and (held[0].num_stages, held[0].num_replicas) == now
        self._journal: Journal = []

    def carry_out(self, until: int) -> None:
        parcels = self._together(self._plan)
        self._together(lambda: self._check(parcels))
        told = self._exchange_told(parcels)
        arrived, state = self._together(lambda: self._allocate(told))
        self._transfer(parcels, told, arrived)
        share_data(self._run, self._batch, until, f"the snapshot of batch {self._batch}")
        layers = self._take_in(arrived)
        self._finish(layers, arrived, state)

    def _together(self, action: Callable[[], T]) -> T:
        return together(action, self._stage.device, lambda text: SnapshotError(
            f"going back to the snapshot of batch {self._batch} failed, nothing has changed ({text})"
        ))

    # -- what can fail ------------------------------------------------------------------------

    def _plan(self) -> list[Parcel]:
        held = [s for s in self._inventory if s.batch == self._batch and s.is_complete]
        if self._stage.module.owned and held and held[0].num_replicas != self._stage.module.replica.count:
            raise ValueError(
                f"replicas own parameters (own_by_replica), of which snapshots know {held[0].num_replicas} replicas' "
                f"and there are {self._stage.module.replica.count} now; load a checkpoint"
            )
        return plan_restore(held, self._batch, self._seats, self._boundaries)

    def _check(self, parcels: Iterable[Parcel]) -> None:
        for owner in dict.fromkeys(p.owner for p in parcels if p.source == self._rank):
            if not self._copy(owner).is_sound():
                raise ValueError(f"the copy of {owner} on rank {self._rank} is damaged: its checksum is another")

    def _copy(self, owner: Seat) -> Copy:
        return self._run.snapshots.store.get(self._batch, owner)

    def _told(self, parcel: Parcel) -> _Told:
        copy = self._copy(parcel.owner)
        state, layers = load(copy.manifest)
        if parcel.part is Part.STATE:
            return _Told(state, {})
        taken = _TAKEN[parcel.part]
        described = {}
        for index in parcel.layers:
            skeleton, starts, places = layers[index]
            there = [(n, Place(*place)) for n, place in enumerate(places)]
            there = [(n, p) for n, p in there if p.whose in taken and p.start + p.num_bytes <= copy.data.numel()]
            described[index] = (skeleton if parcel.part is Part.ALL else (), starts, there)
        return _Told(b"", described)

    def _exchange_told(self, parcels: Sequence[Parcel]) -> list[tuple[Parcel, _Told]]:
        """What comes to this rank, without tensors; what it has itself included."""
        own = {p: self._told(p) for p in parcels if p.source == self._rank}
        going: dict[int, list[Any]] = {}
        for parcel in parcels:
            if parcel.source == self._rank and parcel.destination != self._rank:
                state, layers = own[parcel]
                plain = {i: (s, a, [(n, tuple(p)) for n, p in t]) for i, (s, a, t) in layers.items()}
                going.setdefault(parcel.destination, []).append((state, plain))
        coming = [p for p in parcels if p.destination == self._rank and p.source != self._rank]
        sources = list(dict.fromkeys(p.source for p in coming))
        received = exchange_bytes(
            {rank: pickle.dumps(texts) for rank, texts in sorted(going.items())}, sources, self._stage.device
        )
        texts = {rank: iter(load(data)) for rank, data in received.items()}
        found = []
        for parcel in parcels:
            if parcel.destination != self._rank:
                continue
            if parcel.source == self._rank:
                found.append((parcel, own[parcel]))
            else:
                state, plain = next(texts[parcel.source])
                layers = {i: (s, a, [(n, Place(*p)) for n, p in t]) for i, (s, a, t) in plain.items()}
                found.append((parcel, _Told(state, layers)))
        return found

    def _allocate(self, told: Sequence[tuple[Parcel, _Told]]) -> tuple[dict[int, _Arrived], dict[str, Any]]:
        """Layers of which the tensors are still to come, and this rank's state."""
        state: dict[str, Any] = {}
        arrived: dict[int, _Arrived] = {}
        for parcel, (text, layers) in told:
            if parcel.part is Part.STATE:
                with torch.serialization.safe_globals(known_classes()):
                    state = torch.load(io.BytesIO(text), map_location="cpu", weights_only=True)
            elif parcel.part is Part.ALL:
                for index, ((head, body), starts, _) in layers.items():
                    tensors, entries = make_room(head, self._stage.device)
                    spread = [set(names) for names, _ in starts]
                    arrived[index] = _Arrived(body, tensors, entries, spread)
        return dict(sorted(arrived.items())), state

    def _transfer(
        self, parcels: Sequence[Parcel], told: Sequence[tuple[Parcel, _Told]], arrived: dict[int, _Arrived]
    ) -> None:
        """Let all bytes travel through host memory, and give each to the tensor that it is of."""
        sends: dict[int, list[Tensor]] = {}
        for parcel in parcels:
            if parcel.source == self._rank and parcel.destination != self._rank:
                for _, _, places in self._told(parcel).layers.values():
                    sends.setdefault(parcel.destination, []).extend(self._bytes(parcel.owner, p) for _, p in places)
        receives: dict[int, list[Tensor]] = {}
        deliveries: list[tuple[Parcel, int, list[Start], int, Place, Tensor]] = []
        for parcel, (_, layers) in told:
            for index, (_, starts, places) in layers.items():
                for number, place in places:
                    if parcel.source == self._rank:
                        data = self._bytes(parcel.owner, place)
                    else:
                        data = torch.empty(place.num_bytes, dtype=torch.uint8)
                        receives.setdefault(parcel.source, []).append(data)
                    deliveries.append((parcel, index, starts, number, place, data))
        journey = Transfer(
            sends, receives, buffer_bytes=self._run.config.transfer_buffer_bytes, device=self._stage.device
        )
        journey.start()
        journey.finish()
        self._deliver(deliveries, arrived)

    def _bytes(self, owner: Seat, place: Place) -> Tensor:
        return self._copy(owner).data[place.start : place.start + place.num_bytes]

    def _deliver(
        self, deliveries: Iterable[tuple[Parcel, int, list[Start], int, Place, Tensor]], arrived: dict[int, _Arrived]
    ) -> None:
        pieces: dict[tuple[int, int, str], list[tuple[int, Tensor]]] = {}
        numbers = {index: self._numbers(each) for index, each in arrived.items()}
        for parcel, index, starts, number, place, data in deliveries:
            tensors = arrived[index].tensors.all
            if place.whose == SHARD:
                _, k, name = place.key
                pieces.setdefault((index, k, name), []).append((starts[k][1], data))
            else:
                target = tensors[number if parcel.part is Part.ALL else numbers[index][place.key]]
                fill(target, data)
        for (index, k, name), found in pieces.items():
            entry = arrived[index].entries[k]
            dtype = self._dtype(arrived[index], k, name)
            parts = tuple(data.view(dtype) for _, data in sorted(found, key=lambda item: item[0]))
            entry.state[name] = Pieces(parts)
            arrived[index].spread[k].add(name)

    @staticmethod
    def _numbers(arrived: _Arrived) -> dict[tuple[Any, ...], int]:
        """Tensors that another replica's copy fills, by their name."""
        tensors = arrived.tensors.all
        number = {id(tensor): n for n, tensor in enumerate(tensors)}
        found: dict[tuple[Any, ...], int] = {}
        for k, entry in enumerate(arrived.entries):
            found["parameter", k] = number[id(entry.parameter)]
            for name, value in entry.state.items():
                if isinstance(value, Tensor):
                    found["state", k, name] = number[id(value)]
        return found

    @staticmethod
    def _dtype(arrived: _Arrived, k: int, name: str) -> torch.dtype:
        known = arrived.entries[k].state.get(name)
        return known.dtype if known is not None else torch.float32  # which flat optimizers keep

    # -- the change ---------------------------------------------------------------------------

    def _take_in(self, arrived: dict[int, _Arrived]) -> dict[int, nn.Module]:
        stage, module, optimizer = self._stage, self._stage.module, self._stage.optimizer
        before, old = module.placement, module.local_layers()
        names = module.surroundings.names(old.values(), stage.pipeline)
        departed = [p for layer in old.values() for p in layer.parameters() if id(p) not in names.shared]
        layers: dict[int, nn.Module] = {}

        def change() -> None:
            for index, each in arrived.items():
                made = unpack(
                    each.body, each.tensors, names=names, device=stage.device,
                    build=partial(module.surroundings.build, index), journal=self._journal,
                ).layer
                if made is not None:
                    layers[index] = made
            module.install(Placement.from_boundaries(self._boundaries), dict(sorted(layers.items())))
            stage.pipeline.name_parameters()
            if optimizer is not None:
                optimizer.prepare(departed, {e.parameter: e.group for e in entries if e.group is not None})

        def put_back() -> None:
            undo(self._journal)
            module.install(before, old)
            stage.pipeline.name_parameters()

        entries = [entry for each in arrived.values() for entry in each.entries]
        plain = not isinstance(optimizer, FlatOptimizer)
        states = {e.parameter: e.state for e in entries if e.group is not None} if plain else {}
        Transaction(optimizer, stage.device, f"going back to the snapshot of batch {self._batch}").run(
            change, put_back, states
        )
        module.surroundings.leave(dict(old))
        return layers

    def _finish(self, layers: Mapping[int, nn.Module], arrived: dict[int, _Arrived], state: dict[str, Any]) -> None:
        run, pipeline, optimizer = self._run, self._stage.pipeline, self._stage.optimizer
        engine = state["engine"]
        if isinstance(optimizer, FlatOptimizer):
            states = dict(pair for each in arrived.values() for pair in each.states())
            template = {
                key: _in_pieces(value) if isinstance(value, Tensor) and not value.numel() else value
                for key, value in state["template"].items()
            }
            restore_state(optimizer, states, engine["settings"], template)
        elif optimizer is not None:
            for group, setting in zip(optimizer.groups.optimizer.param_groups, engine["settings"], strict=True):
                group.update(setting)
        take_engine_state(pipeline, engine)
        self._stage.settle()
        run.profiler.sizes_changed()
        restore_extras(run, state["common"], state["rank"], same_stages=self._same_stages)
        run.balancer.ordering.adopt(None, self._stage.partition)
        run.repeating.went_back(state["extra"])


def fill(target: Tensor, data: Tensor) -> None:
    """Give a dense tensor its bytes.

    Args:
        target: of any layout without gaps.
        data: the elements, as they lie in memory.
    """
    with torch.no_grad():
        flat_view(target).copy_(data.view(target.dtype) if data.numel() else flat_view(target))


def _in_pieces(value: Any) -> Any:
    return value if isinstance(value, Pieces) else Pieces((value.view(-1),))
