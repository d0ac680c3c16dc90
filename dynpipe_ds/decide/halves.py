"""What a split backward gives and costs, layer by layer: measured now and then, known from then on.

A batch measures what it runs. Under 1F1B backwards run whole, and nothing tells what their second half would take; so
a few profiled batches split each backward and run both halves at once. The share of a layer's second half follows
from one such batch, what splitting adds from it and the one before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.schedule import Order

TRIALS = 2
"""Batches that split every backward at first: one alone may have been an odd one."""

DRIFT = 0.1
"""Share of the model's backward seconds that must have changed until halves are measured anew."""

_NEWEST = 3  # measurements that a share, or the cost, is the median of


class Halves:
    """Remembers halves.

    Attributes:
        cost: seconds of both halves over those of the whole, at least 1.
    """

    def __init__(self) -> None:
        self.cost = 1.0
        self._costs: deque[float] = deque(maxlen=_NEWEST)
        self._shares: dict[int, list[float]] = {}
        self._whole_s: list[float] | None = None  # of the newest profile's layers, if all backwards ran whole
        self._compared_s: list[float] | None = None  # those that the newest trial was compared with
        self._num_trials = 0
        self._is_stale = False

    @property
    def is_known(self) -> bool:
        """Whether halves of any layer were measured often enough to plan with."""
        return bool(self._shares) and self._num_trials >= TRIALS

    def wants_trial(self) -> bool:
        """Whether the next profiled batch should split all backwards.

        Never two in a row: each is compared with the one before.
        """
        if self._whole_s is None:
            return False
        return self._num_trials < TRIALS or self._is_stale or self._has_drifted(self._whole_s)

    def expect_change(self) -> None:
        """Layers were frozen, replaced or thawed."""
        self._is_stale = True
        self._shares = {i: shares[-1:] for i, shares in self._shares.items()}

    def _has_drifted(self, whole_s: Sequence[float]) -> bool:
        """Whether layers have other shares of the model's backward; a machine that is slow as a whole changes none."""
        before_s = self._compared_s or whole_s
        total_s, total_before_s = sum(whole_s), sum(before_s)
        if not total_s or not total_before_s:
            return total_s != total_before_s
        pairs = zip(whole_s, before_s, strict=True)
        return sum(abs(new_s / total_s - old_s / total_before_s) for new_s, old_s in pairs) > DRIFT

    def observe(self, profile: PipelineProfile, order: Order | None, *, is_trial: bool) -> PipelineProfile:
        """Take in a batch, and give its backwards as if all had run whole.

        Args:
            profile: as measured.
            order: that it ran; ``None``: 1F1B, all backwards whole.
            is_trial: whether it split all backwards for the sake of measuring.
        """
        split = {} if order is None else _split_shares(profile, order)
        seconds = [layer.backward_s for layer in profile.layers]
        if not split:
            self._whole_s = seconds if profile.batch else None  # the first batch is slow in parts
            return profile
        if is_trial and self._whole_s is not None:
            self._count_trial(seconds, self._whole_s, split)
        self._whole_s = None
        layers = tuple(
            layer if i not in split else self._noted(i, layer, split[i]) for i, layer in enumerate(profile.layers)
        )
        return replace(profile, layers=layers)

    def _count_trial(self, seconds: Sequence[float], whole_s: list[float], split: Iterable[int]) -> None:
        halves_s, wholes_s = (sum(of[i] for i in split) for of in (seconds, whole_s))
        if halves_s > 0 and wholes_s > 0:
            self._costs.append(halves_s / wholes_s)
            self.cost = max(1.0, median(self._costs))
        self._compared_s, self._is_stale = whole_s, False
        self._num_trials += 1

    def _noted(self, i: int, layer: LayerProfile, share: float) -> LayerProfile:
        """A layer's whole backward, once what its halves say is noted.

        Args:
            i: its index.
            layer: as measured.
            share: of the batch's micro-batches, those whose backward was split.
        """
        both_s = layer.backward_s / (share + (1.0 - share) / self.cost)
        # A micro-batch whose activations are counted runs whole, so that a batch may be odd.
        newest = min(1.0, layer.weight_s / share / both_s) if both_s else 0.0
        self._shares[i] = [*self._shares.get(i, []), newest][-_NEWEST:]
        return replace(layer, backward_s=both_s / self.cost, weight_s=0.0)

    def fill(self, profile: PipelineProfile) -> PipelineProfile:
        """Add halves to a profile of whole backwards, if any are known.

        Layers that were never split have the usual share: those of the first stage that trains, where nobody waits.

        Args:
            profile: what :meth:`observe` gave, or several combined.
        """
        if not self._shares:
            return profile
        known = {i: median(shares) for i, shares in self._shares.items()}
        usual = median([share for share in known.values() if share] or [0.0])
        shares = [known.get(i, usual) for i in range(len(profile.layers))]
        layers = tuple(
            replace(
                layer, weight_s=share * self.cost * layer.backward_s,
                split_s=(self.cost - 1.0) * layer.backward_s if share else 0.0,
            )
            for layer, share in zip(profile.layers, shares, strict=True)
        )
        return replace(profile, layers=layers)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, plain values."""
        return {
            "shares": {i: list(shares) for i, shares in self._shares.items()}, "costs": list(self._costs),
            "num_trials": self._num_trials, "is_stale": self._is_stale, "whole_s": self._whole_s,
            "compared_s": self._compared_s,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; empty from an older checkpoint.
        """
        self._shares = {i: list(shares) for i, shares in state.get("shares", {}).items()}
        self._costs = deque(state.get("costs", []), maxlen=_NEWEST)
        self.cost = max(1.0, median(self._costs)) if self._costs else 1.0
        self._num_trials, self._is_stale = state.get("num_trials", 0), state.get("is_stale", False)
        self._whole_s, self._compared_s = state.get("whole_s"), state.get("compared_s")


def _split_shares(profile: PipelineProfile, order: Order) -> dict[int, float]:
    """Of each layer on a stage that splits backwards, of how many micro-batches, as a share."""
    split = [len(order.split(stage)) / order.num_micro_batches for stage in range(order.num_stages)]
    return {i: split[s] for i, s in enumerate(profile.placement.layer_stages) if split[s] and profile.layers[i].seconds}
