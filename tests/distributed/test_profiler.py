"""What the profiler says of layers and stages whose times and sizes are known."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from dynpipe_ds import DynamicPipelineModule, PipelineProfile
from tests.distributed.models import (
    HIDDEN,
    LENGTH,
    VOCABULARY,
    Run,
    base_config,
    data,
    loss_fn,
    make_engine,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.sleeping import napping
from tests.distributed.test_exactness import ADAMW, BF16, BF16_FP32_SUMS, CLIP, SGD, ZERO

NAPS = [(0.005, 0.01), (0.01, 0.01), (0.005, 0.02), (0.015, 0.005)]
FREE_S = 0.003  # what a small linear layer may take on a busy machine


def engine_of(layers: list[Any], cut: list[int], config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    torch.manual_seed(7)
    module = DynamicPipelineModule(
        layers, num_stages=len(cut) - 1, loss_fn=loss_fn, partition_method=cut, **arguments
    )
    run = Run(num_stages=2, config=config or {})
    engine, *_ = deepspeed.initialize(model=module, config=base_config(run, 1))
    return engine


# -- times ------------------------------------------------------------------------------------


def profile_naps(interval: int) -> PipelineProfile:
    engine = engine_of(napping(NAPS), [0, 3, 6], activation_checkpoint_interval=interval)
    batches = data(0, 4)
    for _ in range(3):
        engine.train_batch(batches)
    return engine.profile


def profile_frozen() -> PipelineProfile:
    """The first stage and one layer of the second are frozen."""
    engine = engine_of(napping(NAPS), [0, 3, 6])
    for index, layer in engine.local_layers().items():
        layer.requires_grad_(index > 3)
    batches = data(0, 4)
    for _ in range(2):
        engine.train_batch(batches)
    return engine.last_batch_profile


def profile_unbalanced() -> tuple[PipelineProfile, PipelineProfile]:
    """The first stage does nearly everything; then the second one does."""
    engine = engine_of(napping([(0.01, 0.01)] * 4), [0, 5, 6])
    batches, profiles = data(0, 4), []
    for cut in (5, 1):
        engine.repartition((0, cut, 6))
        engine.train_batch(batches)  # the first one after a change also warms up
        engine.train_batch(batches)
        profiles.append(engine.last_batch_profile)
    return profiles[0], profiles[1]


def all_times(_rank: int) -> dict[str, Any]:
    first, second = profile_unbalanced()
    return {
        "plain": profile_naps(0), "checkpointed": profile_naps(1), "frozen": profile_frozen(),
        "first": first, "second": second,
    }  # fmt: skip


@pytest.fixture(scope="module")
def times() -> list[dict[str, PipelineProfile]]:
    return run_ranks(all_times, 2)


Times = list[dict[str, PipelineProfile]]


def test_every_rank_has_the_same_profile(times: Times) -> None:
    assert times[0] == times[1]


def test_layer_times(times: Times) -> None:
    profile = times[0]["plain"]
    assert (profile.batch, profile.boundaries, profile.num_micro_batches) == (2, (0, 3, 6), 4)
    assert [layer.name for layer in profile.layers] == ["Embed", "Nap", "Nap", "Nap", "Nap", "Head"]
    for layer, (forward_s, backward_s) in zip(profile.layers[1:-1], NAPS, strict=True):
        assert forward_s <= layer.forward_s < 2 * forward_s + FREE_S
        assert backward_s <= layer.backward_s < 2 * backward_s + FREE_S
    for layer in (profile.layers[0], profile.layers[-1]):
        assert 0 < layer.forward_s < FREE_S and 0 < layer.backward_s < FREE_S


def test_recomputation_counts_as_backward(times: Times) -> None:
    profile = times[0]["checkpointed"]
    for layer, (forward_s, backward_s) in zip(profile.layers[2:-1], NAPS[1:], strict=True):
        assert forward_s <= layer.forward_s < 2 * forward_s + FREE_S
        assert forward_s + backward_s <= layer.backward_s < 2 * (forward_s + backward_s) + FREE_S


def test_a_frozen_prefix_has_no_backward(times: Times) -> None:
    layers = times[0]["frozen"].layers
    assert [layer.backward_s for layer in layers[:4]] == [0.0] * 4
    assert layers[4].backward_s >= NAPS[3][1]
    for layer, (forward_s, _) in zip(layers[1:-1], NAPS, strict=True):
        assert forward_s <= layer.forward_s < 2 * forward_s + FREE_S
    assert times[0]["frozen"].stages[0].busy_s < 4 * (2 * (NAPS[0][0] + NAPS[1][0]) + 3 * FREE_S)


def test_stage_times_add_up(times: Times) -> None:
    for profile in times[0].values():
        for stage, seconds in zip(profile.stages, profile.stage_seconds(), strict=True):
            assert 0 < stage.step_s < stage.batch_s and stage.fill_drain_s >= 0
            if profile is not times[0]["plain"] and profile is not times[0]["checkpointed"]:  # smoothed
                assert stage.busy_s == pytest.approx(seconds * profile.num_micro_batches)
            told = stage.busy_s + stage.idle_s + stage.step_s
            assert 0.5 * stage.batch_s < told < 1.5 * stage.batch_s  # the ranks' batches don't begin at once


@pytest.mark.parametrize("slow", [0, 1])
def test_the_fast_stage_waits_for_the_slow_one(times: Times, slow: int) -> None:
    profile = times[0]["second" if slow else "first"]
    slow_stage, fast_stage = profile.stages[slow], profile.stages[1 - slow]
    assert slow_stage.busy_s > 10 * fast_stage.busy_s
    assert slow_stage.waiting_s < 0.25 * slow_stage.busy_s
    # While it waits the slow stage does the work of at least two more micro-batches.
    assert fast_stage.waiting_s > 0.4 * slow_stage.busy_s
    assert fast_stage.bubble_ratio > 0.7 > 0.3 > slow_stage.bubble_ratio
    assert profile.bubble_ratio == pytest.approx((fast_stage.bubble_ratio + slow_stage.bubble_ratio) / 2)


def test_fill_and_drain_of_the_second_stage(times: Times) -> None:
    """It begins after one forward of the first stage, which ends with one backward."""
    first, second = times[0]["first"].stages
    assert 0.04 <= second.fill_drain_s < 2 * 0.08 + 4 * FREE_S
    assert first.fill_drain_s < 0.02


def test_saved_and_loaded(times: Times, tmp_path: Path) -> None:
    profile = times[0]["plain"]
    profile.save(tmp_path / "profile.json")
    assert PipelineProfile.load(tmp_path / "profile.json") == profile


# -- bytes ------------------------------------------------------------------------------------

# Bytes by hand: 8 layers, of which the second has (weight, bias) of a norm, 16 x 16 and 16 x 16 weights
# and two biases, and an int64 counter as buffer.
ROWS = 2 * LENGTH
BLOCK = 16 + 16 + 2 * (16 * 16 + 16)
EMBED, HEAD = VOCABULARY * HIDDEN, VOCABULARY * HIDDEN + VOCABULARY

# Parameter, gradient and optimizer bytes of each element, and of each parameter tensor beside.
SIZES: dict[str, tuple[dict[str, Any], int, int, int, int]] = {
    "adamw": (ADAMW, 4, 4, 4 + 4, 4),  # two moments; a step each
    "sgd": (SGD, 4, 4, 4, 0),
    "zero1": ({**ADAMW, **ZERO}, 4, 4, 4 + 4 + 4, 0),  # master weights
    "bf16": ({**ADAMW, **BF16}, 2, 2, 4 + 4 + 4, 0),  # gradients are summed in bfloat16
    "bf16_zero1": ({**ADAMW, **BF16, **ZERO}, 2, 2, 4 + 4 + 4, 0),
    "bf16_zero1_fp32_sums": ({**ADAMW, **BF16_FP32_SUMS}, 2, 4, 4 + 4 + 4, 0),  # in float32
}


def profiles_by_optimizer(rank: int, names: list[str], num_stages: int) -> dict[str, PipelineProfile]:
    del rank
    found = {}
    for name in names:
        engine = make_engine(Run(num_stages=num_stages, config=SIZES[name][0]))
        engine.train_batch(data(engine.grid.get_data_parallel_id(), 4))
        found[name] = engine.last_batch_profile
    return found


def check_sizes(name: str, profile: PipelineProfile, replicas: int) -> None:
    _, parameter, gradient, state, beside = SIZES[name]
    known = {0: (EMBED, 1, 0), 1: (BLOCK, 6, 8), 4: (BLOCK, 6, 8), 7: (HEAD, 2, 0)}
    sharded = replicas if "zero1" in name else 1
    for index, (elements, tensors, buffers) in known.items():
        layer = profile.layers[index]
        assert layer.num_parameters == elements
        assert layer.parameter_bytes == parameter * elements + buffers, (name, layer)
        assert layer.gradient_bytes == gradient * elements, (name, layer)
        assert layer.optimizer_state_bytes == (state * elements + beside * tensors) // sharded, (name, layer)


def test_bytes_of_every_optimizer() -> None:
    results = run_ranks(profiles_by_optimizer, 2, list(SIZES), 2)
    assert {n: replace(p, stages=()) for n, p in results[0].items()} == {
        n: replace(p, stages=()) for n, p in results[1].items()
    }
    for name, profile in results[0].items():
        check_sizes(name, profile, 1)
    check_activations(results[0]["adamw"])


def check_activations(profile: PipelineProfile) -> None:
    """What autograd keeps for one micro-batch; a tensor that two layers keep counts where it is first kept."""
    floats = 4 * ROWS
    assert profile.layers[0].activation_bytes == 8 * ROWS  # the tokens
    # The norm's input, mean, inverse deviation and output, and tanh's output. What goes up is not kept.
    first_width, second_width = 16, 32
    shared = HIDDEN + 1 + 1 + HIDDEN
    assert profile.layers[1].activation_bytes == floats * (shared + first_width)
    assert profile.layers[2].activation_bytes == floats * (shared + second_width)
    # The head keeps its input; the loss is not part of a layer.
    assert profile.layers[7].activation_bytes == floats * HIDDEN


def test_replicas_share_what_zero_shards() -> None:
    results = run_ranks(profiles_by_optimizer, 4, ["adamw", "zero1", "bf16_zero1_fp32_sums"], 2)
    assert all(result == results[0] for result in results)
    for name, profile in results[0].items():
        check_sizes(name, profile, 2)


# -- no trace ---------------------------------------------------------------------------------


def bits(_rank: int, run: Run) -> tuple[list[float], str, bytes]:
    """Losses, weights and the state of the random number generator after training."""
    engine = make_engine(run)
    batches = data(0, run.micro_batches)
    losses = [float(engine.train_batch(batches)) for _ in range(run.num_batches)]
    weights = torch.cat([p.detach().flatten() for p in engine.module.parameters()]).numpy().tobytes()
    random_state = torch.get_rng_state()
    if not run.plain:
        engine.repartition((0, 1, 8))
        assert torch.equal(torch.get_rng_state(), random_state)
        assert engine.overhead.profiling_s > 0 and engine.overhead.migrating_s > 0
    return losses, hashlib.sha256(weights).hexdigest(), random_state.numpy().tobytes()


def profiled_and_not(rank: int) -> None:
    run = Run(num_stages=2, num_batches=12, dropout=0.2, config={**ADAMW, "gradient_clipping": 0.0})
    assert bits(rank, run) == bits(rank, replace(run, plain=True))
    clipped = replace(run, num_batches=3, config={**ADAMW, **CLIP})
    assert bits(rank, clipped)[0] != bits(rank, replace(clipped, plain=True))[0], "the comparison sees little"


def test_profiling_leaves_no_trace() -> None:
    run_ranks(profiled_and_not, 2)
