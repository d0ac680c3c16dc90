"""What every stage has to do in one batch, and how long its links take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.placement import Placement
from dynpipe_ds.schedule.order import Order, waiting_layers

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Seconds = float | Sequence[float] | Sequence[Sequence[float]] | FloatArray
"""One number for all; one for each stage (or boundary); or a table, stage (or boundary) x micro-batch."""


class StageSeconds(NamedTuple):
    """What a stage computes, M seconds each.

    Attributes:
        forward_s: forwards.
        backward_s: backwards in one part.
        input_s: backwards without what is left for later.
        weight_s: what is left for later.
    """

    forward_s: list[float]
    backward_s: list[float]
    input_s: list[float]
    weight_s: list[float]


@dataclass(frozen=True, eq=False)
class Workload:
    """The seconds and bytes of one batch; boundary b lies between stages b and b + 1.

    All seconds may be given as :data:`Seconds` and become tables with one column (the same for every
    micro-batch) or M columns.

    A stage may split a backward (see :class:`~dynpipe_ds.schedule.Order`): ``B`` then takes
    ``backward_s + split_s - weight_s`` and ``W`` takes ``weight_s``.

    Args:
        forward_s: forward seconds of a micro-batch on every stage, ``(S, 1)`` or ``(S, M)``.
        backward_s: the same for the backward, recomputation included.
        num_micro_batches: M.
        activation_link_s: seconds that a micro-batch's activations take over every boundary, from the
            moment the message is sent.
        gradient_link_s: the same for the gradients, which go back.
        step_s: seconds of gradient reduction and optimizer step of every stage, ``(S,)``.
        activation_bytes: bytes that one micro-batch holds on every stage from forward until backward.
        frozen_boundaries: how many boundaries, from the first on, no gradient crosses because all
            layers before them are frozen.
        weight_s: the part of a split backward that computes gradients of weights and may be done later,
            at most all of it; 0 where a stage can't split.
        split_s: what both parts of a backward take longer than the whole.
        weight_bytes: bytes that one micro-batch holds on every stage between ``B`` and ``W``; empty: as
            many as ``activation_bytes``.

    Raises:
        ValueError: for numbers that are negative, not finite, or of the wrong count, or more weight seconds than
            backward seconds.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    num_micro_batches: int
    activation_link_s: FloatArray
    gradient_link_s: FloatArray
    step_s: FloatArray
    activation_bytes: tuple[int, ...]
    frozen_boundaries: int
    weight_s: FloatArray
    weight_bytes: tuple[int, ...]
    split_s: FloatArray

    def __init__(
        self,
        forward_s: Seconds,
        backward_s: Seconds,
        num_micro_batches: int,
        *,
        activation_link_s: Seconds = 0.0,
        gradient_link_s: Seconds = 0.0,
        step_s: float | Sequence[float] = 0.0,
        activation_bytes: Sequence[int] = (),
        frozen_boundaries: int = 0,
        weight_s: Seconds = 0.0,
        weight_bytes: Sequence[int] = (),
        split_s: Seconds = 0.0,
    ) -> None:
        if num_micro_batches < 1:
            raise ValueError(f"num_micro_batches = {num_micro_batches}: must be >= 1")
        num_stages = len(forward_s) if not isinstance(forward_s, float | int) else 0
        if num_stages < 1:
            raise ValueError(f"forward_s = {forward_s}: need one number, or one row, for each stage")
        counts = {"forward_s": num_stages, "backward_s": num_stages}
        counts |= {"activation_link_s": num_stages - 1, "gradient_link_s": num_stages - 1}
        counts |= {"weight_s": num_stages, "split_s": num_stages}
        given = (forward_s, backward_s, activation_link_s, gradient_link_s, weight_s, split_s)
        values: dict[str, object] = {
            name: table(name, seconds, rows, num_micro_batches)
            for (name, rows), seconds in zip(counts.items(), given, strict=True)
        }
        values["step_s"] = table("step_s", step_s, num_stages, 1)[:, 0]
        held = sizes("activation_bytes", activation_bytes or (0,) * num_stages, num_stages)
        if not 0 <= frozen_boundaries <= num_stages - 1:
            raise ValueError(
                f"frozen_boundaries = {frozen_boundaries}: {num_stages} stages have {num_stages - 1} boundaries"
            )
        values |= {
            "activation_bytes": held, "frozen_boundaries": frozen_boundaries,
            "weight_bytes": sizes("weight_bytes", weight_bytes or held, num_stages),
        }  # fmt: skip
        for name, value in {"num_micro_batches": num_micro_batches, **values}.items():
            object.__setattr__(self, name, value)
        if (self.weight_s > self.backward_s + self.split_s).any():
            stage = int((self.weight_s > self.backward_s + self.split_s).any(axis=1).argmax())
            raise ValueError(
                f"weight_s of stage {stage} is {self.weight_s[stage].max()}, its backward_s "
                f"{(self.backward_s + self.split_s)[stage].min()} with split_s: must be a part of it"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages S."""
        return len(self.forward_s)

    def stage_seconds(self, stage: int) -> StageSeconds:
        """What a stage computes, micro-batch by micro-batch.

        Args:
            stage: s.

        Returns:
            Lists of M seconds.
        """
        tables = (self.forward_s, self.backward_s, self.backward_s + self.split_s - self.weight_s, self.weight_s)
        forward_s, backward_s, input_s, weight_s = (
            by_micro_batch(table[stage], self.num_micro_batches) for table in tables
        )
        return StageSeconds(forward_s, backward_s, input_s, weight_s)

    @classmethod
    def from_profile(
        cls,
        profile: PipelineProfile,
        boundaries: Placement | Sequence[int] | None = None,
        *,
        num_micro_batches: int | None = None,
        activation_link_s: Seconds | None = None,
        gradient_link_s: Seconds | None = None,
        step_s: float | Sequence[float] = 0.0,
        speeds: Sequence[float] | None = None,
        weight_bytes: Sequence[int] | None = None,
        late: Sequence[int] = (),
    ) -> Workload:
        """Put a profile's layers on the stages of a partition.

        Args:
            profile: seconds and bytes of every layer.
            boundaries: S + 1 layer indices, or a placement that is a partition; None: the profile's own.
            num_micro_batches: M; None: the profile's own.
            activation_link_s: as in the constructor; None: as measured in the profile, see :func:`links_s`.
            gradient_link_s: the same.
            step_s: as in the constructor.
            speeds: S relative speeds to divide by, when layer times are at unit speed.
            weight_bytes: L bytes that one micro-batch of a layer holds between both parts of a split backward; None:
                its activation bytes.
            late: of how many layers of each stage the gradients of weights may be done later, as in
                :class:`~dynpipe_ds.schedule.Order`; empty: of all.

        Returns:
            The workload.

        Raises:
            ValueError: when boundaries don't cover the layers, a stage holds several ranges, or a number is wrong.
        """
        placement = profile.placement if boundaries is None else Placement.of(boundaries)
        forward_s, backward_s = stage_seconds(profile, placement, speeds)
        activation_bytes = profile.activation_bytes()
        may_wait = waiting_layers(late, placement.layer_stages)
        held = activation_bytes if weight_bytes is None else weight_bytes
        waiting_s = [layer.weight_s if waits else 0.0 for layer, waits in zip(profile.layers, may_wait, strict=True)]
        waiting_bytes = [num_bytes if waits else 0 for num_bytes, waits in zip(held, may_wait, strict=True)]
        weight_s, split_s = (
            _stage_sums(placement, seconds, speeds)
            for seconds in (waiting_s, [layer.split_s for layer in profile.layers])
        )
        halves = zip(weight_s, backward_s, split_s, strict=True)
        return cls(
            forward_s,
            backward_s,
            profile.num_micro_batches if num_micro_batches is None else num_micro_batches,
            activation_link_s=links_s(profile, placement.num_stages, activation_link_s),
            gradient_link_s=links_s(profile, placement.num_stages, gradient_link_s),
            step_s=step_s,
            activation_bytes=_summed(placement, activation_bytes),
            frozen_boundaries=frozen_boundaries(backward_s),
            weight_s=[min(later, whole + more) for later, whole, more in halves],  # sums round
            weight_bytes=_summed(placement, waiting_bytes),
            split_s=split_s,
        )

    @classmethod
    def running(
        cls, order: Order, profile: PipelineProfile, boundaries: Placement | Sequence[int] | None = None, *,
        activation_link_s: Seconds | None = None, gradient_link_s: Seconds | None = None,
        step_s: float | Sequence[float] = 0.0, speeds: Sequence[float] | None = None,
    ) -> Workload:
        """Put a profile's layers on the stages of a partition that runs an order, which may be older than the profile.

        Where layers were frozen since, the first stage that trains sends no gradient any more. If the order splits its
        backwards, ``B`` has nothing to do, and ``W`` does all of it.

        Args:
            order: that runs; it says which layers' gradients may be done later.
            profile: as for :meth:`from_profile`.
            boundaries: as there.
            activation_link_s: as there.
            gradient_link_s: as there.
            step_s: as there.
            speeds: as there.

        Returns:
            The workload.

        Raises:
            ValueError: as there.
        """
        found = cls.from_profile(
            profile, boundaries, activation_link_s=activation_link_s, gradient_link_s=gradient_link_s, step_s=step_s,
            speeds=speeds, late=order.late,
        )
        first = found.frozen_boundaries
        if not first or not order.split(first):
            return found
        weight_s, held = found.weight_s.copy(), found.activation_bytes[first]
        weight_s[first] = found.backward_s[first] + found.split_s[first]
        weight_bytes = (*found.weight_bytes[:first], held, *found.weight_bytes[first + 1 :])
        return replace(found, weight_s=weight_s, weight_bytes=weight_bytes)


def links_s(profile: PipelineProfile, num_stages: int, given: Seconds | None = None) -> Seconds:
    """Seconds of messages over every boundary.

    Args:
        profile: what was measured.
        num_stages: S; of another number of stages nothing was measured.
        given: instead; None: what was measured, and 0 where nothing was.
    """
    if given is not None:
        return given
    return [seconds or 0.0 for seconds in profile.link_s] if len(profile.link_s) == num_stages - 1 else 0.0


def stage_seconds(
    profile: PipelineProfile, placement: Placement, speeds: Sequence[float] | None = None
) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of a micro-batch on every stage of a partition.

    Returns:
        S forward and S backward seconds, each sum rounded once.

    Raises:
        ValueError: when it is not one of the profile's layers, or a stage holds several ranges.
    """
    placement = Placement.of(placement, num_layers=len(profile.layers))
    placement.check_is_partition()
    forward_s = _stage_sums(placement, [layer.forward_s for layer in profile.layers], speeds)
    return forward_s, _stage_sums(placement, [layer.backward_s for layer in profile.layers], speeds)


def _stage_sums(placement: Placement, seconds: Sequence[float], speeds: Sequence[float] | None) -> list[float]:
    factors = [1.0] * placement.num_stages if speeds is None else speeds
    return [fsum(found) / speed for found, speed in zip(placement.by_stage(seconds), factors, strict=True)]


def _summed(placement: Placement, layer_bytes: Sequence[int]) -> list[int]:
    return [sum(held) for held in placement.by_stage(layer_bytes)]


def frozen_boundaries(backward_s: Sequence[float]) -> int:
    """Number of boundaries that no gradient crosses: all before them have no backward."""
    working = [stage for stage, seconds in enumerate(backward_s) if seconds > 0]
    # All zero is a profile without backward times rather than a model without anything to train.
    return working[0] if working else 0


def by_micro_batch(row: FloatArray, num_micro_batches: int) -> list[float]:
    """A row of a table, one number for each micro-batch."""
    values: list[float] = row.tolist()
    return values * num_micro_batches if len(values) == 1 else values


def sizes(name: str, given: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Bytes of every stage.

    Raises:
        ValueError: for another count, or a negative number.
    """
    held = tuple(given)
    if len(held) != num_stages or min(held) < 0:
        raise ValueError(f"{name} = {held}: need one number >= 0 for each of {num_stages} stages")
    return held


def table(name: str, seconds: Seconds, rows: int, num_micro_batches: int) -> FloatArray:
    """Bring seconds into the form of a table.

    Args:
        name: what they are, for the message.
        seconds: one number, one for each row, or a whole table.
        rows: number of stages or boundaries.
        num_micro_batches: M.

    Returns:
        ``(rows, 1)`` or ``(rows, M)``.

    Raises:
        ValueError: for another shape, or numbers that are negative or not finite.
    """
    values = np.asarray(seconds, dtype=np.float64)
    if values.ndim == 0:
        values = np.full(rows, values)
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2 or len(values) != rows or values.shape[1] not in (1, num_micro_batches):
        raise ValueError(
            f"{name} has shape {np.shape(seconds)}: need one number, {rows} numbers, or {rows} rows of "
            f"{num_micro_batches} (micro-batches)"
        )
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"{name}: all seconds must be finite and >= 0")
    return values
