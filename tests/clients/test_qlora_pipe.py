"""The shape of qlora-pipe: its own engine class, constructed directly, whose forward pass gives several losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.runtime.utils import partition_balanced, set_random_seed
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineEngine, DynamicPipelineModule
from tests.clients.life import SAVED_AFTER, Client, compare, weights_of
from tests.clients.parts import HIDDEN, VOCABULARY, Block, Lora, causal_mask, tokens
from tests.distributed.ranks import run_ranks

State = tuple[Tensor, Tensor, Tensor]  # hidden, mask, labels


class Embedding(nn.Embedding):
    def forward(self, inputs: State) -> State:  # type: ignore[override]
        ids, mask, labels = inputs
        return super().forward(ids).requires_grad_(True), mask, labels


class DecoderLayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.attention.qkv = Lora(self.attention.qkv)

    def forward(self, state: State) -> State:
        hidden, mask, labels = state
        return self.run(hidden, mask), mask, labels


class ComputeMetrics(nn.Linear):
    """The losses come out of the last layer; only the first is trained on."""

    def forward(self, state: State) -> tuple[Tensor, ...]:  # type: ignore[override]
        hidden, _, labels = state
        logits = super().forward(hidden).view(-1, VOCABULARY)
        loss = nn.functional.cross_entropy(logits, labels.view(-1))
        return loss, (logits.argmax(-1) == labels.view(-1)).float().mean(), logits.detach().std()


class OnceSpec(LayerSpec):  # type: ignore[misc]
    """Building reads and quantizes weights from a file; the second time there is nothing left to read."""

    def __init__(self, typename: type, *args: Any, estimated_size: int = 1, **kwargs: Any) -> None:
        super().__init__(typename, *args, **kwargs)
        self.estimated_size, self.built = estimated_size, False

    def build(self) -> nn.Module:
        assert not self.built, "its weights were given away"
        self.built = True
        module: nn.Module = super().build()
        return module.requires_grad_(False) if self.typename is not DecoderLayer else module


class ColumnMajor(ProcessTopology):  # type: ignore[misc]
    """Replicas far apart, stages side by side."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["data", "pipe"], dims=[num_dp, num_pp])


def forward_pass(self: Any, buffer_id: int) -> None:
    inputs = tuple(t.clone() for t in self.pipe_buffers["inputs"][buffer_id])
    outputs = super(PipelineEngine, self).forward(inputs)
    self.pipe_buffers["outputs"][buffer_id] = outputs
    if self.is_last_stage():
        self.loss = outputs[0]
        self.fwd_outputs.append([t.detach() for t in outputs])


def engine_class(base: type) -> type:
    class CustomPipelineEngine(base):  # type: ignore[misc,valid-type]
        def train_batch(self) -> list[Tensor]:
            self.reset_activation_shape()
            self.module.train()
            self._compute_loss = True
            self._exec_schedule(schedule.TrainSchedule(self.micro_batches, self.num_stages, self.stage_id))
            return self._aggregate_total_losses()

        def eval_batch(self, data_iter: Any) -> list[Tensor]:
            self.reset_activation_shape()
            self.module.eval()
            self._compute_loss = True
            train_iterator = self.data_iterator
            self.set_dataiterator(data_iter)
            dist.barrier()
            with torch.no_grad():
                self._exec_schedule(schedule.InferenceSchedule(self.micro_batches, self.num_stages, self.stage_id))
            self.set_dataiterator(train_iterator)
            return self._aggregate_total_losses()

        def _aggregate_total_losses(self) -> list[Tensor]:
            """Means over micro-batches and replicas, on every stage."""
            losses = torch.zeros(3)
            if self.is_last_stage():
                losses = torch.tensor(self.fwd_outputs).mean(dim=0)
                dist.all_reduce(losses, group=self.grid.get_data_parallel_group())
            dist.broadcast(losses, self.grid.stage_to_global(self.num_stages - 1), self.grid.get_pipe_parallel_group())
            return list(losses)

    PipelineEngine._INSTRUCTION_MAP[schedule.ForwardPass] = forward_pass
    return CustomPipelineEngine


def module_class(base: type) -> type:
    class CustomPipelineModule(base):  # type: ignore[misc,valid-type]
        def _partition_layers(self, method: str = "estimated_size") -> None:
            assert method == "estimated_size"
            self.parts = partition_balanced([s.estimated_size for s in self._layer_specs], self.num_stages)
            self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    return CustomPipelineModule


def get_optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.01)


NEVER = {"rebalance_every": "never"}


def engine(base: type, engine_base: type = PipelineEngine, section: dict[str, Any] = NEVER) -> Any:
    set_random_seed(11)
    layers = [
        OnceSpec(Embedding, VOCABULARY, HIDDEN, estimated_size=2),
        *(OnceSpec(DecoderLayer, estimated_size=3) for _ in range(5)),
        OnceSpec(ComputeMetrics, HIDDEN, VOCABULARY, estimated_size=2),
    ]
    model = module_class(base)(
        layers, topology=ColumnMajor(num_pp=2, num_dp=dist.get_world_size() // 2), activation_checkpoint_interval=1,
        checkpointable_layers=["DecoderLayer"], partition_method="estimated_size",
    )
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "dynamic_pipeline": {"enabled": True, **section},
    }
    mpu = model.mpu()
    built = engine_class(engine_base)(
        args=None, model=model, optimizer=get_optimizer, mpu=mpu, config=config,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config_class=DeepSpeedConfig(config, mpu),
    )
    built.lr_scheduler = torch.optim.lr_scheduler.LinearLR(built.optimizer, start_factor=0.25, total_iters=4)
    return built


def batches(replica: int) -> Iterator[Any]:
    for ids in tokens(replica):
        labels = ids[:, 1:].contiguous()
        yield (ids[:, :-1].contiguous(), causal_mask(len(ids)), labels), torch.zeros(1)


def train(engine: Any, batches: Iterator[Any]) -> Any:
    engine.set_dataiterator(batches)
    cut = getattr(engine, "partition", None)
    losses = engine.train_batch()
    if isinstance(engine, DynamicPipelineEngine):
        profile = engine.last_batch_profile
        assert profile.batch == engine.global_steps - 1 and profile.boundaries == cut
        assert all(layer.forward_s > 0 for layer in profile.layers)
    return losses


def save(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder, client_state={"step": 3}, save_latest=True, exclude_frozen_parameters=True)


def load(engine: Any, folder: str) -> None:
    path, state = engine.load_checkpoint(folder, load_module_strict=False)
    assert path is not None and state["step"] == 3


MOVES = {1: (0, 1, 7), 2: (0, 6, 7), 4: (0, 2, 7), 5: (0, 5, 7)}
CLIENT = Client(engine, batches, 2, MOVES, train=train, save=save, load=load)


def test_qlora_pipe(tmp_path: Any) -> None:
    compare([CLIENT], tmp_path)


@pytest.mark.exhaustive
def test_qlora_pipe_with_replicas_far_apart(tmp_path: Any) -> None:
    compare([CLIENT], tmp_path, replicas=2)


def derived_from_ours(_rank: int) -> tuple[list[float], list[float]]:
    found = []
    for base in (PipelineEngine, DynamicPipelineEngine):
        built = engine(DynamicPipelineModule, engine_base=base)
        assert isinstance(built, base) and isinstance(built, DynamicPipelineEngine)
        data = batches(0)
        losses = [float(train(built, data)[0]) for _ in range(2)]
        built.repartition(MOVES[1])
        found.append([*losses, float(train(built, data)[0])])
    return found[0], found[1]


def test_it_does_not_matter_what_the_engine_class_derives_from() -> None:
    for theirs, ours in run_ranks(derived_from_ours, 2):
        assert theirs == ours


# -- by itself --------------------------------------------------------------------------------

# Balanced by what every run has alike: the best cut is at 4, on any machine.
BY_ITSELF = {
    "rebalance_every": 2, "profile_batches": 2, "partitioner": "optimal", "cost": "parameters", "hold_batches": 1,
}
BEST, LONG = (0, 4, 7), 8
PUSHED_AWAY = {1: (0, 1, 7), 5: (0, 6, 7)}


def one_batch(engine: Any, batch: int, data: Iterator[Any]) -> Tensor:
    if batch in PUSHED_AWAY and engine.dynamic_config.rebalance_every != "never":
        engine.repartition(PUSHED_AWAY[batch])
    return torch.stack(train(engine, data))


def by_itself(_rank: int, folder: str) -> tuple[Any, ...]:
    """Static and on its own, side by side; saved on the way, and gone on from there in a fresh engine."""
    static, moving = engine(DynamicPipelineModule), engine(DynamicPipelineModule, section=BY_ITSELF)
    cuts: list[tuple[int, ...]] = []
    moving.on_rebalance(lambda event: cuts.append(event.after))
    data, losses = (batches(0), batches(0)), list[Tensor]()
    for batch in range(LONG):
        if batch == SAVED_AFTER:
            save(moving, folder)
        losses.append(one_batch(static, batch, data[0]))
        assert torch.equal(one_batch(moving, batch, data[1]), losses[-1])
    assert torch.equal(*(torch.stack(each.eval_batch(batches(9))) for each in (static, moving)))
    assert len({loss[0].item() for loss in losses}) == LONG
    resumed, rest = engine(DynamicPipelineModule, section=BY_ITSELF), batches(0)
    load(resumed, folder)
    for _ in range(SAVED_AFTER * resumed.micro_batches):
        next(rest)
    for batch in range(SAVED_AFTER, LONG):
        assert torch.equal(one_batch(resumed, batch, rest), losses[batch])
    return cuts, resumed.partition, [weights_of(each) for each in (static, moving, resumed)]


def test_layers_move_by_themselves(tmp_path: Any) -> None:
    """The controller sees the own engine's batches: pushed to a bad cut, it comes back to the best one."""
    first, second = run_ranks(by_itself, 2, str(tmp_path / "checkpoint"))
    assert first[:2] == second[:2] == ([PUSHED_AWAY[1], BEST, PUSHED_AWAY[5], BEST], BEST)
    static, moving, resumed = ({**a, **b} for a, b in zip(first[2], second[2], strict=True))
    assert static == moving == resumed and len(static) == 7
