"""All of it in order: the three ways, the comparison, the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dynpipe_ds.cli.trying.compare import Difference, compare
from dynpipe_ds.cli.trying.outcome import Outcome
from dynpipe_ds.cli.trying.reasons import Reason, explain
from dynpipe_ds.cli.trying.run import run
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
    def equal(self) -> bool:
        """Whether all bits are, as far as the script ran."""
        return all(difference.equal for difference in self.differences.values())

    @property
    def good(self) -> bool:
        """Whether all is equal, or differs for a reason that was shown, and every layer could be carried."""
        shown = bool(self.reasons) and all(reason.shown for reason in self.reasons)
        if not self.complete or not (self.equal or shown):
            return False
        return not any(refused["failed"] for refused in self.outcomes[MOVING].told("refused"))


def carry_out(
    command: Sequence[str], settings: Settings, folder: Path, *, timeout_s: float, ask_why: bool,
    tell: Callable[[str], None],
) -> Trial:
    """Run the script all ways and compare.

    Args:
        command: as the user starts the script.
        settings: of the first run; the others differ in the way and in what they change.
        folder: for what is recorded; one folder a run.
        timeout_s: longest time in which no batch is finished; the start may take several times that.
        ask_why: whether to run more often where something differs.
        tell: given lines about how far it is.
    """

    def once(way: str, changes: tuple[str, ...] = (), batches: int | None = None) -> Outcome:
        place = folder / f"run-{1 + sum(1 for _ in folder.glob('run-*'))}"
        wanted = replace(settings, way=way, changes=changes, batches=batches or settings.batches)
        return run(command, wanted, place, timeout_s=timeout_s, tell=tell)

    trial = Trial()
    for way in WAYS:
        trial.outcomes[way] = once(way)
        if trial.outcomes[way].failure:  # the next one would only fail the same way
            break
    done = {way: outcome for way, outcome in trial.outcomes.items() if not outcome.failure}
    trial.differences = {way: compare(done[DEEPSPEED], done[way]) for way in done if way != DEEPSPEED}
    if MOVING in done:
        trial.moved = compare(done[STILL], done[MOVING])
    if ask_why and not trial.equal:
        trial.reasons = explain(done, once)
    return trial
