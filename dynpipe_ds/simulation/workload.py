"""What every stage has to do in one batch, and how long its links take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

import numpy as np
import numpy.typing as npt

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.placement import Placement

FloatArray = npt.NDArray[np.float64]
Seconds = float | Sequence[float] | Sequence[Sequence[float]] | FloatArray
"""One number for all; one for each stage (or boundary); or a table, stage (or boundary) x micro-batch."""

Sends = Literal["rendezvous", "buffered"]
"""When a send is over: when the message has been received, or at once (see ``docs/simulation.md``)."""


@dataclass(frozen=True, eq=False)
class Workload:
    """The seconds and bytes of one batch; boundary b lies between stages b and b + 1.

    All seconds may be given as :data:`Seconds` and become tables with one column (the same for every
    micro-batch) or M columns.

    Args:
        forward_s: forward seconds of a micro-batch on every stage, ``(S, 1)`` or ``(S, M)``.
        backward_s: the same for the backward, recomputation included.
        num_micro_batches: M.
        activation_link_s: seconds that a micro-batch's activations take over every boundary, from the
            moment both sides are ready (``"rendezvous"``) or the message is sent (``"buffered"``).
        gradient_link_s: the same for the gradients, which go back.
        step_s: seconds of gradient reduction and optimizer step of every stage, ``(S,)``.
        activation_bytes: bytes that one micro-batch holds on every stage from forward until backward.
        frozen_boundaries: how many boundaries, from the first on, no gradient crosses because all
            layers before them are frozen.

    Raises:
        ValueError: for numbers that are negative, not finite, or of the wrong count.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    num_micro_batches: int
    activation_link_s: FloatArray
    gradient_link_s: FloatArray
    step_s: FloatArray
    activation_bytes: tuple[int, ...]
    frozen_boundaries: int

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
    ) -> None:
        if num_micro_batches < 1:
            raise ValueError(f"num_micro_batches = {num_micro_batches}: must be >= 1")
        num_stages = len(forward_s) if not isinstance(forward_s, float | int) else 0
        if num_stages < 1:
            raise ValueError(f"forward_s = {forward_s}: need one number, or one row, for each stage")
        counts = {"forward_s": num_stages, "backward_s": num_stages}
        counts |= {"activation_link_s": num_stages - 1, "gradient_link_s": num_stages - 1}
        given = (forward_s, backward_s, activation_link_s, gradient_link_s)
        values: dict[str, object] = {
            name: table(name, seconds, rows, num_micro_batches)
            for (name, rows), seconds in zip(counts.items(), given, strict=True)
        }
        values["step_s"] = table("step_s", step_s, num_stages, 1)[:, 0]
        held = tuple(activation_bytes) or (0,) * num_stages
        if len(held) != num_stages or min(held) < 0:
            raise ValueError(f"activation_bytes = {held}: need one number >= 0 for each of {num_stages} stages")
        if not 0 <= frozen_boundaries <= num_stages - 1:
            raise ValueError(
                f"frozen_boundaries = {frozen_boundaries}: {num_stages} stages have {num_stages - 1} boundaries"
            )
        values |= {"activation_bytes": held, "frozen_boundaries": frozen_boundaries}
        for name, value in {"num_micro_batches": num_micro_batches, **values}.items():
            object.__setattr__(self, name, value)

    @property
    def num_stages(self) -> int:
        """Number of stages S."""
        return len(self.forward_s)

    @classmethod
    def from_profile(
        cls,
        profile: PipelineProfile,
        boundaries: Placement | Sequence[int] | None = None,
        *,
        num_micro_batches: int | None = None,
        activation_link_s: Seconds = 0.0,
        gradient_link_s: Seconds = 0.0,
        step_s: float | Sequence[float] = 0.0,
        speeds: Sequence[float] | None = None,
    ) -> Workload:
        """Put a profile's layers on the stages of a partition.

        Args:
            profile: seconds and bytes of every layer.
            boundaries: S + 1 layer indices, or a placement that is a partition; None: the profile's own.
            num_micro_batches: M; None: the profile's own.
            activation_link_s: as in the constructor.
            gradient_link_s: as in the constructor.
            step_s: as in the constructor.
            speeds: S relative speeds to divide by, when layer times are at unit speed.

        Returns:
            The workload.

        Raises:
            ValueError: when boundaries don't cover the layers, a stage holds several ranges, or a number is wrong.
        """
        placement = profile.placement if boundaries is None else Placement.of(boundaries)
        forward_s, backward_s = stage_seconds(profile, placement, speeds)
        return cls(
            forward_s,
            backward_s,
            profile.num_micro_batches if num_micro_batches is None else num_micro_batches,
            activation_link_s=activation_link_s,
            gradient_link_s=gradient_link_s,
            step_s=step_s,
            activation_bytes=[sum(held) for held in placement.by_stage(profile.activation_bytes())],
            frozen_boundaries=frozen_boundaries(backward_s),
        )


def stage_seconds(
    profile: PipelineProfile, placement: Placement, speeds: Sequence[float] | None = None
) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of a micro-batch on every stage of a partition.

    Returns:
        S forward and S backward seconds, each sum rounded once.

    Raises:
        ValueError: when it is not one of the profile's layers, or a stage holds several ranges.
    """
    num_stages = len(Placement.of(placement, num_layers=len(profile.layers)).boundaries) - 1
    factors = [1.0] * num_stages if speeds is None else speeds
    forward_s = placement.by_stage([layer.forward_s for layer in profile.layers])
    backward_s = placement.by_stage([layer.backward_s for layer in profile.layers])
    return (
        [fsum(seconds) / speed for seconds, speed in zip(forward_s, factors, strict=True)],
        [fsum(seconds) / speed for seconds, speed in zip(backward_s, factors, strict=True)],
    )


def frozen_boundaries(backward_s: Sequence[float]) -> int:
    """Number of boundaries that no gradient crosses: all before them have no backward."""
    working = [stage for stage, seconds in enumerate(backward_s) if seconds > 0]
    # All zero is a profile without backward times rather than a model without anything to train.
    return working[0] if working else 0


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
