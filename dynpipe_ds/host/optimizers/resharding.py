"""What ranks send each other of flat buffers that replicas share out, when layers move.

Sender and receiver list the same slices in the same order: both know where a parameter lay and where it shall lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.host.optimizers.flat_buffers import GroupBuffers
from dynpipe_ds.host.optimizers.groups import Entry, State
from dynpipe_ds.host.optimizers.stage_optimizer import NewBuffers, Parts, PlaceText
from dynpipe_ds.messages.values import dtype_name, dtype_of
from dynpipe_ds.migration.shards import Place, runs_of

_PLACE, _KINDS = "place", "kinds"


def description(buffers: GroupBuffers, parameter: nn.Parameter) -> State:
    """What the receiver of a parameter has to know of its state: where it lies, and what there is of it."""
    place = buffers.layout.places[parameter]
    kinds = [(key, dtype_name(value.dtype)) for key, value in buffers.state.items()]
    return {_PLACE: (place.ranks, place.share, place.offset), _KINDS: kinds}


def place_text(buffers: NewBuffers, entry: Entry) -> PlaceText | None:
    """Where the state of a parameter that comes shall lie; ``None`` if it has none."""
    if not _has_state(entry):
        return None
    assert entry.group is not None
    return buffers.new[entry.group].layout.places[entry.parameter][:3]


def _has_state(entry: Entry) -> bool:
    return entry.group is not None and _PLACE in entry.state


def among_replicas(buffers: NewBuffers, found: Parts) -> None:
    """Add what replicas of one stage send each other of the parameters that stay there.

    Args:
        buffers: of this rank.
        found: is added to.
    """
    for i, new in buffers.new.items():
        old = buffers.old[i]
        for run in old.runs_to(new.layout) if len(old.ranks) > 1 and old.layout.places != new.layout.places else ():
            if run.source == run.destination:
                continue
            for key, value in old.state.items():
                if run.source == old.rank:
                    found.sends[run.destination].append(value[run.read_at :][: run.num_elements])
                elif run.destination == old.rank:
                    found.receives[run.source].append(new.state[key][run.write_at :][: run.num_elements])


def leave(
    going: Iterable[tuple[int, nn.Parameter, PlaceText | None]], rank: int, buffers: Sequence[GroupBuffers],
    found: Parts,
) -> None:
    """Add what this rank sends of the parameters that go to another stage.

    Args:
        going: with their groups, and where they shall lie; ``None``: as a whole on the rank.
        rank: that has this one's place in the other stage.
        buffers: of this rank, as they are.
        found: is added to.
    """
    for group, parameter, text in going:
        old = buffers[group]
        before = old.layout.places[parameter]
        for run in runs_of(before, _place(text or ((rank,), before.num_elements, 0), parameter)):
            if run.source == old.rank:
                for value in old.state.values():
                    found.sends[run.destination].append(value[run.read_at :][: run.num_elements])


def arrive(coming: Sequence[Entry], buffers: NewBuffers, found: Parts) -> None:
    """Add what this rank receives of the parameters that come from another stage.

    Args:
        coming: in the sender's order.
        buffers: of this rank.
        found: is added to.
    """
    for entry in filter(_has_state, coming):
        assert entry.group is not None
        new = buffers.new[entry.group]
        before, after = _place(entry.state[_PLACE], entry.parameter), new.layout.places[entry.parameter]
        kinds = dict(entry.state[_KINDS])
        for run in runs_of(before, after):
            if run.destination != new.rank:
                continue
            place = slice(run.write_at, run.write_at + run.num_elements)
            for key, dtype in kinds.items():
                found.receives[run.source].append(_target(new.state.get(key), place, dtype))
            for key in new.state.keys() - kinds.keys():
                new.state[key][place].zero_()


def _target(buffer: Tensor | None, place: slice, dtype: str) -> Tensor:
    """Where a slice is received; what the receiver's optimizer does not have is dropped."""
    if buffer is None:
        return torch.empty(place.stop - place.start, dtype=dtype_of(dtype))
    return buffer[place]


def _place(text: PlaceText, parameter: nn.Parameter) -> Place:
    ranks, share, offset = text
    return Place(tuple(ranks), share, offset, parameter.numel())


def lies_at(parameter: nn.Parameter, place: Place, rank: int) -> bool:
    """Whether DeepSpeed's fragment of a parameter is where its place says that this rank's is."""
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
    piece = next((piece for piece in place.pieces() if piece.rank == rank), None)
    if piece is None or mapping is None:
        return piece is None and mapping is None
    start, position = mapping.lp_fragment_address.start, mapping.hp_fragment_address.start
    size = mapping.hp_fragment_address.numel
    return bool((start, position, size) == (piece.start, piece.position, piece.stop - piece.start))
