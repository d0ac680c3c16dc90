"""Why two ways differ: what the configuration suggests, and whether the difference is gone when that is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynpipe_ds.cli.trying.compare import compare
from dynpipe_ds.cli.trying.outcome import Event, Outcome
from dynpipe_ds.cli.trying.settings import DEEPSPEED, MOVING, NO_CLIPPING, NO_DROPOUT, SEED_LAYERS, STILL

Run = Callable[[str, tuple[str, ...]], Outcome]
"""Runs the script one of the ways, with changes."""


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
        "dropout without seed_layers: its masks come from each rank's own stream, so they follow the cut",
        "pass seed_layers=True to the module to have the same masks for every cut",
        lambda facts: any(f["dropout"] for f in facts) and not facts[0]["seed_layers"],
    ),
    _Suspect(
        NO_DROPOUT,
        "dropout: under activation checkpointing DeepSpeed seeds every block from its stage's first layer, ours from "
        "the layer; and a layer that keeps a random stream of its own draws other masks where it has moved",
        "leave it: the masks are as random as before; to compare bits train without dropout",
        lambda facts: any(f["dropout"] for f in facts),
    ),
)


def explain(outcomes: dict[str, Outcome], run: Run) -> list[Reason]:
    """Find out why ways differ from DeepSpeed's class.

    Args:
        outcomes: complete runs by way, of which at least one differs from the first.
        run: runs the script again.

    Returns:
        Reasons that are shown, or, where none is, those that may be.
    """
    first = outcomes[DEEPSPEED]
    again = compare(first, run(DEEPSPEED, ()))
    if not again.equal:
        return [Reason(
            f"the script is not repeatable: two runs with DeepSpeed's class differ, too ({again})",
            "seed everything that draws random numbers (torch, numpy, random, the data's order) and choose "
            "deterministic operations; nothing can be said before", False,
        )]  # fmt: skip
    differing = [way for way in outcomes if way != DEEPSPEED and not compare(first, outcomes[way]).equal]
    facts = [rank.facts for rank in first.ranks]
    changes: tuple[str, ...] = ()
    tried: list[_Suspect] = []
    left = differing
    for suspect in (s for s in _SUSPECTS if s.applies(facts)):
        changes, tried = (*changes, suspect.change), [*tried, suspect]
        changed = {way: run(way, changes) for way in (DEEPSPEED, *left)}
        if not all(outcome.complete for outcome in changed.values()):
            continue
        gone = [way for way in left if compare(changed[DEEPSPEED], changed[way]).equal]
        left = [way for way in left if way not in gone]
        if not left:
            return [_shown(s, changes) for s in _needed(tried, differing, run)]
    return [Reason(text, remedy, False) for text, remedy in _possible(outcomes, tried, left)]


def _needed(tried: Sequence[_Suspect], differing: Sequence[str], run: Run) -> Sequence[_Suspect]:
    """Without those that make no difference: if the last change is enough by itself, it is the reason alone."""
    if len(tried) > 1:
        alone = {way: run(way, (tried[-1].change,)) for way in (DEEPSPEED, *differing)}
        if all(o.complete and compare(alone[DEEPSPEED], o).equal for o in alone.values()):
            return tried[-1:]
    return tried


def _shown(suspect: _Suspect, changes: tuple[str, ...]) -> Reason:
    evidence = f"shown: with {' and '.join(changes)} in all ways all bits are equal"
    return Reason(f"{suspect.text} ({evidence})", suspect.remedy, True)


def _possible(
    outcomes: dict[str, Outcome], tried: Sequence[_Suspect], left: Sequence[str]
) -> list[tuple[str, str]]:
    """What can't be changed to see, or did not explain all."""
    first = outcomes[DEEPSPEED]
    facts = first.facts
    found = []
    if STILL in left:
        outputs = max((r.events["crossing"][0]["outputs"] for r in first.ranks if r.events["crossing"]), default=0)
        if outputs > 1:
            found.append((
                f"{outputs} tensors with gradients cross a cut: DeepSpeed runs one backward for each, ours one for "
                "all, so gradients are added in another order (not shown)", "leave it: only the last bits differ",
            ))  # fmt: skip
        if facts["replicas"] > 2:
            found.append((
                f"{facts['replicas']} replicas: ours adds gradients in the order of the replicas, DeepSpeed's in "
                "that of its ring (not shown)", "leave it: only the last bits differ",
            ))  # fmt: skip
        if any(rank.facts["tied_on_one_stage"] for rank in first.ranks):
            found.append((
                "tied layers on one stage: DeepSpeed sums their gradients as they come, ours in layer order, as across "
                "stages (not shown)", "leave it: only the last bits differ",
            ))  # fmt: skip
        if facts["checkpointing"]:
            found.append((
                "activation checkpointing: layers whose inputs want no gradient are not given to reentrant "
                "checkpointing, which would cut them off from training, as DeepSpeed's does (not shown)",
                "leave it: these layers are trained",
            ))  # fmt: skip
    if not found:
        ways = "it moves layers" if left == [MOVING] else "it does not move layers, too"
        excluded = f"; it is not {', nor '.join(s.text.partition(':')[0] for s in tried)}" if tried else ""
        found.append((
            f"not known{excluded}: the script is repeatable with DeepSpeed's class and differs with ours where {ways}",
            "look at what the layers keep outside of themselves (docs/limits.md), and report it with the script",
        ))  # fmt: skip
    return found
