"""The throughput table of all contenders with the paper's settings, on paper; and DynPipe's Table 2 beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.paper import published, verdicts
from benchmarks.paper.contenders import (
    ALL,
    BEST_STATIC,
    CUT,
    DIFFUSION_T,
    IDEAL,
    ORDER,
    OURS_OF,
    PAPERS,
    PARTITION_T,
    RECUT,
    SPLIT,
    UNIFORM,
    case_of,
    outcomes,
)
from benchmarks.paper.outcome import Outcome
from benchmarks.paper.plots import plot_bars
from benchmarks.paper.report import Report
from benchmarks.record import table
from benchmarks.replay.case import METHODS, first_boundaries, load_trace
from dynpipe_ds.partition import optimal
from dynpipe_ds.simulation import flow_line_s

SCENARIOS = ("pruning", "freezing", "sparse_attention", "early_exit", "mod")
DEPTHS = (24, 32, 40, 48, 56)
ONE_NODE = (BEST_STATIC, PARTITION_T, DIFFUSION_T, CUT, ORDER, SPLIT, IDEAL)


@dataclass(frozen=True)
class Size:
    """One row.

    Args:
        scenario: one of the six.
        counting: ``"equation"``, the paper's, or ``"cost"``, ours.
        blocks: of the model.
        num_stages: S.
        costs: whether all but the layers takes what it takes here (``"calibrated"``) or nothing (``"none"``).
        labels: contenders.
    """

    scenario: str
    counting: str
    blocks: int
    num_stages: int
    costs: str = "calibrated"
    labels: tuple[str, ...] = ALL

    def run(self) -> Row:
        """Simulate all of it."""
        case = replace(case_of(self.scenario, self.counting, self.blocks, self.num_stages), costs=self.costs)
        return Row(self, case.num_micro_batches, outcomes(case, self.labels))


@dataclass(frozen=True)
class Row:
    """What a size's contenders took.

    Args:
        size: of the row.
        num_micro_batches: M.
        outcomes: by label.
    """

    size: Size
    num_micro_batches: int
    outcomes: dict[str, Outcome]

    def whole(self, label: str, over: str = BEST_STATIC) -> float:
        """Throughput of the whole run over that of another contender.

        Args:
            label: of a contender.
            over: of the other.
        """
        return self.outcomes[over].whole_s / self.outcomes[label].whole_s

    def last(self, label: str, over: str = BEST_STATIC) -> float:
        """The same of the last quarter of the run.

        Args:
            label: of a contender.
            over: of the other.
        """
        return self.outcomes[over].last_s / self.outcomes[label].last_s

    def values(self) -> dict[str, Any]:
        """Plain values."""
        size, found = self.size, self.outcomes
        return {
            "scenario": size.scenario, "counting": size.counting, "blocks": size.blocks, "stages": size.num_stages,
            "micro_batches": self.num_micro_batches, "batches": len(found[BEST_STATIC].batches_s),
            "static_whole_s": round(found[BEST_STATIC].whole_s, 3),
            "static_last_s": round(found[BEST_STATIC].last_s, 3),
            "whole": {label: round(self.whole(label), 4) for label in found},
            "last": {label: round(self.last(label), 4) for label in found},
            "moves": {label: one.moves for label, one in found.items() if one.moves},
            "overhead": {
                label: round(one.overhead_s / one.whole_s, 5) for label, one in found.items() if one.overhead_s
            },
            "imbalance": {label: round(one.imbalance, 3) for label, one in found.items() if one.imbalance >= 0},
            "bubble": {label: round(one.bubble, 3) for label, one in found.items() if one.bubble >= 0},
            "hops": {label: one.hops for label, one in found.items() if one.hops >= size.num_stages},
        }


def full_sizes() -> list[Size]:
    """The paper's: every depth on 2, 4 and 8 stages, the figure's on 24, MoE's 32 blocks on 16."""
    found = [Size(name, "cost", blocks, s) for s in (2, 4, 8) for name in SCENARIOS for blocks in DEPTHS]
    found += [Size(name, "equation", blocks, 8) for name in SCENARIOS for blocks in DEPTHS]
    found += [
        Size(name, counting, blocks, 24)
        for counting in ("cost", "equation") for name in SCENARIOS for blocks in published.DEPTHS
    ]
    return found + [Size("moe", counting, 32, 16) for counting in ("cost", "equation")]


def quick_sizes() -> list[Size]:
    """A glance: 24 blocks on 8 stages."""
    return [Size(name, "cost", 24, 8) for name in ("pruning", "freezing")]


def one_node_sizes(counting: str) -> list[Size]:
    """The lines of DynPipe's Table 2; all but the layers takes nothing.

    Args:
        counting: ``"equation"`` or ``"cost"``.
    """
    return [
        Size("pruning", counting, blocks, stages, "none", ONE_NODE) for blocks, stages in sorted(published.ONE_NODE)
    ]


def run(sizes: Sequence[Size], raw: Path, processes: int = 1) -> list[Row]:
    """Simulate the rows that ``raw`` does not hold yet, and add them there.

    Args:
        sizes: rows.
        raw: file of JSON lines.
        processes: how many rows at a time.
    """
    done = {row.size: row for row in _read(raw)}
    missing = [size for size in sizes if size not in done]
    raw.parent.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(_each(missing, processes), start=1):
        done[row.size] = row
        with raw.open("a") as file:
            file.write(json.dumps(_as_values(row)) + "\n")
        size = row.size
        print(f"{number}/{len(missing)} {size.scenario} ({size.counting}), {size.blocks} blocks, {size.num_stages} "
              f"stages: ours {max(row.last(label) for label in OURS_OF if label in row.outcomes):.2f}x", flush=True)
    return [done[size] for size in sizes]


def _each(sizes: Sequence[Size], processes: int) -> Iterator[Row]:
    if processes == 1 or len(sizes) < 2:
        yield from map(Size.run, sizes)
        return
    with get_context("forkserver").Pool(processes) as pool:
        yield from pool.imap(Size.run, sizes)


def _as_values(row: Row) -> dict[str, Any]:
    return {
        "size": vars(row.size), "num_micro_batches": row.num_micro_batches,
        "outcomes": {label: vars(one) for label, one in row.outcomes.items()},
    }


def _read(raw: Path) -> Iterator[Row]:
    for line in raw.read_text().splitlines() if raw.exists() else ():
        values = json.loads(line)
        size = Size(**(values["size"] | {"labels": tuple(values["size"]["labels"])}))
        found = {
            label: Outcome(**(one | {"batches_s": tuple(one["batches_s"])}))
            for label, one in values["outcomes"].items()
        }
        yield Row(size, values["num_micro_batches"], found)


COUNTED = {"cost": "What the states cost (ours)", "equation": "What the paper's equations count (section 2)"}


def compared(report: Report, rows: Sequence[Row]) -> None:
    """Throughput of all contenders, whole run and last quarter apart, with the paper's figure.

    Args:
        report: to fill and save.
        rows: simulated.
    """
    parts = []
    for counting, title in COUNTED.items():
        chosen = [row for row in rows if row.size.counting == counting]
        for phase, of in (("last quarter of the run", Row.last), ("whole run", Row.whole)):
            if chosen:
                parts.append(f"## {title}: {phase}\n\n{_table(chosen, of)}")
    parts.append(f"## Beside the paper's figures\n\n{verdicts.text(rows)}")
    parts.append(f"## Imbalance and idleness at the end\n\n{_imbalances(rows)}")
    report.table = "\n\n".join(parts)
    report.values = [row.values() for row in rows]
    report.text = (
        "Throughput over the best static cut of the same model (Megatron-LM's or DeepSpeed's), all overheads charged, "
        "M = 4S, phases in the proportion of the paper's 10,000 iterations (100 batches; 40 where every iteration is "
        "another), the paper's balancers at its intervals. *Dense model*: the same without the dynamism, cut "
        "uniformly. *Best single re-cut*: by hand, once, with hindsight. *Partition*, *diffusion*: the paper's, as "
        "printed; diffusion "
        "scatters layers, which no engine of ranges runs, so its batches are simulated generously. *Ours*: `auto` at "
        "its defaults; cut only, then with planned orders, then with attention and MLP of a block as two layers. "
        "*Ideal cut*: "
        "every batch on its best cut of whole blocks under 1F1B, for nothing. *Total work / stages*: no schedule at "
        "all."
    )
    left = len(set(full_sizes()) - {row.size for row in rows})
    report.notes += [f"{left} rows of the full set are not in this table."] * bool(left)
    report.notes += verdicts.notes(rows)
    report.notes += [
        "Which densities, frozen blocks and routed tokens a training goes through is assumed (benchmarks/traces/"
        "equations.py): the paper gives equations for loads, not the loads.",
        "One batch stands for 100 (250) iterations, so a decision weighs more here than in the paper's runs where it "
        "does not decide in every iteration.",
        "A cost of 1 ms for what is not layers (as calibrated on this CPU) against 30 ms for a dense block; Table 2's "
        "page (one_node) has none.",
        "By its own sum over experts (section 2.1) MoE has no imbalance between stages that hold whole blocks.",
    ]
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        is_shown = row.size.blocks == 32 if row.size.scenario == "moe" else row.size.blocks == 48
        if is_shown and row.size.num_stages >= 8 and row.size.counting == "cost":
            name = f"{row.size.scenario}\n{row.size.num_stages} stages".replace("_", " ")
            bars = {label: row.last(label) for label in (RECUT, *PAPERS, *OURS_OF, IDEAL)}
            panels.setdefault("last quarter, what the states cost", {})[name] = bars
    report.save(None if not panels else lambda path: plot_bars(
        path, panels, ylabel="throughput over\nbest static (x)", title=report.title, reference=1.0,
        xlabel="scenario (simulation)",
    ))


def _table(rows: Sequence[Row], of: Callable[[Row, str], float]) -> str:
    head = ["scenario", "blocks", "stages", *(label for label in ALL if label != BEST_STATIC)]
    lines = [
        [row.size.scenario, str(row.size.blocks), str(row.size.num_stages),
         *(f"{of(row, label):.2f}" for label in ALL if label != BEST_STATIC)]
        for row in rows
    ]  # fmt: skip
    return table(head, lines)


def _imbalances(rows: Sequence[Row]) -> str:
    head = ["scenario", "counting", "blocks", "stages", "imbalance (Eq. 2): best static", "partition:time",
            "diffusion:time", "ours: cut", "messages of a micro-batch, diffusion:time", "idle: best static", "ours: "
            "cut",
            "ours: planned order", "paper (Figure 1)"]  # fmt: skip
    lines = []
    for row in rows:
        found, size = row.outcomes, row.size
        if size.blocks not in (32, 48) or (size.blocks == 32) != (size.scenario == "moe"):
            continue
        lines.append([
            size.scenario, size.counting, str(size.blocks), str(size.num_stages),
            *(f"{found[label].imbalance:.2f}" for label in (BEST_STATIC, PARTITION_T, DIFFUSION_T, CUT)),
            f"{found[DIFFUSION_T].hops} (contiguous: {size.num_stages - 1})",
            *(f"{found[label].bubble:.1%}" for label in (BEST_STATIC, CUT, ORDER)), published.idleness(size.scenario),
        ])
    return table(head, lines)


def one_node(report: Report, rows: Sequence[Row]) -> None:
    """Pruning's last phase beside DynPipe's Table 2.

    Args:
        report: to fill and save.
        rows: simulated with :func:`one_node_sizes`, both countings.
    """
    head = ["blocks", "GPUs", "paper: diffusion / static", "partition / static", "speedup, as printed"]
    for name in ("cost", "equation"):
        head += [f"{name}: ideal cut", "diffusion:time as printed", "partition:time", *OURS_OF]
    by_size = {(row.size.counting, row.size.blocks, row.size.num_stages): row for row in rows}
    lines = []
    for (blocks, gpus), line in sorted(published.ONE_NODE.items()):
        ratios = (line.diffusion / line.megatron, line.partition / line.megatron, line.speedup)
        cells = [f"{ratio:.2f}" for ratio in ratios]
        for counting in ("cost", "equation"):
            row = by_size[counting, blocks, gpus]
            cells += [f"{row.last(label):.2f}" for label in (IDEAL, DIFFUSION_T, PARTITION_T, *OURS_OF)]
        lines.append([str(blocks), str(gpus), *cells])
    report.table = table(head, lines)
    report.values = [row.values() for row in rows]
    ceilings = [by_size["cost", blocks, 8].last(IDEAL) for blocks in DEPTHS]
    by_formula = [ceiling_by_formula(blocks, 8) for blocks in DEPTHS]
    printed = [published.ONE_NODE[blocks, 8].speedup for blocks in DEPTHS]
    apart = max(abs(theirs / ceiling - 1) for theirs, ceiling in zip(printed, by_formula, strict=True))
    report.text = (
        "Samples a second over the static cut at 90% sparsity, one pipeline, M = 4S; nothing but layers takes time. "
        "*Ideal cut* is the ceiling: the best contiguous cut of whole blocks under 1F1B. The left columns are the "
        "paper's; it ran out of memory with 48 blocks on 2 GPUs, and with 56 on 2 and 4."
    )
    report.notes += [
        "8 stages, 24 to 56 blocks, ceiling of a contiguous cut of whole blocks: by the formula (M - 1) slowest + "
        f"sum of stages {_slashed(by_formula)}, by the simulator {_slashed(ceilings)}; the paper "
        f"{_slashed(printed)}, at most "
        f"{apart:.1%} from the formula. Under 1F1B the uniform cut's light stages work ahead of its slowest one, "
        f"which the formula does not see, so the simulated static cut is faster and the gain smaller.",
        "The ceilings are those of *our* load model, whose densities are assumed: the printed factors are what the "
        "best cut of such a model gives, and no more.",
        "By the paper's own equation, linear in density, the ceiling is far above its table: there, too, a pruned "
        "layer must cost more than its share of parameters.",
    ]
    report.save()


def ceiling_by_formula(blocks: int, num_stages: int) -> float:
    """Gain of the best contiguous cut of whole blocks at 90% sparsity, by the formula of a line of unequal stages.

    Args:
        blocks: of the model.
        num_stages: S; there are 4S micro-batches.
    """
    costs = load_trace(f"model:pruning_cost:{blocks}").batches[-1].seconds
    start = first_boundaries(METHODS[UNIFORM], load_trace(f"model:pruning_cost:{blocks}"), num_stages)
    static, best = (
        flow_line_s([math.fsum(costs[a:b]) for a, b in pairwise(cuts)], 4 * num_stages)
        for cuts in (start, optimal(costs, num_stages).boundaries)
    )
    return static / best


def _slashed(values: Iterable[float]) -> str:
    return "/".join(f"{value:.2f}" for value in values)
