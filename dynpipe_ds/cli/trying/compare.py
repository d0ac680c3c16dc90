"""Two runs of the script, bit for bit: losses of every batch, evaluations, and what all ranks held at the end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import zip_longest

from dynpipe_ds.cli.command import layer_spans
from dynpipe_ds.cli.trying.outcome import Outcome
from dynpipe_ds.cli.trying.weights import Digests, number


@dataclass(frozen=True)
class Difference:
    """What differs between two runs; empty texts where nothing does.

    Attributes:
        losses: the first batch whose loss differs, and by how much.
        evaluations: the same of ``eval_batch``.
        weights: layers whose weights differ at the end.
        state: layers whose optimizer state does.
        batch: the first batch that differs, counted from 1; 0 if none.
        compared_state: how many tensors of optimizer state both runs had.
    """

    losses: str = ""
    evaluations: str = ""
    weights: str = ""
    state: str = ""
    batch: int = 0
    compared_state: int = 0

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.losses or self.evaluations or self.weights or self.state)

    def __str__(self) -> str:
        return "; ".join(text for text in (self.losses, self.evaluations, self.weights, self.state) if text)


def compare(first: Outcome, second: Outcome) -> Difference:
    """Compare two complete runs.

    Args:
        first: the one to compare with.
        second: the other.
    """
    losses, batch = _losses([r.losses for r in first.ranks], [r.losses for r in second.ranks], "the loss of batch")
    evaluations, _ = _losses(
        [r.evaluations for r in first.ranks], [r.evaluations for r in second.ranks], "the result of evaluation"
    )
    unread = any("unread" in rank.end for rank in (*first.ranks, *second.ranks))
    weights = "" if unread else _layers(first.held("weights"), second.held("weights"), "weights")
    a, b = first.held("state"), second.held("state")
    both = a.keys() & b.keys()  # ours keeps a tied layer's state once for every occurrence, DeepSpeed's maybe not
    state = _layers({name: a[name] for name in both}, {name: b[name] for name in both}, "optimizer state")
    return Difference(losses, evaluations, weights, state, batch, len(both))


def _losses(first: list[list[list[str]]], second: list[list[list[str]]], what: str) -> tuple[str, int]:
    """The earliest that differs on any rank."""
    found: list[tuple[int, str]] = []
    for a, b in zip(first, second, strict=True):
        for i, (x, y) in enumerate(zip_longest(a, b), start=1):
            if x != y:
                found.append((i, f"{what} {i} differs{_amount(x, y)}"))
                break
    index, text = min(found, default=(0, ""))
    return text, index


def _amount(a: list[str] | None, b: list[str] | None) -> str:
    if a is None or b is None or len(a) != len(b):
        return ": only one of the two has it"
    for x, y in zip(a, b, strict=True):
        one, other = number(x), number(y)
        if x != y and one is not None and other is not None:
            return f": {one:.9g} and {other:.9g}"
    return ""


def _layers(first: Digests, second: Digests, what: str) -> str:
    differing = {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
    return f"{what} of {layer_spans(layers_in(differing))} differ" if differing else ""


def layers_in(names: Collection[str]) -> set[int]:
    """Layers that names of digests speak of.

    Args:
        names: ``replica/layer/name``.
    """
    return {int(name.split("/")[1]) for name in names}
