"""The tables, from results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from benchmarks.paper import published
from benchmarks.paper.experiments import AUTO, OPTIMAL, UNIFORM, grouped, scenario_of
from benchmarks.paper.plots import plot_bars, plot_heat_map
from benchmarks.paper.report import Report
from benchmarks.replay.case import METHODS, OURS, PAPERS, STATIC, VARIANTS, WARM_UP, Result, best
from benchmarks.replay.predict import ideal_s
from dynpipe_ds.reporting import save_gantt
from dynpipe_ds.simulation import simulate

STATIC_LABELS = [m.label for m in STATIC]
PAPER_LABELS = [m.label for m in PAPERS]
VARIANT_LABELS = [m.label for m in VARIANTS]
OUR_LABELS = [m.label for m in OURS]
Groups = Mapping[tuple[str, int, str], dict[str, Result]]


def blocks_of(result: Result) -> int:
    """Blocks of the model.

    Args:
        result: a run.
    """
    return len(result.case.load_trace().layers) - 2


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def _present(groups: Groups) -> list[str]:
    return [label for label in METHODS if any(label in methods for methods in groups.values())]


def _intervals() -> str:
    words = {name: str(low) if low == high else f"{low} to {high}" for name, (low, high) in published.INTERVALS.items()}
    return ", ".join(f"{name} {word}" for name, word in words.items())


def _floor(result: Result) -> float:
    """Bubble ratio of equal stages: what fill and drain alone cost."""
    s, m = result.case.num_stages, result.case.num_micro_batches
    return (s - 1) / (m + s - 1)


def throughput(report: Report, results: Sequence[Result]) -> None:
    """Throughput of every method, speedup over the best static one.

    Args:
        report: to fill and save.
        results: runs.
    """
    groups = grouped(results)
    labels = _present(groups)
    header = [
        "scenario", "blocks", "stages", "M", *labels, "ours over best static", "auto over best static",
        "ours, last quarter", "best of the paper's balancers over best static", "ideal", "best of ours / ideal",
        "paper (Figure 3)",
    ]
    rows, panels, values = [], {}, []
    for (trace, num_stages, _), runs in groups.items():
        name, any_run = scenario_of(trace), next(iter(runs.values()))
        timed = any_run.case.replicas * any_run.case.num_micro_batches * (any_run.case.num_batches - WARM_UP)
        ideal = timed / ideal_s(any_run.case)
        reached = max((runs[label].throughput for label in OUR_LABELS if label in runs), default=0.0) / ideal
        static = best(runs.values(), STATIC_LABELS)
        speedups = {label: run.throughput / static.throughput for label, run in runs.items()}
        last_static = max(runs[label].last_throughput() for label in STATIC_LABELS if label in runs)
        ours = [label for label in OUR_LABELS if label in runs]
        last = max((runs[label].last_throughput() for label in ours), default=0.0) / last_static
        theirs = max((speedups[label] for label in PAPER_LABELS if label in runs), default=0.0)
        rows.append([
            name, str(blocks_of(any_run)), str(num_stages), str(any_run.case.num_micro_batches),
            *(f"{runs[label].throughput:.2f}" if label in runs else "" for label in labels),
            *(f"**{speedups[label]:.2f}x**" if label in speedups else "" for label in (OPTIMAL, AUTO)),
            f"{last:.2f}x", f"{theirs:.2f}x" if theirs else "", f"{ideal:.2f}", f"{reached:.1%}",
            published.speedup(name, blocks_of(any_run)),
        ])
        panels.setdefault(f"{num_stages} stages, {blocks_of(any_run)} blocks", {})[name.replace("_", "\n")] = speedups
        values.append({
            "scenario": name, "blocks": blocks_of(any_run), "stages": num_stages, "replicas": any_run.case.replicas,
            "kind": any_run.kind,
            "speedups": speedups,
            "throughputs": {label: run.throughput for label, run in runs.items()}, "last_quarter": last,
            "ideal": ideal, "reached": reached,
            "same_losses": len({tuple(run.losses) for run in runs.values()}) == 1 if any_run.losses else None,
        })
    report.table, report.values = _markdown(header, rows), values
    report.text += (
        "Throughput in micro-batches a second"
        + (" of all replicas" if any(r.case.replicas > 1 for r in results) else "")
        + ". *static uniform*: as many blocks on every stage (Megatron-LM's rule); *static parameters*: DeepSpeed's; "
        "*partition*: the paper's, which can run, at its interval (its diffusion, as printed, can't: compared.md); "
        "*balanced*: DeepSpeed's of today; *contiguous diffusion*, *optimal:time*: ours at the same "
        "interval; *auto*: ours, moving when it pays, which it can know after two to four batches at the soonest. "
        "*ideal*: every batch on the best partition for it, chosen with hindsight, simulated without any overhead."
    )
    report.notes += [
        "Paper: DynMo, Figure 3, by depth, each factor with what it is over; 720 GPUs, MoE and MoD 128. Freezing is "
        "over Egeria, sparse attention and early exit over dense models, so only the others can stand beside a "
        "speedup over static cuts. Models, GPUs and amounts of dynamism differ from these load models'. What "
        "contradicts itself "
        "in the paper: published.md.",
        "With few layers a stage, one layer is too large a step to even out what differs: load models whose blocks "
        "differ by less than a block's share of a stage (MoE, MoD) then leave nothing to gain.",
    ]
    longer = [run.longer for run in results if run.kind == "replay"]
    if longer:
        report.notes.append(
            f"Everything but the layers (messages, the engine, overheads, as calibrated) makes the runs "
            f"{median(longer):.2f} times as long as the layers say, at worst {max(longer):.2f} times."
        )
    if told := [v["same_losses"] for v in values if v["same_losses"] is not None]:
        of_all = f"{sum(told)} of {len(told)} replayed rows"
        report.notes.append(f"Losses of all batches have equal bits whatever the method: {of_all}.")
    report.save(lambda path: plot_bars(
        path, panels, ylabel="throughput over\nbest static (x)", title=report.title, reference=1.0,
        xlabel=f"scenario ({', '.join(dict.fromkeys(run.kind for run in results))})",
    ))


def heat_maps(report: Report, results: Sequence[Result]) -> list[str]:
    """A layer-cost picture and a before-and-after timeline for each scenario of the largest middle pipeline.

    Args:
        report: whose folder they go to.
        results: runs of the throughput table.

    Returns:
        File names.
    """
    names = []
    groups = grouped(results)
    stages = max((s for _, s, _ in groups if s <= 8), default=0)
    for (trace, num_stages, _), runs in groups.items():
        if num_stages != stages or OPTIMAL not in runs:
            continue
        run, name = runs[OPTIMAL], scenario_of(trace)
        case, trace, parts = run.case, run.case.load_trace(), run.boundaries_by_batch()
        costs = 1e3 * np.array([trace.at(b, case.num_batches).seconds for b in range(case.num_batches)])
        size = f"{blocks_of(run)} blocks, {num_stages} stages"
        title = f"{name}, {size}: told layer times and {OPTIMAL}'s cuts ({run.kind})"
        names.append(f"layers_{name}_quick.png" if report.quick else f"layers_{name}.png")
        plot_heat_map(report.folder / names[-1], costs, parts, title=title)
        last = case.num_batches - 1
        moment = trace.at(last, case.num_batches)
        timelines = {}
        for label, boundaries in (("static uniform", run.first_boundaries), (OPTIMAL, parts[-1])):
            timelines[label] = simulate(case.workload(moment, boundaries, last), timeline=True).timeline
        names.append(names[-1].replace("layers_", "timeline_"))
        save_gantt(report.folder / names[-1], timelines, title=f"{name}: the last batch, simulated from the told times")
    return names


def bubbles(report: Report, results: Sequence[Result]) -> None:
    """Bubble ratio without dynamism, with it on a static partition, and with ours (Figure 1).

    Args:
        report: to fill and save.
        results: runs of the throughput table.
    """
    rows, panels, values = [], {}, []
    columns = ("before it changes", "static uniform", "best static", OPTIMAL, AUTO)
    for (trace, num_stages, _), runs in grouped(results).items():
        name, uniform = scenario_of(trace), runs[UNIFORM]
        static = best(runs.values(), STATIC_LABELS)
        trace = static.case.load_trace()
        changed = next((b.batch for b in trace.batches if b.batch), trace.num_batches)
        dense = static.bubbles[1 : max(2, changed * static.case.num_batches // trace.num_batches)]
        bars = {
            "before it changes": median(dense), "static uniform": uniform.last_bubble(),
            "best static": static.last_bubble(),
        } | {label: runs[label].last_bubble() for label in (OPTIMAL, AUTO) if label in runs}
        floor = _floor(static)
        rows.append([
            name, str(num_stages), str(static.case.num_micro_batches), f"{floor:.1%}",
            *(f"{bars[label]:.1%}" if label in bars else "" for label in columns),
            published.idleness(name),
        ])
        panels.setdefault(f"{num_stages} stages", {})[name.replace("_", "\n")] = bars | {"fill and drain": floor}
        values.append({"scenario": name, "stages": num_stages, "fill_and_drain": floor, **bars})
    header = [
        "scenario", "stages", "M", "fill and drain, equal stages", *columns, "paper (Figure 1)",
    ]
    report.table, report.values = _markdown(header, rows), values
    report.text = (
        "Idle share of a stage, mean over the stages; static and dynamic ones of the last quarter of the run. *Before "
        "it changes* is the same model before its first change (MoE: its first batches, which are uneven already)."
    )
    report.notes.append(
        "Paper: a static cut under an almost zero-bubble schedule, 720 GPUs (MoE 128), fill and drain included; "
        "factors are over its model without the dynamism. Ours are of 1F1B."
    )
    report.save(lambda path: plot_bars(
        path, panels, ylabel="bubble ratio", title=report.title, xlabel=f"scenario ({report.kind})",
    ))


def overhead(report: Report, results: Sequence[Result]) -> None:
    """Shares of profiling, planning and moving (Figure 4); one re-balance in training iterations (Table 1).

    Args:
        report: to fill and save.
        results: runs of the throughput table.
    """
    rows, panels, values = [], {}, []
    for (trace, num_stages, _), runs in grouped(results).items():
        name = scenario_of(trace)
        for label in (*PAPER_LABELS, *VARIANT_LABELS, *OUR_LABELS):
            if label not in runs:
                continue
            run = runs[label]
            batch_s = median(run.timed_batches_s)
            costs = [(move.plan_s + move.migrate_s) / batch_s for move in run.moves]
            shares = [100 * s / run.wall_s for s in (run.profiling_s, run.planning_s, run.migrating_s)]
            one = f"{median(costs):.3f} ({max(costs):.3f})" if costs else "no move"
            rows.append([
                name, str(num_stages), label, f"{batch_s:.3f}", str(len(run.moves)), *(f"{s:.2f}%" for s in shares),
                f"{sum(shares):.2f}%", published.overhead(name, blocks_of(run)), one,
                published.iterations(label, blocks_of(run)),
            ])
            if label in (OPTIMAL, AUTO):
                bars = dict(zip(("profiling", "planning", "moving"), shares, strict=True))
                panels.setdefault(label, {})[f"{name}\n{num_stages}".replace("_", "\n", 1)] = bars
            values.append({
                "scenario": name, "stages": num_stages, "method": label, "batch_s": batch_s, "moves": len(run.moves),
                "shares_percent": shares, "iterations_of_one_rebalance": costs,
                "moved_bytes": [move.bytes_moved for move in run.moves], "parameter_scale": run.parameter_scale,
            })
    header = [
        "scenario", "stages", "method", "batch, s", "moves", "profiling", "planning", "moving", "together",
        "paper (Figure 4)", "one re-balance, iterations (worst)", "paper (Table 1)",
    ]
    costs = [cost for v in values for cost in v["iterations_of_one_rebalance"]]
    report.table, report.values = _markdown(header, rows), values
    report.text = (
        "Overheads are the first rank's, of the timed batches; one re-balance is the seconds from the decision to the "
        "end of the move, over the median batch, median and worst of the run."
    )
    scale = results[0].parameter_scale
    report.notes += [
        f"Figure 4: share of training at the paper's intervals (iterations: {_intervals()}). Table 1 is of pruning "
        f"and of the paper's own balancers, in training iterations; of one re-balance or of a whole run it does not "
        f"say. Goal: ours below 1.",
        f"Largest of all {len(costs)} re-balances: {max(costs):.3f} iterations." if costs else "No re-balance here.",
        f"Replay layers hold {scale:.3g} of the trace's parameter bytes; moved bytes are charged as the trace's, at "
        "the stated speed. What moving real sizes takes here: python -m benchmarks.overhead.migration.",
    ]
    report.save(lambda path: plot_bars(
        path, panels, ylabel="share of the\ntraining time (%)", title=report.title, xlabel="scenario, stages (replay)",
    ))


def conditions(report: Report, results: Sequence[Result], *, plain: str) -> None:
    """The same runs under several conditions (network, workers), side by side.

    Args:
        report: to fill and save.
        results: runs.
        plain: what the undisturbed condition is called.
    """
    groups = grouped(results)
    labels = _present(groups)
    rows, panels, values = [], {}, []
    for (trace, num_stages, what), runs in groups.items():
        name = scenario_of(trace)
        static = best(runs.values(), STATIC_LABELS)
        undisturbed = groups[trace, num_stages, ""]
        kept = {label: run.throughput / undisturbed[label].throughput for label, run in runs.items()}
        ours = best(runs.values(), OUR_LABELS)
        rows.append([
            name, str(num_stages), what or plain, *(f"{runs[label].throughput:.2f}" for label in labels),
            f"**{ours.throughput / static.throughput:.2f}x**", f"{kept[static.case.method]:.0%}",
            f"{kept[ours.case.method]:.0%}", f"{static.last_bubble():.1%}", f"{ours.last_bubble():.1%}",
        ])
        bars = {label: run.throughput / undisturbed[UNIFORM].throughput for label, run in runs.items()}
        panels.setdefault(f"{name}, {num_stages} stages", {})[what or plain] = bars
        values.append({
            "scenario": name, "stages": num_stages, "condition": what or plain, "kept": kept,
            "throughputs": {label: run.throughput for label, run in runs.items()},
            "partitions": {label: run.boundaries_by_batch()[-1] for label, run in runs.items()},
        })
    header = [
        "scenario", "stages", "condition", *labels, "best of ours over best static", "static keeps", "ours keeps",
        "bubble static", "bubble ours",
    ]
    report.table, report.values = _markdown(header, rows), values
    report.text += " Throughput in micro-batches a second; *keeps*: share of the undisturbed throughput."
    report.save(lambda path: plot_bars(
        path, panels, ylabel="throughput over undisturbed\nstatic uniform (x)", title=report.title, reference=1.0,
        columns=2 if len(panels) > 1 else 1,
    ))

