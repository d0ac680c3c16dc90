"""How long does a run suffer from a bad first cut? Whole runs on paper that start from DeepSpeed's cut by parameters.

    python -m benchmarks.planner.first_cut                     # 2 to 24 stages, six load models, both kinds of orders

The embedding and the head of the load models have a tenth of a block's parameters, so a cut by parameters would be
as good as any. Here they are given those of a real vocabulary, which cost next to nothing to compute, so the first and
the last stage get too few blocks. Prints a Markdown table and asserts nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.paper.experiments import LAYER_MS, SCENARIOS, scenario_of
from benchmarks.record import environment, in_words, table
from benchmarks.replay.case import METHODS, ORDERS, OURS, Case, Result, first_boundaries
from benchmarks.replay.predict import predict
from benchmarks.schedules.replayed import SIZES
from benchmarks.traces import Trace
from dynpipe_ds.partition import balanced

VOCABULARY, HIDDEN = 50_257, 1024
EDGE = VOCABULARY * HIDDEN / (12 * HIDDEN**2)
"""Blocks that the embedding has as many parameters as: 4.1."""
BATCHES = 60
WATCHED = 20
"""Batches that are looked at; later on it is the model that changes."""


@dataclass(frozen=True)
class Row:
    """One run.

    Args:
        case: what ran.
        start: its first partition.
        bad: the run from there.
        good: the same run from as many blocks on each stage.
    """

    case: Case
    start: tuple[int, ...]
    bad: Result
    good: Result

    @property
    def left_after(self) -> int | None:
        """Batches that ran on the first cut; ``None`` if it was never left."""
        return self.bad.moves[0].batch if self.bad.moves else None

    @property
    def first_s(self) -> float:
        """What the first batch takes longer than from the good cut, as a share."""
        return self.bad.engine_s[0] / self.good.engine_s[0] - 1.0

    @property
    def lost_batches(self) -> float:
        """Batches of the good run that the bad start has cost in all, its moves included."""
        return (sum(self.bad.batches_s) - sum(self.good.batches_s)) / self.good.batches_s[0]


def by_parameters(trace: Trace, num_stages: int) -> tuple[int, ...]:
    """DeepSpeed's cut where the embedding and the head are those of a real vocabulary.

    Args:
        trace: the layers; the first and the last are embedding and head.
        num_stages: S.
    """
    inner = list(trace.batches[0].parameter_bytes[1:-1])
    edge = EDGE * max(inner)
    return tuple(int(cut) for cut in balanced([edge, *inner, edge], num_stages).boundaries)


def measure(case: Case) -> Row:
    """Run a case from both cuts.

    Args:
        case: the run, whose method decides.
    """
    trace = case.load_trace()
    start = by_parameters(trace, case.num_stages)
    good = first_boundaries(METHODS[case.method], trace, case.num_stages)
    return Row(case, start, *(predict(case, cuts, until=WATCHED) for cuts in (start, good)))


def text_of(rows: Sequence[Row]) -> str:
    """The table.

    Args:
        rows: what was measured.
    """
    head = ["orders", "stages", "load model", "first batch", "batches on the first cut", "batches lost in all"]
    lines = [
        [
            "planned" if row.case.method == ORDERS[1].label else "1F1B", str(row.case.num_stages),
            scenario_of(row.case.trace), f"{row.first_s:+.0%}",
            "all" if row.left_after is None else str(row.left_after), f"{row.lost_batches:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return table(head, lines)


def main() -> None:
    """Print the environment and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=sorted(SIZES), choices=sorted(SIZES))
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--jitter", type=float, default=0.0, help="of layers from one micro-batch to the next")
    options = parser.parse_args()
    rows = []
    for num_stages in options.stages:
        count, blocks = SIZES[num_stages]
        for scenario in options.scenarios:
            case = Case(f"model:{scenario}:{blocks}", OURS[1].label, num_stages, count, BATCHES, LAYER_MS,
                        jitter=options.jitter)  # fmt: skip
            rows += [measure(replace(case, method=method.label)) for method in (OURS[1], ORDERS[1])]
    print(in_words(environment(threads=1)), end="\n\n")
    print(text_of(sorted(rows, key=lambda row: row.case.method)))


if __name__ == "__main__":
    main()
