"""The live growth, as a newcomer does it: built alone and without layers, it waits, takes over, and enters.

What the present ranks do meanwhile is in ``grow.py``, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynpipe_ds.host.entering import renew_data, renew_replicas
from dynpipe_ds.host.topology import renumber
from dynpipe_ds.host.world import Groups, NobodyMetError, World, identity
from dynpipe_ds.joining.adopting import adopt
from dynpipe_ds.joining.newcomer import Newcomer, OverError, is_in
from dynpipe_ds.placement import Placement
from dynpipe_ds.ranks.place import open_place
from dynpipe_ds.telling import log

if TYPE_CHECKING:
    from dynpipe_ds.run import Run


class Entering:
    """One newcomer's way into the job.

    Args:
        run: of its own engine, which holds no layer.
        newcomer: how it speaks to the job.
    """

    def __init__(self, run: Run, newcomer: Newcomer) -> None:
        self._run, self._stage, self._newcomer = run, run.stage, newcomer

    def wait(self, papers: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Show what is here, wait, and enter; this process is a rank of the job then.

        Args:
            papers: what this process has.

        Returns:
            What the job does now on every rank (``boundaries``, those ``before``, ``num_micro_batches``), and the
            user's own values.

        Raises:
            RefusedError: if this process does not fit, with every difference.
            SystemExit: with code 0, if the job ends before it needs this process, or this process was warned.
        """
        try:
            self._newcomer.show_again(papers)
            while True:
                invited = self._newcomer.wait(lambda: self._run.repacker.is_warned)
                client = self._enter(invited)
                if client is not None:
                    is_in()
                    self._newcomer.hang_up()
                    return {name: invited[name] for name in ("boundaries", "before", "num_micro_batches")}, client
                self._newcomer.knock_again()
        except OverError as error:
            self._newcomer.hang_up()
            log.info("dynamic_pipeline: this worker waited to join and is not needed: %s", error)
            raise SystemExit(0) from None

    def _enter(self, invited: Mapping[str, Any]) -> dict[str, Any] | None:
        """Take over and enter; ``None`` if the present ranks went on without this one."""
        world = World(**invited["world"], timeout_s=invited["timeout_s"])
        client = self._get_ready(invited, world)
        if client is None:
            return None
        try:
            world.check()
            said = world.hear("go")
        except RuntimeError as error:
            said = str(error)
        if said != "yes":
            log.info("dynamic_pipeline: joining was called off (%s)", said)
            return None
        module, pipeline = self._stage.module, self._stage.pipeline
        old = Groups(module)
        module.is_absent = False
        try:
            renumber(pipeline, world, Placement.from_boundaries(invited["wide"]), sizes=invited["sizes"], old=old)
        except NobodyMetError as error:
            log.info("dynamic_pipeline: the job went on without the workers that it had invited (%s)", error)
            self._be_alone_again(world, old)
            return None
        module.surroundings.replica = module.replica
        renew_replicas(pipeline)
        renew_data(pipeline)
        pipeline.reading.source = pipeline.replica
        pipeline.reading.num_sources = self._newcomer.job["num_sources"]
        pipeline.measure_norm(self._stage.module.layer_of_parameter, len(module.layer_names()))
        self._stage.guard.start()
        return client

    def _be_alone_again(self, failed: World, old: Groups) -> None:
        """A fellow newcomer did not come: this process, which holds no layer yet, is as before and can wait again."""
        self._stage.module.is_absent = True
        alone = World([identity()], open_place(), failed.generation + 1)
        renumber(self._stage.pipeline, alone, self._stage.module.placement, old=old)

    def _get_ready(self, invited: Mapping[str, Any], world: World) -> dict[str, Any] | None:
        try:
            replica = self._stage.pipeline.replica_at(invited["sizes"], world.rank)
            client = adopt(self._run, invited["common"], invited["replicas"][replica])
        except Exception as error:  # noqa: BLE001 - whatever it is, the job need not wait for it
            self._newcomer.answer(f"{type(error).__name__}: {error}")
            return None
        self._newcomer.answer("")
        return client
