"""One profile that all ranks agree on, out of what each of them has measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dynpipe_ds.host import accelerator
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile, StageProfile
from dynpipe_ds.measure.recorder import BatchTimes, Stretch


@dataclass(frozen=True)
class LayerSizes:
    """What a layer occupies on this rank.

    Attributes:
        num_parameters: elements of all parameters.
        parameter_bytes: their bytes, buffers included.
        gradient_bytes: bytes of the gradients of trainable parameters.
        optimizer_state_bytes: bytes of optimizer state, master weights included.
    """

    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int


def layer_sizes(
    layer: nn.Module, state_bytes: Callable[[nn.Parameter], int], gradient_dtype: torch.dtype
) -> LayerSizes:
    """Add up what a layer occupies.

    Args:
        layer: a live layer of this stage.
        state_bytes: optimizer-state bytes of one parameter.
        gradient_dtype: what gradients are summed in between micro-batches.
    """
    parameters = list(layer.parameters())
    return LayerSizes(
        num_parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(t.nbytes for t in (*parameters, *layer.buffers())),
        gradient_bytes=sum(p.numel() for p in parameters if p.requires_grad) * gradient_dtype.itemsize,
        optimizer_state_bytes=sum(state_bytes(p) for p in parameters),
    )


_LAYER_FIELDS = 10
_STAGE_FIELDS = 16


class BalancingSeconds(NamedTuple):
    """Seconds that went into balancing since the profile before.

    Attributes:
        gather_s: gathering that profile; of all ranks, the one's that came last to it (the others waited).
        move_s: planning and carrying out the last move, 0 if there was none; of all ranks, the slowest one's.
        own_s: recording the present batch and adding it up, and deciding by the profile before; of all ranks, the
            slowest one's.
        compile_s: compiling layers in the present batch; of all ranks, the slowest one's.
    """

    gather_s: float = 0.0
    move_s: float = 0.0
    own_s: float = 0.0
    compile_s: float = 0.0


def gather_profile(
    times: BatchTimes,
    sizes: dict[int, LayerSizes],
    activation_bytes: dict[int, int],
    *,
    batch: int,
    boundaries: tuple[int, ...],
    names: Sequence[str],
    stage: int,
    device: torch.device,
    spent: BalancingSeconds,
    obstacles: Collection[int] = (),
) -> tuple[PipelineProfile, BalancingSeconds, set[int]]:
    """Put all ranks' measurements together; collective over all ranks.

    Every rank adds the same numbers in the same order, so that all end with the same profile. Replicas
    of a stage are averaged, but for what each computed.

    Args:
        times: this rank's times.
        sizes: sizes of this stage's modules by layer.
        activation_bytes: activation bytes of one micro-batch by layer of this stage.
        batch: number of the batch.
        boundaries: the partition it ran on.
        names: name of every layer of the model.
        stage: this rank's stage.
        device: where the communication back-end works.
        spent: this rank's; it travels along, since a message of its own would cost more than all else here.
        obstacles: layers of which this rank knows that their outputs can't be sent; they travel along, too.

    Returns:
        The profile, what all ranks together spent, and the layers whose outputs can't be sent.
    """
    num_layers, num_stages = len(names), len(boundaries) - 1
    numbers = [0.0] * (num_layers * _LAYER_FIELDS)
    for layer in range(boundaries[stage], boundaries[stage + 1]):
        size = sizes.get(layer, LayerSizes(0, 0, 0, 0))
        numbers[layer * _LAYER_FIELDS : (layer + 1) * _LAYER_FIELDS] = [
            times.forward_s.get(layer, 0.0) / max(1, times.num_micro_batches), *_backward_s(times, layer),
            size.num_parameters, size.parameter_bytes, size.gradient_bytes, size.optimizer_state_bytes,
            activation_bytes.get(layer, 0), layer in obstacles,
        ]
    busy_s = sum(times.forward_s.values()) + sum(times.backward_s.values())
    numbers += [
        stage, busy_s, times.fill_s, times.waiting_s, times.compute_end_s, times.step_s, times.batch_s,
        float(accelerator.peak_memory_bytes()), *_ends(times.first_forward), *_ends(times.first_backward), *spent,
    ]
    message = torch.tensor(numbers, dtype=torch.float64).to(device)
    gathered = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, message)
    everyone = torch.stack(gathered).cpu()

    replicas = dist.get_world_size() / num_stages
    table = (everyone[:, :-_STAGE_FIELDS].sum(0) / replicas).view(num_layers, _LAYER_FIELDS).tolist()
    rows = everyone[:, -_STAGE_FIELDS:].numpy()
    end_s = float(rows[:, 4].max())
    stages = []
    for s in range(num_stages):
        workers = rows[rows[:, 0] == s]
        mean = workers.mean(0)
        stages.append(StageProfile(
            busy_s=float(mean[1]),
            fill_drain_s=float(mean[2] + end_s - mean[4]),
            waiting_s=float(mean[3]),
            step_s=float(mean[5]),
            batch_s=float(mean[6]),
            peak_memory_bytes=int(workers[:, 7].max()),
            replicas_busy_s=tuple(workers[:, 1].tolist()) if len(workers) > 1 else (),
        ))
    profile = PipelineProfile(
        batch=batch,
        boundaries=boundaries,
        num_micro_batches=times.num_micro_batches,
        layers=_layers(names, table),
        stages=tuple(stages),
        link_s=tuple(_links_s(rows, num_stages)),
    )
    obstructing = {layer for layer, row in enumerate(table) if row[-1] > 0}
    spent = BalancingSeconds(float(rows[:, 12].min()), *(float(rows[:, i].max()) for i in (13, 14, 15)))
    return profile, spent, obstructing


def _ends(stretch: Stretch | None) -> tuple[float, float]:
    """When a computation's message came, -1 if that was not seen, and when it ended."""
    if stretch is None:
        return -1.0, -1.0
    return stretch.came_s if stretch.waited else -1.0, stretch.ended_s


def _links_s(rows: Any, num_stages: int) -> Iterator[float | None]:
    """What a message takes over each boundary: half of there and back, in which the ranks' clocks cancel out.

    The first activations leave when a stage's first forward ends, and come to the next stage, which waits for them;
    the first gradients go back alike. NTP's measure of a delay (Mills 1991).
    """
    stages = [rows[rows[:, 0] == stage][:, 8:12] for stage in range(num_stages)]
    for before, after in pairwise(stages):
        came, ended = (after[:, 0], before[:, 2]), (before[:, 1], after[:, 3])
        if min(times.min() for times in (*came, *ended)) < 0:
            yield None
        else:
            both_s = sum(float(arrival.mean() - end.mean()) for arrival, end in zip(came, ended, strict=True))
            yield max(0.0, both_s / 2)


def _backward_s(times: BatchTimes, layer: int) -> tuple[float, float, float]:
    """A layer's mean seconds of a whole backward, of both halves of one that was split, and of the second half."""
    both_s, weight_s = times.halves.get(layer, (0.0, 0.0))
    whole_s = times.backward_s.get(layer, 0.0) - both_s
    num_whole = times.num_micro_batches - (times.num_split if both_s else 0)
    return whole_s / max(1, num_whole), both_s / max(1, times.num_split), weight_s / max(1, times.num_split)


def _layers(names: Sequence[str], table: Sequence[Sequence[float]]) -> tuple[LayerProfile, ...]:
    """Layers of a batch. What splitting adds to a backward is too little to be measured layer by layer."""
    compared = [(whole_s, both_s) for _, whole_s, both_s, weight_s, *_ in table if whole_s and weight_s]
    wholes_s, boths_s = (sum(row[kind] for row in compared) for kind in (0, 1))
    added = max(0.0, boths_s / wholes_s - 1.0) if compared else 0.0
    layers = []
    for name, (forward_s, whole_s, both_s, weight_s, *sizes) in zip(names, table, strict=True):
        backward_s = whole_s or both_s
        split_s = added * whole_s if weight_s else 0.0
        later_s = weight_s / both_s * (backward_s + split_s) if both_s else 0.0
        layers.append(LayerProfile(
            name, forward_s, backward_s, *map(int, sizes[:-1]), weight_s=later_s, split_s=split_s,  # type: ignore[misc]
        ))
    return tuple(layers)
