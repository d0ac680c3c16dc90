"""Profiles in a checkpoint: the same when they are read back, and small."""

from __future__ import annotations

import io
import random
from dataclasses import replace

import torch

from dynpipe_ds.checkpoint.profiles import pack, unpack
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile, StageProfile


def profiles(num_profiles: int, num_layers: int, num_stages: int) -> list[PipelineProfile]:
    """Profiles with times of their own, and sizes that change now and then."""
    rng = random.Random(0)

    def one(batch: int) -> PipelineProfile:
        cuts = sorted(rng.sample(range(1, num_layers), num_stages - 1))
        layers = (
            LayerProfile(f"block {i % 3}", rng.random(), rng.random(), 2**40 + i, 4, batch // 10, 8, 3)
            for i in range(num_layers)
        )
        stages = (StageProfile(*(rng.random() for _ in range(5)), rng.randrange(2**40)) for _ in range(num_stages))
        return PipelineProfile(batch, (0, *cuts, num_layers), 8, tuple(layers), tuple(stages))

    return [one(batch) for batch in range(num_profiles)]


def test_they_are_the_same_when_read_back() -> None:
    mixed = [*profiles(3, 5, 2), *(replace(p, batch=p.batch + 3) for p in profiles(25, 5, 4))]
    mixed[1] = replace(mixed[1], stages=())
    for some in (mixed, mixed[:1], []):
        buffer = io.BytesIO()
        torch.save(pack(some), buffer)
        buffer.seek(0)
        assert unpack(torch.load(buffer, weights_only=True)) == some


def test_the_longest_history_of_a_large_model_is_small() -> None:
    buffer = io.BytesIO()
    many = profiles(64, 400, 24)
    torch.save(pack(many), buffer)
    assert buffer.tell() < 64 * 400 * 16 * 2, "less than twice the seconds alone"
    assert buffer.tell() < sum(len(profile.dumps()) for profile in many) / 5, "a fifth of what it is as text"


def test_halves_of_backwards_are_kept() -> None:
    (whole,) = profiles(1, 3, 2)
    layers = [replace(layer, weight_s=layer.backward_s / 3, split_s=0.125) for layer in whole.layers]
    mixed = [whole, replace(whole, layers=layers)]
    assert unpack(pack(mixed)) == mixed


def test_seconds_of_replicas_are_kept() -> None:
    (alone,) = profiles(1, 3, 2)
    stages = [replace(stage, replicas_busy_s=(stage.busy_s, 2.0)) for stage in alone.stages]
    mixed = [alone, replace(alone, stages=stages)]
    assert unpack(pack(mixed)) == mixed
    old = pack([alone])
    del old["replicas_busy_s"]
    assert unpack(old) == [alone]
