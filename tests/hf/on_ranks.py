"""What each rank of the multi-process tests does: load its stage, train with and without moves, save."""

from __future__ import annotations

import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.distributed.configs import BF16, BY_HAND, TORCH_ADAMW
from tests.distributed.models import digest
from tests.hf import tiny
from tests.scenarios import exactness

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
        save_to: where the trained model goes.
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


def train_all(
    rank: int, jobs: list[Job], scenario: exactness.Job | None = None, example: tuple[str, ...] = ()
) -> Any:
    """Train each job, and a scenario's, without and with moves; run a script's ``main`` with its arguments."""
    trained = [(train(job, moves=False), train(job, moves=True)) for job in jobs]
    of_scenario = exactness.train_both(rank, scenario) if scenario else None
    if example:
        runpy.run_path(example[0])["main"](*example[1:])
    return trained, of_scenario


def train(job: Job, *, moves: bool) -> Trained:
    """Train one of the runs of a job on this rank."""
    import deepspeed

    from dynpipe_ds import CheckpointError, DynamicPipelineModule
    from dynpipe_ds.hf import PretrainedFolder, causal_lm_loss, save_pretrained, take_expert_load

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
    losses: list[float] = []
    loads: list[dict[int, list[int]]] = []
    for number in range(job.num_batches):
        if moves and number in job.moves:
            engine.repartition(job.moves[number])
        losses.append(float(engine.train_batch(data)))
        routed = {index: take_expert_load(layer) for index, layer in engine.local_layers().items()}
        loads.append({index: load.tolist() for index, load in routed.items() if load is not None})
    found = digest(engine)
    evaluation = tiny.batches(9, padded=job.padded)
    evaluated, logits = engine.eval_batch(evaluation, return_logits=True)
    refused = ""
    if moves and job.save_to is not None:
        save_pretrained(engine, job.save_to, source=job.folder, max_shard_bytes=10_000)
        try:
            save_pretrained(engine, job.save_to)
        except CheckpointError as error:
            refused = str(error)
    if isinstance(logits, tuple):
        logits = logits[0]
    return Trained(
        losses, found, folder.bytes_read, own_bytes, loads, float(evaluated),
        None if logits is None else logits.detach().float(), refused,
    )  # fmt: skip
