"""``DynamicPipelineModule`` in place of ``PipelineModule``: what it takes, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

from dynpipe_ds import DynamicPipelineEngine, DynamicPipelineModule, PipelineProfile
from dynpipe_ds.measure.profile import LayerProfile
from dynpipe_ds.partition import optimal
from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, BY_HAND, CLIP, ZERO
from tests.distributed.models import (
    Block,
    Embed,
    Head,
    Run,
    base_config,
    data,
    layers_of,
    loss_fn,
    make_engine,
)
from tests.distributed.ranks import run_ranks

RUN = Run(num_stages=2)
DEEPSPEED_METHODS = ["uniform", "parameters", "Parameters", "type:block", "type:Embed|Head"]


def module_with(method: Any, cls: type = DynamicPipelineModule, **arguments: Any) -> Any:
    torch.manual_seed(7)
    layers = arguments.pop("layers", None) or layers_of(RUN)
    return cls(layers, num_stages=2, loss_fn=loss_fn, partition_method=method, **arguments)


def cut_again(module: Any, method: Any, profile: Any = None, pin: tuple[int, ...] = ()) -> tuple[int, ...]:
    """What the constructor would do with these arguments, without building everything anew."""
    module.initial_profile, module.pinned_cuts = profile, pin
    module._partition_layers(method)
    assert all(type(b) is int for b in module.parts)
    return tuple(module.boundaries)


def profile_of(seconds: list[float]) -> PipelineProfile:
    layers = tuple(
        LayerProfile(
            name="L", forward_s=s, backward_s=s, num_parameters=1, parameter_bytes=4, gradient_bytes=4,
            optimizer_state_bytes=8, activation_bytes=0,
        )
        for s in seconds
    )
    return PipelineProfile(batch=3, boundaries=(), num_micro_batches=4, layers=layers, stages=())


def last_seven(profile: PipelineProfile, num_stages: int) -> list[int]:
    """Knows no times at construction."""
    assert profile.costs("time") == [0.0] * 8 and num_stages == 2
    return [0, 1, len(profile.layers)]


def refused(message: str, function: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=message):
        function()


def first_partitions(_rank: int, saved: Path) -> None:
    theirs, ours = (module_with("parameters", cls) for cls in (PipelineModule, DynamicPipelineModule))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), "the same random numbers are drawn"
    for method in DEEPSPEED_METHODS:
        theirs._partition_layers(method)
        assert cut_again(ours, method) == tuple(int(b) for b in theirs.parts), method
        assert ours.local_indices() == range(theirs._local_start, theirs._local_stop)
    counts = ours._count_layer_params()
    by_count = optimal(counts, 2).boundaries
    for method in ("profile", "optimal:time", "optimal:parameters"):
        assert cut_again(ours, method) == by_count
    assert cut_again(ours, "uniform:time") == (0, 4, 8)
    for method in ("balanced:parameters", "diffusion:time", "balanced:time", "diffusion:parameters"):
        assert sum(counts[: cut_again(ours, method)[1]]) == pytest.approx(sum(counts) / 2, rel=0.4)
    for boundaries in ([0, 3, 8], (0, 3, 8), np.array([0, 3, 8])):
        assert cut_again(ours, boundaries) == (0, 3, 8)
    assert cut_again(ours, last_seven) == (0, 1, 8)
    # A profile from an earlier run, as a value or as a file, gives the times.
    measured = profile_of([9, 1, 1, 1, 1, 1, 1, 1])
    assert cut_again(ours, "uniform:time", measured) == (0, 4, 8)
    assert cut_again(ours, lambda p, s: optimal(p.costs(), s).boundaries, measured) == (0, 1, 8)
    assert cut_again(ours, "optimal:time", measured, pin=(1, 2)) == (0, 3, 8)
    for profile in (measured, saved, str(saved)):
        assert module_with("profile", profile=profile).boundaries == (0, 1, 8)


def refusals(_rank: int) -> None:
    module = module_with(np.array([0, 3, 8]))
    refused(r"partition_method 'optimum:time' is not .*optimal.*callable", lambda: module_with("optimum:time"))
    refused(r"\(0, 8, 8\) leave stage 1 empty", lambda: cut_again(module, [0, 8, 8]))
    refused(r"\(0, 8\) have 2 entries; 2 stages need 3", lambda: cut_again(module, lambda *_: [0, 8]))
    refused(r"cut at 4, between layers 3 and 4", lambda: module_with("uniform", pin=[4]))
    refused(r"cut at 3, between layers 2 and 3", lambda: cut_again(module, [0, 3, 8], pin=(3,)))
    short = profile_of([1, 2, 3])
    refused(r"saved profile has 3 layers but the model has 8", lambda: cut_again(module, "profile", short))
    with pytest.raises(FileNotFoundError, match="no such file"):
        module_with("profile", profile="/nowhere/profile.json")


def start(section: dict[str, Any] | None, method: Any = "uniform", **arguments: Any) -> Any:
    config = base_config(RUN, 1) | {"dynamic_pipeline": section}
    if section is None:
        del config["dynamic_pipeline"]
    engine, *_ = deepspeed.initialize(model=module_with(method, **arguments), config=config)
    return engine


def sections(_rank: int) -> None:
    for section in (None, {"enabled": False, "partitioner": "diffusion"}):
        engine = start(section)
        assert isinstance(engine, DynamicPipelineEngine) and isinstance(engine, deepspeed.PipelineEngine)
        assert engine.partition == (0, 4, 8) and engine.profile is None and engine.last_batch_profile is None
        assert list(engine.local_layers()) == list(engine.module.local_indices())
        for forbidden in (engine.rebalance, lambda: engine.repartition((0, 3, 8)), lambda: engine.on_rebalance(print)):
            with pytest.raises(RuntimeError, match=r'needs "dynamic_pipeline": {"enabled": true} in the DeepSpeed'):
                forbidden()
    # What the section says and the module's own choice must agree.
    on = BY_HAND
    asked = r"partition_method is diffusion:time but the dynamic_pipeline section asks for optimal:time"
    refused(asked, lambda: start({**on, "partitioner": "optimal"}, "diffusion:time"))
    refused("section asks for optimal:parameters", lambda: start({**on, "cost": "parameters"}, "optimal:time"))
    refused("is last_seven but", lambda: start({**on, "partitioner": "optimal"}, last_seven))
    assert str(start({**on, "partitioner": "diffusion"}, "diffusion:time").dynamic.balancer.method) == "diffusion:time"
    assert str(start({**on, "partitioner": "diffusion"}, [0, 2, 8]).dynamic.balancer.method) == "diffusion:time"
    assert str(start({**on, "cost": "parameters"}, "type:block").dynamic.balancer.method) == "optimal:parameters"
    # Problems of the section are all told at once, on every rank.
    wrong = {"enabled": True, "rebalance_evry": 2, "min_gain": 3, "pinned_cuts": [4]}
    refused(r"2 problems in section .*(?s:.*)min_gain = 3.*(?s:.*)rebalance_evry.*did you mean", lambda: start(wrong))
    refused(r"pinned_cuts = \[9\]: with 8 layers", lambda: start({**on, "pinned_cuts": [9]}))
    refused(r"cut at 4, between layers 3 and 4", lambda: start({**on, "pinned_cuts": [4]}))
    block = Block()
    refused(
        r"layers 1 and 3 \(Block\) share a parameter.*TiedLayerSpec",
        lambda: start(on, layers=[LayerSpec(Embed), block, LayerSpec(Block), block, LayerSpec(Head)]),
    )
    # DeepSpeed's own module gets DeepSpeed's own engine.
    assert type(make_engine(replace(RUN, plain=True))) is deepspeed.PipelineEngine


def everything(rank: int, saved: Path) -> None:
    first_partitions(rank, saved)
    refusals(rank)
    sections(rank)


def test_partition_methods_and_sections(tmp_path: Path) -> None:
    profile_of([9, 1, 1, 1, 1, 1, 1, 1]).save(tmp_path / "profile.json")
    run_ranks(everything, 2, tmp_path / "profile.json")


# -- without the section nothing differs ------------------------------------------------------

CONFIGS: list[dict[str, Any]] = [
    {**ADAMW, **CLIP}, {**ADAMW, **ZERO, **CLIP}, {**ADAMW, **BF16_FP32_SUMS, **CLIP},
]


def as_deepspeed(_rank: int) -> None:
    """Everything on that could differ: clipping, tied layers, dropout under checkpointing, evaluation."""
    for config in CONFIGS:
        run = Run(num_stages=2, tied=True, dropout=0.2, checkpoint_interval=1, config=config)
        theirs, ours = train(replace(run, plain=True)), train(replace(run, config=off(config)))
        assert theirs == ours and len(set(ours[0])) == len(ours[0])


def off(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "dynamic_pipeline": {"enabled": False}}


def train(run: Run) -> tuple[list[float], list[float], bytes]:
    engine = make_engine(run, checkpointable_layers=["Block"])
    batches, losses, evaluated = data(0, run.micro_batches), [], []
    for _ in range(4):
        losses.append(float(engine.train_batch(batches)))
        evaluated.append(float(engine.eval_batch(data(5, run.micro_batches))))
    state = torch.cat([p.detach().float().flatten() for p in engine.module.parameters()])
    return losses, evaluated, state.numpy().tobytes()


def test_a_disabled_section_gives_the_bits_of_deepspeed() -> None:
    run_ranks(as_deepspeed, 2)
