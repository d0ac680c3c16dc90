"""What each rank of the multi-process tests does: train in place and with moves, save; what then holds."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.distributed.configs import BF16, BY_HAND, TORCH_ADAMW
from tests.distributed.models import digest
from tests.hf import tiny
from tests.scenarios import exactness

GOES_ON_AT = 3  # the batch that a run from a checkpoint begins with
BF16_ZERO1 = {**TORCH_ADAMW, **BF16, "zero_optimization": {"stage": 1}}


@dataclass(frozen=True)
class Job:
    """What is trained twice.

    Attributes:
        folder: the model.
        stages: pipeline stages.
        moves: boundaries before a batch.
        settings: DeepSpeed's.
        padded: whether masks and positions come with the ids.
        checkpoint_interval: layers between two activation checkpoints.
        save_to: where the run with moves writes its model.
        num_batches: batches of each run.
        split_blocks: whether blocks are cut into halves.
        adapter: what ``peft.LoraConfig`` is given, if adapters are trained.
        further: folder of the adapters that are trained in place of new ones.
    """

    folder: Path
    stages: int
    moves: dict[int, tuple[int, ...]]
    settings: dict[str, Any] = field(default_factory=lambda: TORCH_ADAMW)
    padded: bool = False
    checkpoint_interval: int = 0
    save_to: Path | None = None
    num_batches: int = 5
    split_blocks: bool = False
    adapter: dict[str, Any] | None = None
    further: Path | None = None

    def layers(self, model: Any = None) -> list[Any]:
        """Its layers.

        Args:
            model: the opened folder; by default opened anew.
        """
        from dynpipe_ds.hf import causal_lm_layers

        return causal_lm_layers(
            self.folder if model is None else model, attention_mask=self.padded, position_ids=self.padded,
            split_blocks=self.split_blocks, adapter=self._adapter(),
        )  # fmt: skip

    def _adapter(self) -> Any:
        if self.adapter is None:
            return self.further
        import peft

        return peft.LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **self.adapter})


@dataclass
class Trained:
    """What one rank knows of a run."""

    losses: list[float]
    layers: dict[str, str]
    bytes_read: int
    own_bytes: int
    loads: list[dict[int, list[int]]]  # by batch
    evaluated: float
    logits: torch.Tensor | None
    refused: str
    gradients: list[tuple[int, int, int]]  # by layer: trained elements; elements, gradient bytes of the profile


Runs = list[dict[str, Trained]]
"""What every rank knows of each run."""


def train_all(
    rank: int, jobs: list[Job], scenario: exactness.Job | None = None, example: tuple[str, ...] = ()
) -> Any:
    """Train each job, and a scenario's, without and with moves; run a script's ``main`` with its arguments."""
    trained = [train_ways(job) for job in jobs]
    of_scenario = exactness.train_both(rank, scenario) if scenario else None
    if example:
        runpy.run_path(example[0])["main"](*example[1:])
    return trained, of_scenario


def train_ways(job: Job) -> dict[str, Trained]:
    """Train a job in place and with moves; adapters also from the checkpoint of the first run in another partition, and
    (no batch) from the adapters that the second one saved."""
    if job.adapter is None:
        return {"static": train(job, {}), "moved": train(job, job.moves, export=True)}
    assert job.save_to is not None
    checkpoint = job.save_to.with_name(f"{job.save_to.name}_checkpoint")
    further = dataclasses.replace(job, adapter=None, further=job.save_to, num_batches=0)
    return {
        "static": train(job, {}, save=checkpoint),
        "moved": train(job, job.moves, export=True),
        "resumed": train(job, {GOES_ON_AT: job.moves[GOES_ON_AT]}, load=checkpoint),
        "further": train(further, {}),
    }


def train(
    job: Job, moves: Mapping[int, tuple[int, ...]], *, save: Path | None = None, load: Path | None = None,
    export: bool = False,
) -> Trained:
    """Train one of the runs of a job on this rank.

    Args:
        job: the job.
        moves: boundaries before a batch.
        save: folder for a checkpoint before batch ``GOES_ON_AT``.
        load: folder of the checkpoint that the run begins with.
        export: whether it writes its model where the job says, if it does.
    """
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule
    from dynpipe_ds.hf import PretrainedFolder, causal_lm_loss, take_expert_load

    torch.manual_seed(11 if load is None else 12)  # what is loaded does not follow from the seed
    folder = PretrainedFolder(job.folder)
    module = DynamicPipelineModule(
        job.layers(folder), num_stages=job.stages,
        loss_fn=causal_lm_loss, partition_method="parameters", seed_layers=True,
        activation_checkpoint_interval=job.checkpoint_interval,
    )  # fmt: skip
    own_bytes = sum(p.nbytes for p in module.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "steps_per_print": 10**9,
        "dynamic_pipeline": BY_HAND, **job.settings,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=module, config=config)
    data = tiny.batches(engine.grid.get_data_parallel_id(), padded=job.padded)
    first = 0 if load is None else GOES_ON_AT
    for _ in range(3 * first):
        next(data)
    if load is not None:
        engine.repartition(job.moves[1])
        engine.load_checkpoint(str(load))
    losses: list[float] = []
    loads: list[dict[int, list[int]]] = []
    for number in range(first, job.num_batches):
        if save is not None and number == GOES_ON_AT:
            engine.save_checkpoint(str(save))
        if number in moves:
            engine.repartition(moves[number])
        losses.append(float(engine.train_batch(data)))
        routed = {index: take_expert_load(layer) for index, layer in engine.local_layers().items()}
        loads.append({index: load.tolist() for index, load in routed.items() if load is not None})
    found, gradients = digest(engine), _gradients(engine)
    evaluated, logits = engine.eval_batch(tiny.batches(9, padded=job.padded), return_logits=True)
    if isinstance(logits, tuple):
        logits = logits[0]
    return Trained(
        losses, found, folder.bytes_read, own_bytes, loads, float(evaluated),
        None if logits is None else logits.detach().float(), _write(engine, job) if export else "", gradients,
    )  # fmt: skip


def _gradients(engine: Any) -> list[tuple[int, int, int]]:
    parameters = [p for layer in engine.local_layers().values() for p in layer.parameters()]
    assert all(p.grad is None for p in parameters if not p.requires_grad)
    profile = engine.last_batch_profile
    return [] if profile is None else [
        (sum(p.numel() for p in layer.parameters() if p.requires_grad), profile.layers[index].num_parameters,
         profile.layers[index].gradient_bytes)
        for index, layer in engine.local_layers().items()
    ]  # fmt: skip


def _write(engine: Any, job: Job) -> str:
    """Write the model where the job says; returns how a second time is refused."""
    from dynpipe_ds import CheckpointError
    from dynpipe_ds.hf import save_pretrained

    if job.save_to is None:
        return ""
    save_pretrained(engine, job.save_to, source=job.folder, max_shard_bytes=10_000)
    try:
        save_pretrained(engine, job.save_to)
    except CheckpointError as error:
        return str(error)
    return "nothing"


# -- what holds of the runs --------------------------------------------------------------------


def check_same_bits(job: Job, runs: Runs) -> None:
    """No bit differs between the runs, nor between replicas; layers have moved."""
    static = runs[0]["static"]
    assert len(set(static.losses)) == job.num_batches
    layers: dict[str, set[tuple[str, str]]] = {}
    for way in (way for way in runs[0] if way != "further"):  # the first is static
        first = GOES_ON_AT if way == "resumed" else 0
        for rank in runs:
            assert rank[way].losses == static.losses[first:] and rank[way].evaluated == static.evaluated, way
        layers[way] = {item for rank in runs for item in rank[way].layers.items()}
        assert layers[way] == layers["static"], way
    assert len(layers["static"]) == len(job.layers()), "replicas have different weights"
    held = [[rank[way].layers.keys() for rank in runs] for way in ("static", "moved")]
    assert held[0] != held[1], "nothing has moved"


def check_written(job: Job, runs: Runs) -> None:
    """The folder is complete, and was not written twice."""
    assert job.save_to is not None
    messages = {rank["moved"].refused for rank in runs}
    assert len(messages) == 1 and "exists and is not an empty folder: give another name" in messages.pop()
    assert (job.save_to / "tokenizer_config.json").is_file() == (job.folder / "tokenizer_config.json").is_file()
    assert not list(job.save_to.parent.glob(".*.partial"))


def logits_by(model: Any, job: Job) -> torch.Tensor:
    """What transformers computes where an engine hands back logits: of the last of three micro-batches."""
    inputs, _ = [pair for _, pair in zip(range(3), tiny.batches(9, padded=job.padded), strict=False)][-1]
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**tiny.named(inputs)).logits.float()
    return logits
