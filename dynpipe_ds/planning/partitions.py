"""All partitions of one pipeline: what their stages have to do, may hold and take at least."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition.neighbours import Cuts, IntArray
from dynpipe_ds.partition.problem import Problem
from dynpipe_ds.planning.bounds import bounds, num_ahead, stage_bounds
from dynpipe_ds.planning.even import even_cuts, most_groups
from dynpipe_ds.planning.memory import activation_caps, late_layers, worker_bytes_of_1f1b
from dynpipe_ds.planning.planner import num_computations
from dynpipe_ds.simulation import Workload
from dynpipe_ds.simulation.workload import FloatArray, Seconds, table

_EVEN = ((0.0, 4), (1.0, 6), (2.0, 4))
"""How often the idle seconds of a stage count, since an order waits for longer than it must, and how many doublings."""
_BOUNDS_A_COMPUTATION = 5  # bounds of one batch on one partition that take as long as looking at a computation
_CELLS_A_COMPUTATION = 30  # choices of a stage's groups that take as long
_MOST_CELLS = 2_000_000  # of them: 0.2 seconds, and 16 MB for each number that is known of them


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
        self.varying, self.until = varying, self._until(varying or [profile])
        self.num_computations = num_computations(problem.num_stages, profile.num_micro_batches)
        self._there_s, self._back_s = (
            table(name, seconds, problem.num_stages - 1, profile.num_micro_batches).min(axis=1)
            for name, seconds in zip(("activation_link_s", "gradient_link_s"), links_s, strict=True)
        )
        self._num_bounded = self._num_cells = 0

    def _until(self, profiles: Sequence[PipelineProfile]) -> dict[str, FloatArray]:
        """Of each batch the sums over the first groups of layers, by what is summed."""
        newest = self.profile
        rows: dict[str, Sequence[Sequence[float]]] = {
            "forward": [[layer.forward_s for layer in profile.layers] for profile in profiles],
            "backward": [[layer.backward_s for layer in profile.layers] for profile in profiles],
            "weight": [[min(layer.weight_s, layer.backward_s) for layer in profile.layers] for profile in profiles],
            "trains": [[layer.backward_s > 0 for layer in newest.layers]],
            "state": [newest.state_bytes()], "activation": [newest.activation_bytes()],
        }  # fmt: skip
        starts = list(self.problem.starts)
        return {
            name: np.array([[0, *np.cumsum(values)] for values in batches])[:, starts]
            for name, batches in rows.items()
        }  # fmt: skip

    @property
    def num_aside(self) -> int:
        """Computations that could be looked at in the time that bounds and even partitions have taken."""
        return self._num_bounded // _BOUNDS_A_COMPUTATION + self._num_cells // _CELLS_A_COMPUTATION

    def boundaries(self, cuts: Cuts) -> tuple[int, ...]:
        """The layer indices of cuts between groups."""
        return tuple(self.problem.starts[cut] for cut in cuts)

    def workloads(self, cuts: Cuts, late: Sequence[int]) -> list[Workload]:
        """Of the profile, and of each batch that it is the mean of."""
        return [
            Workload.from_profile(
                profile, self.boundaries(cuts), speeds=self.problem.speeds, weight_bytes=self.weight_bytes, late=late,
                activation_link_s=self.links_s[0], gradient_link_s=self.links_s[1],
            )
            for profile in (self.profile, *self.varying)
        ]  # fmt: skip

    def caps(self, cuts: Cuts) -> tuple[int, ...]:
        """Bytes of activations that each stage may hold; a ``ValueError`` where there is no room for one."""
        return activation_caps(self.profile, self.boundaries(cuts), self.worker_bytes)

    def late(self, cuts: Cuts, caps: Sequence[int]) -> tuple[int, ...]:
        """Layers of each stage whose gradients of weights have room to wait; empty if all have."""
        return late_layers(self.profile, self.boundaries(cuts), caps, self.weight_bytes)

    def least_s(self, candidates: IntArray) -> FloatArray:
        """Lower bounds of many partitions, as batches vary; infinite for those that don't fit."""
        if not len(candidates):
            return np.zeros(0)
        self._num_bounded += len(candidates) * len(self.varying)
        sums = {name: np.diff(each[:, candidates], axis=2) for name, each in self.until.items()}
        forward_s, backward_s, weight_s = (
            np.maximum(sums[name], 0.0) / self.problem.speeds for name in ("forward", "backward", "weight")
        )
        input_s = np.maximum(backward_s - weight_s, 0.0)
        count = self.profile.num_micro_batches
        trains, activation_bytes = sums["trains"][0] > 0, sums["activation"][0].astype(np.int64)
        caps = (np.array(self.worker_bytes) - sums["state"][0]).astype(np.int64)
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
        until = {name: each.mean(axis=0) for name, each in self.until.items()}
        input_s = until["backward"] - until["weight"]
        ends = np.arange(self.problem.num_groups + 1)[:, None]
        width = most_groups(until["forward"] + until["backward"], num_stages)
        starts = ends - np.arange(min(width, _MOST_CELLS // (num_stages * len(ends))) + 1)
        is_allowed = (starts >= 0) & ((starts < ends) | self.problem.allow_empty)
        starts = np.maximum(starts, 0)
        held = {name: each[ends] - each[starts] for name, each in until.items()}
        speeds = np.array(self.problem.speeds)[:, None, None]
        usual = float(np.mean(self.problem.speeds))
        forward_s, backward_s, weight_s = (np.maximum(held[n], 0.0) / speeds for n in ("forward", "backward", "weight"))
        awaited_s = count * (forward_s + np.maximum(backward_s - weight_s, 0.0))
        both_s = self._there_s + self._back_s
        before_s, behind_s = (
            np.array(sums)[:, None, None]
            for sums in ([0.0, *np.cumsum(self._there_s)], [*np.cumsum(both_s[::-1])[::-1], 0.0])
        )
        rest_s = (until["forward"][-1] + input_s[-1] - until["forward"][ends] - input_s[ends]) / usual
        worker_bytes = np.broadcast_to(np.array(self.worker_bytes), num_stages)[:, None, None]
        caps, activation_bytes = (worker_bytes - held["state"]).astype(np.int64), held["activation"].astype(np.int64)
        least_s = stage_bounds(
            until["forward"][starts] / usual + before_s, forward_s + rest_s + behind_s,
            num_ahead(caps, activation_bytes, count) * forward_s, awaited_s, count * weight_s,
            input_s[starts] / usual, until["trains"][ends] > 0,
        )
        busy_s = awaited_s + count * weight_s
        return np.where(is_allowed & (caps >= activation_bytes), busy_s, inf), least_s - busy_s
