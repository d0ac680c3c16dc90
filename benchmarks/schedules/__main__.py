"""What planned orders, split backwards and messages that nobody waits for bring, next to the best there was before.

    python -m benchmarks.schedules --quick                 # virtual time, 4 stages, three load models: two minutes
    python -m benchmarks.schedules                         # virtual time, 2, 4 and 8 stages, six load models
    python -m benchmarks.schedules --stages 16 24 --batches 16
    python -m benchmarks.schedules --halves --stages 4 8   # the same, attention and MLP of a block being two layers
    python -m benchmarks.schedules --paper                 # the same runs in one process (replay/predict.py), all sizes
    python -m benchmarks.schedules --sleeping              # layers sleep, 4 and 8 stages; an idle machine
    python -m benchmarks.schedules --real                  # real compute on two ranks; an idle machine

Finished replays are kept in ``--raw`` and not made again; delete the folder to measure anew.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.paper.experiments import run as run_all
from benchmarks.paper.experiments import simulate_all
from benchmarks.record import RESULTS, add_force, environment, finished_runs, force, in_words, installed
from benchmarks.schedules import real, replayed
from benchmarks.schedules.on_paper import TODAY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--sleeping", action="store_true", help="layers sleep")
    how.add_argument("--paper", action="store_true", help="no engine: the simulator, with the engine's own balancer")
    how.add_argument("--real", action="store_true", help="layers compute, on two ranks")
    parser.add_argument("--quick", action="store_true", help="few batches and load models, 4 stages")
    parser.add_argument("--halves", action="store_true", help="replays: attention and MLP of a block are two layers")
    parser.add_argument("--stages", type=int, nargs="+", choices=sorted(replayed.SIZES))
    parser.add_argument("--batches", type=int, help="of a run")
    named = [*replayed.SCENARIOS, "none", real.NARROW]
    parser.add_argument("--only", nargs="+", choices=named, help="load models or scenarios")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="--real: overrides as for make run")
    parser.add_argument("--out", type=Path, default=RESULTS / "schedules")
    parser.add_argument("--raw", type=Path, help="of finished replays; default: by commit, none if quick")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    if options.real:
        real.run(options)
        return
    machine = environment() if options.sleeping else None
    print(in_words(machine or installed()), flush=True)
    scenarios = options.only or (replayed.SCENARIOS[1:4] if options.quick else replayed.SCENARIOS)
    usual = [4, 8] if options.sleeping else [4, 8, 16, 24] if options.paper else [2, 4, 8]
    stages = options.stages or ([4] if options.quick else usual)
    batches = options.batches or (14 if options.quick else 26 if options.sleeping else 40)
    given = {"halves": options.halves} | ({"clock": "sleeping"} if options.sleeping else {})
    name = "sleeping" if options.sleeping else "paper" if options.paper else "virtual"
    made = simulate_all if options.paper else run_all
    with tempfile.TemporaryDirectory() as folder:
        raw = options.raw or (Path(folder) if options.quick else finished_runs("schedules"))
        rows = []
        for num_stages in stages:
            cases = replayed.cases(num_stages, batches, scenarios, **given)
            for row in replayed.measure(cases, raw / f"{name}.jsonl", made):
                rows.append(row)
                print(f"{num_stages} stages, {row.case.trace}: auto {row.gain:.3f}x over 1F1B, "
                      f"{row.gain_over_paper:.3f}x over {TODAY}", flush=True)  # fmt: skip
    kind = {"sleeping": "sleeping replay", "paper": "simulation", "virtual": "replay"}[name]
    replayed.report(rows, options.out, kind, machine, quick=options.quick)


if __name__ == "__main__":
    main()
