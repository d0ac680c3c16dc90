"""All partitions of one pipeline: what their stages have to do, may hold and take at least."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import fsum, inf

import numpy as np

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition.neighbours import Cuts, IntArray
from dynpipe_ds.partition.problem import Problem
from dynpipe_ds.placement import Placement
from dynpipe_ds.planning.bounds import bounds, num_ahead, stage_bounds
from dynpipe_ds.planning.even import even_cuts, most_groups
from dynpipe_ds.planning.listing import link_tables, new_works
from dynpipe_ds.planning.memory import num_late, worker_bytes_of_1f1b
from dynpipe_ds.planning.pace import pace
from dynpipe_ds.planning.planner import num_computations
from dynpipe_ds.planning.runs import Work
from dynpipe_ds.simulation import Workload
from dynpipe_ds.simulation.workload import FloatArray, Seconds, frozen_boundaries, table

_EVEN = ((0.0, 4), (1.0, 6), (2.0, 4))
"""How often the idle seconds of a stage count, since an order waits for longer than it must, and how many doublings."""
_MOST_CELLS = 2_000_000  # choices of a stage's groups: 0.2 seconds, and 16 MB for each number that is known of them


class Partitions:
    """What partitions of one pipeline have to do, may hold and take at least.

    Args:
        profile: seconds and bytes of every layer, and M.
        problem: which partitions there are; their cuts lie between its groups of layers.
        worker_bytes: state and activations that a worker may hold, for all or for each; None: what the fullest worker
            holds under 1F1B on the present partition.
        present: S + 1 layer indices.
        weight_bytes: as for :meth:`~dynpipe_ds.simulation.Workload.from_profile`.
        links_s: seconds of activations and of gradients over every boundary.
        varying: batches that the profile is the mean of; empty if it is all that is known.

    Attributes:
        num_computations: of a batch.
    """

    def __init__(
        self, profile: PipelineProfile, problem: Problem, worker_bytes: int | Sequence[int] | None,
        present: tuple[int, ...], weight_bytes: Sequence[int] | None, links_s: tuple[Seconds, Seconds],
        varying: Sequence[PipelineProfile],
    ) -> None:
        self.profile, self.problem, self.links_s = profile, problem, links_s
        self.weight_bytes = profile.activation_bytes() if weight_bytes is None else list(weight_bytes)
        self.worker_bytes = worker_bytes_of_1f1b(profile, present) if worker_bytes is None else worker_bytes
        self._activation_bytes = profile.activation_bytes()
        self.varying, (self._until_s, self._until_held) = varying, self._sums(varying or [profile])
        self.num_computations = num_computations(problem.num_stages, profile.num_micro_batches)
        there_s, back_s = (
            table(name, seconds, problem.num_stages - 1, profile.num_micro_batches)
            for name, seconds in zip(("activation_link_s", "gradient_link_s"), links_s, strict=True)
        )
        self._links = link_tables(there_s, back_s, profile.num_micro_batches)
        self._there_s, self._back_s = there_s.min(axis=1), back_s.min(axis=1)
        self._speeds = np.array(problem.speeds)
        self._layers_s = [
            [[getattr(layer, name) for layer in each.layers] for each in (profile, *varying)]
            for name in ("forward_s", "backward_s", "split_s", "weight_s")
        ]
        self._known_sums_s: dict[tuple[int, int], FloatArray] = {}
        self._known_weights_s: dict[tuple[int, int], FloatArray] = {}
        self._until_state_bytes = [0, *accumulate(profile.state_bytes())]
        self._until_weight_bytes = [0, *accumulate(self.weight_bytes)]
        self._most = np.broadcast_to(np.array(self.worker_bytes), problem.num_stages).tolist()
        self._num_bounded = self._num_cells = 0
        self._placements: dict[Cuts, Placement] = {}

    def _sums(self, batches: Sequence[PipelineProfile]) -> tuple[FloatArray, IntArray]:
        """Of the first groups of layers.

        Returns:
            Seconds of forwards, backwards and gradients of weights, ``(3, B, G + 1)``; and how many layers train, bytes
            of state and of activations, ``(3, G + 1)``.
        """
        seconds = [
            [[layer.forward_s, layer.backward_s, min(layer.weight_s, layer.backward_s)] for layer in batch.layers]
            for batch in batches
        ]
        trains = [layer.backward_s > 0 for layer in self.profile.layers]
        held = [trains, self.profile.state_bytes(), self._activation_bytes]
        starts = list(self.problem.starts)
        until_s = np.cumsum(np.array(seconds).transpose(2, 0, 1), axis=-1)
        until_held = np.cumsum(np.array(held, dtype=np.int64), axis=-1)
        return (
            np.insert(until_s, 0, 0.0, axis=-1)[..., starts],
            np.insert(until_held, 0, 0, axis=-1)[..., starts],
        )  # fmt: skip

    @property
    def num_aside(self) -> int:
        """Computations that could be looked at in the time that bounds and even partitions have taken."""
        now = pace()
        return int(self._num_bounded / now.bounds_a_computation) + int(self._num_cells / now.cells_a_computation)

    def placement(self, cuts: Cuts) -> Placement:
        """The layers of cuts between groups."""
        if cuts not in self._placements:
            self._placements[cuts] = Placement.of([self.problem.starts[cut] for cut in cuts])
        return self._placements[cuts]

    def workload(self, cuts: Cuts, late: Sequence[int]) -> Workload:
        """Of the profile."""
        return Workload.from_profile(
            self.profile, self.placement(cuts), speeds=self.problem.speeds, weight_bytes=self.weight_bytes, late=late,
            activation_link_s=self.links_s[0], gradient_link_s=self.links_s[1],
        )

    def works(self, cuts: Cuts, late: Sequence[int], caps: Sequence[int]) -> list[Work]:
        """Of the profile, and of each batch that it is the mean of: as of their workloads, to the bit, but sooner.

        Partitions that a search looks at have most of their stages in common.
        """
        ranges = list(pairwise(self.placement(cuts).cuts))
        waiting = [
            (first, first + count) for (first, _), count in zip(ranges, late, strict=True)
        ] if late else ranges  # fmt: skip
        speeds, count = self._speeds[:, None], self.profile.num_micro_batches
        forward_s, backward_s, split_s = np.stack([self._sums_s(*layers) for layers in ranges], axis=1) / speeds
        weight_s = np.stack([self._weights_s(*layers) for layers in waiting]) / speeds
        weight_s = np.minimum(weight_s, backward_s + split_s)  # sums round
        of_stages = np.stack([forward_s, backward_s, split_s, weight_s]).transpose(0, 2, 1)
        seconds = np.array(np.broadcast_to(of_stages[..., None], (*of_stages.shape, count)), order="C")
        return new_works(
            seconds, self._links, [frozen_boundaries(each) for each in backward_s.T.tolist()],
            self.activation_bytes(cuts),
            [sum(self.weight_bytes[first:end]) for first, end in waiting], caps,
        )  # fmt: skip

    def activation_bytes(self, cuts: Cuts) -> list[int]:
        """Of a micro-batch, of each stage."""
        return [sum(self._activation_bytes[first:end]) for first, end in pairwise(self.placement(cuts).cuts)]

    def _sums_s(self, first: int, end: int) -> FloatArray:
        """Of the profile and of each batch, forward, backward and split seconds of some layers, ``(3, 1 + K)``."""
        if (first, end) not in self._known_sums_s:
            self._known_sums_s[first, end] = np.array([
                [fsum(seconds[first:end]) for seconds in batches] for batches in self._layers_s[:3]
            ])  # fmt: skip
        return self._known_sums_s[first, end]

    def _weights_s(self, first: int, end: int) -> FloatArray:
        """The same of gradients of weights, ``(1 + K,)``."""
        if (first, end) not in self._known_weights_s:
            self._known_weights_s[first, end] = np.array([fsum(seconds[first:end]) for seconds in self._layers_s[3]])
        return self._known_weights_s[first, end]

    def caps(self, cuts: Cuts) -> tuple[int, ...]:
        """Bytes of activations that each stage of a partition that fits may hold."""
        until = self._until_state_bytes
        ranges = pairwise(self.placement(cuts).cuts)
        return tuple(most + until[first] - until[end] for most, (first, end) in zip(self._most, ranges, strict=True))

    def late(self, cuts: Cuts, caps: Sequence[int]) -> tuple[int, ...]:
        """Layers of each stage whose gradients of weights have room to wait; empty if all have."""
        ranges = list(pairwise(self.placement(cuts).cuts))
        found = tuple(
            num_late(self._until_weight_bytes, first, end, cap - sum(self._activation_bytes[first:end]))
            for cap, (first, end) in zip(caps, ranges, strict=True)
        )
        return () if all(count == end - first for count, (first, end) in zip(found, ranges, strict=True)) else found

    def least_s(self, candidates: IntArray) -> FloatArray:
        """Lower bounds of many partitions, as batches vary; infinite for those that don't fit."""
        if not len(candidates):
            return np.zeros(0)
        self._num_bounded += len(candidates) * len(self.varying)
        until_s, until_held = (each.take(candidates, axis=-1) for each in (self._until_s, self._until_held))
        seconds, held = (each[..., 1:] - each[..., :-1] for each in (until_s, until_held))
        forward_s, backward_s, weight_s = np.maximum(seconds, 0.0) / self._speeds
        input_s = np.maximum(backward_s - weight_s, 0.0)
        count = self.profile.num_micro_batches
        trains, activation_bytes, caps = held[0] > 0, held[2], np.array(self.worker_bytes) - held[1]
        found = bounds(
            forward_s, input_s, count * (forward_s + input_s), count * weight_s, self._there_s,
            np.where(trains.any(axis=1), trains.argmax(axis=1), 0), gradient_link_s=self._back_s,
            ahead_s=num_ahead(caps, activation_bytes, count) * forward_s,
        )
        return np.where((caps >= activation_bytes).all(axis=1), found.mean(axis=0), inf)

    def even(self) -> list[Cuts]:
        """Partitions whose stages take about as long, by what they compute and what they can't but be idle."""
        busy_s, idle_s = self._stage_seconds()
        self._num_cells += busy_s.size
        found = (even_cuts(busy_s + share * idle_s, num_doublings) for share, num_doublings in _EVEN)
        return [cuts for cuts in dict.fromkeys(found) if cuts is not None]

    def _stage_seconds(self) -> tuple[FloatArray, FloatArray]:
        """What stages compute, and how long they are idle at least, for :func:`even_cuts`."""
        num_stages, count = self.problem.num_stages, self.profile.num_micro_batches
        until_s, until_held = self._until_s.mean(axis=1), self._until_held
        input_s = until_s[1] - until_s[2]
        ends = np.arange(self.problem.num_groups + 1)[:, None]
        width = most_groups(until_s[0] + until_s[1], num_stages)
        starts = ends - np.arange(min(width, _MOST_CELLS // (num_stages * len(ends))) + 1)
        is_allowed = (starts >= 0) & ((starts < ends) | self.problem.allow_empty)
        starts = np.maximum(starts, 0)
        held = until_held[:, ends] - until_held[:, starts]
        speeds = self._speeds[:, None, None]
        usual = float(np.mean(self.problem.speeds))
        seconds = np.maximum(until_s[:, ends] - until_s[:, starts], 0.0)
        forward_s, backward_s, weight_s = (each / speeds for each in seconds)
        awaited_s = count * (forward_s + np.maximum(backward_s - weight_s, 0.0))
        both_s = self._there_s + self._back_s
        before_s, behind_s = (
            np.array(sums)[:, None, None]
            for sums in ([0.0, *np.cumsum(self._there_s)], [*np.cumsum(both_s[::-1])[::-1], 0.0])
        )
        rest_s = (until_s[0][-1] + input_s[-1] - until_s[0][ends] - input_s[ends]) / usual
        worker_bytes = np.broadcast_to(np.array(self.worker_bytes), num_stages)[:, None, None]
        caps, activation_bytes = worker_bytes - held[1], held[2]
        least_s = stage_bounds(
            until_s[0][starts] / usual + before_s, forward_s + rest_s + behind_s,
            num_ahead(caps, activation_bytes, count) * forward_s, awaited_s, count * weight_s,
            input_s[starts] / usual, until_held[0][ends] > 0,
        )
        busy_s = awaited_s + count * weight_s
        return np.where(is_allowed & (caps >= activation_bytes), busy_s, inf), least_s - busy_s
