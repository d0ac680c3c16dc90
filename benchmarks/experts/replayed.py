"""Speed of placements on ranks whose experts wait: everything that travels is real."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.experts.drawn import calibrated, routed
from benchmarks.experts.settings import KEPT, Setting
from benchmarks.experts.waiting import BACKWARD, Batch, Sizes, Waiting
from benchmarks.ranks import Send, on_ranks
from benchmarks.record import table
from scenarios.moe.placing import PLANNERS, Lanes, LayerModel, balance, plan, reroute
from scenarios.report.interval import median_of_ratios

CONTENDERS = ("static", "fastermoe", "pro_prophet", "lanes", "local")
GOALS = {"lanes": 1.3, "pro_prophet": 1.15}
HIDDEN_GOAL = 0.8
FIXED = ("static", "local")


@dataclass
class Measured:
    """A contender's batches.

    Args:
        seconds: of whole batches.
        waits_s: what they would take if nothing but waiting took time.
        hidden_s: seconds of Trans and Agg that no rank waited for, over ranks.
        travelled_s: seconds of Trans and Agg, over ranks.
        megabytes: of copies and sums that travelled.
        balance: busiest rank over the mean, of each block and batch.
        copies: over ranks, mean of the blocks.
        plan_cpu_s: CPU seconds of planning a block.
        plan_s: the same by the clock, on a thread while the batch runs.
        plan_waited_s: seconds that a rank waited for a plan.
        reroute_cpu_s: CPU seconds of re-routing a block, on the first rank; nothing runs beside it.
    """

    seconds: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    hidden_s: float = 0.0
    travelled_s: float = 0.0
    megabytes: list[float] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    plan_cpu_s: list[float] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)
    plan_waited_s: float = 0.0
    reroute_cpu_s: list[float] = field(default_factory=list)

    def add(self, batch: Batch, tables: Sequence[Sequence[Tensor]], sizes: Sizes) -> None:
        """Count a batch."""
        lanes, sums = [batch.shared.lanes[block] for block in range(sizes.blocks)], batch.shared.sums
        self.seconds.append(batch.seconds)
        self.waits_s.append(sizes.busy_s([[each] * sizes.micro_batches for each in lanes], tables))
        self.hidden_s += sums.hidden_s
        self.travelled_s += sums.travelled_s
        self.megabytes.append((sums.trans_bytes + sums.agg_bytes) / 1e6)
        self.balance += [balance(lanes[block], rows.tolist()) for block, rows in batch.shared.rows.items()]
        self.copies.append(sums.copies / sizes.blocks)
        self.plan_s.append(sums.plan_s / sizes.blocks)
        self.plan_waited_s += sums.waited_s

    @property
    def hidden(self) -> float | None:
        """Share of Trans and Agg that no rank waited for; ``None`` where nothing but greetings travelled."""
        return self.hidden_s / self.travelled_s if any(self.megabytes) else None


class Contender:
    """One placement, batch after batch; collective.

    Args:
        name: a key of :data:`~scenarios.moe.placing.PLANNERS`.
        stage: runs it.
        model: what planners are told.
    """

    def __init__(self, name: str, stage: Waiting, model: LayerModel) -> None:
        assert name in PLANNERS
        self.name, self.measured, self._stage, self._model = name, Measured(), stage, model
        first = (Lanes.local if name == "local" else Lanes.static)(stage.num_ranks, stage.sizes.num_experts)
        self._lanes = dict.fromkeys(range(stage.sizes.blocks), first)
        self._earlier: dict[int, Tensor] = {}

    def run(self, tables: Sequence[Sequence[Tensor]], *, counted: bool) -> None:
        """Run a batch, which plans the next one meanwhile."""
        planned = self.name not in FIXED
        batch = self._stage.batch(
            tables, self._lanes, self._plan if planned else None, self._reroute if self.name == "lanes" else None
        )
        self._lanes |= batch.shared.plans
        self._earlier = dict(batch.shared.rows)
        if counted:
            self.measured.add(batch, tables, self._stage.sizes)

    def _plan(self, layer: int, rows: list[list[int]]) -> Lanes:
        began = time.thread_time()
        earlier = self._earlier[layer].tolist() if self._earlier else None
        found = plan(self.name, rows, self._model, present=self._lanes[layer], earlier=earlier)
        self.measured.plan_cpu_s.append(time.thread_time() - began)
        return found

    def _reroute(self, lanes: Lanes, rows: list[list[int]]) -> Lanes:
        began = time.thread_time()
        found = reroute(lanes, rows, self._model)
        self.measured.reroute_cpu_s.append(time.thread_time() - began)
        return found


def run_rank(send: Send, sizes: Sizes, settings: Sequence[Setting], batches: int, repeats: int) -> None:
    """Measure on this rank; the first one tells, setting by setting."""
    for setting in settings:
        constants = calibrated(sizes, setting, repeats)
        stage = Waiting(sizes)
        contenders = [Contender(name, stage, LayerModel(constants)) for name in CONTENDERS]
        for batch, tables in enumerate(routed(setting, sizes, batches + 1)):
            turn = batch % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                contender.run(tables, counted=batch > 0)
        stage.close()
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, {each.name: each.measured.plan_cpu_s for each in contenders})
        for contender in contenders:
            contender.measured.plan_cpu_s = [cpu_s for found in everybody for cpu_s in found[contender.name]]
        send((setting, constants, {each.name: each.measured for each in contenders}))


def measure(
    sizes: Sizes, *, num_ranks: int = 4, top_k: int = 1, batches: int = 12, repeats: int = 3,
    drifts: Sequence[str] = tuple(KEPT),
) -> Iterator[tuple[Setting, Any, dict[str, Measured]]]:
    """Run all contenders in turns.

    Args:
        sizes: of the stage.
        num_ranks: R, all of one stage.
        top_k: experts a token; rows of a rank are as many whatever it is.
        batches: counted of each contender and drift, after one to plan from.
        repeats: of calibration.
        drifts: keys of :data:`~benchmarks.experts.settings.KEPT`.

    Yields:
        The setting, the constants that planners were told, and what was measured by contender.
    """
    tokens = sizes.rows * sizes.micro_batches // top_k
    settings = [Setting("S", "HPWNV", num_ranks, sizes.num_experts, top_k, tokens, drift) for drift in drifts]
    yield from on_ranks(num_ranks, run_rank, sizes, settings, batches, repeats)


HEAD = (
    "drift", "placement", "speedup of the layers", "of whole batches", "if only waiting took time",
    "seconds of a batch", "of it waiting", "busiest rank over mean", "copies of a layer", "MB of a batch", "hidden",
    "planning a layer, CPU ms", "waited for plans, ms a batch", "re-routing a layer, CPU ms",
)  # fmt: skip


def report(sizes: Sizes, found: Sequence[tuple[Setting, Any, dict[str, Measured]]]) -> tuple[dict[str, Any], str]:
    """Turn what was measured into values and text.

    Args:
        sizes: of the stage.
        found: of :func:`measure`.
    """
    rows, values, lines = [], [], []
    rest_s = sizes.blocks * sizes.micro_batches * (1 + BACKWARD) * sizes.rest_s
    for setting, _, measured in found:
        static = measured["static"]
        for name, each in measured.items():
            layers, whole = (
                median_of_ratios([s - less for s in static.seconds], [s - less for s in each.seconds])
                for less in (rest_s, 0.0)
            )
            waits = (sum(static.waits_s) - rest_s * len(static.waits_s)) / (
                sum(each.waits_s) - rest_s * len(each.waits_s)
            )
            hidden = each.hidden
            count = len(each.seconds)
            rows.append([
                setting.drift, name, layers.text(), whole.text(), f"{waits:.2f}x", f"{median(each.seconds):.2f}",
                f"{median(each.waits_s):.2f}", f"{fmean(each.balance):.2f}", f"{fmean(each.copies):.0f}",
                f"{fmean(each.megabytes):.1f}", "" if hidden is None else f"{hidden:.0%}",
                f"{1e3 * fmean(each.plan_cpu_s):.0f}" if each.plan_cpu_s else "",
                f"{1e3 * each.plan_waited_s / count:.1f}" if each.plan_cpu_s else "",
                f"{1e3 * fmean(each.reroute_cpu_s):.1f}" if each.reroute_cpu_s else "",
            ])  # fmt: skip
            values.append({
                "drift": setting.drift, "top_k": setting.top_k, "placement": name, "layers": asdict(layers),
                "whole": asdict(whole), "waits": waits, "hidden": hidden, **asdict(each),
            })  # fmt: skip
            if name in GOALS:
                lines.append(_goal(f"{name}, drift {setting.drift}: layers", layers.value, GOALS[name], "x"))
                if hidden is not None:
                    lines.append(_goal(f"{name}, drift {setting.drift}: hidden", 100 * hidden, 100 * HIDDEN_GOAL, "%"))
    told = [
        f"drift {setting.drift}: {1e-9 / constants.byte_s if constants.byte_s else 0:.2f} GB/s, "
        f"{1e3 * constants.message_s:.2f} ms a message" for setting, constants, _ in found
    ]  # fmt: skip
    num_ranks = found[0][0].num_ranks
    text = "\n\n".join([
        "# Experts that wait, on ranks that exchange",
        "**SLEEPING REPLAY: experts and the rest of a block wait for a time that is told and compute nothing; counts, "
        "all-to-all, copies, sums of gradients and plans are real.**",
        f"{num_ranks} ranks, one stage of {sizes.blocks} blocks with {sizes.num_experts} experts each, "
        f"{sizes.num_experts // num_ranks} at home on a rank; {sizes.micro_batches} micro-batches of {sizes.rows} rows "
        f"a rank; hidden {sizes.hidden}, width {sizes.width}; Zipf 1.1, dropless, no balancing loss, "
        f"{found[0][0].top_k} experts a token. A row waits {1e6 * sizes.row_s:.0f} µs in the forward and "
        f"{BACKWARD:g} times that in the backward, the rest of a block {1e3 * sizes.rest_s:.0f} ms and {BACKWARD:g} "
        "times that. Each batch is planned from the one before; all placements run the same batches in turns.",
        table(HEAD, rows),
        "\n".join(f"- {line}" for line in [
            *lines,
            "Speedups are over static: medians of pairs of batches, with 95% intervals. *Of the layers* leaves out "
            "what is told for the rest of the blocks. *If only waiting took time*: the layers' speedup by the busiest "
            "ranks' waits alone, which no load of the machine changes.",
            "Plans are made on a thread while the batch runs; re-routing, of *lanes* alone, happens on every rank "
            "before a layer's first forward, and nothing hides it.",
            "*Hidden*: share of the seconds of Trans and Agg for which no rank waited; none where nothing travels.",
            f"Measured before, for the planners: {'; '.join(told)}.",
        ]),
    ])  # fmt: skip
    return {"sizes": asdict(sizes), "values": values}, text


def _goal(what: str, value: float, goal: float, unit: str) -> str:
    return f"{what} {value:.3g}{unit} (goal {goal:g}{unit}: {'reached' if value >= goal else 'not reached'})."
