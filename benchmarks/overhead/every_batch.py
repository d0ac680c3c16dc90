"""Rebalancing after every batch of models that change in every batch: what profiling, planning and moving cost.

python -m benchmarks.overhead.every_batch [--batches 20 --quick]

*Decides*: ``rebalance_every: 1`` and no least gain, so that the smallest gain moves layers. *Moves*: the worst case, a
layer goes to the other stage or back after every batch.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import Send, on_ranks
from benchmarks.record import (
    COLOURS,
    HATCHES,
    RESULTS,
    add_force,
    environment,
    force,
    new_figure,
    save,
    save_figure,
    table,
)
from benchmarks.scenarios.contenders import read_settings

NAME = "every_batch"
GOAL, GOAL_LAYER_S = 0.02, 0.020
WARM_UP = 3
PARTS = ("profiling", "planning", "migrating")
SCENARIOS = {
    "moe": [],
    "mod": ["scenario.batches=[0]"],
    "sparse_attention": [
        "scenario.batches=[0]", "scenario.buckets=[16]", "scenario.blocks=[0.5]", "scenario.redraw_every=1",
    ],
}
EVERY_BATCH = ("ds.dynamic_pipeline.rebalance_every=1", "ds.dynamic_pipeline.min_gain=0.0")


def measure(scenario: str, options: argparse.Namespace, *, always: bool) -> dict[str, Any]:
    """Seconds of batches and what of them was overhead; with ``always`` a layer moves after every batch."""
    from scenarios.compare import build_contender
    from scenarios.data import load_tokens

    overrides = [f"scenario={scenario}", *SCENARIOS[scenario], *([] if always else EVERY_BATCH), *options.set]
    settings = read_settings(overrides)
    run = build_contender(settings, load_tokens(vocab_size=settings.model.vocab_size), dynamic=not always)
    engine, seconds, at_start_s = run.engine, [], [0.0] * len(PARTS)
    start = engine.partition
    other = (start[0], start[1] + 1, *start[2:])
    moves: list[Any] = []
    engine.on_rebalance(moves.append)
    for batch in range(WARM_UP + options.batches):
        if batch == WARM_UP:
            at_start_s = [getattr(engine.overhead, f"{part}_s") for part in PARTS]
            moves.clear()
        before_s = run.measured.timed_s
        for _ in run.train_window(range(batch, batch + 1), timed=True):
            if always:
                engine.repartition(start if batch % 2 else other)
        seconds.append(run.measured.timed_s - before_s)
    now = [getattr(engine.overhead, f"{part}_s") for part in PARTS]
    own_s = [b - a for a, b in zip(at_start_s, now, strict=True)]
    overhead_s = torch.tensor(own_s, dtype=torch.float64, device=engine.device)
    dist.all_reduce(overhead_s, op=dist.ReduceOp.MAX)
    layer_s = statistics.median(layer.seconds for layer in engine.profile.layers[1:-1])
    return {
        "scenario": scenario, "always": always, "batches_s": seconds[WARM_UP:], "layer_s": layer_s,
        "overhead_s": dict(zip(PARTS, overhead_s.tolist(), strict=True)), "moves": len(moves),
        "moved_bytes": [event.bytes_moved for event in moves],
    }


def share(row: dict[str, Any]) -> float:
    """Share of the time that is overhead."""
    return float(sum(row["overhead_s"].values()) / sum(row["batches_s"]))


def share_at_goal(row: dict[str, Any]) -> float:
    """The same had a layer taken 20 ms: overheads as measured, the rest of the batch longer or shorter."""
    overhead_s, total_s = sum(row["overhead_s"].values()), sum(row["batches_s"])
    return float(overhead_s / (overhead_s + (total_s - overhead_s) * GOAL_LAYER_S / row["layer_s"]))


def report(values: dict[str, Any], folder: Path) -> None:
    """Write the table and the picture."""
    head = (
        "scenario", "after every batch", "moves (MB each)", "layer, ms", "batch, ms", *(f"{p}, ms" for p in PARTS),
        "overhead", "at 20 ms a layer (goal 2%)",
    )
    rows = []
    for row in values["rows"]:
        count = len(row["batches_s"])
        mb = statistics.mean(row["moved_bytes"]) / 1e6 if row["moved_bytes"] else 0.0
        rows.append([
            row["scenario"], "moves a layer" if row["always"] else "decides",
            f"{row['moves']} of {count} ({mb:.1f})", f"{1e3 * row['layer_s']:.1f}",
            f"{1e3 * statistics.median(row['batches_s']):.0f}",
            *(f"{1e3 * row['overhead_s'][part] / count:.1f}" for part in PARTS),
            f"{share(row):.2%}", f"{share_at_goal(row):.2%}",
        ])
    draw(values, save(folder, NAME, values, table(head, rows)))


def draw(values: dict[str, Any], path: Path) -> None:
    """Stacked bars of what the overhead is made of."""
    figure = new_figure(8, 4)
    axes = figure.subplots()
    rows, base = values["rows"], [0.0] * len(values["rows"])
    labels = [f"{r['scenario']}\n{'moves' if r['always'] else 'decides'}".replace("_", "\n") for r in rows]
    for number, part in enumerate(PARTS, start=1):
        heights = [100 * row["overhead_s"][part] / sum(row["batches_s"]) for row in rows]
        axes.bar(
            labels, heights, 0.6, bottom=base, color=COLOURS[number], hatch=HATCHES[number], edgecolor="white",
            label=part,
        )
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.axhline(100 * GOAL, color="black", linestyle=":", label="goal")
    axes.set(ylabel="share of the training time (%)", title="Rebalancing after every batch", ylim=(0, None))
    axes.legend(frameon=False)
    save_figure(figure, path)


def run_rank(send: Send, options: argparse.Namespace) -> None:
    """Measure on this rank."""
    rows = [measure(name, options, always=always) for name in SCENARIOS for always in (False, True)]
    send({"rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides as for make run")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    if options.quick:
        options.batches = 4
    found = environment()
    [values] = on_ranks(2, run_rank, options)
    report({"environment": found} | values, options.out)


if __name__ == "__main__":
    main()
