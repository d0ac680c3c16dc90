"""What the profiler says of layers and stages whose times and sizes are known."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch

from dynpipe_ds import DynamicPipelineModule, PipelineProfile
from dynpipe_ds.measure import HostClock
from dynpipe_ds.measure.recorder import (
    BACKWARD,
    FORWARD,
    LOAD,
    REDUCE,
    STEP,
    TRANSFER,
    BatchRecorder,
    BatchTimes,
)
from tests.distributed.configs import ADAMW, BF16, BF16_FP32_SUMS, CLIP, SGD, UNCLIPPED, ZERO
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
from tests.distributed.sleeping import meet, napping, sleep, told_time

# Seconds that add up without rounding; no other time passes but the optimizer's.
NAPS = [(0.25, 0.5), (0.5, 0.5), (0.25, 1.0), (0.75, 0.25)]
STEP_S = 0.125
TIMES = [(0.0, 0.0), *NAPS, (0.0, 0.0)]


def engine_of(layers: list[Any], cut: list[int], config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    torch.manual_seed(7)
    module = DynamicPipelineModule(
        layers, num_stages=len(cut) - 1, loss_fn=loss_fn, partition_method=cut, **arguments
    )
    run = Run(num_stages=2, config=config or {})
    engine, *_ = deepspeed.initialize(model=module, config=base_config(run, 1))
    engine.optimizer.register_step_post_hook(lambda *_: sleep(STEP_S))
    return engine


def train(engine: Any, num_batches: int) -> None:
    batches = data(0, 4)
    for _ in range(num_batches):
        engine.train_batch(batches)
        meet()


# -- times ------------------------------------------------------------------------------------


def profile_naps(interval: int) -> PipelineProfile:
    engine = engine_of(napping(NAPS), [0, 3, 6], activation_checkpoint_interval=interval)
    train(engine, 3)
    return engine.profile


def profile_frozen() -> PipelineProfile:
    """The first stage and one layer of the second are frozen."""
    engine = engine_of(napping(NAPS), [0, 3, 6])
    for index, layer in engine.local_layers().items():
        layer.requires_grad_(index > 3)
    train(engine, 2)
    return engine.last_batch_profile


def profile_unbalanced() -> tuple[PipelineProfile, PipelineProfile]:
    """The first stage does nearly everything; then the second one does."""
    engine = engine_of(napping([(0.5, 0.5)] * 5), [0, 5, 7])
    profiles = []
    for cut in (5, 2):
        engine.repartition((0, cut, 7))
        train(engine, 1)
        profiles.append(engine.last_batch_profile)
    return profiles[0], profiles[1]


def test_one_rank_adds_up_its_marks() -> None:
    """Transfers are fill before the first computation and waiting up to the last; after that they are neither."""
    marks = [
        (TRANSFER, -1, 0.5), (LOAD, -1, 0.25), (FORWARD, 3, 1.0), (FORWARD, 4, 2.0), (TRANSFER, -1, 4.0),
        (FORWARD, 3, 1.0), (FORWARD, 4, 3.0), (BACKWARD, 4, 8.0), (TRANSFER, -1, 16.0), (BACKWARD, 3, 32.0),
        (TRANSFER, -1, 64.0), (REDUCE, -1, 128.0), (STEP, -1, 256.0),
    ]  # fmt: skip
    seconds = [mark[2] for mark in marks]
    recorder = BatchRecorder()
    with patch.object(HostClock, "stamp", side_effect=[0.0, *accumulate([0.125, *seconds])]):
        recorder.start()
        for i, (kind, layer, _) in enumerate(marks):
            if i in (3, 6):  # within an instruction, layer after layer
                recorder.run(layer, abs, 0)
            else:
                recorder.instruction(kind, layer)
        times = recorder.stop()
    assert (times.first_forward, times.first_backward) == ((0.625, 3.875, True), (11.875, 19.875, False))
    assert replace(times, first_forward=None, first_backward=None) == BatchTimes(
        forward_s={3: 2.0, 4: 5.0}, backward_s={4: 8.0, 3: 32.0}, num_micro_batches=2, fill_s=0.625, waiting_s=20.0,
        compute_end_s=0.125 + sum(seconds[:-3]), step_s=256.0, batch_s=0.125 + sum(seconds),
    )  # fmt: skip


def all_times(_rank: int) -> dict[str, Any]:
    with told_time():
        first, second = profile_unbalanced()
        return {
            "plain": profile_naps(0), "checkpointed": profile_naps(1), "frozen": profile_frozen(),
            "first": first, "second": second,
        }  # fmt: skip


@pytest.fixture(scope="module")
def times() -> list[dict[str, PipelineProfile]]:
    return run_ranks(all_times, 2)


Times = list[dict[str, PipelineProfile]]


def layer_times(profile: PipelineProfile) -> list[tuple[float, float]]:
    return [(layer.forward_s, layer.backward_s) for layer in profile.layers]


def test_every_rank_has_the_same_profile(times: Times) -> None:
    assert times[0] == times[1]


def test_layer_times(times: Times) -> None:
    profile = times[0]["plain"]
    assert (profile.batch, profile.boundaries, profile.num_micro_batches) == (2, (0, 3, 6), 4)
    assert [layer.name for layer in profile.layers] == ["Embed", "Nap", "Nap", "Nap", "Nap", "Head"]
    assert layer_times(profile) == TIMES


def test_recomputation_counts_as_backward(times: Times) -> None:
    """All of a stage is computed again before its backward, and counts there, where it is seen to happen."""
    assert layer_times(times[0]["checkpointed"]) == [(f, f + b) for f, b in TIMES]


def test_a_frozen_prefix_has_no_backward(times: Times) -> None:
    profile = times[0]["frozen"]
    assert layer_times(profile) == [(f, b if index > 3 else 0.0) for index, (f, b) in enumerate(TIMES)]
    assert profile.stages[0].busy_s == 4 * (NAPS[0][0] + NAPS[1][0])


def test_stage_times_add_up(times: Times) -> None:
    for profile in times[0].values():
        for stage, seconds in zip(profile.stages, profile.stage_seconds(), strict=True):
            assert stage.busy_s == 4 * seconds
            assert stage.busy_s + stage.idle_s + STEP_S == stage.batch_s, "all end the batch together"
        # Who comes first to the step waits there for the others, with whom it adds up the gradients' norm.
        assert min(stage.step_s for stage in profile.stages) == STEP_S


def idle_times(profile: PipelineProfile) -> list[tuple[float, float]]:
    return [(stage.fill_drain_s, stage.waiting_s) for stage in profile.stages]


def test_the_second_stage_waits_for_a_slow_first_one(times: Times) -> None:
    """The first computes all the time: forwards end after 2, 4, 8 and 12 s, the last two backwards after 14 and 16."""
    profile = times[0]["first"]
    assert [stage.busy_s for stage in profile.stages] == [4 * (2.0 + 2.0), 4 * (0.5 + 0.5)]
    # The second does 1 s of work after each of these forwards: it begins after 2 s and ends 3 s before the first.
    assert idle_times(profile) == [(0.0, 0.0), (2.0 + 3.0, (4.0 - 3.0) + (8.0 - 5.0) + (12.0 - 9.0))]
    assert [stage.bubble_ratio for stage in profile.stages] == [0.0, 0.75] and profile.bubble_ratio == 0.375


def test_the_first_stage_waits_for_a_slow_second_one(times: Times) -> None:
    """The second computes all the time from 0.5 s on: its backwards end after 4.5, 8.5, 12.5 and 16.5 s."""
    profile = times[0]["second"]
    assert [stage.busy_s for stage in profile.stages] == [4 * (0.5 + 0.5), 4 * (2.0 + 2.0)]
    # The first does two forwards, then backward and forward after each of these, in the end two backwards: until 17 s.
    waiting_s = (4.5 - 1.0) + (8.5 - 5.5) + (12.5 - 9.5) + (16.5 - 13.0)
    assert idle_times(profile) == [(0.0, waiting_s), (0.5 + 0.5, 0.0)]


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
        assert layer.forward_s > 0 and layer.backward_s > 0, "by the machine's own clock"
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
    run = Run(num_stages=2, num_batches=12, dropout=0.2, config={**ADAMW, **UNCLIPPED})
    assert bits(rank, run) == bits(rank, replace(run, plain=True))
    clipped = replace(run, num_batches=3, config={**ADAMW, **CLIP})
    assert bits(rank, clipped)[0] != bits(rank, replace(clipped, plain=True))[0], "the comparison sees little"


def test_profiling_leaves_no_trace() -> None:
    run_ranks(profiled_and_not, 2)
