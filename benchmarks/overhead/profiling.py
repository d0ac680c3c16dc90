"""What profiling every batch costs: batches with the recorder on against batches with it off, in turns.

python -m benchmarks.overhead.profiling [--batches 100 --hidden 256 --quick]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import Send, now_s, on_ranks
from benchmarks.record import COLOURS, RESULTS, add_force, environment, force, new_figure, save, save_figure, table
from scenarios.compare import silence
from scenarios.report.interval import Estimate, median_of_ratios

NAME = "profiling"
WARM_UP = 4


def build(options: argparse.Namespace) -> Any:
    """A two-stage GPT engine that profiles every batch and never moves."""
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule
    from scenarios.gpt import GPTConfig, gpt_layers, loss_fn

    torch.manual_seed(1)
    model = GPTConfig(depth=options.depth, hidden=options.hidden, seq_len=options.length)
    module = DynamicPipelineModule(
        gpt_layers(model), num_stages=2, loss_fn=loss_fn, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never", "profile_every": 1},
    }
    return deepspeed.initialize(model=module, config=config)[0]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of batches with profiling and without, in turns."""
    with silence():
        engine = build(options)
    tokens = torch.randint(256, (2, options.length + 1))
    batches = iter(lambda: (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    before_s = 0.0
    for number in range(2 * options.batches + WARM_UP):
        # on, off, off, on: a drift of the machine hurts both alike
        engine.profiling = number % 4 in (0, 3)
        if number == WARM_UP:
            before_s = engine.overhead.profiling_s
        start_s = now_s()
        engine.train_batch(batches)
        if number >= WARM_UP:
            seconds[engine.profiling].append(now_s() - start_s)
    return {
        "hidden": options.hidden, "with_s": seconds[True], "without_s": seconds[False],
        "layer_s": statistics.median(layer.seconds for layer in engine.profile.layers[1:-1]),
        "accounted_s": engine.overhead.profiling_s - before_s,
    }


def more(values: dict[str, Any]) -> Estimate:
    """What a batch with profiling takes more than the one beside it without, as a share."""
    return median_of_ratios(values["with_s"], values["without_s"]).change


def report(values: dict[str, Any], folder: Path) -> None:
    """Write the table and the picture."""
    pairs = [100 * (a / b - 1) for a, b in zip(values["with_s"], values["without_s"], strict=True)]
    accounted = values["accounted_s"] / sum(values["with_s"])
    head = (
        "layer, ms", "batch without profiling, ms", "with", "difference, median of pairs (95% interval)",
        "own accounting",
    )
    row = [
        f"{1e3 * values['layer_s']:.1f}", f"{1e3 * statistics.median(values['without_s']):.1f}",
        f"{1e3 * statistics.median(values['with_s']):.1f}", more(values).text("+.1%", ""),
        f"{accounted:.2%}",
    ]
    path = save(folder, NAME, values, table(head, [row]))
    figure = new_figure(5, 3.5)
    axes = figure.subplots()
    axes.boxplot(pairs, orientation="horizontal", widths=0.5, medianprops={"color": COLOURS[2], "linewidth": 2})
    axes.plot(pairs, [1] * len(pairs), "|", color=COLOURS[1], markersize=12)
    axes.axvline(0, color="#555555", linestyle=":")
    axes.set(yticks=[], xlabel="batch with profiling against the next one without (%)", title="Profiling every batch")
    save_figure(figure, path)


def run_rank(send: Send, options: argparse.Namespace) -> None:
    """Measure on this rank."""
    send(measure(options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("depth", 4), ("hidden", 256), ("length", 128), ("batches", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    if options.quick:
        options.batches = 30
    found = environment()
    [values] = on_ranks(2, run_rank, options)
    report({"environment": found} | values, options.out)


if __name__ == "__main__":
    main()
