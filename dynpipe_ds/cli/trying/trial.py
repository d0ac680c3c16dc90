"""All of it in order: the three ways, the comparison, the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dynpipe_ds.cli.trying.compare import Difference, compare
from dynpipe_ds.cli.trying.outcome import Outcome
from dynpipe_ds.cli.trying.processes import run
from dynpipe_ds.cli.trying.reasons import Reason, explain
from dynpipe_ds.cli.trying.settings import DEEPSPEED, MOVING, STILL, WAYS, Settings


@dataclass
class Trial:
    """What was found.

    Attributes:
        outcomes: by way; without those that were not worth a run after another had failed.
        differences: to DeepSpeed's class, by way.
        moved: difference between ours with and without moves; ``None`` if one of the two failed.
        reasons: why something differs.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)
    moved: Difference | None = None
    reasons: list[Reason] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the script ran all ways."""
        return len(self.outcomes) == len(WAYS) and not any(outcome.failure for outcome in self.outcomes.values())

    @property
    def good(self) -> bool:
        """Whether all is equal, or differs for a reason that was shown, and no move failed."""
        equal = all(difference.equal for difference in self.differences.values())
        shown = bool(self.reasons) and all(reason.shown for reason in self.reasons)
        return self.complete and (equal or shown) and not self._has_failed_moves

    @property
    def _has_failed_moves(self) -> bool:
        """Whether a layer could not be carried, where a move was within the rules."""
        return any(refused["failed"] for refused in self.outcomes[MOVING].told("refused"))


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        command: as the user starts the script.
        batches: after which the script is stopped.
        move_every: batches between two moves.
        seed: of the boundaries.
        timeout_s: longest time in which no batch is finished; the start may take several times that.
        explain: whether to run more often where something differs.
    """

    command: Sequence[str]
    batches: int
    move_every: int
    seed: int
    timeout_s: float
    explain: bool


def carry_out(plan: Plan, folder: Path, tell: Callable[[str], None]) -> Trial:
    """Run the script all ways and compare.

    Args:
        plan: what to run.
        folder: for what is recorded; one folder a run.
        tell: given lines about how far it is.
    """
    settings = Settings(DEEPSPEED, plan.batches, plan.move_every, plan.seed)

    def once(way: str, changes: tuple[str, ...] = (), batches: int | None = None) -> Outcome:
        place = folder / f"run-{1 + sum(1 for _ in folder.glob('run-*'))}"
        wanted = replace(settings, way=way, changes=changes, batches=batches or plan.batches)
        return run(plan.command, wanted, place, timeout_s=plan.timeout_s, tell=tell)

    trial = Trial()
    for way in WAYS:
        trial.outcomes[way] = once(way)
        if trial.outcomes[way].failure:  # the next one would only fail the same way
            break
    done = {way: outcome for way, outcome in trial.outcomes.items() if not outcome.failure}
    for way in done:
        if way != DEEPSPEED:
            trial.differences[way] = compare(done[DEEPSPEED], done[way])
    if MOVING in done:
        trial.moved = compare(done[STILL], done[MOVING])
    if plan.explain and not all(difference.equal for difference in trial.differences.values()):
        trial.reasons = explain(done, once)
    return trial
