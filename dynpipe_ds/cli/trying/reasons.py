"""Why two ways differ: what the configuration suggests, and whether the difference is gone when that is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynpipe_ds.cli.trying.compare import compare
from dynpipe_ds.cli.trying.outcome import Event, Outcome
from dynpipe_ds.cli.trying.settings import DEEPSPEED, MOVING, NO_CLIPPING, NO_DROPOUT, SEED_LAYERS, STILL


class Run(Protocol):
    """Runs the script once more."""

    def __call__(self, way: str, changes: tuple[str, ...] = (), batches: int | None = None) -> Outcome:
        """Run it.

        Args:
            way: one of the three.
            changes: what to change beside.
            batches: after which to stop; as always, if not given.
        """


@dataclass(frozen=True)
class Reason:
    """Why a difference is there, or may be.

    Attributes:
        text: the reason, and the evidence for it.
        remedy: what helps.
        shown: whether changing it in all ways took the difference away.
    """

    text: str
    remedy: str
    shown: bool


@dataclass(frozen=True)
class _Suspect:
    change: str
    text: str
    remedy: str
    applies: Callable[[Sequence[Event]], bool]


_SUSPECTS = (
    _Suspect(
        NO_CLIPPING,
        "gradient clipping: ours takes the norm of the whole model, the same for every cut; DeepSpeed's counts the "
        "first stage only in fp32, and is rounded otherwise in bf16 and under ZeRO-1",
        'to compare with DeepSpeed set "gradient_clipping": 0; to train leave it, ours is the norm of the whole model',
        lambda facts: facts[0]["clipping"] > 0 and facts[0]["stages"] > 1,
    ),
    _Suspect(
        SEED_LAYERS,
        "random numbers without seed_layers: dropout and whatever else layers draw comes from each rank's own stream, "
        "so it follows the cut",
        "pass seed_layers=True to the module to have the same masks for every cut",
        lambda facts: not facts[0]["seed_layers"],
    ),
    _Suspect(
        NO_DROPOUT,
        "dropout: under activation checkpointing DeepSpeed seeds every block from its stage's first layer, ours from "
        "the layer; and a layer that keeps a random stream of its own draws other masks where it has moved",
        "leave it: the masks are as random as before; to compare bits train without dropout",
        lambda facts: any(f["dropout"] for f in facts),
    ),
)


def explain(outcomes: Mapping[str, Outcome], run: Run) -> list[Reason]:
    """Find out why ways differ from DeepSpeed's class.

    Args:
        outcomes: complete runs by way, of which at least one differs from the first.
        run: runs the script again.

    Returns:
        Reasons that are shown, or, where none is, those that may be.
    """
    first = outcomes[DEEPSPEED]
    again = compare(first, run(DEEPSPEED))
    if not again.equal:
        return [Reason(
            f"the script is not repeatable: two runs with DeepSpeed's class differ, too ({again})",
            "seed everything that draws random numbers (torch, numpy, random, the data's order) and choose "
            "deterministic operations; nothing can be said before", False,
        )]  # fmt: skip
    differing = [way for way in outcomes if way != DEEPSPEED and not compare(first, outcomes[way]).equal]
    facts = [rank.facts for rank in first.ranks]
    tried: list[_Suspect] = []
    left = differing
    failed: list[Reason] = []
    for suspect in (s for s in _SUSPECTS if s.applies(facts)):
        try:
            left = _differing(left, [*tried, suspect], run)
        except _FailedError as error:
            failed.append(Reason(f"{suspect.text} (not shown: {error})", suspect.remedy, False))
            continue
        tried.append(suspect)
        if not left:
            needed = _needed(tried, differing, run)
            return [_shown(suspect, needed) for suspect in needed]
    return failed + (_possible(outcomes, left) or [_unknown(outcomes, tried, left[-1], run)])


class _FailedError(Exception):
    """The script fails with a change."""


def _differing(ways: Sequence[str], changed: Sequence[_Suspect], run: Run) -> list[str]:
    """Ways that still differ with changes."""
    changes = tuple(suspect.change for suspect in changed)
    found = {way: run(way, changes) for way in (DEEPSPEED, *ways)}
    for outcome in found.values():
        if outcome.failure:
            raise _FailedError(f"{outcome.settings.named} fails, {' '.join(outcome.failure.split())}")
    return [way for way in ways if not compare(found[DEEPSPEED], found[way]).equal]


def _needed(tried: Sequence[_Suspect], differing: Sequence[str], run: Run) -> list[_Suspect]:
    """Without those that make no difference."""
    needed = list(tried)
    for suspect in tried[:-1]:
        rest = [one for one in needed if one is not suspect]
        if not _differing(differing, rest, run):
            needed = rest
    return needed


def _shown(suspect: _Suspect, needed: Sequence[_Suspect]) -> Reason:
    changes = " and ".join(one.change for one in needed)
    return Reason(f"{suspect.text} (shown: with {changes} in all ways all bits are equal)", suspect.remedy, True)


def _possible(outcomes: Mapping[str, Outcome], left: Sequence[str]) -> list[Reason]:
    """Known differences between ours and DeepSpeed's that no change takes away, where the script has what they need."""
    if STILL not in left or (MOVING in left and not compare(outcomes[STILL], outcomes[MOVING]).equal):
        return []  # those don't depend on moves
    ranks = outcomes[DEEPSPEED].ranks
    facts = ranks[0].facts
    outputs = max((crossing["outputs"] for rank in ranks for crossing in rank.events["crossing"]), default=0)
    found = {
        f"{outputs} tensors with gradients cross a cut: DeepSpeed runs one backward for each, ours one for all, so "
        "gradients are added in another order": outputs > 1,
        f"{facts['replicas']} replicas: ours adds gradients in the order of the replicas, DeepSpeed's in that of its "
        "reduction": facts["replicas"] > 2,
        "tied layers on one stage: DeepSpeed sums their gradients as they come, ours in layer order, as across "
        "stages": any(rank.facts["tied_on_one_stage"] for rank in ranks),
        "activation checkpointing: ours does not give it layers whose inputs want no gradient, which it would cut off "
        "from training": facts["checkpointing"] > 0,
    }  # fmt: skip
    remedy = "leave it; the run that moves has the same bits as the one that does not"
    texts = [text for text, given in found.items() if given]
    return [Reason(f"{text} (not shown: no setting changes it)", remedy, False) for text in texts]


def _unknown(outcomes: Mapping[str, Outcome], tried: Sequence[_Suspect], way: str, run: Run) -> Reason:
    """What else can be said: what was equal before the first loss that differs."""
    excluded = f"; it is not {', nor '.join(s.text.partition(':')[0] for s in tried)}" if tried else ""
    batch = compare(outcomes[DEEPSPEED], outcomes[way]).batch
    evidence = ""
    if batch > 1:
        before = compare(run(DEEPSPEED, batches=batch - 1), run(way, batches=batch - 1))
        found = "all weights are still equal" if before.equal else str(before)
        evidence = f"; after batch {batch - 1} {found}"
    return Reason(
        f"not known{excluded}: the script is repeatable with DeepSpeed's class and differs with {way}{evidence}",
        "look at what the layers keep outside of themselves (docs/limits.md), and report it with the script", False,
    )
