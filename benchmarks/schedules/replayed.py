"""The same runs on the real engine: in virtual time, or with layers that sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.paper.experiments import EVERY, LAYER_MS, SCENARIOS, scenario_of
from benchmarks.paper.published import CHANGING_EVERY_BATCH
from benchmarks.paper.report import Report
from benchmarks.record import table
from benchmarks.replay.case import ORDERS as PLANNING
from benchmarks.replay.case import OURS, STATIC, WARM_UP, Case, Result
from benchmarks.schedules.on_paper import CHARGED, LEAST, MESSAGES, ROWS, TODAY, OnPaper, on_paper

SIZES = {2: (8, 24), 4: (16, 24), 8: (32, 24), 16: (32, 48), 24: (48, 48)}
"""Stages: micro-batches and blocks."""
GOALS = {4: 1.07, 8: 1.08, 16: 1.17, 24: 1.15}
"""What virtual time is to reach, over the best cut under 1F1B with messages that are waited for."""
HALVES_GOALS = {4: 1.10, 8: 1.14, 16: 1.25, 24: 1.25}
"""The same where blocks are cut into halves, over whole ones."""
SLEEPING_GOAL, TOLD_GOAL = 1.08, 0.97
STATIC_RUN, USUAL_RUN, AUTO_RUN, ROOMY_RUN = STATIC[0].label, OURS[1].label, PLANNING[1].label, PLANNING[2].label
ON_ENGINE = {
    STATIC_RUN: "static, 1F1B", USUAL_RUN: "dynamic, 1F1B", AUTO_RUN: "dynamic, `schedule: auto`",
    ROOMY_RUN: f"the same, `activation_budget: {PLANNING[2].activation_budget}`",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One load model on one pipeline.

    Args:
        case: the run whose method is static.
        paper: simulated in every way.
        runs: on the engine, by method.
        waited: on the engine, 1F1B with sends that are waited for (sleeping replay).
    """

    case: Case
    paper: dict[str, OnPaper]
    runs: dict[str, Result]
    waited: Result | None = None

    @property
    def gain(self) -> float:
        """Throughput of ``auto`` over that of the dynamic engine under 1F1B; sends are waited for if that was run."""
        return (self.waited or self.runs[USUAL_RUN]).wall_s / self.runs[AUTO_RUN].wall_s

    @property
    def whole_gain(self) -> float:
        """The same with messages: in virtual time no sender can wait, so what waiting costs under 1F1B is simulated."""
        return self.gain if self.waited else self.gain * self.paper[TODAY].seconds / self.paper[MESSAGES].seconds

    @property
    def gain_over_paper(self) -> float:
        """The same over the best cut for each batch under 1F1B, with messages that are waited for, on paper."""
        return self.paper[TODAY].seconds / self.runs[AUTO_RUN].wall_s

    @property
    def gain_over_charged(self) -> float:
        """The same where that, too, is charged what DeepSpeed takes for every pass, step and batch."""
        return self.paper[CHARGED].seconds / self.runs[AUTO_RUN].wall_s

    @property
    def roomy_gain_over_paper(self) -> float:
        """The same where workers may hold more activations."""
        return self.paper[TODAY].seconds / self.runs[ROOMY_RUN].wall_s

    @property
    def as_told(self) -> float:
        """Throughput of ``auto`` as a share of what is simulated for the cuts and orders that it ran."""
        return 1.0 / self.runs[AUTO_RUN].longer


HALVES = ":halves"  # of a load model's name: attention and MLP of a block are two layers


def cases(
    num_stages: int, batches: int, scenarios: Sequence[str], *, halves: bool = False, **options: Any
) -> Iterator[Case]:
    """Static runs of some load models.

    Args:
        num_stages: S.
        batches: of a run.
        scenarios: load models.
        halves: whether attention and MLP of a block are two layers.
        **options: further fields of the case.
    """
    count, blocks = SIZES[num_stages]
    for name in scenarios:
        every = 1 if name in CHANGING_EVERY_BATCH else EVERY
        trace = f"model:{name}:{blocks}{HALVES if halves else ''}"
        yield Case(trace, STATIC_RUN, num_stages, count, batches, every=every,
                   **{"layer_ms": LAYER_MS, **options})  # fmt: skip


def measure(
    wanted: Iterable[Case], raw: Path, run: Callable[[Sequence[Case], Path], Sequence[Result]]
) -> Iterator[Row]:
    """Run what is wanted in every way.

    Args:
        wanted: static runs.
        raw: file of finished runs, which are not made again.
        run: what runs them: the engine, or the simulator.
    """
    for case in wanted:
        is_sleeping = case.clock == "sleeping"  # and every second of it passes: only what is compared is run
        names = [AUTO_RUN] if is_sleeping else list(ON_ENGINE)
        waited = [replace(case, method=USUAL_RUN, sends="waited")] if is_sleeping else []
        results = run([*(replace(case, method=name) for name in names), *waited], raw)
        by_method = dict(zip(names, results, strict=False))
        paper = on_paper(case)
        if case.trace.endswith(HALVES):  # what all is compared with has whole blocks
            paper |= on_paper(replace(case, trace=case.trace.removesuffix(HALVES)), (TODAY, CHARGED))
        yield Row(case, paper, by_method, results[-1] if is_sleeping else None)


def report(rows: Sequence[Row], folder: Path, kind: str, machine: dict[str, Any] | None, *, quick: bool) -> None:
    """Write the tables.

    Args:
        rows: what was measured.
        folder: for results.
        kind: ``"replay"``, ``"sleeping replay"`` or ``"simulation"``.
        machine: what was seen of the machine; ``None`` where its load does not matter.
        quick: whether runs were short.
    """
    name = {"replay": "virtual", "simulation": "paper", "sleeping replay": "sleeping"}[kind]
    name = f"{name}_halves" if rows[0].case.trace.endswith(HALVES) else name
    found = Report(name, folder, kind, quick, "Orders, split backwards, messages", machine=machine)
    found.text = _text(rows, "the real engine" if kind != "simulation" else "the engine's own balancer in whole runs")
    sizes = sorted({row.case.num_stages for row in rows})
    parts = [_overview([[row for row in rows if row.case.num_stages == size] for size in sizes])]
    parts.append("## Every load model\n\n" + _each(rows))
    found.table = "\n\n".join(parts)
    found.values = [_values(row) for row in rows]
    found.notes = list(_notes(rows, sizes, kind))
    found.save()


def _text(rows: Sequence[Row], what: str) -> str:
    case, whole = rows[0].case, ""
    num_models = len({scenario_of(row.case.trace) for row in rows})
    if case.trace.endswith(HALVES):
        whole = (
            f"A block counts as one layer. Attention and MLP of a block are two layers, but in *{TODAY}* they are "
            "one, *charged* or not.\n\n"
        )
    return (
        f"Medians over {num_models} load models, of {case.num_batches - WARM_UP} batches: "
        f"how many times as fast as *{TODAY}* on paper, the best until now, and the mean bubble in brackets. The "
        "first rows are simulated: each batch has the best cut and order for it, with hindsight; *waited for* are "
        "messages whose sender goes on when they are received; *charged* is what DeepSpeed takes for every pass, step "
        f"and batch. The last rows are {what}, which profiles, "
        f"decides and moves, all of its own work included.\n\n{whole}A mean layer takes "
        f"{case.layer_ms:g} ms, a message {1e3 * case.known_costs().message_s:.2f} ms. Gradients "
        f"of weights are {case.weight_share:.0%} of each layer's backward; a frozen layer has none. The "
        "activations of a micro-batch take as many bytes as the dense layer's parameters. No worker holds more than "
        "the fullest one does under 1F1B, at the start or on the cut that is run; with `activation_budget: "
        f"{PLANNING[2].activation_budget}`, so many times its activations. What is simulated for what "
        "ran counts layers and messages, as the engine's own predictions do; for sleeping replay, layers alone."
    )


def _overview(columns: Sequence[Sequence[Row]]) -> str:
    head = ["", *(f"{c[0].case.num_stages} stages, M {c[0].case.num_micro_batches}" for c in columns)]
    lines = [[row, *(_paper_cell(column, row) for column in columns)] for row in ROWS]
    ran = columns[0][0].runs
    lines += [[f"whole run, {ON_ENGINE[method]}", *(_engine_cell(c, method) for c in columns)] for method in ran]
    if columns[0][0].waited is not None:
        lines.append(["whole run, dynamic, 1F1B, sends waited for", *(_waited_cell(column) for column in columns)])
    lines += [
        ["**`auto` over the dynamic engine under 1F1B**", *(_median([row.gain for row in c]) for c in columns)],
        ["the same with messages that are waited for", *(_median([row.whole_gain for row in c]) for c in columns)],
        ["**`auto` over what is simulated for what it ran**", *(_median([row.as_told for row in c]) for c in columns)],
    ]  # fmt: skip
    return table(head, lines)


def _paper_cell(column: Sequence[Row], name: str) -> str:
    return _cell([(row.paper[TODAY].seconds / row.paper[name].seconds, row.paper[name].bubble_ratio) for row in column])


def _engine_cell(column: Sequence[Row], method: str) -> str:
    runs = [(row.paper[TODAY].seconds, row.runs[method]) for row in column]
    return _cell([(today_s / run.wall_s, fmean(run.bubbles[WARM_UP:])) for today_s, run in runs])


def _waited_cell(column: Sequence[Row]) -> str:
    runs = [(row.paper[TODAY].seconds, row.waited) for row in column if row.waited is not None]
    return _cell([(today_s / run.wall_s, fmean(run.bubbles[WARM_UP:])) for today_s, run in runs])


def _cell(found: Sequence[tuple[float, float]]) -> str:
    speedups, bubbles = zip(*found, strict=True)
    return f"{median(speedups):.3f} ({median(bubbles):.1%})"


def _median(found: Sequence[float]) -> str:
    return f"**{median(found):.3f}** ({min(found):.3f} to {max(found):.3f})"


def _each(rows: Sequence[Row]) -> str:
    ran = rows[0].runs
    runs = [f"whole run, {ON_ENGINE[method]}" for method in ran]
    head = ["stages", "load model", *ROWS[2:-1], LEAST, *runs, "orders", "moves",
            "`auto` over 1F1B", "over what is simulated"]  # fmt: skip
    lines = [
        [
            str(row.case.num_stages), scenario_of(row.case.trace), *(_paper_cell([row], name) for name in ROWS[2:]),
            *(_engine_cell([row], method) for method in ran), str(row.runs[AUTO_RUN].num_orders),
            str(len(row.runs[AUTO_RUN].moves)), f"{row.gain:.3f}", f"{row.as_told:.3f}",
        ]
        for row in rows
    ]
    return table(head, lines)


def _notes(rows: Sequence[Row], sizes: Sequence[int], kind: str) -> Iterator[str]:
    for size in sizes:
        here = [row for row in rows if row.case.num_stages == size]
        goal = GOALS.get(size) if kind != "sleeping replay" else SLEEPING_GOAL
        gain, over_paper = median(row.whole_gain for row in here), median(row.gain_over_paper for row in here)
        told, charged = median(row.as_told for row in here), median(row.gain_over_charged for row in here)
        if here[0].case.trace.endswith(HALVES):
            goal = HALVES_GOALS.get(size, SLEEPING_GOAL)
            yield (
                f"{size} stages: {over_paper:.3f}x over the best cut of whole blocks for each batch on paper "
                f"(goal {goal:.2f}x: {_reached(over_paper, goal)}){_with_room(here)}; {charged:.3f}x where that is "
                f"charged as whole runs are ({_reached(charged, goal)}); {told:.1%} of what was simulated."
            )
        elif goal is not None:
            yield (
                f"{size} stages: {gain:.3f}x over the dynamic engine under 1F1B with messages that are waited for "
                f"(goal {goal:.2f}x: {_reached(gain, goal)}), {over_paper:.3f}x over the best cut for each batch on "
                f"paper; {told:.1%} of what was simulated (goal {TOLD_GOAL:.0%}: {_reached(told, TOLD_GOAL)})."
            )
    if kind != "simulation":
        every = [[*row.runs.values(), *([row.waited] if row.waited else [])] for row in rows]
        same = sum(len({tuple(run.losses) for run in runs}) == 1 for runs in every)
        yield f"Losses of all batches have equal bits whatever the cut and the order: {same} of {len(rows)} rows."
    slower = [row for row in rows if row.gain < 0.99]
    yield "Nowhere is `auto` below 0.99x of 1F1B." if not slower else "Below 0.99x of 1F1B: " + ", ".join(
        f"{scenario_of(row.case.trace)} on {row.case.num_stages} stages ({row.gain:.3f}x)" for row in slower
    )
    if kind == "sleeping replay":
        yield (
            "*Sends waited for*: the sender of a message goes on when it is sent, as before; receives are still posted "
            "ahead."
        )


def _reached(value: float, goal: float) -> str:
    return "reached" if value >= goal else "not reached"


def _with_room(rows: Sequence[Row]) -> str:
    if ROOMY_RUN not in rows[0].runs:
        return ""
    gain = median(row.roomy_gain_over_paper for row in rows)
    return f", {gain:.3f}x with {PLANNING[2].activation_budget:g} times the activations"


def _values(row: Row) -> dict[str, Any]:
    runs = {**row.runs, **({} if row.waited is None else {"sends waited for": row.waited})}
    return {
        "scenario": scenario_of(row.case.trace), "stages": row.case.num_stages, "case": asdict(row.case),
        "paper": {name: asdict(one) for name, one in row.paper.items()}, "gain": row.gain, "whole_gain": row.whole_gain,
        "gain_over_paper": row.gain_over_paper, "as_told": row.as_told,
        "engine": {
            method: {
                "wall_s": run.wall_s, "told_s": run.told_s, "batches_s": run.batches_s, "bubbles": run.bubbles,
                "num_orders": run.num_orders, "moves": [asdict(move) for move in run.moves],
                "overhead": run.overhead(), "machine_s": run.machine_s,
            }
            for method, run in runs.items()
        },
    }


__all__ = ["SCENARIOS", "SIZES", "Row", "cases", "measure", "report"]
