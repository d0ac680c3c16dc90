"""What belongs to layers, engine and process is in a checkpoint too, and what a caller leaves out is left out."""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds import CheckpointError, ParameterReplacement, keep_in_checkpoints
from tests.distributed import models
from tests.distributed.clients import compile_first
from tests.distributed.configs import ADAMW, BF16, BF16_FP32_SUMS, CLIP, FP16, WARMUP, ZERO
from tests.distributed.models import HIDDEN, Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint_faults import same_text
from tests.matrix import mostly

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "zero1": {**ADAMW, **ZERO},
    "bf16_zero1": {**ADAMW, **BF16_FP32_SUMS},
}


class Sparse(nn.Module):
    """Keeps some elements of its weight, in one dimension, and takes the shapes of what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN * HIDDEN) * 0.1)
        self.register_buffer("kept", torch.arange(HIDDEN * HIDDEN))
        self.rounds = 0

    def forward(self, x: Tensor) -> Tensor:
        dense = torch.zeros(HIDDEN * HIDDEN, dtype=x.dtype).index_put((self.kept,), self.weight)
        return x + x @ dense.view(HIDDEN, HIDDEN)

    def get_extra_state(self) -> dict[str, int]:
        return {"rounds": self.rounds}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.rounds = state["rounds"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        stored = state_dict[f"{prefix}weight"]
        if stored.shape != self.weight.shape:
            self.weight = nn.Parameter(torch.empty_like(stored, dtype=self.weight.dtype))
            self.kept = torch.empty_like(state_dict[f"{prefix}kept"])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def prune(engine: Any) -> None:
    replacements = []
    for layer in engine.local_layers().values():
        if isinstance(layer, Sparse):
            large = layer.weight.detach().abs().float().argsort(descending=True, stable=True)
            keep = large[: layer.weight.numel() * 3 // 4].sort().values
            layer.kept, layer.rounds = layer.kept[keep], layer.rounds + 1
            new = nn.Parameter(layer.weight.detach()[keep].clone())
            replacements.append(ParameterReplacement(layer, "weight", new, lambda t, keep=keep: t[keep]))
    engine.replace_parameters(replacements)


def freeze_first(engine: Any) -> None:
    for i, layer in engine.local_layers().items():
        if i == 1:
            layer.requires_grad_(False)
            layer.frozen_since = {"batch": 2, "why": ("test", None)}
            keep_in_checkpoints(layer, "frozen_since")


def sparse_engine(run: Run) -> Any:
    original = models.layers_of

    def layers_of(run: Run) -> list[Any]:
        layers = original(run)
        return [*layers[:2], LayerSpec(Sparse), *layers[2:5], LayerSpec(Sparse), *layers[5:]]

    models.layers_of = layers_of
    try:
        return make_engine(run)
    finally:
        models.layers_of = original


def sparse_run(stages: int, config: dict[str, Any]) -> Run:
    first = {2: (0, 4, 10), 3: (0, 2, 5, 10), 4: (0, 2, 5, 8, 10)}[stages]
    return Run(stages, first=first, dropout=0.1, config={**config, **CLIP, **WARMUP})


def train(engine: Any, run: Run, first: int, last: int) -> list[float]:
    batches = islice(data(0, run.micro_batches), first * run.micro_batches, None)
    return [float(engine.train_batch(batches)) for _ in range(first, last)]


def describe(engine: Any) -> dict[int, Any]:
    return {
        i: (
            [p.requires_grad for p in layer.parameters()], [tuple(p.shape) for p in layer.parameters()],
            getattr(layer, "rounds", None), getattr(layer, "frozen_since", None),
        )
        for i, layer in engine.local_layers().items()
    }


def save_pruned(rank: int, folder: str) -> list[Any]:
    results = []
    for name, config in OPTIMIZERS.items():
        run = sparse_run(3, config)
        engine = sparse_engine(run)
        train(engine, run, 0, 2)
        prune(engine)
        freeze_first(engine)
        train(engine, run, 2, 3)
        prune(engine)
        engine.save_checkpoint(f"{folder}/{name}")
        state = digest(engine), describe(engine)
        engine.repartition((0, 5, 8, 10))  # the losses are the same for a cut that has no frozen stage
        results.append((train(engine, run, 3, 6), *state))
    return results


def load_pruned(rank: int, folder: str, stages: int) -> list[Any]:
    results = []
    for name, config in OPTIMIZERS.items():
        run = sparse_run(stages, config)
        engine = sparse_engine(run)
        if name == "zero1":  # in the middle of something else
            train(engine, run, 0, 1)
            prune(engine)
            for layer in engine.local_layers().values():
                layer.frozen_since = "never to be seen again"
                keep_in_checkpoints(layer, "frozen_since")
        engine.load_checkpoint(f"{folder}/{name}")
        state = digest(engine), describe(engine)
        results.append((train(engine, run, 3, 6), *state))
    return results


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str]:
    folder = str(tmp_path_factory.mktemp("pruned"))
    return run_ranks(save_pruned, 3, folder), folder


@pytest.mark.parametrize("stages", mostly([2, 3, 4], [3]))
def test_pruned_and_frozen_layers(pruned: Any, stages: int) -> None:
    reference, folder = pruned
    results = run_ranks(load_pruned, stages, folder, stages)
    for i, name in enumerate(OPTIMIZERS):
        for what in (1, 2):
            merged = [{k: v for rank in run for k, v in rank[i][what].items()} for run in (results, reference)]
            assert merged[0] == merged[1], name
        assert results[0][i][0] == reference[0][i][0], name


def replicas_keep_their_own(rank: int, folder: str) -> None:
    run = Run(1, config=ADAMW)
    engine = make_engine(run)
    train(engine, run, 0, 1)
    layer = engine.local_layers()[1]
    layer.seen = {"by rank": torch.tensor([rank])}
    keep_in_checkpoints(layer, "seen")
    engine.save_checkpoint(folder)
    other = make_engine(run)
    other.load_checkpoint(folder)
    found = other.local_layers()[1].seen["by rank"]
    assert found.tolist() == [rank]
    assert found.untyped_storage().filename is None, "still in the file"


def test_replicas_keep_their_own_attributes(tmp_path: Any) -> None:
    run_ranks(replicas_keep_their_own, 2, str(tmp_path))


# -- the engine's and the process's own state -------------------------------------------------

DYNAMIC = {"dynamic_pipeline": {"enabled": True, "rebalance_every": "auto", "profile_batches": 2}}


def draw() -> tuple[Any, ...]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def engine_state(rank: int, folder: str) -> None:
    run = Run(2, config={**ADAMW, **DYNAMIC})
    engine = make_engine(run)
    train(engine, run, 0, 4)
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank + 50)
    draw()
    engine.save_checkpoint(folder, client_state={"data": {"epoch": 2, "order": torch.arange(3)}})
    expected = draw()
    other = make_engine(run)
    _, client = other.load_checkpoint(folder)
    assert draw() == expected
    assert client["data"]["epoch"] == 2 and client["data"]["order"].tolist() == [0, 1, 2]
    assert other.profile == engine.profile and other.last_batch_profile == engine.last_batch_profile
    assert other.dynamic.balancer.state_dict() == engine.dynamic.balancer.state_dict()
    assert other.overhead == engine.overhead and other.micro_steps == engine.micro_steps
    assert other.module.micro_offset == engine.module.micro_offset
    assert other.global_samples == engine.global_samples
    train(other, run, 4, 6)


def load_profile_on_four(rank: int, folder: str) -> None:
    """The stored profile chooses the partition for another number of stages."""
    run = Run(4, config={**ADAMW, **DYNAMIC}, first=(0, 1, 2, 3, 8))
    engine = make_engine(run)
    engine.load_checkpoint(folder)
    assert engine.partition != (0, 1, 2, 3, 8)
    assert engine.profile is None and len(engine.dynamic.balancer.state_dict()["profiles"]) == 4
    train(engine, run, 4, 7)


def test_engine_state_is_restored(tmp_path: Any) -> None:
    run_ranks(engine_state, 2, str(tmp_path))
    run_ranks(load_profile_on_four, 4, str(tmp_path))


def options(rank: int, folder: str) -> None:
    run = Run(2, first=(0, 4, 8), config={**ADAMW, **ZERO, **WARMUP})
    engine = make_engine(run)
    train(engine, run, 0, 3)
    engine.save_checkpoint(folder, tag=7)
    weights = {i: layer.state_dict() for i, layer in engine.local_layers().items()}

    def loaded(**kwargs: Any) -> Any:
        other = make_engine(run)
        path, _ = other.load_checkpoint(folder, **kwargs)
        assert f"{folder}/7/mp_rank_" in path
        for i, layer in other.local_layers().items():
            for key, value in layer.state_dict().items():
                assert torch.equal(value, weights[i][key])
        for parameter in other.module.parameters():  # what the next step starts from
            master = other.stage_optimizer.export([parameter])[0]["master"]
            assert torch.equal(master.view(-1), parameter.detach().view(-1))
        return other

    module_only = loaded(load_module_only=True)
    assert module_only.global_steps == 0 and module_only.get_lr() != engine.get_lr()
    assert not any(module_only.stage_optimizer.groups.optimizer.state.values())
    no_optimizer = loaded(load_optimizer_states=False)
    assert no_optimizer.global_steps == 3
    assert not any(no_optimizer.stage_optimizer.groups.optimizer.state.values())
    no_schedule = loaded(load_lr_scheduler_states=False)
    assert no_schedule.lr_scheduler.last_batch_iteration != engine.lr_scheduler.last_batch_iteration
    train(no_schedule, run, 3, 4)
    for layer in engine.local_layers().values():
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("up" not in name)
    engine.save_checkpoint(folder, tag="lean", exclude_frozen_parameters=True, save_latest=False)
    with pytest.raises(CheckpointError, match=r"it lacks \['up.bias', 'up.weight'\]"):
        engine.load_checkpoint(folder, tag="lean")
    lean = make_engine(run)
    lean.load_checkpoint(folder, tag="lean", load_module_strict=False)
    assert all(p.requires_grad == ("up" not in name) for name, p in lean.module.named_parameters())
    with pytest.raises(ValueError, match="custom_load_fn is not supported"):
        engine.load_checkpoint(folder, custom_load_fn=print)
    with pytest.raises(CheckpointError, match="the ranks name different checkpoints"):
        engine.save_checkpoint(folder, tag=f"of rank {rank}")
    with pytest.raises(ValueError, match="save_dir = '': must name a folder"):
        engine.save_checkpoint("")


def test_options(tmp_path: Any) -> None:
    run_ranks(options, 2, str(tmp_path))


class Rogue:
    """Something that pickle can carry and that must not be run by reading a checkpoint."""


def unsafe_client_state(rank: int, folder: str) -> None:
    run = Run(2, config=ADAMW)
    engine = make_engine(run)
    with pytest.raises(CheckpointError, match=r"client_state\['rogue'\] is of class .*Rogue .*add_safe_globals"):
        engine.save_checkpoint(folder, client_state={"rogue": Rogue()})
    with torch.serialization.safe_globals([Rogue]):
        engine.save_checkpoint(folder, client_state={"rogue": Rogue()})
    with pytest.raises(CheckpointError, match=r"(?s)add_safe_globals.*Rogue"):
        engine.load_checkpoint(folder)
    with torch.serialization.safe_globals([Rogue]):
        _, client = engine.load_checkpoint(folder)
    assert isinstance(client["rogue"], Rogue)


def test_reading_runs_no_code(tmp_path: Any) -> None:
    run_ranks(unsafe_client_state, 2, str(tmp_path))


class Scheduler:
    """A schedule of the caller's own, with state that NumPy computed."""

    def __init__(self, since: Any = None) -> None:
        self.rate, self.since = numpy.float64(0.01), since

    def step(self, *_: Any, **__: Any) -> None:
        self.rate *= 0.9

    def get_last_lr(self) -> list[float]:
        return [self.rate]

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate, self.since = state["rate"], state["since"]


def numbers_of_numpy(rank: int, folder: str) -> None:
    """Everywhere that values of others get into a checkpoint: stored as plain values, or refused by their path."""
    for name in ("adamw", "zero1"):
        run, place = Run(2, config=OPTIMIZERS[name]), f"{folder}/{name}"
        engine = make_engine(run)
        engine.lr_scheduler = Scheduler()
        train(engine, run, 0, 1)
        groups = engine.stage_optimizer.groups.optimizer.param_groups
        for group in groups:
            group["lr"] = numpy.float64(group["lr"])
        layer = next(iter(engine.local_layers().values()))
        layer.seen = {"at": numpy.int64(3), "order": numpy.arange(3)}
        keep_in_checkpoints(layer, "seen")
        client = {"step": numpy.int32(7), "best": (numpy.float64(0.1), Path("a/b"))}
        engine.save_checkpoint(place, client_state=client)
        other = make_engine(run)
        other.lr_scheduler = Scheduler()
        _, found = other.load_checkpoint(place)
        assert (found["step"], found["best"]) == (7, (0.1, "a/b")) and type(found["step"]) is int
        assert type(other.lr_scheduler.rate) is float and other.lr_scheduler.rate == engine.lr_scheduler.rate
        seen = next(iter(other.local_layers().values())).seen
        assert type(seen["at"]) is int and seen["at"] == 3 and seen["order"].tolist() == [0, 1, 2]
        ours = other.stage_optimizer.groups.optimizer.param_groups
        assert [group["lr"] for group in ours] == [group["lr"] for group in groups]
        assert train(other, run, 1, 2) == train(engine, run, 1, 2)

        before = sorted(path.name for path in Path(place).iterdir())
        for where, spoil, restore in (
            (
                r"lr_scheduler'\]\['since'\] is of class datetime.datetime",
                lambda: setattr(engine, "lr_scheduler", Scheduler(datetime.now())),
                lambda: setattr(engine, "lr_scheduler", Scheduler()),
            ),
            (
                r"param_groups'\]\[0\]\['note'\] is of class decimal.Decimal",
                lambda: groups[0].update(note=Decimal(1)), lambda: groups[0].pop("note"),
            ),
            (
                r"attributes'\]\[\d\]\[''\]\['seen'\] is of class argparse.Namespace",
                lambda: setattr(layer, "seen", Namespace(a=1)), lambda: setattr(layer, "seen", 1),
            ),
        ):
            spoil()
            with pytest.raises(CheckpointError, match=where) as caught:
                engine.save_checkpoint(place, tag="refused")
            assert "and could not be loaded again; store " in same_text(str(caught.value))
            torch.distributed.barrier()
            assert sorted(path.name for path in Path(place).iterdir()) == before, "nothing is left"
            torch.distributed.barrier()
            restore()
        engine.load_checkpoint(place)


def test_values_of_others_are_stored_as_plain_ones_or_refused(tmp_path: Any) -> None:
    run_ranks(numbers_of_numpy, 2, str(tmp_path))


def other_optimizers(rank: int, folder: str, clients: list[str]) -> None:
    fp16 = Run(2, num_batches=6, config={**ADAMW, **ZERO, **FP16})
    two_groups = [Run(2, num_batches=6, config=CLIP, client=name) for name in clients]
    two_groups.append(replace(two_groups[0], config={**CLIP, **ZERO}))
    bf16 = Run(2, num_batches=6, config={**ADAMW, **BF16})
    for i, run in enumerate([fp16, *two_groups, bf16]):
        engine = make_engine(run)
        train(engine, run, 0, 2)
        engine.repartition((0, 1, 8))
        train(engine, run, 2, 3)
        engine.save_checkpoint(f"{folder}/{i}")
        skipped = engine.skipped_steps
        expected = train(engine, run, 3, 6)
        other = make_engine(run)
        other.load_checkpoint(f"{folder}/{i}")
        assert other.skipped_steps == skipped
        if run is fp16:
            assert other.optimizer.loss_scaler.cur_iter == 3
        assert train(other, run, 3, 6) == expected, i
        assert digest(other) == digest(engine), i
        if run is fp16:
            assert vars(other.optimizer.loss_scaler) == vars(engine.optimizer.loss_scaler)
        assert other.get_lr() == engine.get_lr(), i


# DeepSpeed compiles the other one for a minute.
@pytest.mark.parametrize("client", mostly(["adamw_object_scheduler", "cpu_adam"], ["adamw_object_scheduler"]))
def test_other_optimizers(tmp_path: Any, client: str) -> None:
    compile_first(client)
    run_ranks(other_optimizers, 2, str(tmp_path), [client])
