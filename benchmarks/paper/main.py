"""The paper's tables and figures, one command each; results go to ``benchmarks/results/paper/``.

    python -m benchmarks.paper.main all --quick    # two to three minutes on two idle cores
    python -m benchmarks.paper.main published      # the paper's figures, their places, its contradictions
    python -m benchmarks.paper.main balancers      # its algorithms as printed and ours on the same costs
    python -m benchmarks.paper.main compared       # Figure 3 with its settings, all contenders, on paper
    python -m benchmarks.paper.main one_node       # DynPipe Table 2: pruning's last phase, on paper (3 minutes)
    python -m benchmarks.paper.main unstable       # DynPipe D.2: does balancing gain more on an unstable network?
    python -m benchmarks.paper.main throughput     # balancers that can run: replay on 4 stages, else simulation
    python -m benchmarks.paper.main throughput --stages 2 4 8
    python -m benchmarks.paper.main recorded       # the same for the recorded traces, 4 stages
    python -m benchmarks.paper.main bubbles        # Figure 1, from the runs of 'throughput'
    python -m benchmarks.paper.main overhead       # Figure 4, DynPipe Table 1, from the runs of 'throughput'
    python -m benchmarks.paper.main network        # link delays, on paper
    python -m benchmarks.paper.main workers        # one stage 1.5 times slower, on paper
    python -m benchmarks.paper.main replicas       # 8 and 30 data-parallel replicas, simulation
    python -m benchmarks.paper.main paper          # all that needs no engine
    python -m benchmarks.replay.validate           # simulator against engine

Every run is kept in ``--raw`` and not made again: a command that was interrupted goes on where it was, and one whose
runs shall be made anew begins with deleting the folder.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.paper import compared, experiments, listed, tables, unstable
from benchmarks.paper.report import KINDS, Report
from benchmarks.record import finished_runs, in_words, installed
from benchmarks.replay.case import Case, Result
from benchmarks.replay.record import FOLDER
from benchmarks.traces import Trace

RESULTS = Path(__file__).parents[1] / "results" / "paper"


def _throughput(options: argparse.Namespace) -> list[Result]:
    return experiments.run(experiments.throughput(options.size), options.raw / "throughput.jsonl", options.processes)


def _simulate(name: str, cases: Sequence[Case], options: argparse.Namespace) -> list[Result]:
    return experiments.simulate_all(cases, options.raw / f"{name}.jsonl", options.processes)


def _which_are_simulated(results: Sequence[Result]) -> list[str]:
    """A line that says which rows are not replayed, if some are."""
    stages = sorted({run.case.num_stages for run in results if run.kind == "simulation"})
    if not stages:
        return []
    return [
        f"Rows of {' and '.join(map(str, stages))} stages are SIMULATION: the engine's own balancer decides, batches "
        "are computed by dynpipe_ds.simulation, and overheads are charged as in replay."
    ]


def throughput(options: argparse.Namespace) -> None:
    results = _throughput(options)
    report = Report("throughput", options.out, "replay", options.quick, "Throughput (DynPipe Table 2, Figure 3)")
    report.text = "Load models of the six kinds of dynamism. "
    report.pictures += tables.heat_maps(report, results)
    report.notes = _which_are_simulated(results)
    tables.throughput(report, results)


def recorded(options: argparse.Namespace) -> None:
    files = sorted(FOLDER.glob("*.json"))
    if not files:
        raise SystemExit(f"no traces in {FOLDER}: record them with python -m benchmarks.replay.record all")
    if options.quick:
        files = [file for file in files if file.stem in options.size.scenarios]
    few = tuple(dict.fromkeys((stages, 0) for stages, _ in options.size.pipelines if stages <= 4))
    methods = tuple(m for m in options.size.methods if m in experiments.RECORDED_RUN)
    size = replace(options.size, pipelines=few, methods=methods)
    cases = experiments.throughput(size, [str(file.relative_to(Path.cwd())) for file in files])
    results = experiments.run(cases, options.raw / "recorded.jsonl")
    title = "Throughput, traces recorded from this project's scenarios"
    report = Report("recorded", options.out, "replay", options.quick, title)
    report.notes = [f"{file.name}: {Trace.load(file).source.description}" for file in files]
    tables.throughput(report, results)


def bubbles(options: argparse.Namespace) -> None:
    results = _throughput(options)
    report = Report("bubbles", options.out, "replay", options.quick, "Bubble ratios (Figure 1)")
    report.notes = _which_are_simulated(results)
    tables.bubbles(report, results)


def overhead(options: argparse.Namespace) -> None:
    results = _throughput(options)
    title = "Overheads (Figure 4) and what one re-balance costs (DynPipe Table 1)"
    report = Report("overhead", options.out, "replay", options.quick, title)
    report.notes = _which_are_simulated(results)
    tables.overhead(report, results)


def network(options: argparse.Namespace) -> None:
    results = _simulate("network", experiments.network(options.size), options)
    report = Report("network", options.out, "simulation", options.quick, "Unstable network (DynPipe D.2)")
    report.text = (
        "A message travels for a while, and its sender goes on: *steady delays* a fifth of a dense stage's forward, "
        "*delays vary* the same times N(1, 1) cut off at 0 and 4, anew for every message."
    )
    report.notes = ["No partition avoids a delay that every boundary has; what ours gains, it gains by the layers."]
    tables.conditions(report, results, plain="no delays")


def workers(options: argparse.Namespace) -> None:
    results = _simulate("workers", experiments.workers(options.size), options)
    title = "Unequal workers: the second stage is 1.5 times slower"
    report = Report("workers", options.out, "simulation", options.quick, title)
    report.text = (
        "*optimal* and *simulated* are told the speeds (`stage_speeds`); the paper's balancers only see that layers on "
        "the slow stage take longer."
    )
    tables.conditions(report, results, plain="equal workers")


def replicas(options: argparse.Namespace) -> None:
    results = _simulate("replicas", experiments.replicas(options.size), options)
    report = Report("replicas", options.out, "simulation", options.quick, "Data-parallel replicas (Figure 3)")
    report.text = "16 stages with 8 replicas, 24 with 30; a batch ends with the slowest replica. "
    report.notes = ["Links, gradient reduction, profiling and moving take no time here."]
    tables.throughput(report, results)


def published(options: argparse.Namespace) -> None:
    listed.all_published(Report("published", options.out, "quoted", options.quick, "What the paper says"))


def balancers(options: argparse.Namespace) -> None:
    title = "The paper's algorithms as printed, and ours, on the same costs"
    listed.balancers(Report("balancers", options.out, "simulation", options.quick, title), options.quick)


def on_paper(options: argparse.Namespace) -> None:
    sizes = compared.quick_sizes() if options.quick else compared.full_sizes()
    rows = compared.run(sizes, options.raw / "compared.jsonl", options.processes)
    title = "Throughput with the paper's settings (Figure 3), all contenders"
    compared.compared(Report("compared", options.out, "simulation", options.quick, title), rows)


def one_node(options: argparse.Namespace) -> None:
    sizes = [size for counting in ("cost", "equation") for size in compared.one_node_sizes(counting)]
    rows = compared.run(sizes, options.raw / "one_node.jsonl", options.processes)
    title = "Pruning's last phase on one node (DynPipe, Table 2)"
    compared.one_node(Report("one_node", options.out, "simulation", options.quick, title), rows)


def unstable_network(options: argparse.Namespace) -> None:
    title = "Unstable network: does balancing gain more? (DynPipe, D.2)"
    unstable.unstable(Report("unstable", options.out, "simulation", options.quick, title), options.quick)


TABLES: dict[str, Callable[[argparse.Namespace], None]] = {
    f.__name__: f for f in (published, balancers, one_node, throughput, recorded, bubbles, overhead, network, workers)
} | {"replicas": replicas, "compared": on_paper, "unstable": unstable_network}
ON_PAPER = ("published", "balancers", "one_node", "compared", "unstable", "network", "workers", "replicas")
"""Tables for which nothing is run on the engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*TABLES, "paper", "all"])
    parser.add_argument("--quick", action="store_true", help="few batches, scenarios and methods on 2 stages")
    known = sorted({stages for stages, _ in experiments.FULL.pipelines})
    parser.add_argument("--stages", type=int, nargs="+", choices=known)
    parser.add_argument("--methods", nargs="+", choices=experiments.FULL.methods, metavar="METHOD")
    parser.add_argument("--batches", type=int)
    parser.add_argument("--processes", type=int, default=1, help="how many simulate at a time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--raw", type=Path, help="of finished runs; default: by commit, none if quick")
    options = parser.parse_args()
    if options.methods and experiments.UNIFORM not in options.methods:
        parser.error(f"--methods needs {experiments.UNIFORM!r} among them: all others are compared with it")
    size = experiments.QUICK if options.quick else experiments.FULL
    if options.stages:
        few = tuple(s for s in size.few if s in options.stages)
        chosen_pipelines = tuple(pair for pair in experiments.FULL.pipelines if pair[0] in options.stages)
        size = replace(size, pipelines=chosen_pipelines, few=few)
    options.size = replace(size, batches=options.batches or size.batches, methods=options.methods or size.methods)
    print(in_words(installed()), *KINDS.values(), sep="\n", flush=True)
    chosen = {"all": list(TABLES), "paper": list(ON_PAPER)}.get(options.table, [options.table])
    if options.table == "all" and not any(FOLDER.glob("*.json")):
        chosen.remove("recorded")
    with tempfile.TemporaryDirectory() as folder:
        options.raw = options.raw or (Path(folder) if options.quick else finished_runs("paper"))
        for name in chosen:
            TABLES[name](options)


if __name__ == "__main__":
    main()
