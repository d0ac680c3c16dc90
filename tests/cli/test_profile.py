"""``dynpipe profile``: bytes as the engine counts them, times that are known, one layer at a time."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds import PipelineProfile
from dynpipe_ds.decide.methods import PartitionMethod
from dynpipe_ds.measure.layerwise import LayerError, TrainingMemory, measure_layers
from tests.cli.conftest import Command
from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, SGD
from tests.distributed.models import Run, base_config, data, layers_of, loss_fn, make_engine
from tests.distributed.ranks import run_ranks
from tests.distributed.sleeping import napping, told_time

MEMORY = TrainingMemory()
RUNS = {
    "adamw": Run(num_stages=1, functions=True, tied=True, config=ADAMW),
    "sgd_checkpointed": Run(num_stages=1, checkpoint_interval=1, config=SGD),
    "bf16": Run(num_stages=1, functions=True, config={**ADAMW, **BF16_FP32_SUMS}),
}


def engine_profiles(_rank: int) -> dict[str, PipelineProfile]:
    found = {}
    for name, run in RUNS.items():
        engine = make_engine(run)
        engine.train_batch(data(0, 4))
        found[name] = engine.last_batch_profile
    return found


def test_bytes_are_those_of_training() -> None:
    """Layer by layer against the engine's own profile: parameters, gradients, optimizer state, activations."""
    (trained,) = run_ranks(engine_profiles, 1)
    inputs, labels = next(data(0, 4))
    for name, run in RUNS.items():
        measured = measure_layers(
            layers_of(run), inputs, labels, loss_fn=loss_fn, memory=TrainingMemory.from_config(base_config(run, 1)),
            repeats=1, checkpointed=run.checkpoint_interval == 1,
        )  # fmt: skip
        for mine, engines in zip(measured.layers, trained[name].layers, strict=True):
            for key in ("name", "num_parameters", "parameter_bytes", "gradient_bytes", "activation_bytes"):
                assert getattr(mine, key) == getattr(engines, key), (name, key, mine, engines)
            # torch keeps 4 bytes a tensor for Adam's step, which are not counted; a block has 6 tensors.
            assert 0 <= engines.optimizer_state_bytes - mine.optimizer_state_bytes <= 24, (name, mine, engines)
            assert mine.forward_s > 0 and mine.backward_s > 0


def test_known_times() -> None:
    """Recomputation falls into the backward; a frozen beginning has none."""
    naps = [(0.25, 0.5), (0.5, 0.25)]
    inputs, labels = next(data(0, 1))
    arguments: dict[str, Any] = {"loss_fn": loss_fn, "memory": MEMORY, "repeats": 2, "warmup": 1}
    with told_time():
        plain = measure_layers(napping(naps), inputs, labels, **arguments)
        again = measure_layers(napping(naps), inputs, labels, checkpointed=True, **arguments)
    assert [(layer.forward_s, layer.backward_s) for layer in plain.layers] == [(0.0, 0.0), *naps, (0.0, 0.0)]
    recomputed = [(forward_s, forward_s + backward_s) for forward_s, backward_s in naps]
    assert [(layer.forward_s, layer.backward_s) for layer in again.layers] == [(0.0, 0.0), *recomputed, (0.0, 0.0)]
    assert plain.boundaries == () and plain.stages == ()

    frozen = [nn.Linear(4, 4).requires_grad_(False), torch.relu, nn.Linear(4, 4)]
    measured = measure_layers(frozen, torch.randn(2, 4), memory=MEMORY)
    assert [layer.backward_s > 0 for layer in measured.layers] == [False, False, True]
    assert [layer.optimizer_state_bytes for layer in measured.layers] == [0, 0, 8 * 20]


def test_halves_are_measured_where_there_are_any() -> None:
    """Not of the first layer, whose input wants no gradient, frozen ones, functions, and what is recomputed."""
    frozen = nn.Linear(64, 64).requires_grad_(False)
    layers = [nn.Linear(64, 64), nn.Linear(64, 64), torch.relu, frozen, nn.Linear(64, 4)]
    inputs = torch.randn(256, 64)
    measured = measure_layers(layers, inputs, memory=MEMORY)
    assert [layer.weight_s > 0 for layer in measured.layers] == [False, True, False, False, True]
    assert all(layer.weight_s <= layer.backward_s + layer.split_s for layer in measured.layers)
    assert not any(layer.split_s for layer in measured.layers if not layer.weight_s)
    again = measure_layers(layers, inputs, memory=MEMORY, checkpointed=True)
    assert not any(layer.weight_s for layer in again.layers)


class Counted(nn.Module):
    """Knows how many of its kind exist at once."""

    alive: weakref.WeakSet[Counted] = weakref.WeakSet()
    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        Counted.alive.add(self)
        gc.collect()
        Counted.most = max(Counted.most, len(Counted.alive))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_one_layer_at_a_time() -> None:
    """A layer is gone before the next is built, so the model may be larger than the device."""
    measured = measure_layers([LayerSpec(Counted) for _ in range(4)], torch.randn(2, 8), memory=MEMORY)
    assert len(measured.layers) == 4 and Counted.most == 1


class InPlace(nn.Module):
    """Changes its input, takes and gives tuples, and passes a mask on."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        x += 1.0
        return x * mask, mask


def test_tuples_masks_and_changes_in_place() -> None:
    """As between the layers of one stage; live modules are not touched."""
    model = nn.Linear(4, 4)
    before = model.weight.clone()

    def first(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return model(pair[0]), pair[1]

    x, mask = torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool)
    kept = x.clone()
    profile = measure_layers([first, InPlace(), InPlace()], (x, mask), memory=MEMORY)
    assert [layer.name for layer in profile.layers] == ["first", "InPlace", "InPlace"]
    assert torch.equal(x, kept) and torch.equal(model.weight, before)


def test_a_layer_that_fails_is_named() -> None:
    """With its place; the cause is kept."""
    with pytest.raises(LayerError, match=r"layer 1 \(Linear\) can't be built and run: RuntimeError: mat1") as caught:
        measure_layers([nn.Linear(4, 4), nn.Linear(3, 4)], torch.randn(2, 4), memory=MEMORY)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("config", "replicas", "expected"),
    [
        ({}, 1, (torch.float32, torch.float32, 8)),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, 1, (torch.float32, torch.float32, 4)),
        ({"optimizer": {"type": "SGD"}}, 1, (torch.float32, torch.float32, 0)),
        ({"zero_optimization": {"stage": 1}}, 4, (torch.float32, torch.float32, 3)),
        ({"bf16": {"enabled": True}}, 4, (torch.bfloat16, torch.bfloat16, 12)),
        ({"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 1,
         (torch.float16, torch.float32, 12)),
    ],
)  # fmt: skip
def test_what_a_configuration_keeps(config: dict[str, Any], replicas: int, expected: tuple[Any, ...]) -> None:
    """Precision, sums of gradients, state and master weights by hand."""
    memory = TrainingMemory.from_config(config, num_replicas=replicas)
    assert (memory.dtype, memory.gradient_dtype, memory.optimizer_bytes) == expected


@pytest.mark.usefixtures("workplace")
def test_the_file_is_a_start_for_training(dynpipe: Command) -> None:
    """`plan` for 1F1B and the module's partition_method "profile" choose the same boundaries from it."""
    done = dynpipe("profile", "my_model:layers", "--config", "ds_config.json", "--repeats", 1, "--json")
    assert done.json["profile"] == "profile.json" and done.json["num_micro_batches"] == 8
    profile = PipelineProfile.load("profile.json")
    assert len(profile.layers) == 8 and profile.num_micro_batches == 8
    assert done.json["total"]["num_parameters"] == sum(layer.num_parameters for layer in profile.layers)
    planned = dynpipe("plan", "profile.json", "--stages", 3, "--schedule", "1f1b", "--json").json["boundaries"]
    assert tuple(planned) == PartitionMethod.parse("profile").plan(profile, 3).boundaries


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("return [1]", 2, "returned a list of 1: it must return (layers, (inputs, labels))"),
        ("return [], (1, 2)", 2, "with a list of at least one layer"),
        ("return [torch.relu], 1", 2, "returned a int as batch"),
        ("return [torch.relu], (1, 2), 3", 2, "returned a int as loss_fn"),
        ("raise KeyError('size')", 1, "raised KeyError: 'size' (--traceback shows where)"),
        ("return [torch.relu, 7], (torch.ones(2), None)", 1, "layer 1 (int) can't be built and run: TypeError"),
    ],
)
def test_a_model_that_does_not_fit(dynpipe: Command, body: str, code: int, told: str) -> None:
    """One line; wrong shape of the answer is wrong usage, a model that fails is a problem."""
    name = f"bad_model_{time.monotonic_ns()}"
    Path(f"{name}.py").write_text(f"import torch\ndef layers():\n    {body}\n", encoding="utf-8")
    done = dynpipe("profile", f"{name}:layers")
    assert done.code == code and told in done.err and done.err.count("\n") == 1
    assert not done.out


@pytest.mark.usefixtures("workplace")
def test_an_optimizer_that_is_not_known(dynpipe: Command) -> None:
    """Named with the remedy, which works."""
    Path("lamb.json").write_text('{"optimizer": {"type": "Lamb"}, "gradient_accumulation_steps": "auto"}')
    command = ("profile", "my_model:layers", "--config", "lamb.json", "--repeats", 1)
    done = dynpipe(*command)
    assert done.code == 2 and "'Lamb'" in done.err and "--optimizer-bytes" in done.err
    done = dynpipe(*command, "--optimizer-bytes", 12)
    assert done.code == 2 and "gradient_accumulation_steps = 'auto'" in done.err and "--micro-batches" in done.err
    done = dynpipe(*command, "--optimizer-bytes", 12, "--micro-batches", 2, "--json")
    assert done.json["layers"][0]["state_bytes"] == 2112 * (4 + 4 + 12)
