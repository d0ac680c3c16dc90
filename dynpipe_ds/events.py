"""What the engine tells: one change of partition, and the time spent on other things than training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RebalanceEvent:
    """One change of partition, as told to ``on_rebalance`` callbacks.

    Attributes:
        batch: number of batches trained before it.
        before: boundaries it replaced.
        after: boundaries since then.
        predicted_gain: predicted share by which the bottleneck shrinks, 0 when not known.
        bytes_moved: bytes of the moved layers, over all stages, one replica.
        plan_s: seconds that deciding took.
        migrate_s: seconds that moving took.
    """

    batch: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    predicted_gain: float
    bytes_moved: int
    plan_s: float
    migrate_s: float

    @property
    def seconds(self) -> float:
        """Seconds from the decision to the end of the move."""
        return self.plan_s + self.migrate_s

    def __str__(self) -> str:
        return (
            f"re-partition after batch {self.batch}: {list(self.before)} -> {list(self.after)}, "
            f"predicted gain {self.predicted_gain:.1%}, {self.bytes_moved / 2**20:.1f} MiB moved, "
            f"took {self.seconds:.3f} s"
        )


@dataclass
class Overhead:
    """Seconds that this rank has spent on not training, since the engine was made.

    Attributes:
        profiling_s: adding up marks and exchanging profiles (waiting for slower ranks left out).
        planning_s: choosing boundaries and deciding.
        migrating_s: moving layers and rebuilding optimizers.
    """

    profiling_s: float = 0.0
    planning_s: float = 0.0
    migrating_s: float = 0.0
