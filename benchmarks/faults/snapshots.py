"""What snapshots in a neighbour's memory cost: the same model without them and with them, window by window in turns.

python -m benchmarks.faults.snapshots [--minutes 7 --rounds 24 --window 10 --models 8x256x128 --ranks 2 --quick]

*auto*: the smallest interval that costs less than 3% by the library's own accounting; *every 5*: one every five
batches. Threads of one engine's last copy may still run while the next engine computes, which is little with windows of
many batches. CPU time is that of all ranks, threads included: on a busy machine it alone says something.
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
from benchmarks.record import RESULTS, add_force, environment, force, save, table
from scenarios.compare import silence
from scenarios.report.interval import Estimate, median_of_ratios

NAME = "snapshots"
GOAL = 0.03
WITHOUT = "none"
SURVIVE: dict[str, dict[str, Any]] = {
    WITHOUT: {}, "auto": {"enabled": True}, "every 5": {"enabled": True, "snapshot_every": 5},
}
_LEAST_ROUNDS = 6
"""Each kind of engine is then once in each place of a round."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {}, "bf16, ZeRO-1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
}


def build(kind: str, model: str, optimizer: str) -> Any:
    """A GPT on as many stages as there are ranks; all start from the same weights."""
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule
    from scenarios.gpt import GPTConfig, gpt_layers, loss_fn

    depth, hidden, length = (int(number) for number in model.split("x"))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True, **OPTIMIZERS[optimizer],
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never", "survive": SURVIVE[kind]},
    }
    torch.manual_seed(1)
    layers = gpt_layers(GPTConfig(depth=depth, hidden=hidden, seq_len=length))
    with silence():
        module = DynamicPipelineModule(
            layers, num_stages=dist.get_world_size(), loss_fn=loss_fn, partition_method="uniform"
        )
        engine: Any = deepspeed.initialize(model=module, config=config)[0]
    engine.profiling = False
    return engine


def is_over(until_s: float) -> bool:
    """Whether the first rank finds that the time is over; the same on every rank."""
    over = torch.tensor(now_s() > until_s)
    dist.broadcast(over, src=0)
    return bool(over)


def measure(model: str, optimizer: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and CPU seconds of every engine's windows, its own accounting, and whether all have the same losses."""
    length = int(model.split("x")[2])
    engines = {kind: build(kind, model, optimizer) for kind in SURVIVE}
    tokens = torch.randint(256, (2, length + 1), generator=torch.Generator().manual_seed(2))
    batches = iter(lambda: (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None)
    wall_s: dict[str, list[float]] = {kind: [] for kind in engines}
    cpu_s: dict[str, list[float]] = {kind: [] for kind in engines}
    losses: dict[str, list[float]] = {kind: [] for kind in engines}
    before_s = dict.fromkeys(engines, 0.0)
    kinds = list(engines)
    until_s = now_s() + 60 * options.minutes / len(OPTIMIZERS) / len(options.models)
    for number in range(1 + options.rounds):  # the first window warms up
        if number > _LEAST_ROUNDS and is_over(until_s):
            break
        shift = number // 2 % len(kinds)
        order = kinds[shift:] + kinds[:shift]
        for kind in order if number % 2 == 0 else reversed(order):
            start_s, start_cpu_s = now_s(), time.process_time()
            losses[kind] += [float(engines[kind].train_batch(batches)) for _ in range(options.window)]
            used_s = torch.tensor(time.process_time() - start_cpu_s, dtype=torch.float64)
            took_s = now_s() - start_s
            dist.all_reduce(used_s)
            if number == 0:
                before_s[kind] = engines[kind].overhead.snapshots_s
            else:
                wall_s[kind].append(took_s)
                cpu_s[kind].append(float(used_s))
    spent = torch.tensor([engines[k].overhead.snapshots_s - before_s[k] for k in kinds], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return {
        "model": model, "optimizer": optimizer, "wall_s": wall_s, "cpu_s": cpu_s, "window": options.window,
        "spent_s": dict(zip(kinds, spent.tolist(), strict=True)),
        "same_losses": all(losses[kind] == losses[WITHOUT] for kind in kinds),
    }


def more(row: dict[str, Any], kind: str, seconds: str) -> Estimate:
    """What windows with snapshots take more than those without, median with its interval."""
    return median_of_ratios(row[seconds][kind], row[seconds][WITHOUT]).change


def report(values: dict[str, Any], folder: Path) -> None:
    """Write the table."""
    head = (
        "model", "optimizer", "snapshots", "batch, ms", "wall time (95% interval)", "CPU time of all ranks",
        f"own accounting (goal {GOAL:.0%})", "own accounting, ms a batch", "same losses",
    )
    rows = []
    for row in values["rows"]:
        for kind in SURVIVE:
            total_s, count = sum(row["wall_s"][kind]), len(row["wall_s"][kind]) * row["window"]
            batch = f"{1e3 * statistics.median(row['wall_s'][kind]) / row['window']:.1f}"
            compared = ("", "") if kind == WITHOUT else (
                more(row, kind, "wall_s").text("+.1%", ""), more(row, kind, "cpu_s").text("+.1%", "")
            )
            spent_s = row["spent_s"][kind]
            rows.append([
                row["model"], row["optimizer"], kind, batch, *compared, f"{spent_s / total_s:.2%}",
                f"{1e3 * spent_s / count:.2f}", "yes" if row["same_losses"] else "NO",
            ])
    save(folder, NAME, values, table(head, rows))


def run_rank(send: Send, options: argparse.Namespace) -> None:
    """Measure on this rank."""
    send({"rows": [measure(model, name, options) for model in options.models for name in OPTIMIZERS]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no round is begun, of all together")
    parser.add_argument("--rounds", type=int, default=24, help="at most")
    parser.add_argument("--window", type=int, default=10, help="batches")
    parser.add_argument("--models", nargs="+", default=["8x256x128"], help="blocks x hidden x length")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a smaller model")
    parser.add_argument("--out", type=Path, default=RESULTS / "faults")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    if options.quick:
        options.rounds, options.models = _LEAST_ROUNDS, ["8x128x64"]
    found = environment()
    [values] = on_ranks(options.ranks, run_rank, options)
    report({"environment": found} | values, options.out)


if __name__ == "__main__":
    main()
