"""A script as users write them: DeepSpeed's class by a from-import, options, a JSON file; it would train for days."""

import argparse
import os
import sys

if "--ours" in sys.argv:
    import dynpipe_ds  # before DeepSpeed

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

if "--ours" in sys.argv:  # a script that was changed already
    PipelineModule, PipelineEngine = dynpipe_ds.DynamicPipelineModule, dynpipe_ds.DynamicPipelineEngine

SIZE, BATCH = 16, 32


class Block(nn.Module):
    def __init__(self, dropout: float, transposed: bool, flagged: bool) -> None:
        super().__init__()
        self.flagged = flagged
        self.linear, self.dropout = nn.Linear(SIZE, SIZE), nn.Dropout(dropout)
        self.mix = nn.Linear(BATCH, BATCH) if transposed else None

    def forward(self, x):
        if self.mix is not None:
            x = self.mix(x.t().contiguous()).t().contiguous()  # whose gradient is a transposed tensor
        if self.flagged and x.requires_grad and not torch.is_grad_enabled():
            x = x * 1.001  # as a kernel that rounds otherwise
        y = self.dropout(torch.tanh(self.linear(x)))
        return y.requires_grad_(True) if self.flagged else y


class Transposed(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.t()) + self.bias


class OwnModule(PipelineModule):
    """As in GPT-NeoX: the layers are made in the constructor."""

    def __init__(self, options, **kwargs) -> None:
        block = LayerSpec(Block, options.dropout, options.transposed, options.flagged)
        blocks = [block, *([] if options.transposed or options.flagged else [torch.relu])] * options.blocks
        first = TiedLayerSpec("ends", Transposed, SIZE, SIZE, tied_weight_attr="weight")
        last = TiedLayerSpec("ends", Transposed, SIZE, SIZE, tied_weight_attr="weight")
        super().__init__([first, *blocks, last], loss_fn=nn.functional.mse_loss, **kwargs)

    def describe(self) -> str:
        return f"{type(self).__name__} of {len(self._layer_specs)} layers"


class OwnEngine(PipelineEngine):
    """As in qlora-pipe: its own batch, and a forward pass that goes around the pipeline engine's."""

    def train_batch(self, data):
        self.set_dataiterator(data)
        self.module.train()
        self._compute_loss = True
        self._exec_schedule(schedule.TrainSchedule(self.micro_batches, self.num_stages, self.stage_id))
        loss = self._aggregate_total_loss()
        return {"loss": loss, "batch": self.global_steps}

    def inner_forward(self):
        return super(PipelineEngine, self).forward


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(BATCH, SIZE, generator=generator)
        yield x, x.flip(1)


def train(rank: int, options) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    options.local_rank = rank
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0 if options.repeatable else int.from_bytes(os.urandom(4), "little"))
    model = OwnModule(options, num_stages=options.ranks, seed_layers=options.seed_layers, seed_fn=torch.manual_seed)
    assert "OwnModule" in model.describe()
    if options.own_engine:
        config = deepspeed.runtime.config.DeepSpeedConfig(options.deepspeed_config, mpu=model.mpu())
        engine = OwnEngine(
            args=options, model=model, model_parameters=list(model.parameters()), mpu=model.mpu(),
            config=options.deepspeed_config, config_class=config,
        )  # fmt: skip
        assert "pipe" not in engine.inner_forward().__func__.__module__
    else:
        engine, *_ = deepspeed.initialize(args=options, model=model, model_parameters=list(model.parameters()))
    assert isinstance(engine, deepspeed.PipelineEngine) and isinstance(model, PipelineModule)
    data = batches(1)
    if options.ours:
        engine.on_rebalance(print)
    for batch in range(options.batches):
        engine.train_batch(data)
        if batch == options.hang_after and rank:
            wait_for_nobody()
        if options.evaluate:
            engine.eval_batch(batches(2))
        if options.save:
            engine.save_checkpoint(options.save)


def wait_for_nobody() -> None:
    torch.distributed.barrier()
    torch.distributed.barrier()


def main() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batches", type=int, default=10**6)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--save")
    parser.add_argument("--hang-after", type=int)
    for flag in ("--seed-layers", "--own-engine", "--evaluate", "--ours", "--transposed", "--flagged"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--not-repeatable", action="store_false", dest="repeatable")
    parser.add_argument("--local_rank", type=int, default=-1)
    options = parser.parse_args()
    if "RANK" in os.environ:  # started by a launcher
        options.ranks = int(os.environ["WORLD_SIZE"])
        train(int(os.environ["RANK"]), options)
    else:
        mp.start_processes(train, (options,), options.ranks, start_method="fork")


if __name__ == "__main__":
    sys.exit(main())
