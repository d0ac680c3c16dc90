"""Workers come and go while a pipeline trains: 2, 4, 1 and 3 stages, with seconds, bits and a picture.

python -m benchmarks.elastic.main [--batches 40] [--picture docs/images/elastic.png]
python -m benchmarks.elastic.main pauses [--repeats 3] [--force]

The first: ``dynpipe run`` starts two ranks and four spares of ``train.py``; after that the same with two ranks that
stay. Losses of both runs are compared bit for bit.

The second (``pauses.py``): seconds of pause for every direction, optimizer and size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.elastic import pauses
from benchmarks.record import RESULTS, add_force, force, new_figure, save_figure, table, tell

START, SPARES = 2, 4
SIZES = (4, 1, 3)
_ROOM = 1.15  # above the highest line


def train(num_batches: int, steps: Mapping[int, int], spares: int) -> dict[str, Any]:
    """What the first rank of a run wrote."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "dynpipe_ds", "run", "--workers", str(START), "--spares", str(spares), "--",
            str(Path(__file__).with_name("train.py")), folder, "--batches", str(num_batches), "--steps",
            json.dumps({str(batch): size for batch, size in steps.items()}),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        if done.returncode:
            said = f"{done.stdout[-2000:]}{done.stderr}"
            raise RuntimeError(f"the training ended with exit code {done.returncode}: {said}")
        record: dict[str, Any] = json.loads((Path(folder) / "record.json").read_text())
        return record


def draw(record: Mapping[str, Any], path: Path) -> Path:
    """Workers and batches a second over time, with the pauses.

    Args:
        record: of the run that is resized.
        path: of the picture.
    """
    batches, pauses = record["batches"], record["pauses"]
    start = batches[0]["began"]
    figure = new_figure(8.0, 3.4)
    workers, speed = figure.subplots(2, 1, sharex=True)
    times = [batch["began"] - start for batch in batches] + [batches[-1]["ended"] - start]
    workers.stairs([batch["stages"] for batch in batches], times, fill=True, color="#9ecae1")
    workers.set_ylabel("workers")
    workers.set_ylim(0, 4.6)
    each = [1.0 / (batch["ended"] - batch["began"]) for batch in batches]
    speed.stairs(each, times, color="#08519c")
    speed.set_ylim(0, _ROOM * max(each))
    speed.set_ylabel("batches a second")
    speed.set_xlabel("seconds since the first batch")
    for pause in pauses:
        for axes in (workers, speed):
            axes.axvspan(pause["began"] - start, pause["ended"] - start, color="#d94801", alpha=0.8, lw=0)
        text = f"{pause['before']} → {pause['after']}: {pause['ended'] - pause['began']:.2f} s"
        workers.annotate(text, (pause["ended"] - start, 4.1), fontsize=8, color="#a63603")
    return save_figure(figure, path)


def rows(record: Mapping[str, Any]) -> list[Sequence[str]]:
    """One row for each number of stages: seconds of a batch, and of the pause before it."""
    found = []
    batches, pauses = list(record["batches"]), [None, *record["pauses"]]
    for pause in pauses:
        size = START if pause is None else pause["after"]
        ran = []
        while batches and batches[0]["stages"] == size:
            ran.append(batches.pop(0))
        seconds = [batch["ended"] - batch["began"] for batch in ran]
        paused = "" if pause is None else f"{pause['ended'] - pause['began']:.2f}"
        parts = "" if pause is None else f"{pause['regroup_s']:.2f} + {pause['migrate_s']:.2f}"
        found.append((str(size), str(len(ran)), f"{1000 * median(seconds):.0f}", paused, parts))
    return found


def picture(num_batches: int, path: Path) -> bool:
    """Measure one job, compare and draw; whether the losses are the same.

    Args:
        num_batches: of each run.
        path: of the picture.
    """
    every = num_batches // (len(SIZES) + 1)
    steps = {every * (i + 1) - 1: size for i, size in enumerate(SIZES)}
    resized, stays = train(num_batches, steps, SPARES), train(num_batches, {}, 0)
    losses = [[batch["loss"] for batch in run["batches"]] for run in (resized, stays)]
    head = ["workers", "batches", "ms a batch", "pause before, s", "regroup + move, s"]
    tell(
        ["12 layers that wait 4 + 8 ms, 8 micro-batches, AdamW, gloo"],
        [
            table(head, rows(resized)), "",
            f"losses of all {num_batches} batches: {'equal bits' if losses[0] == losses[1] else 'DIFFERENT'}",
            f"picture: {draw(resized, path)}",
        ],
    )  # fmt: skip
    return losses[0] == losses[1]


def main() -> None:
    """Measure one of both; exit code 1 if losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["picture", "pauses"], default="picture")
    parser.add_argument("--batches", type=int, default=40, help="of the picture")
    parser.add_argument("--picture", type=Path, default=Path("elastic.png"))
    parser.add_argument("--repeats", type=int, default=pauses.REPEATS, help="of every direction")
    parser.add_argument("--out", type=Path, default=RESULTS / "elastic", help="folder for the pauses")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    if options.what == "pauses":
        is_same = pauses.main(options.out, options.repeats)
    else:
        is_same = picture(options.batches, options.picture)
    raise SystemExit(not is_same)


if __name__ == "__main__":
    main()
