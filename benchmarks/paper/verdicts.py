"""Which of the paper's factors ours meet, beat or miss, over a baseline of the same kind; or why they can't be "
"compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from benchmarks.paper import published
from benchmarks.paper.contenders import BEST_STATIC, DENSE, LEAST, OURS_OF, PAPERS
from benchmarks.record import table

BEATEN, MET, MISSED = "beaten", "met", "missed"
BEYOND = "missed; more than all work / stages would give here"
NO_COMPARISON = "can't be compared"
WHY = {
    published.TUTEL: "Tutel is not here (experts over devices: benchmarks/expert_parallel)",
    published.EGERIA: "over Egeria, whose own overhead grows with depth; ours are over the static cut with the same "
    "freezing",
}


class SizeOf(Protocol):
    """What is asked of a row's size."""

    @property
    def scenario(self) -> str:
        """One of the six."""

    @property
    def counting(self) -> str:
        """``"equation"`` or ``"cost"``."""

    @property
    def blocks(self) -> int:
        """Of the model."""

    @property
    def num_stages(self) -> int:
        """S."""


class RowOf(Protocol):
    """What is asked of a row of ``compared``."""

    @property
    def size(self) -> SizeOf:
        """Of the row."""

    def last(self, label: str, over: str = BEST_STATIC) -> float:
        """Throughput of the last quarter over that of another contender."""


def verdict(theirs: float, ours: float, bound: float) -> str:
    """What a figure of the paper is beside ours, both over the same kind of baseline.

    Args:
        theirs: factor.
        ours: the best of ours.
        bound: total work / stages: what no partition and no schedule passes.
    """
    if ours >= 1.02 * theirs:
        return BEATEN
    if ours >= 0.98 * theirs:
        return MET
    return MISSED if theirs <= bound else BEYOND


def text(rows: Sequence[RowOf]) -> str:
    """Each factor of Figure 3 beside ours.

    Args:
        rows: simulated.
    """
    head = ["scenario", "model", "paper", "over", "stages", "counting", "best of the paper's four as printed",
            "best of ours", "total work / stages", "verdict, last quarter"]  # fmt: skip
    return table(head, [line for factor in published.FACTORS for line in _lines(factor, rows)])


def notes(rows: Sequence[RowOf]) -> list[str]:
    """What the verdicts come to.

    Args:
        rows: simulated.
    """
    lines = [line for factor in published.FACTORS for line in _lines(factor, rows)]
    counts = Counter((line[5] or "-", line[-1].partition(":")[0]) for line in lines)
    told = "; ".join(f"{counting}: {verdict} {count}" for (counting, verdict), count in sorted(counts.items()))
    return [
        f"Verdicts, by counting ({told}). A factor over a dense model is mostly the work that is saved, which is "
        f"assumed "
        "here; the column *dense model* has how much.",
        "The paper does not say whether the static baseline of pruning prunes, so its factors stand over both.",
    ]


def _lines(factor: published.Factor, rows: Sequence[RowOf]) -> Iterator[list[str]]:
    depth = factor.model if isinstance(factor.model, int) else 32
    first = [factor.scenario, str(factor.model), f"{factor.factor:.2f}x"]
    why = f"{NO_COMPARISON}: {WHY[factor.baseline]}" if factor.baseline in WHY else ""
    if factor.baseline == published.TUTEL:
        yield [*first, factor.baseline, "", "", "", "", "", why]
        return
    bases = {factor.baseline: DENSE if factor.baseline in (published.DENSE, published.NO_EXIT) else BEST_STATIC}
    if factor.scenario == "pruning":
        bases = {"static, pruned": BEST_STATIC, "static, not pruned": DENSE}
    for row in rows:
        size = row.size
        if size.scenario != factor.scenario or size.blocks != depth or size.num_stages < 8:
            continue
        for name, over in bases.items():
            theirs, ours = (max(row.last(label, over) for label in labels) for labels in (PAPERS, OURS_OF))
            bound = row.last(LEAST, over)
            yield [
                *first, name, str(size.num_stages), size.counting, f"{theirs:.2f}x", f"{ours:.2f}x", f"{bound:.2f}x",
                why or verdict(factor.factor, ours, bound),
            ]
