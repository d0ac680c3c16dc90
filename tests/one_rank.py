"""A run of one rank without an engine: what checkpoints and re-packing ask of it, and a note of what they tell it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dynpipe_ds.config import SECTION, DynamicPipelineConfig, parse_config
from dynpipe_ds.decide.balancer import Balancer
from dynpipe_ds.events import Overhead
from dynpipe_ds.journal.write import JournalWriter
from dynpipe_ds.measure import HostClock
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile, StageProfile
from dynpipe_ds.placement import Placement
from dynpipe_ds.snapshots.taking import Snapshots
from dynpipe_ds.survive.landmarks import Landmarks

Calls = list[tuple[Any, ...]]
"""Who was told what, in order."""


@contextmanager
def world() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Guard:
    """Notes what goes on; nothing is lost here."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    @contextmanager
    def naming_lost_ranks(self, doing: str) -> Iterator[None]:
        self._calls.append(("naming lost ranks", doing))
        yield

    @contextmanager
    def no_way_back(self, doing: str) -> Iterator[None]:
        self._calls.append(("no way back", doing))
        yield


class Profiler:
    """Has measured two things."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.state: dict[str, Any] = {"marks": 7, "sizes": [1, 2]}

    def sizes_changed(self) -> None:
        self._calls.append(("sizes changed",))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {key: state[key] for key in ("marks", "sizes") if key in state}


class Repacking:
    """Is about to shrink to so many stages."""

    def __init__(self) -> None:
        self.wished: int | None = None
        self.same_stages: bool | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"wished_stages": self.wished}

    def load_state_dict(self, state: Any, *, same_stages: bool) -> None:
        self.wished, self.same_stages = state.get("wished_stages"), same_stages


class FakeRun:
    """A :class:`dynpipe_ds.run.Run`; its balancer and its section are real, which are values.

    Args:
        stage: what is here of the model; notes in its ``calls``.
        **section: keys of the section.
    """

    def __init__(self, stage: Any, **section: Any) -> None:
        self.stage, self.calls = stage, stage.calls
        self.config: DynamicPipelineConfig = parse_config({SECTION: {"enabled": True, **section}})
        self.balancer = Balancer(self.config)
        self.profiler = Profiler(self.calls)
        self.snapshots = Snapshots(self, dict)  # off
        self.landmarks = Landmarks(self)
        self.overhead = Overhead()
        self.clock = HostClock()
        self.num_batches = 0
        self.journal = JournalWriter(None, dict)
        self.repacking = Repacking()
        self.move_fails: Exception | None = None
        self.warned: list[tuple[str, str]] = []

    def watch_anew(self, *, fewer: bool = False) -> None:
        """Nobody is watched."""

    def move_layers(self, placement: Placement) -> int:
        self.calls.append(("move", placement.boundaries))
        if self.move_fails is not None:
            raise self.move_fails
        self.stage.partition = placement.boundaries
        return 0

    def notice_frozen_layers(self) -> None:
        self.calls.append(("notice frozen layers",))

    def warn_once(self, message: str, what: str) -> None:
        self.warned.append((what, message))

    def observe(self, batch: int, seconds: Sequence[float]) -> None:
        """Have a batch measured on the present partition: so long each layer takes, forward and backward."""
        layers = tuple(LayerProfile(f"layer {i}", s / 3, 2 * s / 3, 10, 40, 0, 80, 8) for i, s in enumerate(seconds))
        stages = tuple(StageProfile(1.0, 0.0, 0.0, 0.01, 2.0, 0) for _ in range(self.stage.num_stages))
        self.balancer.observe(PipelineProfile(batch, self.stage.partition, 4, layers, stages), 0.0)
        self.num_batches = batch + 1


CPU = torch.device("cpu")
