"""How fast workers are, from layers that were measured on several of them.

What a layer takes on one worker is the product of what the layer costs and of how slow the worker is. Where layers move
between two workers, and no layer has changed, the second follows from what they took before and after. Replicas of a
stage run the same layers, so one that is slow shows without any move (``replicas.py``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import Any

from dynpipe_ds.decide.evidence import USUAL, noise_of
from dynpipe_ds.decide.replicas import LEAST_RATIO, Replicas
from dynpipe_ds.placement import Placement

CONFIDENCE = 2.0
"""A difference must exceed so many standard deviations of what was measured.

Batches in which nothing moves tell of no difference, whatever their noise. After a move, under 10% of noise of whole
ranks, one of 1.1 is claimed by mistake in one of forty moves; the next move corrects it.
"""

_BATCHES = 4  # before and after a move
_SPAN = 12  # batches that all of these must lie within: layers change slowly, too
_LEAST_BATCHES = 2
_UNUSUAL = 3.0  # times what usually goes from some layers to others between two batches
_LEAST_CHANGE = 0.02  # of the time: less is no change

_Batch = tuple[int, tuple[float, ...]]  # its number, and what its layers took


class Speeds:
    """Relative speeds of the workers of a pipeline.

    Args:
        given: by the section, for each stage; ``None``: all alike. What is measured corrects it.

    Attributes:
        values: one for each stage, 1.0 for a normal worker, of replicas the slowest one's, which all others wait for;
            ``None`` where none was given and none differs.
    """

    def __init__(self, given: Sequence[float] | None) -> None:
        self._given = None if given is None else tuple(given)
        self._replicas = Replicas()
        self._links: dict[tuple[int, int], float] = {}  # logarithm of how much slower the second of two workers is
        self._boundaries: tuple[int, ...] = ()
        self._costs: deque[_Batch] = deque(maxlen=_BATCHES)
        self._shifts: deque[float] = deque(maxlen=2 * _BATCHES)
        self._before: tuple[tuple[int, ...], list[_Batch]] | None = None
        self._num_stages = 0
        self.values = self._put_together()

    @property
    def means(self) -> list[float] | None:
        """The same of a mean over each stage's replicas, as layers are measured."""
        if self.values is None or not self._replicas.slowness:
            return self.values
        ratios = [self._replicas.slowest(stage) - self._replicas.mean(stage) for stage in range(len(self.values))]
        return [speed * math.exp(ratio) for speed, ratio in zip(self.values, ratios, strict=True)]

    def _put_together(self) -> list[float] | None:
        replicas = self._replicas
        if not self._links and not replicas.slowness:
            return None if self._given is None else list(self._given)
        given = [
            # Of a worker that was said to be slow, what one replica explains is that one's.
            max(0.0, -math.log(speed) - replicas.slowest(stage)) if speed < 1.0 else -math.log(speed)
            for stage, speed in enumerate(self._given or [1.0] * self._num_stages)
        ]
        found = list(given)
        for group in self._groups():
            slowness = self._relative(group)
            # Most workers are as they were said to be; of two the faster one.
            shift = median_low([slowness[stage] - given[stage] for stage in group])
            for stage in group:
                value = slowness[stage] - shift
                found[stage] = value if abs(value - given[stage]) > math.log(LEAST_RATIO) / 2 else given[stage]
        if found == given and not replicas.slowness:
            return None if self._given is None else list(self._given)
        return [math.exp(-value - replicas.slowest(stage)) for stage, value in enumerate(found)]

    def observe(
        self, batch: int, boundaries: Sequence[int], costs: Sequence[float], busy_s: Sequence[Sequence[float]] = ()
    ) -> bool:
        """Take in what layers took in a batch.

        Args:
            batch: its number.
            boundaries: the partition it ran on.
            costs: L seconds of a micro-batch, as measured, means over the replicas.
            busy_s: S stages x R replicas, seconds that workers computed for; empty where there is one replica.

        Returns:
            Whether :attr:`values` are others than before.
        """
        cuts, known = tuple(boundaries), (self.values, self.means)
        if len(cuts) - 1 != self._num_stages:
            self._num_stages, self._links, self._before = len(cuts) - 1, {}, None
            self._costs.clear()
            self._replicas = Replicas()
        elif cuts != self._boundaries:
            self._before = self._boundaries, list(self._costs)
            self._costs.clear()
        self._boundaries = cuts
        if self._replicas.observe(busy_s):
            self.expect_change()  # what layers took before was divided by other speeds
        stages = Placement.from_boundaries(cuts).layer_stages
        usual = [math.exp(-self._replicas.mean(stage)) for stage in range(self._num_stages)]
        newest = tuple(cost * usual[stage] for cost, stage in zip(costs, stages, strict=True))
        if self._costs and self._is_change(newest):
            self.expect_change()
        self._costs.append((batch, newest))
        if self._before is not None and len(self._costs) >= _LEAST_BATCHES:
            before = [costs for number, costs in self._before[1] if number > batch - _SPAN]
            if len(before) >= _LEAST_BATCHES:
                self._compare(self._before[0], before)
            if len(self._costs) == _BATCHES:  # later on layers may have changed
                self._before = None
        self.values = self._put_together()
        return (self.values, self.means) != known

    def describe(self) -> list[str]:
        """Which workers differ, a few words each."""
        found = []
        for stage, speed in enumerate(self.values or ()):
            differing = self._replicas.differing(stage)
            named = [(f"replica {replica} of stage {stage}", math.exp(log)) for replica, log in differing]
            found += named or [(f"stage {stage}", 1 / speed)]
        return [
            f"{name} {'slower' if slowness > 1 else 'faster'} by {max(slowness, 1 / slowness):.2f}x"
            for name, slowness in found if slowness != 1.0
        ]

    def expect_change(self) -> None:
        """Layers have changed: what they took before tells nothing of workers."""
        self._costs.clear()
        self._before = None

    # -- measuring ----------------------------------------------------------------------------

    def _is_change(self, newest: tuple[float, ...]) -> bool:
        """Whether layers have changed since the batch before, which ran on the same workers.

        Layers are often moved because they have changed, so what they took before must not be compared with what they
        take afterwards.
        """
        before = self._costs[-1][1]
        totals = sum(newest) or 1.0, sum(before) or 1.0
        shift = sum(abs(new / totals[0] - old / totals[1]) for new, old in zip(newest, before, strict=True))
        known = bool(self._shifts)
        unusual = max(_LEAST_CHANGE, _UNUSUAL * median(self._shifts)) if known else math.inf
        self._shifts.append(min(shift, unusual))
        return shift > unusual

    def _compare(self, boundaries: tuple[int, ...], costs: list[tuple[float, ...]]) -> None:
        """What layers took on their old and their new worker; those that stayed tell how the old one has changed."""
        after = [costs for _, costs in self._costs]
        stayed_layers, moved = _stayed_and_moved(boundaries, self._boundaries)
        found = {stage: _Ratio.of(layers, costs, after) for stage, layers in stayed_layers.items()}
        stayed = {stage: ratio for stage, ratio in found.items() if ratio is not None}
        usual = median([ratio.log for ratio in stayed.values()]) if stayed else 0.0
        # Layers that stayed and take another share of the time: the model changes, and moved layers may have, too.
        drift = max([abs(ratio.log - usual) for ratio in stayed.values()] + [abs(usual)])
        chance = max([CONFIDENCE * ratio.noise for ratio in stayed.values()], default=0.0)
        tells = drift <= max(math.log(LEAST_RATIO), chance)  # else by more than those that stayed, perhaps
        for (a, b), layers, beside in moved:
            ratio, together = _Ratio.of(layers, costs, after), _Ratio.of(layers, costs, after, beside)
            if ratio is None or together is None:
                continue
            noise = max([ratio.noise, *(other.noise for other in stayed.values())])
            own, doubt = stayed[a].log if a in stayed else usual, max(CONFIDENCE * noise, drift)
            slower, with_others = ratio.log - own, together.log - own
            least = min(abs(slower), abs(with_others)) if slower * with_others > 0 else 0.0
            pair, slower = ((a, b), slower) if a < b else ((b, a), -slower)
            if least > max(math.log(LEAST_RATIO), doubt):
                if tells:
                    self._links[pair] = slower
            elif pair in self._links and abs(self._links[pair]) > doubt:
                self._links[pair] = 0.0  # no longer

    # -- putting together ---------------------------------------------------------------------

    def _neighbours(self, stage: int) -> list[tuple[int, float]]:
        found = [(b, slower) for (a, b), slower in self._links.items() if a == stage]
        return found + [(a, -slower) for (a, b), slower in self._links.items() if b == stage]

    def _groups(self) -> list[list[int]]:
        """Workers that are linked by measurements, directly or over others."""
        found: list[list[int]] = []
        seen: set[int] = set()
        for first in sorted({stage for pair in self._links for stage in pair}):
            group = [] if first in seen else [first]
            seen.add(first)
            for stage in group:
                new = [other for other, _ in self._neighbours(stage) if other not in seen]
                seen.update(new)
                group += new
            if group:
                found.append(sorted(group))
        return found

    def _relative(self, group: Sequence[int]) -> dict[int, float]:
        """Logarithms of how slow the workers of a group are; the first one's is 0."""
        slowness, reached = {group[0]: 0.0}, [group[0]]
        for stage in reached:
            for other, slower in self._neighbours(stage):
                if other not in slowness:
                    slowness[other] = slowness[stage] + slower
                    reached.append(other)
        return slowness

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, plain values."""
        return {
            "links": [(a, b, slower) for (a, b), slower in self._links.items()], "boundaries": self._boundaries,
            "costs": list(self._costs), "before": self._before, "shifts": list(self._shifts),
            "replicas": self._replicas.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; empty from an older checkpoint, or from other stages.
        """
        self._links = {(a, b): slower for a, b, slower in state.get("links", ())}
        self._boundaries = tuple(state.get("boundaries", ()))
        self._num_stages = max(0, len(self._boundaries) - 1)
        self._costs = deque(map(_batch, state.get("costs", ())), maxlen=_BATCHES)
        self._shifts = deque(state.get("shifts", ()), maxlen=2 * _BATCHES)
        self._replicas.load_state_dict(state.get("replicas", {}))
        before = state.get("before")
        self._before = None if before is None else (tuple(before[0]), list(map(_batch, before[1])))
        self.values = self._put_together()


def _batch(stored: Any) -> _Batch:
    number, costs = stored
    return number, tuple(costs)


def _stayed_and_moved(
    before: Sequence[int], after: Sequence[int]
) -> tuple[dict[int, list[int]], list[tuple[tuple[int, int], list[int], list[int]]]]:
    """Which layers tell how much slower one worker is than another.

    A pass of a stage begins with its first or its last layer, and what a pass takes by itself is measured with that
    layer. So where a boundary moves by one layer, three layers take other times on workers that are alike; together
    they take what they took.

    Args:
        before: S + 1 boundaries.
        after: the same.

    Returns:
        Of each stage the layers that stayed in the midst of it. Of two stages the layers that went from the first to
        the second, with the layers beside them that stayed, and now begin or end a stage, or did so before.
    """
    old, new = (Placement.from_boundaries(cuts).layer_stages for cuts in (before, after))
    ends = [{position for cut in cuts for position in (cut - 1, cut)} for cuts in (before, after)]
    num_layers = len(old)
    turned = {layer for layer in range(num_layers) if (layer in ends[0]) != (layer in ends[1])}
    stayed: dict[int, list[int]] = {}
    moved: dict[tuple[int, int], list[int]] = {}
    for layer, pair in enumerate(zip(old, new, strict=True)):
        if pair[0] != pair[1]:
            moved.setdefault(pair, []).append(layer)
        elif layer not in turned:
            stayed.setdefault(pair[0], []).append(layer)
    found = []
    for pair, layers in moved.items():  # layers of a pair are a row
        sides = (layers[0] - 1, layers[-1] + 1)
        found.append((pair, layers, [i for i in sides if i in turned and old[i] == new[i]]))
    return stayed, found


class _Ratio:
    """What some layers took after a move, over what they took before.

    Args:
        log: its logarithm.
        noise: standard deviation of that.
    """

    def __init__(self, log: float, noise: float) -> None:
        self.log, self.noise = log, noise

    @classmethod
    def of(
        cls, layers: Sequence[int], before: Sequence[Sequence[float]], after: Sequence[Sequence[float]],
        beside: Sequence[int] = (),
    ) -> _Ratio | None:
        """Compare.

        Args:
            layers: which.
            before: seconds of all layers in each batch before.
            after: the same afterwards.
            beside: layers that what these take more than before is added to.

        Returns:
            ``None`` where they took nothing.
        """
        sums, others = (
            [[math.fsum(costs[layer] for layer in some) for costs in batches] for batches in (before, after)]
            for some in (layers, beside)
        )
        had = median(others[0])
        sums[1] = [own + other - had for own, other in zip(sums[1], others[1], strict=True)]
        usual = [median(each) for each in sums]
        if min(usual) <= 0:
            return None
        series = ([value / middle for value in each] for each, middle in zip(sums, usual, strict=True))
        one = max(noise_of(each, usual=USUAL) for each in series)
        return cls(math.log(usual[1] / usual[0]), one * math.sqrt(1 / len(before) + 1 / len(after)))
