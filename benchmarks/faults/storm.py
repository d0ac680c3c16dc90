"""The fault storm: workers are killed at random while others join, next to the same training left alone.

python -m benchmarks.faults.storm [--minutes 20 --every 40 --workers 4 --wait-ms 5 --seed 1 --force]

Layers wait instead of computing, so that the workers do not need a core each; what is measured is what a loss costs, on
one machine. Both runs train the same number of batches. *Goodput* is the undisturbed run's time over the storm's, from
the first batch's end to the last one's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, add_force, environment, force, new_figure, save, save_figure, table

NAME = "storm"
GOAL = 0.8
_JOIN = "DYNPIPE_JOIN"
_PATIENCE_S = 300.0
_TRIAL = 60  # batches, to see how long one takes


class Job:
    """The processes of a run, and all that they have told.

    Args:
        arguments: of every worker's script.
        folder: for the door file and the output.
    """

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.told: list[dict[str, Any]] = []
        self._door, self._folder = folder / "door.json", folder
        self._command = [sys.executable, "-u", "-m", "benchmarks.faults.storm_job", *arguments, str(self._door)]
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._lock = threading.Lock()

    def start(self, workers: int) -> None:
        """Start the ranks."""
        port = _free_port()
        for rank in range(workers):
            self._run({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}, port)

    def join(self) -> None:
        """Start a worker that joins."""
        self._run({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", _JOIN: str(self._door)}, _free_port())

    def _run(self, variables: dict[str, str], port: int) -> None:
        process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, text=True, bufsize=1, stderr=(self._folder / "errors").open("a"),
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **variables},
        )
        self._processes[process.pid] = process
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("STORM "):
                with self._lock:
                    self.told.append(json.loads(line.removeprefix("STORM ")))

    def lines(self, key: str) -> list[dict[str, Any]]:
        """What was told that has a key."""
        with self._lock:
            return [line for line in self.told if key in line]

    def training(self) -> list[int]:
        """Process numbers of the workers that train now, by rank."""
        newest = self.lines("batch")[-1:]
        if not newest:
            return []
        last = newest[0]["batch"]
        now = {line["rank"]: line["pid"] for line in self.lines("batch") if line["batch"] >= last - 1}
        alive = [pid for _, pid in sorted(now.items()) if self._processes[pid].poll() is None]
        return list(dict.fromkeys(alive))

    def kill(self, pid: int) -> None:
        """``kill -9``."""
        self._processes[pid].send_signal(signal.SIGKILL)

    def is_over(self) -> bool:
        """Whether all processes have ended."""
        return all(process.poll() is not None for process in self._processes.values())

    def end(self) -> None:
        """End what is left."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def run(options: argparse.Namespace, num_batches: int, every_s: float | None) -> tuple[Job, list[dict[str, Any]]]:
    """One run; with a number of seconds, a worker is killed so often, and another one joins."""
    kills: list[dict[str, Any]] = []
    choice = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        job = Job([str(num_batches), str(options.wait_ms)], Path(folder))
        try:
            job.start(options.workers)
            if every_s is not None:
                job.join()
            _follow(job, kills, choice, every_s, num_batches)
        finally:
            job.end()
            errors = Path(folder, "errors").read_text(errors="replace")
        if not job.lines("digest"):
            raise RuntimeError(f"the run did not come to its end:\n{errors[-4000:]}")
    return job, kills


def _follow(
    job: Job, kills: list[dict[str, Any]], choice: random.Random, every_s: float | None, num_batches: int
) -> None:
    due, seen, last = None, 0, time.monotonic()
    while not job.is_over():
        time.sleep(0.1)
        batches = job.lines("batch")
        if len(batches) > seen:
            seen, last = len(batches), time.monotonic()
        if time.monotonic() - last > _PATIENCE_S:
            raise RuntimeError(f"nothing was trained for {_PATIENCE_S:g} s")
        if every_s is None or not batches:
            continue
        due = time.monotonic() + every_s if due is None else due
        left = num_batches - max(line["batch"] for line in batches)
        workers = job.training()
        if time.monotonic() >= due and len(workers) > 1 and left > num_batches // 50:
            victim = choice.randrange(len(workers))
            kills.append({"time": time.time(), "rank": victim, "pid": workers[victim]})
            job.kill(workers[victim])
            job.join()
            due += every_s


def judge(calm: Job, storm: Job, kills: list[dict[str, Any]]) -> dict[str, Any]:
    """What the two runs say about each other."""
    losses = [{}, {}]  # type: list[dict[int, set[str]]]
    for found, job in zip(losses, (calm, storm), strict=True):
        for line in job.lines("batch"):
            found.setdefault(line["batch"], set()).add(line["loss"])
    digests = [{k: v for line in job.lines("digest") for k, v in line["digest"].items()} for job in (calm, storm)]
    seconds = [_seconds(job) for job in (calm, storm)]
    gaps = []
    for kill in kills:
        before = max((line["batch"] for line in storm.lines("batch") if line["time"] <= kill["time"]), default=0)
        after = [line["time"] for line in storm.lines("batch") if line["batch"] > before + 1]
        gaps.append(min(after, default=float("nan")) - kill["time"])
    last = storm.lines("digest")[0]["pid"]
    held = [line for line in storm.lines("files") if line["pid"] == last]
    used = [{key: line[key] for key in ("files", "threads", "memory_kib")} for line in held]
    return {
        "batches": max(losses[0]), "same_losses": losses[0] == losses[1], "same_state": digests[0] == digests[1],
        "calm_s": seconds[0], "storm_s": seconds[1], "goodput": seconds[0] / seconds[1], "kills": len(kills),
        "ranks": [kill["rank"] for kill in kills], "gaps_s": gaps, "used": used,
        "samples": max(line["samples"] for line in storm.lines("batch")),
        "calm_samples": max(line["samples"] for line in calm.lines("batch")),
    }


def _seconds(job: Job) -> float:
    ends: dict[int, float] = {}
    for line in job.lines("batch"):
        ends[line["batch"]] = min(line["time"], ends.get(line["batch"], float("inf")))
    return ends[max(ends)] - ends[min(ends)]


def draw(storm: Job, kills: list[dict[str, Any]], path: Path) -> Path:
    """The storm's timeline: batches, number of stages, kills."""
    figure = new_figure(8, 3.6)
    lines = sorted(storm.lines("batch"), key=lambda line: line["time"])
    began = lines[0]["time"]
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot([line["time"] - began for line in lines], [line["batch"] for line in lines])
    upper.set_ylabel("batches")
    lower.step([line["time"] - began for line in lines], [line["stages"] for line in lines], where="post")
    lower.set_ylabel("stages")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("seconds")
    for kill in kills:
        for axes in (upper, lower):
            axes.axvline(kill["time"] - began, color="tab:red", linewidth=0.8)
    return save_figure(figure, path)


def main() -> None:
    """Run both, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of the undisturbed run, about")
    parser.add_argument("--every", type=float, default=40.0, help="seconds between two kills")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--wait-ms", type=float, default=5.0, help="that a layer's forward waits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    add_force(parser)
    options = parser.parse_args()
    force(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no worker is left
    about = environment()
    trial, _ = run(options, _TRIAL, None)
    print(f"{_TRIAL} batches took {_seconds(trial):.1f} s", flush=True)
    num_batches = max(_TRIAL, round(options.minutes * 60 * (_TRIAL - 1) / _seconds(trial)))
    calm, _ = run(options, num_batches, None)
    print(f"{num_batches} batches, undisturbed, took {_seconds(calm):.1f} s", flush=True)
    storm, kills = run(options, num_batches, options.every)
    found = judge(calm, storm, kills)
    gaps = found["gaps_s"] or [float("nan")]
    rows = [
        ["batches", str(found["batches"])], ["workers killed", f"{found['kills']} (ranks {found['ranks']})"],
        ["every batch's loss the same bits", str(found["same_losses"])],
        ["final weights and optimizer state the same bits", str(found["same_state"])],
        ["samples trained", f"{found['samples']} of {found['calm_samples']}"],
        ["seconds, undisturbed and in the storm", f"{found['calm_s']:.1f}, {found['storm_s']:.1f}"],
        ["goodput", f"{found['goodput']:.1%} (goal {GOAL:.0%})"],
        ["seconds from a kill to the next new batch: median, longest",
         f"{statistics.median(gaps):.1f}, {max(gaps):.1f}"],
        ["a survivor's files, threads, KiB: first, last", f"{found['used'][0]}, {found['used'][-1]}"],
    ]
    text = table(["", ""], rows)
    values = {"environment": about, **vars(options), "out": str(options.out), **found}
    path = save(options.out, NAME, values, text)
    draw(storm, kills, path.with_name(f"{path.name}.png"))


if __name__ == "__main__":
    main()
