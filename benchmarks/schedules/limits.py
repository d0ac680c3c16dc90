"""What no cut and no order can beat: upper bounds of the gains that whole runs are to reach.

    python -m benchmarks.schedules.limits        # half a minute; reads what `--paper --halves` has kept

The bound of a batch is the least, over all contiguous cuts, of what the slowest stage takes in whatever order
(:func:`dynpipe_ds.planning.stage_bounds`).

Where loads are new in every batch, nobody can plan for the next one. What can be known is their mean. A second table
has what one cut and one order gain that are planned by the mean of all batches of the run, before it begins and for
nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper.experiments import scenario_of
from benchmarks.paper.published import CHANGING_EVERY_BATCH
from benchmarks.paper.report import Report
from benchmarks.record import RESULTS, load, table
from benchmarks.replay.case import WARM_UP, Case
from benchmarks.replay.clocks import Costs
from benchmarks.schedules.on_paper import TODAY, TOGETHER, profile_of
from benchmarks.schedules.replayed import AUTO_RUN, HALVES_GOALS
from benchmarks.traces import TraceBatch
from dynpipe_ds import PipelineProfile
from dynpipe_ds.partition import optimal, simulated
from dynpipe_ds.planning import plan_batch, stage_bounds, worker_bytes_of_1f1b
from dynpipe_ds.simulation import Timetable

FloatArray = NDArray[np.float64]
BUBBLE_GOALS = {8: 0.16}
MEAN_EFFORT = 300_000
"""Computations that the plan by the mean may look at: more than any that a run makes."""


@dataclass(frozen=True)
class Layers:
    """A batch's layers, not cut yet.

    Args:
        forward_s: ``(L, M)`` seconds.
        input_s: ``(L, M)`` seconds of a backward without weight gradients.
        weight_s: ``(L, M)`` seconds of weight gradients.
        num_frozen: leading layers without a backward.
        message_s: of every message.
        forward_host_s: of every forward of a stage, beside its layers.
        backward_host_s: the same of a backward.
    """

    forward_s: FloatArray
    input_s: FloatArray
    weight_s: FloatArray
    num_frozen: int = 0
    message_s: float = 0.0
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All work of the layers."""
        return float(self.forward_s.sum() + self.input_s.sum() + self.weight_s.sum())


def least_of_all_cuts(layers: Layers, num_stages: int) -> float:
    """Seconds that a batch takes at least, on whatever contiguous cut, in whatever order, with whatever memory.

    What the bound of a stage rests on depends on the layers before, in and behind it, and on its number, but not on
    where the others are cut. So the cut whose slowest stage has the least bound is found exactly, stage by stage:
    ``D(s, b) = min over a < b of max(D(s - 1, a), bound(s, a, b))``, in O(S L^2).

    Args:
        layers: of the batch.
        num_stages: S.

    Returns:
        Seconds.
    """
    count, num_layers = layers.forward_s.shape[1], len(layers.forward_s)
    least_forward, least_input, most_forward, forward, inputs, weights = (
        np.concatenate([[0.0], np.cumsum(each)])
        for each in (
            layers.forward_s.min(axis=1), layers.input_s.min(axis=1), layers.forward_s.max(axis=1),
            layers.forward_s.sum(axis=1), layers.input_s.sum(axis=1), layers.weight_s.sum(axis=1),
        )
    )  # fmt: skip
    low, high = np.arange(num_layers + 1)[:, None], np.arange(num_layers + 1)[None, :]
    trains = np.broadcast_to(high > layers.num_frozen, (num_layers + 1, num_layers + 1))
    hosts_s = layers.forward_host_s + np.where(trains, layers.backward_host_s, 0.0)
    all_train = layers.num_frozen == 0  # else it depends on the cut how many stages before train
    best = np.where(np.arange(num_layers + 1) == 0, 0.0, math.inf)  # of so many layers on no stage
    for stage in range(num_stages):
        behind = num_stages - 1 - stage
        returns_s = (
            (least_forward[high] - least_forward[low] + layers.forward_host_s)
            + (least_forward + least_input)[-1] - (least_forward + least_input)[high]
            + behind * (layers.forward_host_s + layers.backward_host_s + 2 * layers.message_s)
        )
        bound = stage_bounds(
            least_forward[low] + stage * (layers.forward_host_s + layers.message_s), returns_s,
            count * (most_forward[high] - most_forward[low] + layers.forward_host_s),
            forward[high] - forward[low] + inputs[high] - inputs[low] + count * hosts_s,
            weights[high] - weights[low],
            least_input[low] + stage * all_train * (layers.backward_host_s + layers.message_s), trains,
        )
        best = np.where(low < high, np.maximum(best[:, None], bound), math.inf).min(axis=0)
    return float(best[-1])


def layers_of(case: Case, moment: TraceBatch, batch: int, costs: Costs) -> Layers:
    """What a batch of a run has to do.

    Args:
        case: the run.
        moment: the trace's batch.
        batch: its number.
        costs: of messages and passes.
    """
    factors = case.micro_batch_factors(moment, batch)
    forward_s, backward_s = (np.array(s)[:, None] * factors for s in (moment.forward_s, moment.backward_s))
    weight_s = case.weight_share * backward_s
    return Layers(
        forward_s, backward_s - weight_s, weight_s, moment.frozen_layers, costs.message_s, costs.forward_s,
        costs.backward_s,
    )


@dataclass(frozen=True)
class Limit:
    """The timed batches of one load model on one pipeline.

    Args:
        stages: S.
        today_s: the best cut of whole blocks under 1F1B for each batch.
        hindsight_s: cut and order together for each batch, halves.
        auto_s: a whole run.
        auto_bubble: its mean bubble.
        least_s: no cut and order takes less, where layers and messages alone take time.
        hosted_s: the same where each pass takes its host time, and each batch its step.
        total_s: all work of layers.
    """

    stages: int
    today_s: float
    hindsight_s: float
    auto_s: float
    auto_bubble: float
    least_s: float
    hosted_s: float
    total_s: float

    @property
    def charged_s(self) -> float:
        """Hindsight with host time and step, which are taken to make it longer as they do the bound."""
        return self.hindsight_s * self.hosted_s / self.least_s

    @property
    def least_bubble(self) -> float:
        """Share of idle time that is left where each batch takes no longer than the bound."""
        return 1.0 - self.total_s / (self.stages * self.least_s)


def _case(one: dict[str, Any]) -> Case:
    return Case(**{k: tuple(map(tuple, v)) if k == "leaves" else v for k, v in one["case"].items()})


def limits(kept: Sequence[dict[str, Any]]) -> Iterator[Limit]:
    """Bounds of what was run.

    Args:
        kept: values of ``paper_halves.json``.
    """
    for one in kept:
        case = _case(one)
        costs = case.known_costs()
        messages = Costs(message_s=costs.message_s)
        ran, paper = one["engine"][AUTO_RUN], one["paper"]
        free_s, hosted_s, total_s, known = [], [], [], dict[int, tuple[float, float, float]]()
        for batch in range(WARM_UP, case.num_batches):
            moment = case.load_trace().at(batch, case.num_batches)
            if case.varies_in(moment) or moment.batch not in known:
                free, hosted = (layers_of(case, moment, batch, each) for each in (messages, costs))
                known[moment.batch] = (
                    least_of_all_cuts(free, case.num_stages),
                    least_of_all_cuts(hosted, case.num_stages) + costs.step_s + costs.batch_s, free.total_s,
                )
            for found, seconds in zip((free_s, hosted_s, total_s), known[moment.batch], strict=True):
                found.append(seconds)
        bubbles = ran["bubbles"][WARM_UP:]
        yield Limit(
            case.num_stages, paper[TODAY]["seconds"], paper[TOGETHER]["seconds"], ran["wall_s"],
            math.fsum(bubbles) / len(bubbles), *map(math.fsum, (free_s, hosted_s, total_s)),
        )  # fmt: skip


@dataclass(frozen=True)
class Foreseen:
    """A load model whose loads are new in every batch, and the best plan that does not know the next one.

    Args:
        scenario: of the load model.
        stages: S.
        today_s: the best cut of whole blocks under 1F1B for each batch.
        planned_s: one cut and one order by the mean of all batches, with host time and step.
        auto_s: a whole run.
    """

    scenario: str
    stages: int
    today_s: float
    planned_s: float
    auto_s: float


def foreseen(kept: Sequence[dict[str, Any]]) -> Iterator[Foreseen]:
    """What plans by the mean load gain.

    Args:
        kept: values of ``paper_halves.json``.
    """
    for one in kept:
        case = _case(one)
        if scenario_of(case.trace) in CHANGING_EVERY_BATCH:
            yield Foreseen(
                scenario_of(case.trace), case.num_stages, one["paper"][TODAY]["seconds"], planned_by_the_mean_s(case),
                one["engine"][AUTO_RUN]["wall_s"],
            )  # fmt: skip


def planned_by_the_mean_s(case: Case) -> float:
    """Seconds of all timed batches under one cut and one order, planned by the mean of the very batches.

    Args:
        case: the run.
    """
    batches, costs, trace = range(WARM_UP, case.num_batches), case.known_costs(), case.load_trace()
    profile, first = _mean([profile_of(case, batch) for batch in batches]), profile_of(case, 0)
    starts = [
        partitioner(profile.costs("time"), case.num_stages, speeds=case.stage_speeds).boundaries
        for partitioner in (partial(simulated, profile=profile), optimal)
    ]
    most = max(worker_bytes_of_1f1b(first, first.boundaries), worker_bytes_of_1f1b(profile, starts[0]))
    found = plan_batch(
        profile, starts, worker_bytes=most, speeds=case.stage_speeds, effort=MEAN_EFFORT,
        activation_link_s=costs.message_s, gradient_link_s=costs.message_s,
    )
    cuts, order = found.placement.boundaries, found.planned.order
    workloads = [case.workload(trace.at(batch, case.num_batches), cuts, batch, order=order) for batch in batches]
    timetable = Timetable(order, workloads[0].frozen_boundaries)
    return math.fsum(timetable.simulation(workload).batch_s + costs.batch_s for workload in workloads)


def _mean(profiles: Sequence[PipelineProfile]) -> PipelineProfile:
    names = ("forward_s", "backward_s", "weight_s")
    layers = tuple(
        replace(layer, **{name: fmean(getattr(profile.layers[i], name) for profile in profiles) for name in names})
        for i, layer in enumerate(profiles[-1].layers)
    )
    return replace(profiles[-1], layers=layers)


def foreseen_text(found: Sequence[Foreseen]) -> str:
    """The second table.

    Args:
        found: of all pipelines.
    """
    rows = [
        [str(o.stages), o.scenario, f"{o.today_s / o.planned_s:.3f}", f"{o.today_s / o.auto_s:.3f}",
         f"{o.planned_s / o.auto_s:.1%}"]
        for o in found
    ]  # fmt: skip
    head = ("stages", "load model", "planned by the mean, for nothing", "`auto`, whole run", "`auto` reaches")
    return table(head, rows)


def text_of(found: Sequence[Limit]) -> str:
    """The table: medians over load models.

    Args:
        found: of all pipelines.
    """
    sizes = sorted({one.stages for one in found})
    columns = [[one for one in found if one.stages == size] for size in sizes]
    gains = {
        "goal, whole run": [f"{HALVES_GOALS[size]:.2f}" for size in sizes],
        "`auto`, whole run": [_median(c, "auto_s") for c in columns],
        "hindsight: cut and order for each batch, for nothing": [_median(c, "hindsight_s") for c in columns],
        "**bound**: any cut, any order": [_median(c, "least_s") for c in columns],
        "**bound** with host time and step": [_median(c, "hosted_s") for c in columns],
        "hindsight, longer by as much as that bound is": [_median(c, "charged_s") for c in columns],
        "bound over hindsight": [f"{median(o.hindsight_s / o.least_s for o in c):.3f}" for c in columns],
        "least bubble": [f"{median(o.least_bubble for o in c):.1%}" for c in columns],
        "bubble of `auto`": [f"{median(o.auto_bubble for o in c):.1%}" for c in columns],
    }
    return table(["", *(f"{size} stages" for size in sizes)], [[name, *cells] for name, cells in gains.items()])


def _median(column: Sequence[Limit], name: str) -> str:
    return f"{median(one.today_s / getattr(one, name) for one in column):.3f}"


def notes(found: Sequence[Limit]) -> Iterator[str]:
    """Which goals are out of reach.

    Args:
        found: of all pipelines.
    """
    for size, goal in HALVES_GOALS.items():
        here = [one for one in found if one.stages == size]
        if here:
            most = median(o.today_s / o.hosted_s for o in here)
            verdict = "out of reach" if most < goal else "within the bound"
            yield f"{size} stages: at most {most:.3f}x (goal {goal:.2f}x: {verdict})."
        if here and size in BUBBLE_GOALS:
            least, wanted = median(o.least_bubble for o in here), BUBBLE_GOALS[size]
            yield (
                f"{size} stages: a bubble of {least:.1%} at least (goal {wanted:.0%}: "
                f"{'out of reach' if least > wanted else 'within the bound'})."
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=Path, default=RESULTS / "schedules", help="folder with paper_halves.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "schedules")
    options = parser.parse_args()
    kept = load(options.kept, "paper_halves")
    if kept is None:
        parser.error(f"{options.kept} has no paper_halves.json; run python -m benchmarks.schedules --paper --halves")
    found = list(limits(kept["values"]))
    report = Report("limits", options.out, "simulation", False, "What no cut and no order can beat")
    report.text = (
        f"Medians over six load models, gains over *{TODAY}* of whole blocks, chosen for each batch with hindsight. "
        "Halves of blocks, runs of 40 batches. The bounds hold for every contiguous cut and every order, in whatever "
        "memory."
    )
    means = list(foreseen(kept["values"]))
    report.table, report.notes = text_of(found), list(notes(found))
    report.table += (
        "\n\nWhere loads are new in every batch: one cut and one order, planned by the mean of all of the run's "
        f"batches before it begins and for nothing. Host time and step count.\n\n{foreseen_text(means)}"
    )
    report.values = {"limits": [vars(one) for one in found], "by_the_mean": [vars(one) for one in means]}
    report.save()


if __name__ == "__main__":
    main()
