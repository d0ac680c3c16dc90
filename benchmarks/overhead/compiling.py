"""What ``torch.compile`` takes where a layer arrives that its new stage has not compiled yet, in processor seconds.

python -m benchmarks.overhead.compiling [--backends eager aot_eager inductor --hidden 256]

Two stages hold a GPT with two blocks, compiled by ``engine.compile()``: the first stage the embedding and both blocks,
the second one the head alone. One block arrives there, and then the other. Processor seconds of that process and of
those that it starts (a C++ compiler), in the batch after the move, less those of a batch in which nothing is compiled:
they hardly depend on how busy the machine is. Caches of torch are empty at first. Inductor keeps what it made on disk,
where the second stage finds what the first one compiled; stages on two machines have a cache each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from benchmarks.ranks import Send, on_ranks
from benchmarks.record import tell
from dynpipe_ds import DynamicPipelineModule
from scenarios.gpt import GPTConfig, gpt_layers, loss_fn

SAMPLES, MICRO_BATCHES, STEADY = 4, 2, 3
HEAD = [
    "| backend | caches | first block that arrives, s | another of the same class and shape, s | a batch, s |",
    "|---|---|---|---|---|",
]


def processor_s() -> float:
    """Processor seconds of this process, and of processes of its that have ended."""
    return sum(os.times()[:4])


def batches(model: GPTConfig) -> Iterator[Any]:
    draw = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(model.vocab_size, (SAMPLES, model.seq_len + 1), generator=draw)
        yield tokens[:, :-1], tokens[:, 1:]


def build(model: GPTConfig, backend: str) -> Any:
    module = DynamicPipelineModule(
        gpt_layers(model), num_stages=2, loss_fn=loss_fn, seed_layers=True, partition_method=[0, 3, 4]
    )
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "steps_per_print": 10**9,
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"},
    }  # fmt: skip
    engine = deepspeed.initialize(model=module, config=config)[0]
    engine.compile(backend=backend, compile_kwargs={"dynamic": False})
    return engine


def run_rank(send: Send, options: argparse.Namespace, backend: str, caches: str, shared: bool) -> None:
    """Measure on the second rank; the first tells."""
    folder = caches if shared else f"{caches}/{dist.get_rank()}"
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    model = GPTConfig(depth=2, hidden=options.hidden)
    engine, data = build(model, backend), batches(model)

    def batch() -> float:
        before_s = processor_s()
        engine.train_batch(data)
        return processor_s() - before_s

    found = []
    for boundaries in ((0, 3, 4), (0, 2, 4), (0, 1, 4)):
        if boundaries != engine.partition:
            engine.repartition(boundaries)
        first_s = batch()
        steady_s = statistics.median(batch() for _ in range(STEADY))
        found += [first_s - steady_s, steady_s]
    told = torch.tensor(found)
    dist.broadcast(told, 1)
    _, _, block_s, _, again_s, steady_s = told.tolist()
    where = "none" if backend != "inductor" else "shared" if shared else "of each stage"
    send(f"| `{backend}` | {where} | {block_s:.2f} | {again_s:.2f} | {steady_s:.2f} |")


def measured(options: argparse.Namespace) -> Iterator[str]:
    for backend in options.backends:
        for shared in (False, True) if backend == "inductor" else (True,):
            with tempfile.TemporaryDirectory() as caches:
                yield from on_ranks(2, run_rank, options, backend, caches, shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--backends", nargs="+", default=["eager", "aot_eager", "inductor"])
    parser.add_argument("--hidden", type=int, default=256, help="width of the blocks")
    tell(HEAD, measured(parser.parse_args()))


if __name__ == "__main__":
    main()
