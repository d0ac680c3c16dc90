"""Hash-sparse attention equals dense attention under the same mask, and computes only what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from hydra import compose, initialize_config_dir
from torch import Tensor

from benchmarks.layers.case import count_operations
from scenarios.gpt import Attention, Block, GPTConfig, rotate
from scenarios.kernels import choose
from scenarios.scenario import build_layers
from scenarios.settings import config_folder
from scenarios.sparse_attention import HashSparseAttention, HashSparseBlock, SparseAttention
from scenarios.sparse_attention.groups import size_class
from scenarios.sparse_attention.hashing import draw_directions, hash_codes
from scenarios.sparse_attention.kernels import (
    count_pairs,
    flex_codes_attention,
    separate_codes_attention,
    shared_codes_attention,
)
from tests.scenarios.fakes import TINY, FakeEngine, run

CONFIG = GPTConfig(depth=2, hidden=32, heads=2, seq_len=96)
HASHINGS = pytest.mark.parametrize("hashing", ["shared", "separate"])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor) -> Tensor:
    """Compute every pair, then drop those that are not allowed: softmax written out, 0 where no key is left."""
    seq = q.shape[1]
    same = q_codes.transpose(1, 2)[..., :, None] == k_codes.transpose(1, 2)[..., None, :]
    mask = same & torch.ones(seq, seq, device=q.device).tril().bool()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    weights = scores.sub(scores.amax(-1, keepdim=True).detach()).exp() * mask
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


class MaskedAttention(HashSparseAttention):
    """The same codes, the dense way."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor) -> Tensor:
        return masked_attention(q, k, v, q_codes, k_codes)


def backward(module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Output, input gradient and weight gradients."""
    x = x.clone().requires_grad_(True)
    y = module(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    gradients = torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])
    return [y.detach(), *gradients]


def assert_close(left: list[Tensor], right: list[Tensor], limit: float = 1e-5) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.isfinite().all()
        assert (a - b).abs().max() <= limit * max(1.0, float(b.abs().max()))


@HASHINGS
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("buckets", [2, 6, 16])
def test_equals_dense_attention_under_the_same_mask(hashing: Any, positions: Any, buckets: int) -> None:
    """Forward, input gradient, and the gradients of all weights."""
    config = GPTConfig(depth=2, hidden=32, heads=2, seq_len=96, positions=positions)
    torch.manual_seed(0)
    sparse = HashSparseAttention(config, hashing=hashing)
    dense = MaskedAttention(config, hashing=hashing)
    dense.load_state_dict(sparse.state_dict())
    for attention in (sparse, dense):
        attention.draw(buckets, seed=3)
    x = 3 * torch.randn(3, 96, 32)
    assert_close(backward(sparse, x), backward(dense, x))
    assert sparse.take_pairs() == dense.take_pairs()


def test_one_bucket_is_the_plain_block() -> None:
    """The same bits as a dense block, and every causal pair counted."""
    torch.manual_seed(0)
    plain, sparse = Block(CONFIG), HashSparseBlock(CONFIG)
    sparse.load_state_dict(plain.state_dict())
    x = torch.randn(2, 50, 32)
    assert all(a.equal(b) for a, b in zip(backward(sparse, x), backward(plain, x), strict=True))
    assert isinstance(sparse.attention, HashSparseAttention) and sparse.attention.buckets == 1
    assert sparse.attention.take_pairs() == [2 * 2 * 50 * 51 // 2] * 2
    assert sparse.attention.take_pairs() == [0, 0]


def codes(kind: str, seq: int, buckets: int) -> Tensor:
    """Codes ``[2, seq, 2]`` of the extreme cases."""
    if kind == "all in one bucket":
        return torch.full((2, seq, 2), buckets - 1)
    if kind == "each in its own":
        return torch.arange(seq)[None, :, None].expand(2, seq, 2).contiguous()
    generator = torch.Generator().manual_seed(7)
    return torch.randint(buckets // 2, (2, seq, 2), generator=generator) * 2


@pytest.mark.parametrize("kind", ["all in one bucket", "each in its own", "every second bucket empty"])
@pytest.mark.parametrize("seq", [1, 2, 17, 70])
def test_extreme_codes(kind: str, seq: int) -> None:
    """No padding or empty bucket shows; a token that sees only itself gets its own value."""
    buckets = max(2, seq)
    buckets += buckets % 2
    q, k, v = torch.randn(3, 2, seq, 2, 8).unbind()
    given = codes(kind, seq, buckets)
    y = shared_codes_attention(q, k, v, given, buckets)
    assert_close([y], [masked_attention(q, k, v, given, given)])
    assert_close([separate_codes_attention(q, k, v, given, given, buckets)], [y])
    if kind == "all in one bucket":
        dense = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        assert_close([y], [dense.transpose(1, 2)])
    if kind == "each in its own":
        assert_close([y], [v])


def test_a_query_without_a_key_gives_zero() -> None:
    """Disjoint codes, and a key that comes only after the query: output and gradients are 0, not NaN."""
    tensors = [t.requires_grad_(True) for t in torch.randn(3, 1, 20, 2, 16).unbind()]
    q_codes, k_codes = torch.zeros(2, 1, 20, 2, dtype=torch.int64).unbind()
    y = separate_codes_attention(*tensors, q_codes, k_codes + 1, 2)
    assert y.eq(0).all() and count_pairs(q_codes, k_codes + 1, 2) == 0
    assert all(g.eq(0).all() for g in torch.autograd.grad(y.sum(), tensors))
    late = torch.where(torch.arange(20)[None, :, None] < 12, k_codes + 1, k_codes)
    y = separate_codes_attention(*tensors, q_codes, late, 2)
    assert y[:, :12].eq(0).all() and y[:, 12:].ne(0).all() and y.isfinite().all()
    with torch.no_grad():
        assert_close([flex_codes_attention(*tensors, q_codes, late)], [y])
    assert count_pairs(q_codes, late, 2) == 2 * 8 * 9 // 2
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), tensors))


@HASHINGS
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_past_does_not_see_the_future(hashing: Any, positions: Any) -> None:
    """Another token at t may sort everything anew, yet outputs before t stay."""
    config = GPTConfig(depth=2, hidden=32, heads=2, seq_len=64, positions=positions)
    torch.manual_seed(0)
    attention = HashSparseAttention(config, hashing=hashing)
    attention.draw(8, seed=1)
    x = 3 * torch.randn(2, 64, 32)
    y = attention(x)
    for t in (1, 2, 40, 63):
        changed = x.clone()
        changed[:, t] = 3 * torch.randn(2, 32)
        assert_close([attention(changed)[:, :t].detach()], [y[:, :t].detach()], 1e-6)
        assert not torch.allclose(attention(changed)[:, t], y[:, t])


@HASHINGS
def test_flex_attention_computes_the_same(hashing: Any) -> None:
    """The forward of the CUDA path; it has no backward on a CPU."""
    torch.manual_seed(0)
    sparse = HashSparseAttention(CONFIG, hashing=hashing)
    flex = HashSparseAttention(CONFIG, hashing=hashing, kernel="flex")
    flex.load_state_dict(sparse.state_dict())
    for attention in (sparse, flex):
        attention.draw(6, seed=3)
    x = 3 * torch.randn(2, 96, 32)
    with torch.no_grad():
        assert_close([flex(x)], [sparse(x)])


def test_directions_are_the_same_wherever_layers_are_made() -> None:
    """In float32 on the CPU, also where new tensors go elsewhere, in another type."""
    wanted = draw_directions(2, 8, 4, seed=3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = draw_directions(2, 8, 4, seed=3)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, wanted) and found.dtype == torch.float32


@pytest.mark.cuda  # compiled FlexAttention has no backward on a CPU
@HASHINGS
def test_compiled_flex_attention_on_cuda(hashing: Any) -> None:
    """Chosen by itself, and equal to the dense way within its tensor cores' precision."""
    config = GPTConfig(depth=2, hidden=128, heads=2, seq_len=512)
    sparse = HashSparseAttention(config, hashing=hashing).cuda()
    dense = MaskedAttention(config, hashing=hashing).cuda()
    dense.load_state_dict(sparse.state_dict())
    for attention in (sparse, dense):
        attention.draw(8, seed=3)
    x = torch.randn(2, 512, 128, device="cuda", requires_grad=True)
    weights = torch.randn_like(x)
    found, wanted = (
        [y, *torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])]
        for module in (sparse, dense)
        for y in [module(x)]
    )
    assert_close(found, wanted, 2e-2)
    assert choose("attention within hash buckets", x.device, x.dtype, 64).name == "flex"


def test_the_hash_keeps_near_vectors_together() -> None:
    """The code depends on the direction only; opposite vectors never share one; the seed decides."""
    directions = draw_directions(2, 16, 8, seed=5)
    assert directions.shape == (2, 16, 4) and directions.equal(draw_directions(2, 16, 8, seed=5))
    assert not directions.equal(draw_directions(2, 16, 8, seed=6))
    x = torch.randn(2, 400, 2, 16)
    found = hash_codes(x, directions)
    assert found.unique().tolist() == list(range(8))
    assert found.equal(hash_codes(7 * x, directions))
    assert (found == hash_codes(-x, directions)).sum() == 0
    near = (found == hash_codes(x + 0.1 * torch.randn_like(x), directions)).float().mean()
    far = (found == hash_codes(torch.randn_like(x), directions)).float().mean()
    assert near > 0.85 and far < 0.2
    wanted = torch.einsum("bshd,hdr->bshr", x, directions)
    assert found.equal(torch.cat((wanted, -wanted), dim=-1).argmax(-1))


def test_size_classes() -> None:
    """Nothing is cut off, an empty bucket costs nothing, and large ones waste an eighth at most."""
    sizes = torch.arange(5000)
    padded = size_class(sizes)
    assert (padded >= sizes).all() and padded[0] == 0 and padded[1] == 16
    assert ((padded - sizes)[128:] <= sizes[128:] / 8).all()
    assert len(padded.unique()) < 60


def test_counted_work_falls_with_the_buckets() -> None:
    """A mask over dense attention would count all pairs, and as many FLOPs as the dense block."""
    config = GPTConfig(depth=2, hidden=64, heads=2, seq_len=512)
    torch.manual_seed(0)
    dense, sparse = Block(config), HashSparseBlock(config)
    assert isinstance(sparse.attention, HashSparseAttention)
    x = torch.randn(1, 512, 64)
    all_flops = count_operations(dense, x)
    attention_flops = 14 * 2 * 512 * 512 * 32
    linear_flops = 6 * 512 * 12 * 64 * 64
    assert all_flops == linear_flops + attention_flops
    for buckets in (2, 4, 8, 16):
        sparse.attention.draw(buckets, seed=0)
        sparse.attention.take_pairs()
        flops = count_operations(sparse, x)
        pairs, dense_pairs = sparse.attention.take_pairs()
        assert dense_pairs == 2 * 512 * 513 // 2
        assert 1 / buckets <= pairs / dense_pairs < 1.5 / buckets
        # Padding to size classes and hashing come on top of the pairs.
        assert flops - linear_flops < (1.7 * pairs / dense_pairs + 0.02) * attention_flops


def test_the_schedule_decides_buckets_by_block_and_batch() -> None:
    """Dense, then the first half of the blocks, then all; the pairs that are computed follow."""
    scenario = SparseAttention(batches=(2, 4, 6), buckets=(4, 8, 1), blocks=(0.5, 1.0, 1.0))
    engine = FakeEngine(scenario)
    found = []
    for batch in range(7):
        run(engine, scenario, range(batch, batch + 1))
        found.append(scenario.report(engine))
    assert [report["buckets by block"] for report in found] == [
        [1, 1, 1, 1], [1, 1, 1, 1], [4, 4, 1, 1], [4, 4, 1, 1], [8, 8, 8, 8], [8, 8, 8, 8], [1, 1, 1, 1],
    ]  # fmt: skip
    for report in found:
        dense = 2 * 2 * 12 * 13 // 2
        for buckets, pairs, density in zip(
            report["buckets by block"], report["pairs by block"], report["density by block"], strict=True
        ):
            assert density == pytest.approx(pairs / dense, abs=1e-4)
            assert (pairs == dense) if buckets == 1 else (pairs < 0.9 * dense)
    assert found[2]["sparse blocks"] == "2 of 4" and found[2]["kernel"] == "sdpa"
    assert sum(found[4]["pairs by block"]) < sum(found[2]["pairs by block"]) < sum(found[0]["pairs by block"])


def test_hashes_are_drawn_from_seed_layer_and_batch_alone() -> None:
    """Not from the default generator; anew after some batches if wanted; each layer its own."""

    def directions(batch: int, **settings: Any) -> list[Tensor]:
        scenario = SparseAttention(batches=(0,), buckets=(4,), blocks=(1.0,), **settings)
        engine = FakeEngine(scenario)
        torch.manual_seed(batch)
        state = torch.get_rng_state()
        scenario.before_batch(engine, batch)
        assert torch.get_rng_state().equal(state)
        return [layer.attention.directions for layer in engine.layers[1:-1]]

    first = directions(0)
    assert not first[0].equal(first[1])
    assert all(a.equal(b) for a, b in zip(first, directions(5), strict=True))
    assert not first[0].equal(directions(0, seed=1)[0])
    redrawn = [directions(batch, redraw_every=3)[0] for batch in range(5)]
    assert redrawn[0].equal(redrawn[2]) and not redrawn[2].equal(redrawn[3]) and redrawn[3].equal(redrawn[4])


def test_one_layer_and_one_token() -> None:
    """The smallest model and the shortest sequence train."""
    scenario = SparseAttention(batches=(0,), buckets=(4,), blocks=(1.0,))
    model = GPTConfig(depth=1, hidden=8, heads=1, seq_len=1, vocab_size=8)
    losses = run(FakeEngine(scenario, model), scenario, range(3))
    assert losses[-1] < losses[0]


def test_bfloat16_trains() -> None:
    """Codes, kernels and counts take bf16."""
    for hashing in ("shared", "separate"):
        attention = HashSparseAttention(CONFIG, hashing=hashing).bfloat16()
        attention.draw(4, seed=0)
        assert attention.directions.dtype == torch.bfloat16 and attention.pairs.dtype == torch.int64
        found = backward(attention, torch.randn(2, 96, 32).bfloat16())
        assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in found)


def test_settings_without_a_meaning() -> None:
    """All problems in one message; a model without a plain block is refused."""
    with pytest.raises(ValueError, match="buckets=5 must be even.*; blocks=2.0 .*; hashing='x' is unknown.*; redraw"):
        wrong: Any = {"hashing": "x", "redraw_every": -1}
        SparseAttention(batches=(0,), buckets=(5,), blocks=(2.0,), **wrong)
    with pytest.raises(ValueError, match="batches has 2 entries, buckets has 1 entries.*give one"):
        SparseAttention(batches=(0, 1), buckets=(2,), blocks=(1.0,))
    with pytest.raises(ValueError, match=r"batches=\[3, 3\] must be increasing.*kernel='x' is unknown.*auto"):
        SparseAttention(batches=(3, 3), buckets=(2, 0), blocks=(1.0, 1.0), kernel="x")
    with pytest.raises(ValueError, match="no plain block"):
        SparseAttention().layers(TINY, [LayerSpec(torch.nn.Linear, 2, 2)])
    assert [spec.typename for spec in build_layers(SparseAttention(), TINY)][1:-1] == [HashSparseBlock] * 4


def test_rotary_positions_do_not_move_codes() -> None:
    """Equal content has one code wherever it stands."""
    config = GPTConfig(depth=2, hidden=32, heads=2, seq_len=96, positions="rotary")
    attention = HashSparseAttention(config, hashing="separate")
    attention.draw(8, seed=0)
    x = torch.randn(1, 1, 32).expand(1, 96, 32)
    attention(x)
    q, k, _ = attention.qkv(x).view(1, 96, 3, 2, 16).unbind(2)
    q_codes, k_codes = attention.codes(q, k)
    assert q_codes.eq(q_codes[:, :1]).all() and k_codes.eq(k_codes[:, :1]).all()
    turned = rotate(q.transpose(1, 2), attention.cos, attention.sin).transpose(1, 2)
    assert not hash_codes(turned, attention.directions).eq(q_codes).all()
    assert isinstance(attention, Attention)


def test_the_configuration_brings_a_long_model() -> None:
    """Unless the command line names another; the override shown in the file's comment is accepted."""
    shown = ["scenario.batches=[6,30]", "scenario.buckets=[8,32]", "scenario.blocks=[1.0,1.0]"]
    with initialize_config_dir(config_dir=str(config_folder()), version_base=None):
        long = compose("config", overrides=["scenario=sparse_attention", *shown])
        tiny = compose("config", overrides=["scenario=sparse_attention", "model=gpt_tiny"])
        none = compose("config", overrides=["scenario=none"])
    assert (long.model.seq_len, tiny.model.seq_len, none.model.seq_len) == (1024, 32, 128)
    assert long.scenario.buckets == [8, 32] and "model" not in long.scenario
