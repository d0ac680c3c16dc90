"""A run between two batches, as checkpoints and re-packing see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dynpipe_ds.checkpoint.checkpoints import Checkpoints
from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.balancer import Balancer
from dynpipe_ds.events import Overhead
from dynpipe_ds.joining.address import Address
from dynpipe_ds.journal.write import JournalWriter
from dynpipe_ds.measure.clock import Clock
from dynpipe_ds.measure.profiler import Profiler
from dynpipe_ds.placement import Placement
from dynpipe_ds.snapshots.taking import Snapshots
from dynpipe_ds.stage import Stage
from dynpipe_ds.survive.landmarks import Landmarks


class Stateful(Protocol):
    """What a checkpoint keeps as plain values."""

    def state_dict(self) -> dict[str, Any]:
        """All that matters for going on."""

    def load_state_dict(self, state: Any, *, same_stages: bool) -> None:
        """Take in what :meth:`state_dict` gave; ``same_stages``: whether it comes from as many stages."""


class Renewed(Protocol):
    """What counts by stages and ranks."""

    def goes_on_with(self, staying: Sequence[int]) -> None:
        """Renew that after ranks were lost; collective over those that are left."""

    def node_name(self) -> str:
        """Of this rank's node."""

    @property
    def is_warned(self) -> bool:
        """Whether this process was told that it is taken away."""

    def door_of(self, rank: int) -> tuple[Address | None, str]:
        """Where a rank's door is, and what it takes to be let in."""


class Repeated(Protocol):
    """What is done once more when ranks were lost; all methods but :meth:`state` are collective over all ranks.

    Attributes:
        reached: batches that any rank is known to have trained, while training goes on without lost ranks.
    """

    reached: int

    def state(self) -> dict[str, Any]:
        """What goes with a copy of this rank's state."""

    def share_results(self) -> None:
        """Let what some ranks have done between batches be done on all."""

    def inherit(self, state: Mapping[str, Any]) -> None:
        """Keep, on a worker that joined, what the first rank's state was, for the acts that its script will tell of."""

    def went_back(self, state: Mapping[str, Any]) -> None:
        """Take note that this rank has gone back, and take in what was kept for it."""

    def replay(self, until: int) -> dict[int, Any]:
        """Train again the batches up to a number; their losses, by number."""


class Run(Protocol):
    """What is saved, loaded and made shorter.

    Attributes:
        stage: what is here of the model.
        balancer: decides.
        profiler: measures.
        checkpoints: saves and loads.
        config: the section.
        snapshots: copies state into other workers' memory.
        landmarks: checkpoints that training can go back to in place.
        overhead: seconds spent on not training.
        clock: which they are read from.
        num_batches: trained so far.
        journal: of the run.
    """

    stage: Stage
    balancer: Balancer
    profiler: Profiler
    checkpoints: Checkpoints
    config: DynamicPipelineConfig
    snapshots: Snapshots
    landmarks: Landmarks
    overhead: Overhead
    clock: Clock
    num_batches: int
    journal: JournalWriter

    @property
    def repeating(self) -> Repeated:
        """What is done once more, as far as others need it."""

    @property
    def repacker(self) -> Renewed:
        """What goes on with another number of stages, as far as others need it."""

    @property
    def repacking(self) -> Stateful:
        """What re-packing is about to do."""

    def watch_anew(self, *, fewer: bool = False) -> None:
        """Take note that the ranks are others, on purpose; collective over all ranks."""

    def move_layers(self, placement: Placement) -> int:
        """Let layers move; collective over all ranks, which all do or none."""

    def notice_frozen_layers(self) -> None:
        """Tell the optimizer of layers that were frozen or unfrozen; collective over all ranks."""

    def warn_once(self, message: str, what: str) -> None:
        """Warn on the first rank, once for each kind of trouble."""
