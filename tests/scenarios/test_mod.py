"""Mixture of Depths in one process: the same as a masked dense block, at the cost of the chosen tokens alone."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from scenarios.combined import Combined
from scenarios.data import BatchShape, TokenBatches, load_tokens
from scenarios.gpt import Block, GPTConfig, loss_fn, rotary_table
from scenarios.mod import CapacitySchedule, MixtureOfDepths, RoutedBlock, num_chosen, top_tokens
from scenarios.mod.routing import wanted_tokens
from scenarios.scenario import build_layers, build_scenario
from tests.scenarios.fakes import TINY, FakeEngine, run
from tests.scenarios.routed_fakes import AddingBlock

SEQ = TINY.seq_len
LATER = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)


def routed(capacity: float, *, config: GPTConfig = TINY, block: type[Block] = Block, **settings: Any) -> RoutedBlock:
    """Build a routed block whose weights are large enough to matter."""
    torch.manual_seed(0)
    layer = RoutedBlock(config, LayerSpec(block, config), capacity=capacity, **settings)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
        layer.predictor.down.weight -= layer.predictor.down.weight.mean()  # so that it wants about half
    return layer


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """Put an extra loss beside the stream."""
    return x, torch.tensor(0.0)


def reference(layer: RoutedBlock, x: Tensor, config: GPTConfig) -> Tensor:
    """Equation 1 with all tokens computed and a mask; written without the code under test."""
    scores = (x * layer.router.weight[0]).sum(-1)
    kth = scores.sort(dim=1, descending=True).values[:, num_chosen(layer.capacity, x.shape[1]) - 1]
    chosen = scores >= kth[:, None]
    hidden_keys = LATER | ~chosen[:, None, None, :]
    hidden_keys = hidden_keys & ~torch.eye(SEQ, dtype=torch.bool)  # a row without keys would be NaN
    block = layer.block
    normed = block.norm1(x)
    split = block.attention.qkv(normed).unflatten(-1, (3, config.heads, -1)).movedim(-3, 0).transpose(2, 3)
    q, k, v = split
    if config.positions == "rotary":
        half = q.shape[-1] // 2
        cos, sin = (table.repeat(1, 2) for table in rotary_table(SEQ, 2 * half))
        turned = [torch.cat((-t[..., half:], t[..., :half]), dim=-1) for t in (q, k)]
        q, k = (t * cos + u * sin for t, u in zip((q, k), turned, strict=True))
    products = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(hidden_keys, -math.inf)
    attended = (products.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    middle = x + block.attention.out(attended)
    change = middle + block.mlp(block.norm2(middle)) - x
    return x + change * scores[..., None] * chosen[..., None]


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("capacity", [0.125, 0.25, 0.5, 1.0])
def test_equals_a_masked_dense_block(capacity: float, positions: Any) -> None:
    """Forward, input gradient and the gradient of every weight, the router's included."""
    config = replace(TINY, positions=positions)
    layer = routed(capacity, config=config)
    xs = [torch.randn(3, SEQ, 16, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    outputs = layer(xs[0]), reference(layer, xs[1], config)
    names, weights = zip(*[(n, p) for n, p in layer.named_parameters() if "predictor" not in n], strict=True)
    towards = torch.randn_like(xs[0])
    found, expected = (
        torch.autograd.grad(output, [x, *weights], towards) for output, x in zip(outputs, xs, strict=True)
    )
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(outputs[0], xs[0])
    for name, one, other in zip(("input", *names), found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        assert one.abs().sum() > 0


def flops(layer: torch.nn.Module, x: Tensor) -> int:
    """Count forward and backward."""
    with FlopCounterMode(display=False) as counter:
        output = layer(pair(x.requires_grad_()))
        (output[0].sum() + output[1]).backward()
    return counter.get_total_flops()


def test_operations_fall_with_the_capacity() -> None:
    """A mask over dense work would count as much at every capacity."""
    config = GPTConfig(hidden=64, heads=2, seq_len=64)
    x = torch.randn(2, 64, 64)
    dense = flops(Block(config), x)
    for capacity in (0.0, 0.125, 0.25, 0.5, 1.0):
        layer = routed(capacity, config=config, predictor_width=4)
        assert flops(layer, x) == pytest.approx(capacity * dense, abs=0.02 * dense)
        seen: list[tuple[int, ...]] = []
        layer.block.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(tuple(args[0][0].shape)))
        layer(pair(x))
        assert seen == ([(2, round(64 * capacity), 64)] if capacity else [])


def test_capacity_0_is_the_identity() -> None:
    """Nothing is computed and nothing trains, but the gradient passes."""
    layer, x = routed(0.0), torch.randn(2, SEQ, 16, requires_grad=True)
    output, extra_loss = layer(pair(x))
    output.sum().backward()
    assert torch.equal(output, x) and float(extra_loss) == 0
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(p.grad is None for p in layer.parameters())


def test_capacity_1_is_the_dense_block_with_the_routers_weight() -> None:
    """Every token is computed."""
    layer, x = routed(1.0), torch.randn(2, SEQ, 16)
    expected = x + (x @ layer.router.weight.T) * (layer.block(x) - x)
    torch.testing.assert_close(layer(pair(x))[0], expected)
    torch.testing.assert_close(layer.eval()(x), expected)


def test_chosen_tokens_are_in_order_and_ties_go_to_the_earlier() -> None:
    """So attention among them is causal, and every machine chooses the same."""
    scores = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    assert top_tokens(scores, 3).tokens.tolist() == [[1, 3, 4], [0, 1, 2]]
    assert [num_chosen(c, 128) for c in (0, 0.001, 0.125, 0.5, 1)] == [0, 0, 16, 64, 128]


@pytest.mark.parametrize("capacity", [0.0, 0.125, 0.6, 1.0])
@pytest.mark.parametrize("seq_len", [1, 2])
def test_shortest_sequences_and_one_layer(capacity: float, seq_len: int) -> None:
    """No NaN, also in evaluation."""
    config = GPTConfig(depth=1, hidden=8, heads=2, seq_len=seq_len, vocab_size=16)
    scenario = MixtureOfDepths(capacity=[capacity], blocks=[0])
    engine = FakeEngine(scenario, config)
    assert all(map(math.isfinite, run(engine, scenario, range(2))))
    assert scenario.report(engine)["share of tokens computed by layer"][1] == round(capacity * seq_len) / seq_len
    layer = engine.layers[1].eval()
    assert layer(pair(torch.randn(2, seq_len, 8)))[0].isfinite().all()


def test_the_predictor_trains_without_touching_the_stream() -> None:
    """Its term is 0 with a gradient, and that goes to the predictor alone."""
    layer, x = routed(0.25), torch.randn(2, SEQ, 16, requires_grad=True)
    output, extra_loss = layer((x, torch.tensor(0.5)))
    assert float(extra_loss.detach()) == 0.5
    gradients = torch.autograd.grad(
        extra_loss, [x, *layer.parameters()], retain_graph=True, allow_unused=True, materialize_grads=True
    )
    for (name, _), gradient in zip([("x", x), *layer.named_parameters()], gradients, strict=True):
        assert bool(gradient.abs().sum() > 0) == name.startswith("predictor")
    towards_output = torch.autograd.grad(output.sum(), list(layer.predictor.parameters()), allow_unused=True)
    assert towards_output == (None,) * 3


def test_the_predictor_learns_on_real_text() -> None:
    """Better than chance and than one answer to all, and the language model learns meanwhile."""
    config = GPTConfig(depth=2, hidden=48, heads=2, seq_len=48)
    scenario = MixtureOfDepths(capacity=[0.5], batches=[8])
    engine = FakeEngine(scenario, config)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=4e-3)
    shape = BatchShape(seq_len=48, micro_batch_size=16, num_micro_batches=1)
    data = TokenBatches(load_tokens(), shape, seed=0)
    losses, reports = [], []
    for batch in range(60):
        scenario.before_batch(engine, batch)
        (tokens, labels), *_ = data.micro_batches(batch)
        x: Any = tokens
        for layer in engine.layers:
            x = layer(x)
        loss = loss_fn(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        reports.append(scenario.report(engine))
    assert losses[-1] < 3.2 < 5 < losses[0]
    assert reports[7]["capacity"] == "100.0%" and "predictor accuracy" not in reports[7]
    assert reports[-1]["capacity"] == "50.0%" and "always no: 50%" in reports[-1]["predictor accuracy"]
    accuracy = [report["predictor accuracy by layer"][2] for report in reports[-5:]]
    assert min(accuracy) > 0.65


def test_evaluation_is_causal() -> None:
    """A token that changes leaves what came before it; by rank it would not."""
    x = torch.randn(4, SEQ, 16)
    changed = x.clone()
    changed[:, 8:] += 3.0
    for inference, causal in (("predictor", True), ("top_k", False)):
        layer = routed(0.5, inference=inference).eval()
        before, after = layer(pair(x))[0], layer(pair(changed))[0]
        torch.testing.assert_close(before[:, 8:] == after[:, 8:], torch.zeros(4, SEQ - 8, 16).bool())
        assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6) == causal
    assert layer.counts()[0] == 0, "evaluation is not counted"


@pytest.mark.parametrize("share", [0.0, None, 1.0])
def test_evaluation_computes_what_the_predictor_wants(share: float | None) -> None:
    """None of the tokens, some, different numbers in a batch, all: each sequence as if it were alone."""
    layer, x = routed(0.5).eval(), torch.randn(3, SEQ, 16)
    if share is not None:
        with torch.no_grad():
            layer.predictor.up.bias.fill_(99.0)
            layer.predictor.down.weight.fill_(2 * share - 1)
    together = layer(pair(x))[0]
    torch.testing.assert_close(together, torch.cat([layer(pair(row[None]))[0] for row in x]))
    wanted = layer.predictor(x) > 0
    assert float(wanted.float().mean()) == share or (share is None and len(wanted.sum(dim=1).unique()) > 1)
    assert torch.equal(together[~wanted], x[~wanted])
    assert bool((together[wanted] != x[wanted]).any(dim=-1).all())


def test_rows_of_different_length_are_filled_up() -> None:
    """Behind the wanted tokens, and not counted."""
    tokens, counts = wanted_tokens(torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]]).bool())
    assert counts is not None
    assert tokens.tolist() == [[1, 3], [0, 1]] and counts.tolist() == [[True, True], [True, False]]
    assert wanted_tokens(torch.zeros(2, 4).bool()).tokens.shape == (2, 1)


def test_what_the_inner_block_adds_to_the_loss_is_kept() -> None:
    """With its gradient, and of the computed tokens alone."""
    for capacity in (0.25, 1.0):
        layer, x = routed(capacity, block=AddingBlock), torch.randn(2, SEQ, 16, requires_grad=True)
        found = layer((x, torch.tensor(2.0)))[1]
        tokens = top_tokens(layer.router(x), round(capacity * SEQ)).tokens[..., None].expand(-1, -1, 16)
        expected = layer.block((x.gather(1, tokens), torch.tensor(2.0)))[1]
        torch.testing.assert_close(found, expected)
        assert float(found.detach()) > 2
        one, other = (torch.autograd.grad(loss, x)[0] for loss in (found, expected))
        torch.testing.assert_close(one, other)


def test_dropout_falls_on_the_chosen_tokens() -> None:
    """Two draws differ there and nowhere else; evaluation has none."""
    layer, x = routed(0.25, config=replace(TINY, dropout=0.5)), torch.randn(2, SEQ, 16)
    chosen = top_tokens(layer.router(x), SEQ // 4).tokens
    differ = (layer(x) != layer(x)).any(dim=-1)
    assert differ.gather(1, chosen).all() and differ.sum() == chosen.numel()
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    """The block runs twice, chooses alike, and tells the same shares."""
    gradients, shares = [], []
    for checkpointed in (False, True):
        layer, x = routed(0.25), torch.ones(2, SEQ, 16).cumsum(1).requires_grad_()
        given = (lambda *parts: layer(parts)), *pair(x)  # noqa: B023
        output, extra_loss = checkpoint(*given, use_reentrant=reentrant) if checkpointed else layer(pair(x))
        (output.sum() + extra_loss).backward()
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
        tokens, computed, *_ = layer.counts()
        shares.append(computed / tokens)
    assert shares == [0.25, 0.25]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_layer_travels_with_its_capacity() -> None:
    """Everything is on the layer."""
    layer, x = routed(0.25), torch.randn(2, SEQ, 16)
    layer.capacity = 0.5
    moved = pickle.loads(pickle.dumps(layer))
    assert torch.equal(moved(pair(x))[0], layer(pair(x))[0])


def test_half_precision() -> None:
    """Scores stay float32."""
    layer, x = routed(0.25).bfloat16(), torch.randn(2, SEQ, 16).bfloat16()
    output, extra_loss = layer(pair(x))
    (output.float().sum() + extra_loss).backward()
    assert output.dtype == torch.bfloat16 and layer.router(x).dtype == extra_loss.dtype == torch.float32
    assert layer.eval()(pair(x))[0].isfinite().all()


@pytest.mark.parametrize(
    ("blocks", "routed_layers"),
    [("every_other", [2, 4]), ("later_half", [3, 4]), ("all", [1, 2, 3, 4]), ([0, 3], [1, 4]), ([], [])],
)
def test_which_blocks(blocks: Any, routed_layers: list[int]) -> None:
    """By rule or by index; the embedding is layer 0."""
    specs = build_layers(MixtureOfDepths(blocks=blocks), TINY)
    assert [i for i, spec in enumerate(specs) if spec.typename is RoutedBlock] == routed_layers


def test_the_schedule_and_the_report() -> None:
    """Full capacity before the first entry; each layer's share is told."""
    schedule = CapacitySchedule((2, 4), (0.5, 0.25))
    assert [schedule.at(batch) for batch in (0, 1, 2, 3, 4, 99)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    scenario = MixtureOfDepths(batches=(1, 2), capacity=(0.5, 0.0))
    engine = FakeEngine(scenario)
    shares = []
    for batch in range(3):
        run(engine, scenario, range(batch, batch + 1))
        shares.append(scenario.report(engine)["share of tokens computed by layer"])
    assert shares == [[1.0] * 6, [1, 1, 0.5, 1, 0.5, 1], [1, 1, 0, 1, 0, 1]]
    assert scenario.report(engine)["capacity"] == "0.0%"


def test_over_another_scenario() -> None:
    """Routing wraps the blocks that the other one has made."""
    parts = {"adding": {"name": "tests.scenarios.routed_fakes:Adding"}, "mod": {"capacity": [0.25]}}
    scenario = build_scenario("mod_moe", {"parts": parts})
    assert isinstance(scenario, Combined) and scenario.extra_loss
    engine = FakeEngine(scenario)
    assert [type(layer).__name__ for layer in engine.layers[1:3]] == ["AddingBlock", "RoutedBlock"]
    assert type(engine.layers[2].block) is AddingBlock
    assert all(map(math.isfinite, run(engine, scenario, range(2))))


def test_settings_without_a_meaning() -> None:
    """All problems in one message."""
    with pytest.raises(ValueError) as caught:
        MixtureOfDepths(
            batches=[3, 3], capacity=[1.5], blocks="some", inference="rank", predictor_width=0,  # type: ignore
            predictor_weight=-1,
        )  # fmt: skip
    for part in ("2 entries", "increasing", "shares in", "one of every_other", "one of predictor", "width=0", "-1"):
        assert part in str(caught.value)
    for blocks in ([4], [-1], [1, 1]):
        with pytest.raises(ValueError, match="different indices of blocks from 0 to 3"):
            build_layers(MixtureOfDepths(blocks=blocks), TINY)
