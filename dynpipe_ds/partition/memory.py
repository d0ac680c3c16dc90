"""What 1F1B holds on a stage, against the cap of the stage."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass

from dynpipe_ds.placement import Placement, plain_ints
from dynpipe_ds.schedule.makers import in_flight


@dataclass(frozen=True)
class StageMemory:
    """Memory that a partition needs under the one-forward-one-backward schedule.

    A stage holds the state of its layers and, at the peak, the activations of
    ``min(M, S - s)`` micro-batches: stage ``s`` has sent that many forward before the first
    backward comes back (PipeDream-Flush, Narayanan et al. 2021, section 2.2).

    Attributes:
        state_bytes: Per layer: parameters, gradients and optimizer state.
        activation_bytes: Per layer: what the backward of one micro-batch keeps.
        num_micro_batches: ``M``, micro-batches in a batch.
        cap_bytes: What one stage may hold; one number for all stages or one for each.
    """

    state_bytes: Sequence[int]
    activation_bytes: Sequence[int]
    num_micro_batches: int
    cap_bytes: int | Sequence[int]

    def __post_init__(self) -> None:
        if len(self.state_bytes) != len(self.activation_bytes):
            raise ValueError(
                f"state_bytes has {len(self.state_bytes)} layers and activation_bytes "
                f"{len(self.activation_bytes)}; both need one entry a layer"
            )
        for name in ("state_bytes", "activation_bytes"):
            for layer, value in enumerate(getattr(self, name)):
                if value < 0:
                    raise ValueError(f"{name} of layer {layer} is {value}; it must be >= 0")
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {self.num_micro_batches}; it must be >= 1")

    def in_flight(self, stage: int, num_stages: int) -> int:
        """Number of micro-batches whose activations a stage holds at its peak.

        Args:
            stage: Index of the stage.
            num_stages: ``S``.

        Returns:
            ``min(M, S - stage)``.
        """
        return in_flight("1f1b", self.num_micro_batches, num_stages, stage)

    def caps(self, num_stages: int) -> tuple[int, ...]:
        """Cap of every stage.

        Args:
            num_stages: ``S``.

        Returns:
            ``S`` numbers of bytes.

        Raises:
            ValueError: The caps are not one number or one a stage, or negative.
        """
        given = self.cap_bytes
        caps = plain_ints("cap_bytes", given if isinstance(given, Sized) else (given,) * num_stages)
        if len(caps) != num_stages:
            raise ValueError(
                f"cap_bytes has {len(caps)} entries; give one number or one for each of the "
                f"{num_stages} stages"
            )
        if min(caps) < 0:
            stage = caps.index(min(caps))
            raise ValueError(f"cap_bytes is {caps[stage]} on stage {stage}; it must be >= 0")
        return caps

    def stage_bytes(self, boundaries: Placement | Sequence[int]) -> tuple[int, ...]:
        """Peak memory of every stage of a partition.

        Args:
            boundaries: ``S + 1`` layer indices, or a placement that is a partition.

        Returns:
            ``S`` numbers of bytes.
        """
        cuts = Placement.of(boundaries).boundaries
        num_stages = len(cuts) - 1
        return tuple(
            int(sum(self.state_bytes[first:end]))
            + int(sum(self.activation_bytes[first:end])) * self.in_flight(stage, num_stages)
            for stage, (first, end) in enumerate(zip(cuts, cuts[1:], strict=False))
        )
