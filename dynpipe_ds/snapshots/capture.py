"""A worker's state between two batches: plain values, and tensors with their places in one row of bytes.

A layer with its optimizer state is encoded as for a move (:mod:`dynpipe_ds.migration.packing`): its skeleton and its
tensors. What a batch changes before its optimizer step (buffers, what layers keep on themselves) is to be copied before
the batch; parameters and optimizer state change in the step alone, and can be copied while the batch computes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dynpipe_ds.checkpoint.extras import common_state, rank_state
from dynpipe_ds.checkpoint.plain import plain
from dynpipe_ds.host.counters import engine_state
from dynpipe_ds.host.optimizers.groups import Entry
from dynpipe_ds.host.optimizers.stage_optimizer import Share
from dynpipe_ds.migration.packing import Package, pack
from dynpipe_ds.owning import is_owned

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

OWN, SHARED, SHARD = 0, 1, 2
"""Whose a tensor is: this replica's alone, every replica's alike, or this replica's share of the stage's."""

LINE = 64  # bytes; every tensor begins at a multiple

Key = tuple[Any, ...]
"""What a tensor is called in any replica's copy: ``("parameter", k)`` or ``("state", k, name)`` of its layer's k-th
parameter; empty for what may have no counterpart there."""


Start = tuple[tuple[str, ...], int]
"""Of one parameter: names of the state that replicas share out, and the first element of this replica's share."""


class Place(NamedTuple):
    """Where a tensor of a layer lies in a copy.

    Attributes:
        whose: :data:`OWN`, :data:`SHARED` or :data:`SHARD`.
        key: its name in other replicas' copies.
        start: first byte.
        num_bytes: how many.
    """

    whose: int
    key: Key
    start: int
    num_bytes: int


@dataclass
class Captured:
    """What is to be copied.

    Attributes:
        manifest: plain values, pickled: see :func:`capture`.
        now: tensors to copy before the batch, with their first byte.
        during: tensors to copy before the optimizer's step.
        num_bytes: of all tensors in their places.
        own_bytes: of those at the front that other replicas do not have.
        is_sharded: whether replicas share out optimizer state.
        warnings: what could not be carried.
    """

    manifest: bytes = b""
    now: list[tuple[Tensor, int]] = field(default_factory=list)
    during: list[tuple[Tensor, int]] = field(default_factory=list)
    num_bytes: int = 0
    own_bytes: int = 0
    is_sharded: bool = False
    warnings: list[str] = field(default_factory=list)


class _Layer(NamedTuple):
    package: Package
    whose: list[int]
    keys: list[Key]


def capture(run: Run, extra: Mapping[str, Any]) -> Captured:
    """Take this worker's state apart; nothing is copied yet but plain values and random streams.

    Args:
        run: between two batches.
        extra: plain values to keep with it.

    Returns:
        What to copy. Its manifest is ``(state, layers)``: the first in the format of ``torch.save``; of each layer by
        index its head and body, the :data:`Start` of each parameter, and the places of its tensors.

    Raises:
        PackingError: if a layer holds what can't be carried now.
        CheckpointError: if the state holds what could not be read again.
    """
    stage = run.stage
    names = stage.module.surroundings.names(stage.local_layers().values(), stage.pipeline)
    taken: dict[int, tuple[_Layer, list[Start]]] = {}
    layers = stage.local_layers()
    for index in stage.module.local_indices():
        taken[index] = _take(run, index, layers.get(index), names)
    found = Captured()
    places = {index: [Place(OWN, (), 0, 0)] * len(layer.whose) for index, (layer, _) in taken.items()}
    for shared in (False, True):
        for index, (layer, _) in taken.items():
            for number, tensor in _tensors(layer, shared=shared):
                data = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
                places[index][number] = Place(
                    layer.whose[number], layer.keys[number], found.num_bytes, data.numel()
                )
                (found.during if layer.keys[number] else found.now).append((data, found.num_bytes))
                found.num_bytes += -(-data.numel() // LINE) * LINE
        if not shared:
            found.own_bytes = found.num_bytes
    described = {
        index: ((layer.package.head, layer.package.body), starts, [tuple(place) for place in places[index]])
        for index, (layer, starts) in taken.items()
    }
    found.manifest = pickle.dumps((_state(run, extra), described))
    found.is_sharded = any(SHARD in layer.whose for layer, _ in taken.values())
    found.warnings = [text for layer, _ in taken.values() for text in layer.package.warnings]
    return found


def _tensors(layer: _Layer, *, shared: bool) -> Iterator[tuple[int, Tensor]]:
    tensors = layer.package.tensors.all
    return ((n, t) for n, t in enumerate(tensors) if (layer.whose[n] == SHARED) is shared)


def _take(run: Run, index: int, module: nn.Module | None, names: Any) -> tuple[_Layer, list[Start]]:
    stage = run.stage
    parameters = [] if module is None else [p for p in module.parameters() if id(p) not in names.shared]
    shares = [Share({}) for _ in parameters]
    groups: Mapping[nn.Parameter, int] = {}
    if stage.optimizer is not None:
        shares, groups = stage.optimizer.shares(parameters), stage.optimizer.groups.index
    entries = [Entry(p, groups.get(p), s.state) for p, s in zip(parameters, shares, strict=True)]
    name = f"layer {index} ({stage.module.layer_names()[index]})"
    package = pack(
        module, name, entries, names=names, device=stage.device,
        has_template=stage.module.surroundings.has_template(index),
    )
    replicas = stage.module.replica.count
    known: dict[int, tuple[int, Key]] = {}
    for k, (parameter, share) in enumerate(zip(parameters, shares, strict=True)):
        alone = replicas == 1 or is_owned(parameter)
        known[id(parameter)] = (OWN if alone else SHARED, ("parameter", k))
        for key, value in share.state.items():
            if isinstance(value, Tensor):
                whose = OWN if alone else SHARD if key in share.spread else SHARED
                known[id(value)] = (whose, ("state", k, key))
    labels = [known.get(id(source), (OWN, ())) for source in package.sources]
    layer = _Layer(package, [whose for whose, _ in labels], [key for _, key in labels])
    return layer, [(tuple(sorted(share.spread)), share.start) for share in shares]


def _state(run: Run, extra: Mapping[str, Any]) -> bytes:
    """Everything but layers, as ``torch.save`` writes it."""
    optimizer = run.stage.optimizer
    state = {
        "common": common_state(run),
        "rank": {**rank_state(run, with_attributes=False), "overhead": {}},
        "engine": engine_state(run.stage.pipeline),
        "template": {} if optimizer is None else optimizer.template(),
        "extra": dict(extra),
    }
    buffer = io.BytesIO()
    torch.save(plain(state, "the state of this rank: "), buffer)
    return buffer.getvalue()
