"""What one re-partition costs: its rate next to plain messages of the same bytes, by optimizer and by layer size.

python -m benchmarks.overhead.migration [--hidden 256 512 1024 --moves 9 --quick]

Rank 0 gives a block to rank 1 and gets it back, again and again, with a batch in between. In turns with it, as many
bytes travel by one send and one recv between buffers that exist already. And they travel in as many tensors as the
block's weights and their state are, into new memory: the least that messages can take where no memory is kept for
layers that may come. Layers are read from the other rank's memory, as by default, and then, by another engine, sent.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import Send, now_s, on_ranks
from benchmarks.record import COLOURS, RESULTS, add_force, environment, force, new_figure, save, save_figure, table
from scenarios.compare import silence
from scenarios.report.interval import Estimate, median_of_ratios

NAME = "migration"
LEAST_BYTES = 10 * 10**6  # of parameters; the goal is for layers as large as this
GOAL = 0.8
TENSORS = 3 * 12  # a block's parameters, each with two moments
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD with momentum": {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}},
    "AdamW": {"optimizer": ADAMW},
    "DeepSpeedCPUAdam": {},
    "ZeRO-1": {"optimizer": ADAMW, "zero_optimization": {"stage": 1}},
    "bf16": {"optimizer": ADAMW, "bf16": {"enabled": True}},
    "bf16 + ZeRO-1": {
        "optimizer": ADAMW, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}
QUICK = ("AdamW", "ZeRO-1", "bf16")


def build(optimizer: str, hidden: int, *, cross_memory: bool) -> Any:
    """A two-stage GPT of four blocks, with one micro-batch of few tokens: only its weights are large."""
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule
    from scenarios.gpt import GPTConfig, gpt_layers, loss_fn

    torch.manual_seed(1)
    model = GPTConfig(depth=4, hidden=hidden, seq_len=8)
    module = DynamicPipelineModule(gpt_layers(model), num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "steps_per_print": 10**9,
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never", "cross_memory": cross_memory},
        **OPTIMIZERS[optimizer],
    }
    client = {}
    if optimizer == "DeepSpeedCPUAdam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        client = {"optimizer": DeepSpeedCPUAdam(module.parameters(), lr=1e-3)}
    return deepspeed.initialize(model=module, config=config, **client)[0]


def measure(optimizer: str, hidden: int, num_moves: int, *, cross_memory: bool) -> dict[str, Any]:
    """Seconds of moves of one block and of plain messages of as many bytes, in turns."""
    with silence():
        engine = build(optimizer, hidden, cross_memory=cross_memory)
    tokens = torch.randint(256, (1, 9))
    batches = iter(lambda: (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None)
    start = engine.partition
    without = (start[0], start[1] - 1, start[2])
    engine.train_batch(batches)
    engine.train_batch(batches)
    block = engine.profile.layers[start[1] - 1]
    move_s: list[float] = []
    plain_s: list[float] = []
    new_s: list[float] = []
    message = torch.zeros(1, dtype=torch.uint8)
    for number in range(-2, num_moves):  # the first two warm up, one in each direction
        source = number % 2
        event: list[Any] = []
        seconds = timed(lambda e=event, to=start if source else without: e.append(engine.repartition(to)))
        num_bytes = event[0].bytes_moved
        if message.numel() != num_bytes:
            message = torch.zeros(num_bytes, dtype=torch.uint8, device=engine.device)
        plain = timed(lambda m=message, s=source: dist.send(m, 1 - s) if dist.get_rank() == s else dist.recv(m, s))
        parts = message.tensor_split(TENSORS)
        new = timed(lambda p=parts, s=source: in_parts(p, s))
        if number >= 0:
            move_s.append(seconds)
            plain_s.append(plain)
            new_s.append(new)
        engine.train_batch(batches)
    return {
        "optimizer": optimizer, "cross_memory": cross_memory, "hidden": hidden,
        "layer_bytes": block.parameter_bytes, "bytes_moved": num_bytes,
        "move_s": move_s, "plain_s": plain_s, "new_s": new_s,
    }


def in_parts(parts: Sequence[torch.Tensor], source: int) -> None:
    """Send tensors from where they are into new memory."""
    if dist.get_rank() == source:
        operations = [dist.P2POp(dist.isend, part, 1 - source) for part in parts]
    else:
        operations = [dist.P2POp(dist.irecv, torch.empty_like(part), source) for part in parts]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def timed(action: Callable[[], Any]) -> float:
    """Seconds of an action on all ranks, until the last one is done."""
    start_s = now_s()
    action()
    return now_s() - start_s


def rate(row: dict[str, Any], of: str = "plain_s") -> Estimate:
    """Share of the plain messages' rate that moves reach: median of the pairs."""
    return median_of_ratios(row[of], row["move_s"])


def report(values: dict[str, Any], folder: Path) -> None:
    """Write the table and the picture."""
    head = (
        "optimizer", "layers are", "layer, MB", "moved, MB", "move, median ms (worst)", "send and recv, median ms",
        "into new memory, median ms", "of the plain rate (95% interval; goal 80%)", "of the rate into new memory",
    )
    rows = [
        [
            row["optimizer"], "read" if row["cross_memory"] else "sent",
            f"{row['layer_bytes'] / 1e6:.1f}", f"{row['bytes_moved'] / 1e6:.1f}",
            f"{1e3 * statistics.median(row['move_s']):.1f} ({1e3 * max(row['move_s']):.1f})",
            f"{1e3 * statistics.median(row['plain_s']):.1f}", f"{1e3 * statistics.median(row['new_s']):.1f}",
            rate(row).text(".0%", ""), rate(row, "new_s").text(".0%", ""),
        ]
        for row in values["rows"]
    ]
    draw(values, save(folder, NAME, values, table(head, rows)))


def draw(values: dict[str, Any], path: Path) -> None:
    """The share of the plain rate over the bytes moved, a line an optimizer."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for number, name in enumerate(dict.fromkeys(row["optimizer"] for row in values["rows"])):
        for cross_memory, line in ((True, "-"), (False, ":")):
            rows = [r for r in values["rows"] if r["optimizer"] == name and r["cross_memory"] is cross_memory]
            axes.plot(
                [row["bytes_moved"] / 1e6 for row in rows], [100 * rate(row).value for row in rows],
                "osD^vP"[number % 6] + line, color=COLOURS[number % len(COLOURS)], label=name if cross_memory else None,
            )
    axes.axhline(100 * GOAL, color="#555555", linestyle="--", label="goal, for layers of 10 MB or more")
    axes.set(xscale="log", ylim=(0, None), xlabel="bytes moved (MB)", ylabel="share of the rate of send and recv (%)")
    ticks = sorted({round(row["bytes_moved"] / 1e6) for row in values["rows"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
    axes.minorticks_off()
    axes.set_title("Moving one layer with its optimizer state (dotted: in messages)")
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def run_rank(send: Send, options: argparse.Namespace) -> None:
    """Measure on this rank."""
    rows = [
        measure(name, hidden, options.moves, cross_memory=cross_memory)
        for name in options.optimizers for cross_memory in (True, False) for hidden in options.hidden
    ]
    send({"rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--moves", type=int, default=9)
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--quick", action="store_true", help="two sizes, three optimizers")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    if options.quick:
        options.hidden, options.optimizers, options.moves = [512, 1024], list(QUICK), 7
    found = environment()
    [values] = on_ranks(2, run_rank, options)
    report({"environment": found} | values, options.out)


if __name__ == "__main__":
    main()
