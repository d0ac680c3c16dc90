"""Freezing by a schedule: at given batches the frozen prefix grows, or shrinks again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepspeed.pipe import LayerSpec

from scenarios.freezing.prefix import FreezingScenario
from scenarios.gpt import GPTConfig
from scenarios.scenario import Engine


@dataclass(frozen=True)
class FreezeSchedule:
    """From which batch on how much of the model's front is frozen.

    Attributes:
        batches: increasing batch indices.
        frozen: for each of them what is frozen from that batch on: a whole number counts layers, a
            decimal below 1 is a fraction of all layers. Smaller than the one before it unfreezes.
    """

    batches: Sequence[int]
    frozen: Sequence[int | float]

    def __post_init__(self) -> None:
        """Refuse schedules without a meaning."""
        if len(self.batches) != len(self.frozen):
            raise ValueError(
                f"scenario.batches has {len(self.batches)} entries and scenario.frozen "
                f"{len(self.frozen)}: give one amount for each batch"
            )
        if any(batch < 0 for batch in self.batches) or any(
            left >= right for left, right in zip(self.batches, self.batches[1:], strict=False)
        ):
            raise ValueError(f"scenario.batches={list(self.batches)} must be increasing, from 0")
        for amount in self.frozen:
            if amount < 0 or (isinstance(amount, float) and amount >= 1.0):
                raise ValueError(
                    f"scenario.frozen={list(self.frozen)}: {amount} must be a number of layers "
                    "(0, 1, 2, …) or a fraction in [0.0, 1.0)"
                )

    def num_layers(self, batch: int, total: int) -> int:
        """Count the frozen layers in a batch.

        Args:
            batch: index of the batch, from 0.
            total: layers of the model.

        Returns:
            Number of leading layers; fractions are rounded to the nearest layer.
        """
        position = bisect_right(self.batches, batch)
        amount = self.frozen[position - 1] if position else 0
        return round(amount * total) if isinstance(amount, float) else amount

    def check(self, total: int) -> None:
        """Refuse a schedule that would leave nothing to train (``ValueError``)."""
        for batch in self.batches:
            if self.num_layers(batch, total) >= total:
                raise ValueError(
                    f"scenario.frozen={list(self.frozen)} freezes {self.num_layers(batch, total)} "
                    f"layers at batch {batch}, but the model has {total} layers and the last one "
                    "must train"
                )


@dataclass
class ScheduledFreezing(FreezingScenario):
    """Freeze the front of the model at given batches; settings as :class:`FreezeSchedule`."""

    batches: Sequence[int] = (8, 20)
    frozen: Sequence[int | float] = (0.25, 0.5)
    schedule: FreezeSchedule = field(init=False)

    any_model = True

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.schedule = FreezeSchedule(tuple(self.batches), tuple(self.frozen))

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        """Build the layers, and check the schedule against their number."""
        specs = super().layers(model, layers)
        self.schedule.check(len(specs))
        return specs

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Freeze what the schedule says for this batch."""
        self.freeze(engine, self.schedule.num_layers(batch, self.num_layers(engine)))
        super().before_batch(engine, batch)
