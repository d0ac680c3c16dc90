"""What came of the demonstration, read from the events that its first rank wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median
from typing import Any

from dynpipe_ds.cli.demonstration.course import DYNAMIC, FREEZE_AT, NUM_FROZEN, RUNS, STATIC
from dynpipe_ds.cli.show import brackets, layer_spans
from dynpipe_ds.reporting import format_table

Event = dict[str, Any]

_WARM_UP = 2  # batches whose seconds are those of a start
_FREE_LOAD = 0.5  # above the number of processors, from which on others must have waited
_LAST = 8  # batches whose seconds are told for the end


def line(event: Event) -> str | None:
    """What is said of an event as it happens; ``None``: nothing."""
    kind, batch = event["kind"], event.get("batch", 0)
    if kind == "start":
        return (
            f"two processes train a GPT ({event['num_layers']} layers, {event['num_parameters'] / 1e6:.1f} million "
            "parameters) in two runs that take turns: in one the stages stay, in the other they may move"
        )
    if kind == "freeze" and event["run"] == DYNAMIC:
        return f"batch {batch}: {layer_spans(range(NUM_FROZEN))} stop training; the second stage is now slower"
    if kind == "move":
        return (
            f"batch {batch}: layers move, {brackets(event['before'])} -> {brackets(event['after'])}, "
            f"in {event['seconds']:.3f} s"
        )
    return None


def values_of(events: Sequence[Event]) -> dict[str, Any]:
    """The outcome as plain values; ``good`` if layers moved and every bit is equal.

    Args:
        events: all, in order.
    """
    (start,) = _of(events, "start")
    (end,) = _of(events, "end")
    batches = {name: _of(events, "batch", name) for name in RUNS}
    moves = _of(events, "move", DYNAMIC)
    losses = {name: [event["loss"] for event in batches[name]] for name in RUNS}
    equal_losses = losses[STATIC] == losses[DYNAMIC]
    return {
        "good": bool(moves) and equal_losses and end["equal"],
        "losses_equal_bits": equal_losses,
        "weights_and_state_equal_bits": end["equal"],
        "num_tensors": end["num_tensors"],
        "load": os.getloadavg()[0],
        "num_processors": os.cpu_count() or 1,
        "num_layers": start["num_layers"],
        "moves": [{key: move[key] for key in ("batch", "before", "after", "seconds")} for move in moves],
        "runs": {name: _run(batches[name]) for name in RUNS},
    }


def _of(events: Sequence[Event], kind: str, run: str | None = None) -> list[Event]:
    return [event for event in events if event["kind"] == kind and run in (None, event.get("run"))]


def _run(batches: Sequence[Event]) -> dict[str, Any]:
    seconds = [event["seconds"] for event in batches]
    return {
        "boundaries_before": batches[0]["boundaries"],
        "boundaries_after": batches[-1]["boundaries"],
        "batch_before_s": median(seconds[_WARM_UP:FREEZE_AT]),
        "batch_after_s": median(seconds[-_LAST:]),
        "final_loss": float.fromhex(batches[-1]["loss"]),
        "batches_s": seconds,
        "losses": [float.fromhex(event["loss"]) for event in batches],
    }


def text_of(values: dict[str, Any], folder: str) -> str:
    """The outcome for people."""
    static, dynamic = (values["runs"][name] for name in RUNS)
    count = len(static["losses"])
    equal = {True: "equal bits", False: "DIFFER"}
    rows = [
        ["", "stages stay", "stages move"],
        ["boundaries at the start", *(brackets(run["boundaries_before"]) for run in (static, dynamic))],
        ["boundaries at the end", *(brackets(run["boundaries_after"]) for run in (static, dynamic))],
        ["seconds per batch before freezing", *(f"{run['batch_before_s']:.3f}" for run in (static, dynamic))],
        [f"seconds per batch, last {_LAST}", *(f"{run['batch_after_s']:.3f}" for run in (static, dynamic))],
        ["final loss", *(f"{run['final_loss']:.6f}" for run in (static, dynamic))],
        [f"losses of all {count} batches", "", equal[values["losses_equal_bits"]]],
        [f"{values['num_tensors']} weights and optimizer states", "", equal[values["weights_and_state_equal_bits"]]],
    ]
    lines = ["", format_table(rows), ""]
    if not values["moves"]:
        lines += ["No layer moved: no move promised to be worth its cost. Try again on a less busy machine.", ""]
    if values["load"] > values["num_processors"] + _FREE_LOAD:
        lines += [
            f"This machine is busy (load {values['load']:.1f} on {values['num_processors']} processors). "
            "The seconds above say nothing about speed.",
            "",
        ]
    lines += [
        f"written: {folder} (demo.json: every batch; timeline.png: one batch of each run, which stage waits and when)",
        "next, with your own start command: dynpipe try -- COMMAND",
    ]
    return "\n".join(lines)
