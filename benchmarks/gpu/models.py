"""The GPT that is trained here, and engines for it."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import staged
from benchmarks.gpu.job import Job

ADAMW = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1, "torch_adam": True}}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


class Size(NamedTuple):
    """A GPT and its batch.

    Attributes:
        depth: blocks.
        hidden: width.
        heads: of attention.
        seq_len: tokens of a sample.
        micro_batch: samples.
        num_micro_batches: of a batch.
        dropout: probability.
    """

    depth: int
    hidden: int
    heads: int
    seq_len: int
    micro_batch: int
    num_micro_batches: int
    dropout: float = 0.0

    def __str__(self) -> str:
        dropout = f", dropout {self.dropout}" if self.dropout else ""
        return (
            f"{self.depth} blocks of hidden {self.hidden}, {self.heads} heads{dropout}; {self.num_micro_batches} "
            f"micro-batches of {self.micro_batch} x {self.seq_len} tokens"
        )


SMALL = Size(depth=3, hidden=32, heads=2, seq_len=16, micro_batch=2, num_micro_batches=2)


def join(job: Job) -> None:
    """Join the process group, unless that is done: by NCCL for one process, else by what was found to work."""
    import deepspeed  # noqa: F401 - before the group: it looks for its accelerator

    from dynpipe_ds import init_distributed

    if dist.is_initialized():
        return
    backend = job.options.get("backend", staged.NAME) if job.size > 1 or job.device == "cpu" else "nccl"
    staged.start(backend, job.rank, job.size, job.port)
    with silence():
        init_distributed(backend)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what DeepSpeed prints while an engine is made."""
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def engine(
    size: Size, *, num_stages: int, precision: str, section: dict[str, Any] | None, is_dynamic: bool = True,
    boundaries: list[int] | None = None, seed_layers: bool = False,
) -> Any:
    """An engine for the GPT; all start from the same weights.

    Args:
        size: of the model.
        num_stages: S.
        precision: a key of ``PRECISIONS``.
        section: ``dynamic_pipeline``; ``None`` leaves it out.
        is_dynamic: our module, or DeepSpeed's.
        boundaries: where stages begin; by default as many layers each.
        seed_layers: whether every layer seeds its own dropout.
    """
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from dynpipe_ds import DynamicPipelineModule
    from scenarios.gpt import GPTConfig, gpt_layers, loss_fn

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size.micro_batch, "gradient_accumulation_steps": size.num_micro_batches,
        "steps_per_print": 10**9, "optimizer": ADAMW, **PRECISIONS[precision],
    }
    if section is not None:
        config["dynamic_pipeline"] = {"enabled": True, **section}
    model = GPTConfig(
        depth=size.depth, hidden=size.hidden, heads=size.heads, seq_len=size.seq_len, dropout=size.dropout
    )
    torch.manual_seed(1)
    with silence():
        module_class = DynamicPipelineModule if is_dynamic else PipelineModule
        module = module_class(
            gpt_layers(model), num_stages=num_stages, loss_fn=loss_fn, seed_layers=seed_layers, base_seed=1,
            partition_method=boundaries or "uniform",
        )
        return deepspeed.initialize(model=module, config=config)[0]


def batches(size: Size, num_different: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of random bytes, the same in every process; without end."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(256, (num_different, size.micro_batch, size.seq_len + 1), generator=generator)
    while True:
        for part in tokens:
            yield part[:, :-1].contiguous(), part[:, 1:].contiguous()
