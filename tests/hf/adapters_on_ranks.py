"""What each rank of the tests of adapters does: train with and without moves, from a checkpoint, from a folder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.distributed.configs import BY_HAND
from tests.distributed.models import digest
from tests.hf import tiny
from tests.hf.on_ranks import Job


@dataclass
class Adapted:
    """What one rank knows of a run."""

    losses: list[float]
    layers: dict[str, str]
    kept_bytes: list[tuple[int, int, int]]  # by layer: trained elements; elements, gradient bytes of the profile
    logits: torch.Tensor | None


def train_adapters(rank: int, jobs: list[Job]) -> list[dict[str, Adapted]]:
    """Train each job in four ways: in place, with moves, from the checkpoint of the first run in another partition
    (the last two batches), and from the adapters that the second one saved."""
    return [
        {
            "static": _train(job, {}, save=_checkpoint(job)),
            "moved": _train(job, job.moves, export=True),
            "resumed": _train(job, {3: job.moves[3]}, load=_checkpoint(job)),
            "further": _train(dataclasses.replace(job, adapter=None, further=job.save_to, num_batches=0), {}),
        }
        for job in jobs
    ]


def _checkpoint(job: Job) -> Path:
    assert job.save_to is not None
    return job.save_to.with_name(f"{job.save_to.name}_checkpoint")


def _train(
    job: Job, moves: dict[int, tuple[int, ...]], *, save: Path | None = None, load: Path | None = None,
    export: bool = False,
) -> Adapted:
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule
    from dynpipe_ds.hf import causal_lm_loss, save_pretrained

    torch.manual_seed(11 if load is None else 12)  # what is loaded does not follow from the seed
    module = DynamicPipelineModule(
        job.layers(), num_stages=job.stages, loss_fn=causal_lm_loss, partition_method="uniform", seed_layers=True,
        activation_checkpoint_interval=job.checkpoint_interval,
    )
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "steps_per_print": 10**9,
        "dynamic_pipeline": BY_HAND, **job.settings,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=module, config=config)
    data = tiny.batches(engine.grid.get_data_parallel_id(), padded=job.padded)
    losses: list[float] = []
    first = 0 if load is None else 3
    for _ in range(3 * first):
        next(data)
    if load is not None:
        engine.repartition(job.moves[1])
        engine.load_checkpoint(str(load))
    for number in range(first, job.num_batches):
        if number in moves:
            engine.repartition(moves[number])
        losses.append(float(engine.train_batch(data)))
        if save is not None and number == 2:
            engine.save_checkpoint(str(save))
    found = digest(engine)
    parameters = [p for layer in engine.local_layers().values() for p in layer.parameters()]
    assert all(p.grad is None for p in parameters if not p.requires_grad)
    _, logits = engine.eval_batch(tiny.batches(9, padded=job.padded), return_logits=True)
    if isinstance(logits, tuple):
        logits = logits[0]
    if export:
        assert job.save_to is not None
        save_pretrained(engine, job.save_to, source=job.folder)
    profile = engine.last_batch_profile
    kept = [] if profile is None else [
        (sum(p.numel() for p in layer.parameters() if p.requires_grad), profile.layers[index].num_parameters,
         profile.layers[index].gradient_bytes)
        for index, layer in engine.local_layers().items()
    ]  # fmt: skip
    return Adapted(losses, found, kept, None if logits is None else logits.detach().float())
