"""The live growth, as the present ranks do it: newcomers enter as stages without layers, between two batches.

Until the last vote nothing has changed: newcomers have taken over all but layers, in processes of their own, and have
been connected to every rank for a trial. After it all meet in the longer world. If a newcomer does not come then, the
present ranks go on among themselves. Layers move to the new stages as in any other migration, afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dynpipe_ds.host.coordinates import longer
from dynpipe_ds.host.topology import renumber
from dynpipe_ds.host.world import World, identity
from dynpipe_ds.joining.adopting import for_newcomers, of_this_rank
from dynpipe_ds.placement import Placement, present_stage
from dynpipe_ds.ranks.agreement import from_first, gather, together
from dynpipe_ds.ranks.heartbeat import group_timeout
from dynpipe_ds.repacking.live import RepackError
from dynpipe_ds.repacking.outcome import Repacking

if TYPE_CHECKING:
    from dynpipe_ds.joining.door import Door
    from dynpipe_ds.run import Run


def with_empty(boundaries: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    """Boundaries of a longer pipeline in which the new stages have no layers.

    Args:
        boundaries: of the present one, ``S + 1``.
        num_stages: more than ``S``.

    Returns:
        ``num_stages + 1`` boundaries.
    """
    before, wide = len(boundaries) - 1, [boundaries[0]]
    for stage in range(num_stages):
        present = present_stage(stage, before, num_stages)
        wide.append(wide[-1] if present is None else boundaries[present + 1])
    return tuple(wide)


class Grow:
    """One growth on one present rank; all methods are collective over the present ranks.

    Args:
        run: the run.
        door: this rank's; newcomers wait at the first rank's.
        chosen: partition and micro-batches of the longer pipeline, the same on every rank.
        client_state: the user's own values, of which the first rank's count.

    Attributes:
        joined_ranks: ranks of the newcomers, as soon as they are known.
    """

    def __init__(
        self, run: Run, door: Door, chosen: Repacking, client_state: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._run, self._stage, self._door = run, run.stage, door
        self._boundaries, self._num_micro_batches = chosen.boundaries, chosen.num_micro_batches
        self._wide = with_empty(self._stage.partition, chosen.num_stages)
        self._client_state = client_state
        self._leads = dist.get_rank() == 0
        self._newcomers: list[str] = []
        self._members: list[str] = []
        self.joined_ranks: tuple[int, ...] = ()

    def prepare(self, per_stage: Mapping[str, Any], checks: Callable[[], object]) -> None:
        """Let newcomers get ready, connect to them, and vote; bounded.

        Args:
            per_stage: keys of the section that are given for each stage, as they will be.
            checks: more to try before.

        Raises:
            RepackError: on every rank, if any can't go through with it; nothing has changed then.
        """
        self._together(checks)
        places = longer(self._stage.pipeline.topology, self._stage.num_stages + self._num_new)
        self.joined_ranks = tuple(rank for rank, place in enumerate(places) if not isinstance(place, int))
        self._newcomers = from_first(lambda: self._door.waiting()[: len(self.joined_ranks)])
        if len(self._newcomers) < len(self.joined_ranks):
            raise RepackError(
                f"{len(self._newcomers)} workers wait and {len(self.joined_ranks)} are needed, "
                f"{len(self.joined_ranks) // self._num_new} for each new stage; start more"
            )
        coming = iter(self._newcomers)
        lost = lambda: self._door.lost(self._newcomers) if self._leads else ""  # noqa: E731
        self._world = World.among([p if isinstance(p, int) else next(coming) for p in places], lost=lost)
        self._members = gather(identity())
        try:
            own = self._together(lambda: of_this_rank(self._run))
            of_replicas = self._by_replica(own)
            self._together(lambda: self._invite(per_stage, of_replicas))
            self._together(self._world.check)
        except RepackError as error:
            if self._leads:
                self._call_off(str(error))
            raise
        if self._leads:
            self._world.say("go")

    @property
    def _num_new(self) -> int:
        return len(self._boundaries) - 1 - self._stage.num_stages

    def _together(self, action: Callable[[], Any]) -> Any:
        numbers = f"{self._stage.num_stages} to {len(self._boundaries) - 1}"
        return together(action, self._stage.device, lambda text: RepackError(
            f"workers could not join, which would have made {numbers} stages; training goes on without them ({text})"
        ))

    def _by_replica(self, own: str) -> list[str]:
        """What newcomers take over of the rank of the first stage that has their place there."""
        everyone = gather((self._stage.stage_id, self._stage.pipeline.replica, own))
        return [text for stage, _, text in sorted(everyone, key=lambda one: one[1]) if stage == 0]

    def _invite(self, per_stage: Mapping[str, Any], of_replicas: list[str]) -> None:
        if not self._leads:
            return
        pipeline = self._stage.pipeline
        self._door.invite(self._newcomers, {
            "world": self._world.plain, "timeout_s": group_timeout().total_seconds(),
            "sizes": {**pipeline.sizes, "pipe": len(self._boundaries) - 1}, "replicas": of_replicas,
            "wide": list(self._wide), "boundaries": list(self._boundaries), "before": list(self._stage.partition),
            "num_micro_batches": self._num_micro_batches,
            "common": for_newcomers(self._run, per_stage, self._client_state()),
        })

    def _call_off(self, why: str) -> None:
        """Send those who were invited back to the door, where they knock once more."""
        try:
            self._world.say("go", why or "no")
        finally:
            self._door.forget(self._newcomers)

    def go_on(self) -> bool:
        """Meet in the longer world, and renew all that knows of ranks, stages or groups.

        Returns:
            Whether the newcomers came; else all is as before, in a world of the present ranks.
        """
        instead = self._world.instead(self._members)
        dist.barrier()
        came = renumber(
            self._stage.pipeline, self._world, Placement.from_boundaries(self._wide), otherwise=instead
        )
        if self._leads:
            self._door.forget(self._newcomers)
        self._stage.guard.start()
        return came
