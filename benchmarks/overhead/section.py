"""What the section costs a model that does not change: DeepSpeed's own class beside ours, batch by batch in turns.

python -m benchmarks.overhead.section [--rounds 150 --models 12x64x32 8x256x128 --quick]

*auto*: the section as shipped. *every batch*: with ``profile_every: 1``. *no profiles*: with ``engine.profiling`` off,
so what is left are our instructions, the norm, and the question whether anything was frozen.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import Send, now_s, on_ranks
from benchmarks.record import COLOURS, RESULTS, add_force, environment, force, new_figure, save, save_figure, table
from scenarios.compare import silence
from scenarios.report.interval import Estimate, median_of_ratios

NAME = "section"
WARM_UP = 24  # times are steady after 8 profiles, and a first move may come before
GOAL = 0.005
PLAIN = "DeepSpeed's class"
SECTIONS: dict[str, dict[str, Any]] = {"auto": {}, "every batch": {"profile_every": 1}, "no profiles": {}}


def build(name: str, depth: int, hidden: int, length: int) -> Any:
    """A two-stage GPT of so many blocks; all start from the same weights."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from dynpipe_ds import DynamicPipelineModule
    from scenarios.gpt import GPTConfig, gpt_layers, loss_fn

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if name in SECTIONS:
        config["dynamic_pipeline"] = {"enabled": True, **SECTIONS[name]}
    torch.manual_seed(1)
    layers = gpt_layers(GPTConfig(depth=depth, hidden=hidden, seq_len=length))
    module_class = DynamicPipelineModule if name in SECTIONS else PipelineModule
    with silence():
        module = module_class(layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform")
        engine: Any = deepspeed.initialize(model=module, config=config)[0]
    if name in SECTIONS:
        engine.profiling = name != "no profiles"
    return engine


def measure(model: str, rounds: int) -> dict[str, Any]:
    """Seconds and CPU seconds of every engine's batches, and its own accounting."""
    depth, hidden, length = (int(number) for number in model.split("x"))
    engines = {name: build(name, depth, hidden, length) for name in (PLAIN, *SECTIONS)}
    tokens = torch.randint(256, (2, length + 1))
    batches = iter(lambda: (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None)
    wall_s: dict[str, list[float]] = {name: [] for name in engines}
    cpu_s: dict[str, list[float]] = {name: [] for name in engines}
    before_s: dict[str, list[float]] = {}
    num_profiles = dict.fromkeys(SECTIONS, 0)
    names = list(engines)
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            before_s = {name: _overhead_s(engines[name]) for name in SECTIONS}
        shift = number // 2 % len(names)
        order = names[shift:] + names[:shift]
        for name in order if number % 2 == 0 else reversed(order):
            engine = engines[name]
            known = engine.last_batch_profile if name in SECTIONS else None
            start_s, start_cpu_s = now_s(), time.process_time()
            engine.train_batch(batches)
            used_s = torch.tensor(time.process_time() - start_cpu_s, dtype=torch.float64)
            took_s = now_s() - start_s
            dist.all_reduce(used_s)
            if number >= WARM_UP:
                wall_s[name].append(took_s)
                cpu_s[name].append(float(used_s))
                if name in SECTIONS:
                    num_profiles[name] += engine.last_batch_profile is not known
    return {
        "model": model, "wall_s": wall_s, "cpu_s": cpu_s, "num_profiles": num_profiles,
        "spent_s": {
            name: [after - before for before, after in zip(before_s[name], _overhead_s(engines[name]), strict=True)]
            for name in SECTIONS
        },
        "partitions": {name: list(engines[name].partition) for name in SECTIONS},
    }


def _overhead_s(engine: Any) -> list[float]:
    return [engine.overhead.profiling_s, engine.overhead.planning_s]


def ratios(row: dict[str, Any], name: str, kind: str) -> list[float]:
    """What one kind of seconds is more than that of DeepSpeed's class, round by round."""
    return [ours / plain - 1 for ours, plain in zip(row[kind][name], row[kind][PLAIN], strict=True)]


def more(row: dict[str, Any], name: str, kind: str) -> Estimate:
    """The median of :func:`ratios`, with its interval."""
    return median_of_ratios(row[kind][name], row[kind][PLAIN]).change


def report(values: dict[str, Any], folder: Path) -> None:
    """Write the table and the picture."""
    head = (
        "model", "profiled", "DeepSpeed's batch, ms", "ours, ms", "difference, median of rounds (95% interval)",
        "CPU time of both ranks", "batches profiled", f"own accounting: profiling (goal {GOAL:.1%}), deciding",
    )
    rows = []
    for row in values["rows"]:
        for name in SECTIONS:
            profiling_s, planning_s = row["spent_s"][name]
            total_s, count = sum(row["wall_s"][name]), len(row["wall_s"][name])
            rows.append([
                row["model"], name, f"{1e3 * statistics.median(row['wall_s'][PLAIN]):.1f}",
                f"{1e3 * statistics.median(row['wall_s'][name]):.1f}", more(row, name, "wall_s").text("+.1%", ""),
                more(row, name, "cpu_s").text("+.1%", ""), f"{row['num_profiles'][name]} of {count}",
                f"{profiling_s / total_s:.2%}, {planning_s / total_s:.2%}",
            ])
    path = save(folder, NAME, values, table(head, rows))
    figure = new_figure(7, 3.5)
    axes = figure.subplots()
    boxes = {f"{row['model']}\n{name}": ratios(row, name, "cpu_s") for row in values["rows"] for name in SECTIONS}
    axes.boxplot(
        [[100 * ratio for ratio in found] for found in boxes.values()], showfliers=False,
        medianprops={"color": COLOURS[2], "linewidth": 2},
    )
    axes.set_xticks(range(1, len(boxes) + 1), list(boxes), fontsize=7)
    axes.axhline(0, color="#555555", linestyle=":")
    axes.set(ylabel="CPU time beside DeepSpeed's class (%)", title="A model that does not change")
    save_figure(figure, path)


def run_rank(send: Send, options: argparse.Namespace) -> None:
    """Measure on this rank."""
    send({"rows": [measure(model, options.rounds) for model in options.models]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--models", nargs="+", default=["12x64x32", "8x256x128"], help="blocks x hidden x length")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller models")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    if options.quick:
        options.rounds, options.models = 24, ["12x64x32", "8x128x64"]
    found = environment()
    [values] = on_ranks(2, run_rank, options)
    report({"environment": found} | values, options.out)


if __name__ == "__main__":
    main()
