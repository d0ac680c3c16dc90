"""What the engine tells: a change of partition or of the number of workers, and time not spent on training."""

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


@dataclass(frozen=True)
class RepackEvent:
    """One re-packing, as told to ``on_repack`` callbacks.

    Attributes:
        batch: number of batches trained before it.
        before: boundaries of the pipeline as it was.
        after: boundaries of the shorter or longer one.
        released_ranks: global ranks, as they were numbered before, that left.
        released: whether this process is one of them and ends when its callbacks return.
        reason: why it was done.
        plan_s: seconds that deciding took.
        migrate_s: seconds that moving the layers took.
        regroup_s: seconds that making the other world took; 0 on released ranks.
        joined_ranks: global ranks, as they are numbered since, of workers that joined.
    """

    batch: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    released_ranks: tuple[int, ...]
    released: bool
    reason: str
    plan_s: float
    migrate_s: float
    regroup_s: float
    joined_ranks: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds from the start of deciding until the next batch can begin."""
        return self.plan_s + self.migrate_s + self.regroup_s

    def __str__(self) -> str:
        moved = f"ranks {list(self.released_ranks)} released"
        if self.joined_ranks:
            moved = f"ranks {list(self.joined_ranks)} joined"
        return (
            f"re-packed after batch {self.batch} from {len(self.before) - 1} to {len(self.after) - 1} stages: "
            f"{list(self.before)} -> {list(self.after)}, {moved}, "
            f"took {self.seconds:.3f} s ({self.reason})"
        )


@dataclass
class Overhead:
    """Seconds that this rank has spent on not training, since the engine was made.

    Attributes:
        profiling_s: marking where layers begin and end (of the host's work on marks, what the device had to wait for),
            counting sizes, adding up, and exchanging profiles (waiting for slower ranks left out).
        planning_s: choosing boundaries and deciding.
        migrating_s: moving layers and rebuilding optimizers.
        repacking_s: re-packing onto fewer or more ranks, from the decision to the next batch.
        snapshots_s: copying state for the case that a worker is lost: what training waited for, on a CPU what the
            copying threads computed, and what batches took longer beyond that while a copy was on its way.
        compiling_s: compiling layers in batches (``torch.compile``): the first time, and where layers arrive.
    """

    profiling_s: float = 0.0
    planning_s: float = 0.0
    migrating_s: float = 0.0
    repacking_s: float = 0.0
    snapshots_s: float = 0.0
    compiling_s: float = 0.0
