"""Two runs of the script, bit for bit: losses of every batch, evaluations, and what all ranks held at the end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from dynpipe_ds.cli.show import layer_spans
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
        return not str(self)

    def __str__(self) -> str:
        return "; ".join(text for text in (self.losses, self.evaluations, self.weights, self.state) if text)


def compare(first: Outcome, second: Outcome) -> Difference:
    """Compare two complete runs."""
    losses, batch = _losses(first, second, "batch", "the loss of batch")
    evaluations, _ = _losses(first, second, "evaluation", "the result of evaluation")
    unread = any("unread" in rank.end for rank in (*first.ranks, *second.ranks))
    weights = "" if unread else _layers(first.held("weights"), second.held("weights"), "weights")
    a, b = first.held("state"), second.held("state")
    both = a.keys() & b.keys()  # ours keeps a tied layer's state once for every occurrence, DeepSpeed's maybe not
    state = _layers({name: a[name] for name in both}, {name: b[name] for name in both}, "optimizer state")
    return Difference(losses, evaluations, weights, state, batch, len(both))


def _losses(first: Outcome, second: Outcome, kind: str, what: str) -> tuple[str, int]:
    """The earliest that differs on any rank, and its number."""
    found = [
        (i, f"{what} {i} differs{_amount(x, y)}")
        for a, b in zip(first.ranks, second.ranks, strict=True)
        for i, (x, y) in enumerate(zip_longest(a.losses(kind), b.losses(kind)), start=1)
        if x != y
    ]
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
    layers = {int(name.split("/")[1]) for name in differing}
    return f"{what} of {layer_spans(layers)} differ" if differing else ""
