"""Seconds of pause by direction, optimizer and size of the state, with what they are spent on; bits compared.

``python -m benchmarks.elastic.main pauses`` runs a job for each optimizer and size: two stages become four, one, three
and two again, and so on, until every direction was measured often enough. A second job of two stages that stay trains
the same batches, and must have the same losses, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.elastic.train import NUM_LAYERS, OPTIMIZERS, Training, train
from benchmarks.forked import run_forked
from benchmarks.ranks import Send, start_rank
from benchmarks.record import environment, save, table

NAME = "pauses"
START, CYCLE = 2, (4, 1, 3)
DIRECTIONS = tuple(zip((START, *CYCLE[:-1]), CYCLE, strict=True))
STATE_BYTES = (1_000_000, 10_000_000, 100_000_000)
"""Weights and optimizer state of each of the two stages at the start, about."""
_BYTES = {"AdamW": 12, "ZeRO-1": 12, "bf16 + ZeRO-1": 14}  # that a parameter takes along when it moves
_FORWARD_S = 0.001
_APART = 2  # batches between two pauses
REPEATS = 3


def width(state_bytes: int, optimizer: str) -> int:
    """Of layers with which each of the first two stages holds about so many bytes; a multiple of eight.

    Args:
        state_bytes: of weights and optimizer state of one of the two stages.
        optimizer: one of ``train.OPTIMIZERS``.
    """
    parameters = state_bytes * START / NUM_LAYERS / _BYTES[optimizer]
    return max(8, 8 * round(math.sqrt(parameters) / 8))


def held_bytes(hidden: int, optimizer: str) -> int:
    """Weights and optimizer state of each of the first two stages, exactly.

    Args:
        hidden: width of a layer.
        optimizer: one of ``train.OPTIMIZERS``.
    """
    return NUM_LAYERS // START * (hidden * hidden + hidden) * _BYTES[optimizer]


def plan(repeats: int) -> tuple[dict[int, int], int]:
    """After which batches there are how many stages, and how many workers must come for that.

    Args:
        repeats: of every direction.
    """
    sizes = [*[*CYCLE, START] * repeats][:-1]
    comes = sum(max(0, after - before) for before, after in zip([START, *sizes], sizes, strict=False))
    return {_APART * (number + 1) - 1: size for number, size in enumerate(sizes)}, comes


def measure(optimizer: str, state_bytes: int, repeats: int = REPEATS) -> dict[str, Any]:
    """Run both jobs of one row.

    Args:
        optimizer: one of ``train.OPTIMIZERS``.
        state_bytes: of each of the two stages at the start, about.
        repeats: of every direction.

    Returns:
        The row: its pauses in order, each with its parts, and whether the losses are the same.
    """
    steps, comes = plan(repeats)
    hidden = width(state_bytes, optimizer)
    resized = Training(max(steps) + 1 + _APART, steps, optimizer, hidden, _FORWARD_S, waiting=comes)
    stays = replace(resized, steps={}, waiting=0)
    (ours,), (theirs,) = (
        list(run_forked(_train, START, training, newcomers=newcomers))
        for training, newcomers in ((resized, comes), (stays, 0))
    )
    losses = [[batch["loss"] for batch in run["batches"]] for run in (ours, theirs)]
    return {
        "optimizer": optimizer, "hidden": hidden, "state_bytes": held_bytes(hidden, optimizer),
        "num_batches": resized.num_batches, "same_bits": losses[0] == losses[1],
        "pauses": [_told(pause) for pause in ours["pauses"]],
    }  # fmt: skip


def _train(send: Send, training: Training) -> None:
    start_rank()
    send(train(training))


def _told(pause: Mapping[str, Any]) -> dict[str, Any]:
    seconds = {name: pause[name] for name in ("regroup_s", "migrate_s", "plan_s")}
    seconds = {"pause_s": pause["ended"] - pause["began"], **seconds}
    return {
        "before": pause["before"], "after": pause["after"], **{name: round(s, 4) for name, s in seconds.items()},
    }  # fmt: skip


def of_direction(row: Mapping[str, Any], before: int, after: int) -> list[dict[str, Any]]:
    """The pauses of one direction.

    Args:
        row: of :func:`measure`.
        before: stages before.
        after: stages after.
    """
    return [pause for pause in row["pauses"] if (pause["before"], pause["after"]) == (before, after)]


def parts(pause: Mapping[str, float]) -> tuple[float, float, float, float]:
    """Seconds of a pause: all, making process groups anew, moving layers, and the rest.

    Args:
        pause: of a row.
    """
    regroup_s, migrate_s = pause["regroup_s"], pause["migrate_s"]
    return pause["pause_s"], regroup_s, migrate_s, max(0.0, pause["pause_s"] - regroup_s - migrate_s)


def short(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each optimizer and size: the median pause in each direction, and its parts.

    Args:
        rows: of :func:`measure`.
    """
    head = ["optimizer", "MB a stage", *(f"{before} → {after}" for before, after in DIRECTIONS), "losses"]
    return table(head, [[*_names(row), *(_cell(row, *way) for way in DIRECTIONS), _bits(row)] for row in rows])


def _names(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["optimizer"], f"{row['state_bytes'] / 1e6:.1f}"


def _bits(row: Mapping[str, Any]) -> str:
    return "equal bits" if row["same_bits"] else "DIFFERENT"


def _medians(row: Mapping[str, Any], before: int, after: int) -> list[float]:
    """Of each part; those of the pause whose length is the median, so that they add up."""
    pauses = sorted(of_direction(row, before, after), key=lambda pause: pause["pause_s"])
    return [*parts(pauses[len(pauses) // 2])]


def _cell(row: Mapping[str, Any], before: int, after: int) -> str:
    pause_s, *rest = _medians(row, before, after)
    return f"{pause_s:.2f} ({' + '.join(f'{seconds:.2f}' for seconds in rest)})"


def whole(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each pause that was measured.

    Args:
        rows: of :func:`measure`.
    """
    head = ["optimizer", "MB a stage", "stages", "pause, s", "regroup", "move", "rest"]
    return table(head, [
        [*_names(row), f"{pause['before']} → {pause['after']}", *(f"{seconds:.3f}" for seconds in parts(pause))]
        for row in rows for pause in row["pauses"]
    ])  # fmt: skip


def longest(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of the longest pause of all.

    Args:
        rows: of :func:`measure`.
    """
    return max(pause["pause_s"] for row in rows for pause in row["pauses"])


def summary(values: Mapping[str, Any]) -> str:
    """The short table, with how it was measured.

    Args:
        values: as written by :func:`main`.
    """
    rows = values["rows"]
    pauses = [pause for row in rows for pause in row["pauses"]]
    number = min(len(of_direction(row, *way)) for row in rows for way in DIRECTIONS)
    measured = "one pause" if number == 1 else f"the median of {number} pauses"
    growing_s, shrinking_s = (
        median(pause["pause_s"] for pause in pauses if (pause["after"] > pause["before"]) == grows)
        for grows in (True, False)
    )
    return (
        f"{short(rows)}\n\n"
        f"A cell has the seconds from the call of `engine.repack` until it returns on the first rank: {measured}. In "
        f"brackets, of the same pause: letting newcomers in and making process groups anew, moving layers, the rest. "
        f"*MB a stage*: weights and optimizer state of each of the first two stages. Median of all pauses: "
        f"{growing_s:.2f} s to grow, {shrinking_s:.2f} s to shrink; the longest took {longest(rows):.2f} s. *Losses*: "
        f"against a job of two stages that stays, all {rows[0]['num_batches']} batches. Conditions: {NUM_LAYERS} "
        f"layers, one replica, gloo on one machine; newcomers had been built and waited."
    )


def rows_of(repeats: int) -> Iterator[dict[str, Any]]:
    """Measure all rows, and tell each as it comes.

    Args:
        repeats: of every direction.
    """
    for optimizer in OPTIMIZERS:
        for state_bytes in STATE_BYTES:
            row = measure(optimizer, state_bytes, repeats)
            print(f"{' '.join(_names(row))} MB: {', '.join(_cell(row, *way) for way in DIRECTIONS)}; {_bits(row)}",
                  flush=True)  # fmt: skip
            yield row


def main(folder: Path, repeats: int) -> bool:
    """Measure, write and print; whether all losses are the same.

    Args:
        folder: for the results.
        repeats: of every direction.
    """
    values = {"environment": environment(), "rows": list(rows_of(repeats))}
    text = f"{summary(values)}\n\nEvery pause:\n\n{whole(values['rows'])}"
    save(folder, NAME, values, text)
    return all(row["same_bits"] for row in values["rows"])
