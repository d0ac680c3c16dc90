"""When workers enter by the job's own decision: as a batch begins.

A worker that enters goes on with the next batch. What the script does on all ranks behind a batch, such as evaluating
or saving, it does not do, so that has to be over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dynpipe_ds.repacking.outcome import Repacking

if TYPE_CHECKING:
    from dynpipe_ds.run import Run


class LettingIn:
    """Lets workers in as a batch begins; all methods are collective over all ranks.

    Args:
        run: the run.
        carry_out: lets a pipeline get longer, given what was chosen and the seconds that deciding took.
    """

    def __init__(self, run: Run, carry_out: Callable[[Repacking, float], Any]) -> None:
        self._run, self._carry_out = run, carry_out
        self._chosen: tuple[Repacking, float] | None = None
        self._has_just_joined = False

    def choose(self, chosen: Repacking, plan_s: float) -> None:
        """Let the pipeline get longer as the next batch begins, unless it is another one by then."""
        self._chosen = chosen, plan_s

    def has_joined(self) -> None:
        """This process is one that was let in: the others have begun the batch that it begins next."""
        self._has_just_joined = True

    def begin_batch(self, wanted_stages: int, num_waiting: Callable[[], int], repack: Callable[[int], Any]) -> None:
        """Let those in that were decided on; else those that take the place of lost ones.

        Args:
            wanted_stages: that there were before some were lost; 0: none is missing.
            num_waiting: how many wait; collective.
            repack: goes on with a number of stages.

        Raises:
            RepackError: on every rank, if they could not come; training goes on without them.
            ReleaseError: likewise.
        """
        chosen, self._chosen = self._chosen, None
        if self._has_just_joined:
            self._has_just_joined = False
            return
        run, stages = self._run, self._run.stage.num_stages
        if chosen is not None and len(chosen[0].surviving_stages) == stages:
            if not run.balancer.is_held(run.num_batches - 1):
                self._carry_out(*chosen)
        elif wanted_stages > stages and run.balancer.newest and num_waiting() >= len(run.stage.pipeline.ranks_of(0)):
            repack(stages + 1)
