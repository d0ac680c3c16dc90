"""Bytes that a move sends over all ranks, next to the least possible, by optimizer, replicas and stages.

python -m benchmarks.overhead.sent [--hidden 256 --quick]

Counted at the border to torch.distributed, whoever calls it: every message, what describes the layers included, and
every collective as the back-ends' rings send it. The numbers are the same on any machine; processor times are not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.overhead.migration import OPTIMIZERS
from benchmarks.ranks import Send, on_ranks
from benchmarks.record import RESULTS, installed, save, table
from dynpipe_ds.migration import FlatLayout, least_bytes
from scenarios.compare import silence

NAME = "sent"
GOAL = 1.05
DEPTH = 6
WORLDS = ((2, 2), (2, 3), (3, 2), (2, 4), (2, 1))
"""Stages and replicas."""
MODES = ("AdamW", "ZeRO-1", "bf16", "bf16 + ZeRO-1")
MOMENTS = 2  # AdamW's


@dataclass
class Sent:
    """What one rank has sent.

    Attributes:
        num_bytes: of messages, and this rank's part of collectives.
        collectives: calls that all ranks, or all replicas, wait for.
    """

    num_bytes: float = 0.0
    collectives: int = 0


@contextmanager
def counted() -> Iterator[Sent]:
    """Count what is given to torch.distributed."""
    sent, post, reduce, gather = Sent(), dist.batch_isend_irecv, dist.all_reduce, dist.all_gather_object

    def messages(operations: list[Any]) -> Any:
        sent.num_bytes += sum(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
        return post(operations)

    def all_reduce(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        num_ranks = dist.get_world_size(group)
        sent.num_bytes += 2 * (num_ranks - 1) / num_ranks * tensor.nbytes
        sent.collectives += num_ranks > 1
        return reduce(tensor, *args, group=group, **kwargs)

    def all_gather_object(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a move that succeeds gathers no objects")

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "batch_isend_irecv", messages))
        stack.enter_context(patch.object(dist, "all_reduce", all_reduce))
        stack.enter_context(patch.object(dist, "all_gather_object", all_gather_object))
        yield sent
    assert dist.all_gather_object is gather


def build(optimizer: str, hidden: int, num_stages: int) -> Any:
    """A GPT of six blocks on few tokens: only its weights are large."""
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule
    from scenarios.gpt import GPTConfig, gpt_layers, loss_fn

    torch.manual_seed(1)
    model = GPTConfig(depth=DEPTH, hidden=hidden, seq_len=8)
    layers = gpt_layers(model)
    module = DynamicPipelineModule(layers, num_stages=num_stages, loss_fn=loss_fn, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": num_stages, "steps_per_print": 10**9,
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never", "cross_memory": False},  # all in messages
        **OPTIMIZERS[optimizer],
    }
    return deepspeed.initialize(model=module, config=config)[0]


def held(engine: Any) -> tuple[tuple[int, ...], dict[Any, int], dict[int, int]]:
    """Replicas of this rank's stage; elements of its parameters, in the order of the buffer; bytes of its layers."""
    layers = engine.local_layers()
    names = {p: (layer, name) for layer, module in layers.items() for name, p in module.named_parameters()}
    replicas = tuple(dist.get_process_group_ranks(engine.grid.get_data_parallel_group()))
    layer_bytes = {layer: sum(p.nbytes for p in module.parameters()) for layer, module in layers.items()}
    return replicas, {names[p]: p.numel() for p in engine.module.parameters()}, layer_bytes


def everywhere(value: Any) -> list[Any]:
    """What every rank has, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def least(before: list[Any], after: list[Any], optimizer: str) -> int:
    """What ranks need after a move and lack before it, once each."""
    weights = sum(
        num_bytes for old, new in zip(before, after, strict=True) for i, num_bytes in new[2].items() if i not in old[2]
    )
    if optimizer == "AdamW":  # every replica has all of it: as weights
        return weights * (1 + MOMENTS)
    layouts = [
        [FlatLayout(sizes, replicas) for replicas, sizes in {rank[0]: rank[1] for rank in of}.items()]
        for of in (before, after)
    ]
    return weights + least_bytes(*layouts, {str(kind): 4 for kind in range(1 + MOMENTS)})


def measure(optimizer: str, hidden: int, num_stages: int, num_rounds: int) -> list[dict[str, Any]]:
    """Bytes and processor seconds of moves of one block, over all ranks."""
    with silence():
        engine = build(optimizer, hidden, num_stages)
    tokens = torch.randint(256, (1, 9))
    batches = iter(lambda: (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None)
    start = engine.partition
    shorter = (start[0], start[1] - 1, *start[2:])
    engine.train_batch(batches)
    for target in (shorter, start):  # before the first move of a world, ranks find out whose memory they can read
        engine.repartition(target)
    rows: dict[str, dict[str, Any]] = {}
    for number in range(num_rounds):
        for what, target in (("first stage gives one", shorter), ("and gets it back", start)):
            before = everywhere(held(engine))
            with counted() as sent:
                cpu_s = time.process_time()
                engine.repartition(target)
                cpu_s = time.process_time() - cpu_s
            sums = everywhere((sent.num_bytes, sent.collectives, cpu_s))
            row = rows.setdefault(what, {
                "optimizer": optimizer, "hidden": hidden, "stages": num_stages,
                "replicas": dist.get_world_size() // num_stages, "move": what, "cpu_s": [],
                "sent_bytes": round(sum(s[0] for s in sums)), "collectives": max(s[1] for s in sums),
                "least_bytes": least(before, everywhere(held(engine)), optimizer),
            })
            assert row["sent_bytes"] == round(sum(s[0] for s in sums)), "the same every time"
            if number:  # the first one warms up
                row["cpu_s"].append(sum(s[2] for s in sums))
            engine.train_batch(batches)
    return list(rows.values())


def run_rank(send: Send, optimizers: list[str], hidden: int, num_stages: int, num_rounds: int) -> None:
    """Measure on this rank, one engine after the other."""
    for optimizer in optimizers:
        send(measure(optimizer, hidden, num_stages, num_rounds))


def ratio(row: dict[str, Any]) -> float:
    """Bytes sent over the least possible."""
    return float(row["sent_bytes"] / row["least_bytes"])


def report(values: dict[str, Any], folder: Path) -> None:
    """Write the table."""
    head = (
        "optimizer", "stages × replicas", "move", "sent by all, MB", "least possible, MB", "sent / least (goal 1.05)",
        "collectives", "CPU of all ranks, median ms",
    )
    rows = [
        [
            row["optimizer"], f"{row['stages']} × {row['replicas']}", row["move"], f"{row['sent_bytes'] / 1e6:.2f}",
            f"{row['least_bytes'] / 1e6:.2f}", f"{ratio(row):.3f}", str(row["collectives"]),
            f"{1e3 * median(row['cpu_s']):.1f}",
        ]
        for row in values["rows"]
    ]
    save(folder, NAME, values, table(head, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--optimizers", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--quick", action="store_true", help="two stages of two replicas, ZeRO-1")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead")
    options = parser.parse_args()
    worlds = [(2, 2)] if options.quick else WORLDS
    optimizers = ["ZeRO-1"] if options.quick else options.optimizers
    rows: list[dict[str, Any]] = []
    for stages, replicas in worlds:
        for found in on_ranks(stages * replicas, run_rank, optimizers, options.hidden, stages, options.rounds):
            rows = sorted([*rows, *found], key=lambda row: MODES.index(row["optimizer"]))
            report({"environment": installed(), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
