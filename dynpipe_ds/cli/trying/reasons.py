"""Why two ways differ: what the configuration suggests, and whether the difference is gone when that is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynpipe_ds.cli.trying.outcome import Outcome, Process, compare
from dynpipe_ds.cli.trying.settings import (
    DEEPSPEED,
    DENSE_CUTS,
    MOVING,
    NO_CLIPPING,
    NO_DROPOUT,
    NO_FLAGS,
    PLAIN_ADAM,
    SEED_LAYERS,
    STILL,
)

Run = Callable[..., Outcome]
"""Runs the script once more: a way, what to change beside, and, as ``batches``, after how many to stop."""


@dataclass(frozen=True)
class Reason:
    """Why a difference is there, with the evidence, or, not shown by a change in both ways, may be; and what helps."""

    text: str
    remedy: str
    shown: bool


@dataclass(frozen=True)
class _Suspect:
    change: str
    text: str
    remedy: str
    applies: Callable[[Sequence[Process]], bool]


_CLIPPING = _Suspect(
    NO_CLIPPING,
    "gradient clipping: ours takes the norm of the whole model, the same for every cut; DeepSpeed's counts the "
    "first stage only in fp32, and is rounded otherwise in bf16 and under ZeRO-1",
    'to compare with DeepSpeed set "gradient_clipping": 0; to train leave it, ours is the norm of the whole model',
    lambda ranks: ranks[0].facts["clipping"] > 0 and ranks[0].facts["stages"] > 1,
)
_LAYOUT = _Suspect(
    DENSE_CUTS,
    "memory layout: a gradient that is not contiguous crosses a cut; ours keeps its layout, as in the undivided model, "
    "DeepSpeed's is made contiguous, so kernels add in another order",
    "leave it: ours has the bits of the undivided model, whatever the cut",
    lambda ranks: any(rank.events["strided"] for rank in ranks),
)
_FLAGS = _Suspect(
    NO_FLAGS,
    "flags in evaluation: a tensor that wants a gradient, such as a mask, crosses a cut under no_grad; ours keeps its "
    "flag, as in the undivided model, DeepSpeed's loses it, and attention on CPUs chooses its kernel by it",
    "leave it: ours has the bits of the undivided model, whatever the cut",
    lambda ranks: any(rank.events["flagged"] for rank in ranks),
)
_ADAM = _Suspect(
    PLAIN_ADAM,
    "DeepSpeed's compiled Adam on a CPU: it keeps beta ** step as a running product; ours takes the power, so that a "
    "parameter's bits do not follow from what else its stage holds",
    'leave it; to compare bits set "torch_adam": true in the optimizer\'s params',
    lambda ranks: any(rank.facts["compiled_adam"] for rank in ranks),
)
_SEEDS = _Suspect(
    SEED_LAYERS,
    "random numbers without seed_layers: dropout and whatever else layers draw comes from each rank's own stream, "
    "so it follows the cut",
    "pass seed_layers=True to the module to have the same masks for every cut",
    lambda ranks: not ranks[0].facts["seed_layers"],
)
_CHECKPOINTED = _Suspect(
    NO_DROPOUT,
    "dropout under activation checkpointing: DeepSpeed seeds every block from its stage's first layer, ours from the "
    "layer",
    "leave it: the masks are as random as before; to compare bits train without dropout",
    lambda ranks: any(rank.facts["dropout"] for rank in ranks),
)
_STREAMS = replace(
    _CHECKPOINTED,
    text="dropout: a layer draws its masks from a random stream of its own, which is another one where it has moved",
)

# What may differ: between DeepSpeed's class and ours, and, independently of that, where layers move.
_QUESTIONS = (
    (DEEPSPEED, STILL, (_CLIPPING, _LAYOUT, _FLAGS, _ADAM, _CHECKPOINTED)),
    (STILL, MOVING, (_SEEDS, _STREAMS)),
)


def explain(outcomes: Mapping[str, Outcome], run: Run) -> list[Reason]:
    """Why ways differ, of which there are complete runs: what is shown, and where nothing is, what may be.

    Ours is compared with DeepSpeed's class, and moving with not moving.
    """
    again = compare(outcomes[DEEPSPEED], run(DEEPSPEED))
    if not again.equal:
        return [Reason(
            f"the script is not repeatable: two runs with DeepSpeed's class differ, too ({again})",
            "seed everything that draws random numbers (torch, numpy, random, the data's order) and choose "
            "deterministic operations; nothing can be said before", False,
        )]  # fmt: skip
    reasons = []
    for first, second, suspects in _QUESTIONS:
        if {first, second} <= outcomes.keys() and not compare(outcomes[first], outcomes[second]).equal:
            reasons += _Question(outcomes[first], outcomes[second], run).answer(suspects)
    return reasons


class _Question:
    """Why the second of two runs differs from the first."""

    def __init__(self, first: Outcome, second: Outcome, run: Run) -> None:
        self._first, self._second, self._run = first, second, run

    def answer(self, suspects: Sequence[_Suspect]) -> list[Reason]:
        """Change one thing after the other, in this order, until nothing differs."""
        tried: list[_Suspect] = []
        failed: list[Reason] = []
        for suspect in (s for s in suspects if s.applies([*self._first.ranks, *self._second.ranks])):
            is_equal, failure = self._with([*tried, suspect])
            if failure:
                failed.append(Reason(f"{suspect.text} (not shown: {failure})", suspect.remedy, False))
                continue
            tried.append(suspect)
            if is_equal:
                needed = self._needed(tried)
                changes = " and ".join(one.change for one in needed)
                shown = f"(shown: with {changes} in both ways all bits are equal)"
                return [Reason(f"{one.text} {shown}", one.remedy, True) for one in needed]
        return failed + (self._possible() or [self._unknown(tried)])

    def _with(self, changed: Sequence[_Suspect]) -> tuple[bool, str]:
        """Whether nothing differs with changes; and why that can't be said, where the script fails with them."""
        changes = tuple(suspect.change for suspect in changed)
        found = [self._run(outcome.settings.way, changes) for outcome in (self._first, self._second)]
        for outcome in found:
            if outcome.failure:
                return False, f"{outcome.settings.named} fails, {' '.join(outcome.failure.split())}"
        return compare(*found).equal, ""

    def _needed(self, tried: Sequence[_Suspect]) -> list[_Suspect]:
        """Without those that make no difference."""
        needed = list(tried)
        for suspect in tried[:-1]:
            rest = [one for one in needed if one is not suspect]
            if self._with(rest)[0]:
                needed = rest
        return needed

    def _possible(self) -> list[Reason]:
        """Known differences between ours and DeepSpeed's that no change takes away, where the script may have them."""
        if self._second.settings.way == MOVING:
            return []
        ranks = self._first.ranks
        facts = ranks[0].facts
        outputs = max((crossing["outputs"] for rank in ranks for crossing in rank.events["crossing"]), default=0)
        found = {
            f"{outputs} tensors with gradients cross a cut: DeepSpeed runs one backward for each, ours one for all, so "
            "gradients are added in another order": outputs > 1,
            f"{facts['replicas']} replicas: ours adds gradients in the order of the replicas, DeepSpeed's in that of "
            "its reduction": facts["replicas"] > 2,
            "tied layers on one stage: DeepSpeed sums their gradients as they come, ours in layer order, as across "
            "stages": any(rank.facts["tied_on_one_stage"] for rank in ranks),
            "activation checkpointing: ours does not give it layers whose inputs want no gradient, which it would cut "
            "off from training": facts["checkpointing"] > 0,
        }  # fmt: skip
        remedy = "leave it, if the run that moves has the same bits as the one that does not"
        texts = [text for text, given in found.items() if given]
        return [Reason(f"{text} (not shown: no setting changes it)", remedy, False) for text in texts]

    def _unknown(self, tried: Sequence[_Suspect]) -> Reason:
        """What else can be said: what was equal before the first loss that differs."""
        excluded = f"; it is not {', nor '.join(s.text.partition(':')[0] for s in tried)}" if tried else ""
        ways = self._first.settings.way, self._second.settings.way
        batch = compare(self._first, self._second).batch
        evidence = ""
        if batch > 1:
            before = compare(*(self._run(way, batches=batch - 1) for way in ways))
            found = "all weights are still equal" if before.equal else str(before)
            evidence = f"; after batch {batch - 1} {found}"
        return Reason(
            f"not known{excluded}: the script is repeatable, and {ways[1]} differs from {ways[0]}{evidence}",
            "look at what the layers keep outside of themselves (docs/limits.md), and report it with the script", False,
        )
