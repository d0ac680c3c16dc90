"""The fault storm: workers are killed at random while others join, next to the same training left alone.

python -m benchmarks.faults.storm [--minutes 20 --every 40 --workers 4 --wait-ms 10 --seed 1 --logs FOLDER --force]

Layers wait instead of computing, so that the workers do not need a core each; what is measured is what a loss costs, on
one machine. Both runs train the same number of batches, at the same time, so that whatever else the machine does slows
both. *Goodput*: batches that the storm has trained when the undisturbed run is over, over those of that run, both
counted from their first one's end.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.faults.storm_run import StormRun
from benchmarks.record import COLOURS, RESULTS, add_force, environment, force, new_figure, save, save_figure, table

NAME = "storm"
GOAL = 0.8
HELD = ("descriptors", "sockets", "threads", "resident_kib")
_TRIAL = 60  # batches, to see how long one takes


def run_together(runs: list[tuple[StormRun, random.Random | None]], every_s: float, logs: Path | None) -> None:
    """Run several at the same time, each to its end.

    Args:
        runs: with the choice of whom to kill; ``None``: nobody.
        every_s: seconds between two kills.
        logs: folder for the processes' output; ``None``: it is not kept.
    """
    failed: list[BaseException] = []

    def follow(run: StormRun, choice: random.Random | None) -> None:
        try:
            run.follow(choice, every_s)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    try:
        for run, _ in runs:
            run.start()
        threads = [threading.Thread(target=follow, args=pair, daemon=True) for pair in runs]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not failed:
            threads[0].join(0.5)
            threads[-1].join(0.5)
        left = {run.name: run.temporary_files() for run, _ in runs}
    finally:
        for run, _ in runs:
            if logs is not None:
                run.keep_logs(logs)
            run.end()
    if failed:
        raise failed[0]
    for run, _ in runs:
        run.told.append({"temporary_files": left[run.name]})


def ends(run: StormRun) -> dict[int, float]:
    """When each batch was over, on the first worker that told so."""
    found: dict[int, float] = {}
    for line in run.lines("batch"):
        found[line["batch"]] = min(line["time"], found.get(line["batch"], float("inf")))
    return dict(sorted(found.items()))


def seconds(run: StormRun) -> float:
    """From the first batch's end to the last one's."""
    times = list(ends(run).values())
    return times[-1] - times[0]


def goodput(calm: StormRun, storm: StormRun) -> float:
    """Batches of the storm over those of the undisturbed run, in the time that the latter took."""
    times = list(ends(storm).values())
    until_s = times[0] + seconds(calm)
    return (sum(time <= until_s for time in times) - 1) / (len(ends(calm)) - 1)


def gaps(storm: StormRun) -> list[float]:
    """Seconds from each kill to the end of the first batch that had not begun then."""
    times = ends(storm)
    found = []
    for kill in storm.kills:
        before = max((batch for batch, time in times.items() if time <= kill["time"]), default=0)
        found.append(times[before + 2] - kill["time"])
    return found


def held(storm: StormRun) -> dict[str, Any]:
    """What the worker that saw most losses held, whenever all stages were there: before each loss, and at the end.

    Returns:
        ``losses`` that it lived through, and for each name of :data:`HELD` so many values and one.
    """
    full = max(line["stages"] for line in storm.lines("batch"))
    samples: dict[int, list[dict[str, Any]]] = {}
    for line in storm.lines("resident_kib"):
        if line["stages"] == full:
            samples.setdefault(line["pid"], []).append(line)
    counted = {
        pid: sum(lines[0]["time"] < kill["time"] < lines[-1]["time"] for kill in storm.kills)
        for pid, lines in samples.items()
    }
    longest = max(counted, key=lambda pid: (counted[pid], pid))
    lines = samples[longest]
    before = [
        [line for line in lines if line["time"] < kill["time"]][-1]
        for kill in storm.kills if lines[0]["time"] < kill["time"] < lines[-1]["time"]
    ]
    return {"losses": counted[longest], **{key: [line[key] for line in (*before, lines[-1])] for key in HELD}}


def judge(calm: StormRun, storm: StormRun) -> dict[str, Any]:
    """What the two runs say about each other."""
    losses: list[dict[int, set[str]]] = [{}, {}]
    for found, run in zip(losses, (calm, storm), strict=True):
        for line in run.lines("batch"):
            found.setdefault(line["batch"], set()).add(line["loss"])
    digests = [{k: v for line in run.lines("digest") for k, v in line["digest"].items()} for run in (calm, storm)]
    began = min(ends(storm).values())
    joined = [line["time"] - began for line in storm.lines("began") if line["began"]]
    return {
        "batches": max(losses[0]), "same_losses": losses[0] == losses[1], "same_state": digests[0] == digests[1],
        "layers": len(digests[0]), "calm_s": seconds(calm), "storm_s": seconds(storm),
        "goodput": goodput(calm, storm), "joined_s": joined, "held": held(storm),
        "kills": [
            {"s": kill["time"] - began, "rank": kill["rank"], "workers": kill["workers"], "gap_s": gap}
            for kill, gap in zip(storm.kills, gaps(storm), strict=True)
        ],
        "samples": max(line["samples"] for line in storm.lines("batch")),
        "calm_samples": max(line["samples"] for line in calm.lines("batch")),
        "snapshots": {
            run.name: max(line["snapshots_s"] for line in run.lines("digest")) / seconds(run) for run in (calm, storm)
        },
        "temporary_files": storm.lines("temporary_files")[0]["temporary_files"],
    }


def draw(calm: StormRun, storm: StormRun, path: Path) -> Path:
    """The timeline: batches of both runs, number of stages, kills."""
    figure = new_figure(9, 4.2)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for run, colour, name in ((calm, COLOURS[0], "undisturbed"), (storm, COLOURS[1], "storm")):
        times = ends(run)
        began = min(times.values())
        upper.plot([(time - began) / 60 for time in times.values()], list(times), color=colour, label=name)
    stages: dict[int, int] = {line["batch"]: line["stages"] for line in storm.lines("batch")}
    lower.step([(time - began) / 60 for time in times.values()], [stages[batch] for batch in times], color=COLOURS[1],
               where="post")
    for number, kill in enumerate(storm.kills):
        for axes in (upper, lower):
            axes.axvline((kill["time"] - began) / 60, color=COLOURS[2], linewidth=0.7, alpha=0.7,
                         label="a worker is killed" if not number else None)
    upper.set_ylabel("batches")
    upper.legend(loc="upper left")
    lower.set_ylabel("stages")
    lower.set_ylim(0, max(stages.values()) + 0.5)
    lower.set_xlabel("minutes")
    return save_figure(figure, path)


def rows(found: dict[str, Any], every_s: float) -> list[list[str]]:
    """The table's."""
    lost_s = [kill["gap_s"] for kill in found["kills"]] or [float("nan")]
    ranks = sorted(kill["rank"] for kill in found["kills"])
    by_rank = ", ".join(f"rank {rank}: {ranks.count(rank)}" for rank in sorted(set(ranks)))
    kept = "; ".join(f"{key} {', '.join(map(str, found['held'][key]))}" for key in HELD)
    calm, storm = found["snapshots"].values()
    return [
        ["batches", str(found["batches"])],
        ["workers killed", f"{len(found['kills'])}, one every {every_s:g} s ({by_rank})"],
        ["workers that joined", str(len(found["joined_s"]))],
        ["every batch's loss has the same bits", "yes" if found["same_losses"] else "NO"],
        [f"final weights and optimizer state of all {found['layers']} layers have the same bits",
         "yes" if found["same_state"] else "NO"],
        ["samples trained, undisturbed and in the storm", f"{found['calm_samples']}, {found['samples']}"],
        ["seconds, undisturbed and in the storm", f"{found['calm_s']:.1f}, {found['storm_s']:.1f}"],
        ["goodput", f"{found['goodput']:.1%} (goal {GOAL:.0%})"],
        ["seconds from a kill to the end of the first batch begun after it: median, longest",
         f"{statistics.median(lost_s):.1f}, {max(lost_s):.1f}"],
        ["checkpoints read", "0 (none is saved)"],
        ["snapshots' share of the time by own accounting, undisturbed and in the storm", f"{calm:.1%}, {storm:.1%}"],
        [f"held by the worker that saw {found['held']['losses']} losses: before each, and at the end", kept],
        ["temporary files left by all processes", str(len(found["temporary_files"]))],
    ]


def main() -> None:
    """Run both, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of the undisturbed run, about")
    parser.add_argument("--every", type=float, default=40.0, help="seconds between two kills")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--wait-ms", type=float, default=10.0, help="that a layer's forward waits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="folder for what all processes write")
    parser.add_argument("--out", type=Path, default=RESULTS / "faults")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no worker is left
    about = environment()

    def new(name: str, num_batches: int) -> StormRun:
        return StormRun(name, options.workers, num_batches, options.wait_ms / 1000)

    trial = new("trial", _TRIAL)
    run_together([(trial, None)], options.every, options.logs)
    print(f"{_TRIAL} batches took {seconds(trial):.1f} s", flush=True)
    num_batches = max(_TRIAL, round(options.minutes * 60 * (_TRIAL - 1) / seconds(trial)))
    calm, storm = new("undisturbed", num_batches), new("storm", num_batches)
    run_together([(calm, None), (storm, random.Random(options.seed))], options.every, options.logs)
    found = judge(calm, storm)
    kept = {key: value for key, value in vars(options).items() if not isinstance(value, Path)}  # nobody else's folders
    path = save(options.out, NAME, {"environment": about, **kept, **found}, table(["", ""], rows(found, options.every)))
    draw(calm, storm, path)


if __name__ == "__main__":
    main()
