"""The release back-end as the engine uses it: agreed on by all ranks before, apart from training after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from dynpipe_ds.host.world import World
from dynpipe_ds.joining.address import Address
from dynpipe_ds.joining.anew import wait_again
from dynpipe_ds.ranks.agreement import from_first, gather, together
from dynpipe_ds.release import Constraints, ReleaseBackend, ReleaseError, make_backend
from dynpipe_ds.release.exit import ExitBackend
from dynpipe_ds.release.options import ReleaseOptions
from dynpipe_ds.repacking.outcome import Repacking
from dynpipe_ds.telling import warn


class GivingBack:
    """Gives workers back through a back-end.

    Raises:
        ValueError: on every rank, if the back-end can't work on some rank.
    """

    def __init__(self, options: ReleaseOptions, device: torch.device) -> None:
        self._thread: threading.Thread | None = None

        def make() -> ReleaseBackend:
            backend = make_backend(options)
            backend.check()
            return backend

        self.name = options.backend
        self.backend = together(make, device, lambda text: ValueError(
            f'repack.release.backend = "{options.backend}" can\'t be used here: {text}'
        ))
        self.nodes: tuple[str, ...] = ()
        self.positions: tuple[int, ...] = ()
        self.find_nodes()

    def went(self, chosen: Repacking) -> None:
        """Take note that workers are gone; called on the survivors after they met."""
        self.nodes = tuple(self.nodes[rank] for rank in chosen.surviving_ranks)
        self.positions = tuple(self.positions[rank] for rank in chosen.surviving_ranks if self.positions)

    def find_nodes(self) -> None:
        """Learn where all ranks run, when there are others than before; collective over all ranks."""
        found = gather((self.backend.node_name(), self.backend.position()))
        self.nodes = tuple(node for node, _ in found)
        positions = [position for _, position in found if position is not None]
        self.positions = tuple(positions) if len(positions) == len(found) else ()

    def constraints(self) -> Constraints:
        """What the back-end demands now, and that rank 0 stays; collective.

        Raises:
            ReleaseError: on every rank, if the scheduler can't be asked.
        """

        def ask() -> Constraints | str:
            try:
                return self.backend.constraints()
            except Exception as error:  # noqa: BLE001 - a site's own back-end may raise anything
                return f"{type(error).__name__}: {error}"

        rules = from_first(ask)
        if isinstance(rules, str):
            raise ReleaseError(f"the release back-end can't say who must stay: {rules}")
        # Rank 0 speaks to the scheduler, writes what monitors show, and holds the store where ranks meet.
        return replace(rules, ranks_stay=rules.ranks_stay | {0})

    def prepare(self, chosen: Repacking) -> None:
        """Ask the back-end whether it will be granted; does something on rank 0 only."""
        if dist.get_rank() == 0:
            self.wait()
            self.backend.prepare(chosen.released_ranks, chosen.released_nodes)

    def give_back(self, chosen: Repacking, world: World) -> None:
        """Give the workers back while training goes on; called on the survivors after they met."""
        self.went(chosen)
        if dist.get_rank() == 0:
            # Schedulers take seconds. Not a daemon: a short run's last release is still carried out.
            self._thread = threading.Thread(target=self._release, args=(chosen, world), name="dynpipe_ds release")
            self._thread.start()

    def way_out(self, door: Address | None, token: str, *, is_taken: bool) -> Callable[[], NoReturn]:
        """How this worker ends its part in the job.

        Args:
            door: of a rank that goes on; ``None`` if nobody may join.
            token: what it takes to join.
            is_taken: whether it is taken away, so that it can't stay.
        """
        if is_taken:
            return ExitBackend().leave
        if self.backend.workers_stay and door is not None:
            return partial(wait_again, door, token)
        return self.backend.leave

    def check_door(self, *, has_door: bool) -> None:
        """Refuse to keep workers where they could not come back; the same on every rank.

        Args:
            has_door: whether workers may join.

        Raises:
            ValueError: with the remedy.
        """
        if self.backend.workers_stay and not has_door:
            raise ValueError(
                f'repack.release.backend = "{self.name}", elastic.enabled = False: freed workers are to wait at a '
                'door, and there is none; set elastic.enabled to true, or take the back-end "exit"'
            )

    def _release(self, chosen: Repacking, world: World) -> None:
        try:
            if self.backend.workers_leave_first:
                world.wait_for_leaving()
            self.backend.release(chosen.released_ranks, chosen.released_nodes)
            self.backend.verify()
        except Exception as error:  # noqa: BLE001 - they have left: training goes on in any case
            warn(
                f"ranks {list(chosen.released_ranks)} have left, but giving them back failed "
                f"({type(error).__name__}: {error}); training goes on without them"
            )

    def wait(self) -> None:
        """Wait until the last release is through."""
        if self._thread is not None:
            self._thread.join()
