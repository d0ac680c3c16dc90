"""What a split backward gives and costs, layer by layer: measured now and then, known from then on.

A batch measures what it runs. Under 1F1B backwards run whole, and nothing tells what their second half would take; so
a few profiled batches are trials. Of their micro-batches every other one splits its backward and runs both halves at
once. That gives each layer's share of the second half, and what splitting adds: both kinds of backwards ran in the same
batch, so it does not matter that a machine is slower in one batch than in the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any

from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.schedule import Order

TRIALS = 2
"""Trials in a row where no order splits backwards by itself: one alone may have been an odd one."""

DRIFT = 0.1
"""Share of the model's backward seconds that must have changed until halves are measured anew."""

SHARE_OF_TIME = 0.003
"""Of the training time, what trials may add once halves are known."""

AGREE = 0.02
"""Measured costs that differ by less agree."""

_FIRST_PAUSE = 8  # batches, where the costs measured so far do not agree; the next one is twice as long
_LONG_PAUSE = 64  # where they do
_LONGER_BY = 448  # where they do and layers are as they were at the last trial, too
_NEWEST = 5  # measurements that a share, or the cost, is the median of


class Halves:
    """Remembers halves.

    Attributes:
        cost: seconds of both halves over those of the whole, at least 1.
        num_trials: so far.
    """

    def __init__(self) -> None:
        self.cost = 1.0
        self.num_trials = 0
        self._costs: deque[float] = deque(maxlen=_NEWEST)
        self._shares: dict[int, list[float]] = {}
        self._backward_s: list[float] = []  # of the newest profile's layers, as if all had run whole
        self._compared_s: list[float] = []  # those when halves were measured the last time
        self._tried_s: list[float] = []  # those at the last trial
        self._batch, self._next_trial, self._pause = -1, 0, _FIRST_PAUSE
        self._is_stale = False
        self._filled: dict[int, tuple[PipelineProfile, PipelineProfile]] = {}  # since the newest batch, by identity

    @property
    def is_known(self) -> bool:
        """Whether halves of any layer were measured; an order that is planned by them goes on measuring them."""
        return bool(self._shares)

    def wants_trial(self, *, splits: bool = False) -> bool:
        """Whether the next profiled batch should be a trial.

        Args:
            splits: whether it splits backwards if it is none: then it measures the halves of layers that have changed
                by itself, and only what splitting adds calls for a trial.
        """
        if self._batch < 0:  # the first is slow in parts
            return False
        if not splits and self.num_trials < TRIALS:
            return True
        late_by = self._batch + 1 - self._next_trial
        if late_by >= 0 and (late_by >= _LONGER_BY or not self._is_as_at_the_last_trial()):
            return True
        return not splits and (self._is_stale or self._has_drifted(self._backward_s, self._compared_s))

    def _is_as_at_the_last_trial(self) -> bool:
        is_sure = len(self._costs) >= TRIALS and self._costs_agree
        return is_sure and not self._has_drifted(self._backward_s, self._tried_s)

    @property
    def _costs_agree(self) -> bool:
        """Whether what splitting added was about the same in all the newest measurements."""
        return max(self._costs, default=1.0) - min(self._costs, default=1.0) <= AGREE

    def expect_change(self) -> None:
        """Layers were frozen, replaced or thawed."""
        self._is_stale = True

    @staticmethod
    def _has_drifted(seconds: Sequence[float], before_s: Sequence[float]) -> bool:
        """Whether layers have other shares of the model's backward; a machine that is slow as a whole changes none.

        Nor do layers that stopped training: nothing is left to be known of them.
        """
        pairs = [pair for pair in zip(seconds, before_s, strict=False) if pair[0]]  # either may be empty as yet
        total_s, total_before_s = sum(new_s for new_s, _ in pairs), sum(old_s for _, old_s in pairs)
        if not total_s or not total_before_s:
            return total_s != total_before_s
        return sum(abs(new_s / total_s - old_s / total_before_s) for new_s, old_s in pairs) > DRIFT

    def observe(self, profile: PipelineProfile, order: Order | None, *, is_trial: bool) -> PipelineProfile:
        """Take in a batch, and give its backwards as if all had run whole.

        Args:
            profile: as measured.
            order: that it ran; ``None``: 1F1B, all backwards whole.
            is_trial: whether it split backwards for the sake of measuring.
        """
        self._filled.clear()
        split = {} if order is None else _split_shares(profile, order)
        compared = [profile.layers[i] for i, share in split.items() if share < 1.0 and profile.layers[i].weight_s]
        if whole_s := sum(layer.backward_s for layer in compared):
            self._costs.append(1.0 + sum(layer.split_s for layer in compared) / whole_s)
            self.cost = max(1.0, median(self._costs))
        silent = _num_silent(profile)
        seconds = [
            self._noted(i, layer, split[i], counts=i >= silent) if i in split else layer.backward_s
            for i, layer in enumerate(profile.layers)
        ]
        self._backward_s, self._batch = seconds if profile.batch else [], profile.batch  # the first is slow in parts
        if is_trial:
            self._count_trial(seconds, profile)
        if split:  # an order that splits backwards measures halves, too
            self._compared_s, self._is_stale = seconds, False
            if not is_trial:
                self.num_trials = max(self.num_trials, TRIALS)
        if not split:
            return profile
        kept = {
            name: [0.0 if i in split else getattr(layer, name) for i, layer in enumerate(profile.layers)]
            for name in ("weight_s", "split_s")
        }
        return profile.with_seconds(backward_s=seconds, **kept)

    def _count_trial(self, seconds: list[float], profile: PipelineProfile) -> None:
        if self._is_stale or self._has_drifted(seconds, self._tried_s):
            self._pause = _FIRST_PAUSE
        self._tried_s = seconds
        self.num_trials += 1
        forward_s = sum(layer.forward_s for layer in profile.layers)
        added = (self.cost - 1.0) * sum(seconds) / (forward_s + sum(seconds) or 1.0) / 2  # every other micro-batch
        pause = _LONG_PAUSE if self._costs_agree else self._pause
        self._next_trial = profile.batch + max(pause, ceil(added / SHARE_OF_TIME))
        if self.num_trials >= TRIALS:
            self._pause *= 2

    def _noted(self, i: int, layer: LayerProfile, share: float, *, counts: bool) -> float:
        """Seconds of a layer's whole backward, once what its halves say is noted.

        Args:
            i: its index.
            layer: as measured.
            share: of the batch's micro-batches, those whose backward was split.
            counts: whether the halves say anything.
        """
        both_s = layer.backward_s + layer.split_s
        if counts:
            earlier = [] if self._is_stale else self._shares.get(i, [])
            self._shares[i] = [*earlier, layer.weight_s / both_s if both_s else 0.0][-_NEWEST:]
        return layer.backward_s if share < 1.0 else both_s / self.cost

    def fill(self, profile: PipelineProfile) -> PipelineProfile:
        """Add halves to a profile of whole backwards, if any are known.

        Layers that were never split have the usual share: those of the first stage that trains, where nobody waits.

        Args:
            profile: what :meth:`observe` gave, or several combined.
        """
        if not self._shares:
            return profile
        if id(profile) not in self._filled:
            self._filled[id(profile)] = profile, self._fill(profile)
        return self._filled[id(profile)][1]

    def _fill(self, profile: PipelineProfile) -> PipelineProfile:
        shares = self.weight_shares(len(profile.layers))
        pairs = list(zip((layer.backward_s for layer in profile.layers), shares, strict=True))
        return profile.with_seconds(
            weight_s=[share * backward_s for backward_s, share in pairs],
            split_s=[(self.cost - 1.0) * backward_s if share else 0.0 for backward_s, share in pairs],
        )

    def weight_shares(self, num_layers: int) -> list[float]:
        """Seconds of each layer's second half over those of its whole backward, as :meth:`fill` has them.

        Args:
            num_layers: L.
        """
        known = {i: median(shares) for i, shares in self._shares.items()}
        usual = median([share for share in known.values() if share] or [0.0])
        return [known.get(i, usual) * self.cost for i in range(num_layers)]

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, plain values."""
        return {
            "shares": {i: list(shares) for i, shares in self._shares.items()}, "costs": list(self._costs),
            "num_trials": self.num_trials, "is_stale": self._is_stale, "backward_s": self._backward_s,
            "compared_s": self._compared_s, "tried_s": self._tried_s, "batch": self._batch,
            "next_trial": self._next_trial, "pause": self._pause,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; empty from an older checkpoint.
        """
        self._shares = {i: list(shares) for i, shares in state.get("shares", {}).items()}
        self._costs = deque(state.get("costs", []), maxlen=_NEWEST)
        self.cost = max(1.0, median(self._costs)) if self._costs else 1.0
        self.num_trials, self._is_stale = state.get("num_trials", 0), state.get("is_stale", False)
        self._backward_s, self._compared_s, self._tried_s = (
            list(state.get(key, ())) for key in ("backward_s", "compared_s", "tried_s")
        )
        self._filled.clear()
        self._batch, self._next_trial = state.get("batch", -1), state.get("next_trial", 0)
        self._pause = state.get("pause", _FIRST_PAUSE)


def _split_shares(profile: PipelineProfile, order: Order) -> dict[int, float]:
    """Of each layer whose weight gradients were computed apart, of how many micro-batches, as a share."""
    placement = profile.placement
    split = [len(order.split(stage)) / order.num_micro_batches for stage in range(order.num_stages)]
    waits = order.may_wait(placement.layer_stages)
    return {
        i: split[stage] for i, stage in enumerate(placement.layer_stages)
        if split[stage] and waits[i] and profile.layers[i].seconds
    }  # fmt: skip


def _num_silent(profile: PipelineProfile) -> int:
    """Layers up to the end of the first stage that trains.

    It sends no gradient. Where layers were frozen under an order by which it did, it may compute all of its backward in
    the second half, as if that were of its last layer.
    """
    trains = [i for i, layer in enumerate(profile.layers) if layer.backward_s > 0]
    return next((end for end in profile.boundaries[1:] if trains and end > trains[0]), 0)
