"""The load models' equations."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest

from benchmarks.traces.blocks import BLOCK_FORWARD_S, operation_shares
from benchmarks.traces.models import MODELS, cubic_sparsity, global_magnitude, survival


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("depth", [24, 48])
def test_every_model_starts_dense_or_uneven_and_keeps_its_shape(name: str, depth: int) -> None:
    trace = MODELS[name](depth)
    assert len(trace.layers) == depth + 2
    assert trace == MODELS[name](depth), "drawn anew, but not from its seed"
    assert trace.source.kind == "model" and "Assumed" in trace.source.description or name == "dense"
    if name != "moe":
        assert trace.batches[0].forward_s[1:-1] == (BLOCK_FORWARD_S,) * depth
    for batch in trace.batches:
        for f, b in list(zip(batch.forward_s, batch.backward_s, strict=True))[batch.frozen_layers :]:
            assert b == pytest.approx(2 * f, abs=2e-7)


def test_the_cubic_schedule_rises_to_its_end() -> None:
    values = [cubic_sparsity(t / 10, 0.9, 0.1) for t in range(-2, 13)]
    assert values[0] == values[2] == pytest.approx(0.1)
    assert values[-1] == values[12] == pytest.approx(0.9)
    assert all(a <= b for a, b in pairwise(values))
    assert cubic_sparsity(0.5, 0.9) == pytest.approx(0.9 - 0.9 / 8)


def test_global_magnitude_prunes_as_much_as_told_and_small_weights_first() -> None:
    shares = global_magnitude(0.7, [2.0, 1.5, 1.0])
    assert fmean(shares) == pytest.approx(0.7)
    assert shares[0] < shares[1] < shares[2]
    assert global_magnitude(0.7, [3.0, 3.0]) == pytest.approx([0.7, 0.7])


def test_pruning_shrinks_deep_blocks_more() -> None:
    batches = MODELS["pruning"](24).batches
    sums = [sum(batch.parameter_bytes) for batch in batches]
    assert all(a > b for a, b in pairwise(sums))
    first, end = (sum(batches[i].parameter_bytes[1:-1]) for i in (0, -1))
    assert end == pytest.approx(0.1 * first, rel=1e-3)
    last = batches[-1].forward_s[1:-1]
    assert all(a >= b for a, b in pairwise(last)) and last[0] > 1.2 * last[-1]


def test_freezing_goes_from_the_front_and_never_back() -> None:
    frozen = [batch.frozen_layers for batch in MODELS["freezing"](24).batches]
    assert frozen[0] == 0 and all(a < b for a, b in pairwise(frozen))
    assert frozen[-1] == 1 + round(24 * 7 / 12)


def test_tokens_only_leave() -> None:
    for progress in (0.0, 0.3, 1.0):
        values = [survival(block, 24, progress) for block in range(24)]
        assert values[0] == 1.0 and all(a >= b for a, b in pairwise(values))
    assert survival(12, 24, 1.0) < survival(12, 24, 0.3) < survival(12, 24, 0.0) == 1.0
    assert survival(7, 20, 1.0) == pytest.approx(0.5)


def test_experts_are_never_better_than_balanced() -> None:
    trace = MODELS["moe"](24)
    blocks = [s for batch in trace.batches for s in batch.forward_s[1:-1]]
    assert min(blocks) >= BLOCK_FORWARD_S and max(blocks) > 1.5 * BLOCK_FORWARD_S
    assert trace.batches[1].forward_s != trace.batches[2].forward_s


def test_every_second_block_is_routed() -> None:
    last = MODELS["mod"](24).batches[-1].forward_s[1:-1]
    assert set(last[::2]) == {BLOCK_FORWARD_S}
    assert fmean(last[1::2]) == pytest.approx((0.125 + 0.02) * BLOCK_FORWARD_S, rel=0.35)


def test_sparse_attention_saves_scores_alone() -> None:
    scores = operation_shares(8192)[2]
    assert sum(operation_shares(8192)) == pytest.approx(1.0) and 0.5 < scores < 0.6
    for batch in MODELS["sparse_attention"](24).batches[1:]:
        assert all((1 - scores) * BLOCK_FORWARD_S <= s <= BLOCK_FORWARD_S for s in batch.forward_s[1:-1])
