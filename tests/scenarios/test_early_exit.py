"""Early exit: against a dense reference, the work it saves, its losses, its calibration, and its edges."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from scenarios.early_exit import EarlyExit
from scenarios.early_exit.blocks import ExitBlock
from scenarios.early_exit.confidence import Audit, Decay, measure_confidence, thresholds
from scenarios.early_exit.exits import Exit, ExitHead, exit_loss, read_audit
from scenarios.early_exit.rows import ActiveRows, attend_padded, attend_row_by_row
from scenarios.early_exit.state import STILL_IN, ExitState
from scenarios.gpt import Block, GPTConfig, gpt_layers, loss_fn, rotate
from scenarios.scenario import build_layers
from tests.scenarios.fakes import FakeEngine

MODEL = GPTConfig(depth=4, hidden=16, heads=2, seq_len=12, vocab_size=32)
ROTARY = GPTConfig(depth=4, hidden=16, heads=2, seq_len=12, vocab_size=32, positions="rotary")
EVERY = {"first_exit": 1, "exit_interval": 1}


# -- dense references ----------------------------------------------------------------------------


def dense_block(block: ExitBlock, x: Tensor, active: Tensor) -> Tensor:
    """Compute every token with masks alone, as an independent formula."""
    batch, seq, hidden = x.shape
    attention = block.attention
    q, k, v = attention.qkv(block.norm1(x)).view(batch, seq, 3, attention.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    if attention.rotary:
        q, k = rotate(q, attention.cos, attention.sin), rotate(k, attention.cos, attention.sin)
    sees = torch.ones(seq, seq, dtype=torch.bool).tril().expand(batch, seq, seq)
    if not block.visible:
        sees = sees & active[:, None, :]
    sees = sees | torch.eye(seq, dtype=torch.bool)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~sees[:, None], -math.inf)
    y = x + attention.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, hidden))
    y = y + block.mlp(block.norm2(y))
    return torch.where(active[..., None], y, x)


def dense_loss(layers: list[Any], tokens: Tensor, labels: Tensor, scenario: EarlyExit) -> tuple[Tensor, Tensor]:
    """Compute the loss of all exits from dense logits of all tokens; returns it and where each token left."""
    plan = scenario.plan
    x = layers[0](tokens).stream
    batch, seq = tokens.shape
    left_at = torch.full((batch, seq), plan.num_exits)
    position = torch.arange(seq)
    entropies, confidences, predictions = [], [], []
    for block in layers[1:-1]:
        before, x = x, dense_block(block, x, left_at == plan.num_exits)
        if block.exit is None:
            continue
        logits = block.exit.project(block.exit.norm(x))
        entropies.append(F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"))
        confidence = measure_confidence(
            plan.measure, logits=logits, before=before, after=x, classifier=block.exit.classifier
        )
        confidences.append(confidence)
        predictions.append(logits.argmax(-1))
        limit = torch.tensor(block.exit.threshold).expand(seq)
        if plan.decay.temperature is not None and math.isfinite(block.exit.threshold):
            limit = 0.9 * limit + 0.1 * torch.exp(-plan.decay.temperature * position / scenario.plan.decay.seq_len)
        leaves = (left_at == plan.num_exits) & (confidence >= limit) & ~stays(tokens, plan.audit_every)
        left_at = torch.where(leaves, block.exit.number, left_at)
    logits = layers[-1].project(layers[-1].norm(x))
    entropies.append(F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"))
    total = torch.zeros(())
    for b, t in itertools.product(range(batch), range(seq)):
        weights, left = plan.loss_weights, int(left_at[b, t])
        if t == seq - 1:
            total = total + sum(weights) * entropies[-1][b, t]
            continue
        for number in range(left):
            total = total + weights[number] * entropies[number][b, t]
        total = total + sum(weights[left:]) * entropies[left][b, t]
    total = total / tokens.numel()
    if plan.measure == "classifier":
        same = torch.stack(predictions, -1) == logits.argmax(-1)[..., None]
        ends = left_at == plan.num_exits
        total = total + F.binary_cross_entropy(torch.stack(confidences, -1)[ends], same[ends].float())
    return total, left_at


def stays(tokens: Tensor, audit_every: int) -> Tensor:
    """Say who never leaves: the last position, and evenly spaced auditors."""
    position = torch.arange(tokens.shape[1])
    auditors = [(position + sum(row)) % audit_every == 0 if audit_every else position < 0 for row in tokens.tolist()]
    return torch.stack(auditors) | (position == tokens.shape[1] - 1)


def build(scenario: EarlyExit, model: GPTConfig = MODEL) -> list[Any]:
    """Build a model whose predictions differ enough for some tokens to leave and some not."""
    torch.manual_seed(0)
    layers: list[Any] = [spec.build() for spec in build_layers(scenario, model)]
    with torch.no_grad():
        for layer in layers:
            for name, parameter in layer.named_parameters():
                scale = 40 if "project" in name else 8 if parameter.dim() > 1 else 1
                parameter.mul_(scale).add_(0.1 * torch.randn_like(parameter))
    return layers


def forward(layers: list[Any], tokens: Tensor) -> Any:
    """Run all layers."""
    x: Any = tokens
    for layer in layers:
        x = layer(x)
    return x


def data(model: GPTConfig = MODEL, batch: int = 3) -> tuple[Tensor, Tensor]:
    """Draw tokens and labels."""
    rows = torch.randint(model.vocab_size, (batch, model.seq_len + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:]


def gradients(layers: list[Any], loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every parameter."""
    named = {f"{i}.{name}": p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True))


def state_of(stream: Tensor, active: Tensor, num_slots: int = 3) -> ExitState:
    """Make a state in which some tokens have left at the first exit."""
    slots = (*active.shape, num_slots)
    return ExitState(
        stream, torch.randint(MODEL.vocab_size, active.shape), torch.where(active, STILL_IN, 0), torch.zeros(()),
        torch.zeros(slots), torch.zeros(slots, dtype=torch.int64),
    )  # fmt: skip


# -- one block -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [MODEL, ROTARY], ids=["learned", "rotary"])
@pytest.mark.parametrize("left_tokens", ["invisible", "visible"])
def test_a_block_equals_the_dense_one_with_a_mask(left_tokens: Any, model: GPTConfig) -> None:
    """Output, input gradient and weight gradients; rows of different lengths, one of them without tokens."""
    block = build(EarlyExit(left_tokens=left_tokens, calibrate="never"), model)[1]
    torch.manual_seed(1)
    active = torch.rand(4, model.seq_len) < 0.6
    active[1], active[3] = False, True
    streams = [torch.randn(4, model.seq_len, model.hidden).requires_grad_(True)]
    streams.append(streams[0].detach().clone().requires_grad_(True))
    outputs = [block(state_of(streams[0], active)).stream, dense_block(block, streams[1], active)]
    weight = torch.randn_like(outputs[0])
    for output, stream in zip(outputs, streams, strict=True):
        output.backward(weight, inputs=[stream, *block.parameters()])
        found = [stream.grad, *(p.grad for p in block.parameters())]
        if stream is streams[0]:
            mine = [g.clone() for g in found]
            for parameter in block.parameters():
                parameter.grad = None
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine, found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("visible", [False, True])
def test_both_ways_to_attend_agree(visible: bool) -> None:
    """The padded call that CUDA makes, tried here, gives what the calls row by row give."""
    torch.manual_seed(0)
    active = torch.rand(4, 9) < 0.5
    active[2] = False
    rows = ActiveRows.of(active)
    q = torch.randn(rows.count, 2, 4, requires_grad=True)
    k, v = (torch.randn(active.numel() if visible else rows.count, 2, 4, requires_grad=True) for _ in range(2))
    results = []
    for attend in (attend_row_by_row, attend_padded):
        y = attend(q, k, v, rows)
        results.append([y, *torch.autograd.grad(y.sin().sum(), (q, k, v))])
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.cuda  # FlashAttention over packed rows
def test_a_block_on_cuda() -> None:
    """Every kernel that CUDA chooses gives the dense reference."""
    for left_tokens, dtype in itertools.product(("invisible", "visible"), (torch.float32, torch.bfloat16)):
        settings: Any = {"left_tokens": left_tokens, "calibrate": "never"}
        block = build(EarlyExit(**settings))[1].to("cuda", dtype)
        active = torch.rand(4, MODEL.seq_len) < 0.6
        stream = torch.randn(4, MODEL.seq_len, MODEL.hidden)
        state = ExitState(*(t.cuda() for t in state_of(stream.to(dtype), active)))
        mine = block(state).stream.cpu().float()
        reference = dense_block(block.cpu().float(), stream.to(dtype).float(), active)
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(mine, reference, atol=tolerance, rtol=tolerance)


def flops(block: nn.Module, active: Tensor) -> int:
    """Count a forward and backward."""
    stream = torch.randn(*active.shape, MODEL.hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        block(state_of(stream, active)).stream.sum().backward()
    return int(counter.get_total_flops())


def test_tokens_that_left_do_no_work() -> None:
    """Counted operations fall with the tokens: a mask over dense work would count as much as before."""
    active = torch.ones(4, MODEL.seq_len, dtype=torch.bool)
    half = torch.arange(active.numel()).view_as(active) % 2 == 0
    blocks = {
        left: build(EarlyExit(left_tokens=left, calibrate="never"))[1]  # type: ignore[arg-type]
        for left in ("invisible", "visible")
    }
    dense = flops(blocks["invisible"], active)
    assert flops(blocks["visible"], active) == dense
    assert flops(blocks["invisible"], half) <= 0.5 * dense
    # Keys and values, a sixth of the projections of a block, are computed for all tokens.
    assert 0.5 * dense < flops(blocks["visible"], half) <= 0.6 * dense
    assert flops(blocks["invisible"], torch.zeros_like(active)) == 0
    assert flops(blocks["visible"], torch.zeros_like(active)) == 0


@pytest.mark.parametrize("left_tokens", ["invisible", "visible"])
def test_a_block_without_tokens(left_tokens: Any) -> None:
    """Its stream goes through, every parameter has a gradient of zero, and flags are as always."""
    block = build(EarlyExit(left_tokens=left_tokens, **EVERY))[2]
    stream = torch.randn(2, MODEL.seq_len, MODEL.hidden, requires_grad=True)
    state = block(state_of(stream, torch.zeros(2, MODEL.seq_len, dtype=torch.bool)))
    assert torch.equal(state.stream, stream)
    assert state.stream.requires_grad and state.loss.requires_grad and float(state.loss.detach()) == 0
    (state.stream.sum() + state.loss).backward()
    assert torch.equal(stream.grad, torch.ones_like(stream))  # type: ignore[arg-type]
    assert all(p.grad is not None and not p.grad.any() for p in block.parameters())


# -- the whole model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "threshold"),
    [
        ({"left_tokens": "invisible"}, 0.15),
        ({"left_tokens": "visible", "confidence": "state", "decay": None}, 0.75),
        ({"left_tokens": "visible", "confidence": "classifier", "audit_every": 3}, 0.5),
        ({"confidence": "probability", "loss_weights": "equal", "decay": None, "audit_every": 0}, 0.5),
    ],
    ids=["softmax", "state", "classifier", "adpc"],
)
def test_loss_and_gradients_equal_the_dense_model(settings: dict[str, Any], threshold: float) -> None:
    """The same tokens leave at the same exits, and count as they would if every exit had seen every token."""
    scenario = EarlyExit(**EVERY, **settings, threshold=threshold, calibrate="never", first_batch=0)
    layers = build(scenario)
    scenario.before_batch(_engine(layers), 0)
    tokens, labels = data()
    output = forward(layers, tokens)
    loss = exit_loss(output, labels)
    reference, left_at = dense_loss(layers, tokens, labels, scenario)
    left = [(left_at == number).sum().item() for number in range(scenario.plan.num_exits + 1)]
    assert sum(n > 0 for n in left) >= 3, f"a test of little: {left}"
    assert layers[-1].take_left() == left
    torch.testing.assert_close(loss, reference, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(layers, loss), gradients(layers, reference), atol=1e-5, rtol=1e-5)


def _engine(layers: list[Any]) -> Any:
    """Hold layers as a stage does."""
    engine = FakeEngine.__new__(FakeEngine)
    engine.layers, engine.partition, engine.device = layers, (0, len(layers)), torch.device("cpu")
    return engine


def test_nobody_leaves_before_the_first_batch() -> None:
    """The blocks are then the plain ones, and the head's prediction is the plain model's."""
    scenario = EarlyExit(first_batch=5, loss_weights="equal")
    layers = build(scenario)
    scenario.before_batch(_engine(layers), 4)
    plain: list[Any] = [spec.build() for spec in gpt_layers(MODEL)]
    for mine, other in zip(layers, plain, strict=True):
        other.load_state_dict(mine.state_dict(), strict=False)
    tokens, labels = data()
    output = forward(layers, tokens)
    assert torch.equal(output.logits.view(3, MODEL.seq_len, -1), forward(plain, tokens))
    for layer in layers:
        layer.eval()
    torch.testing.assert_close(exit_loss(forward(layers, tokens), labels), loss_fn(forward(plain, tokens), labels))


def test_evaluation_counts_the_prediction_that_a_token_left_with() -> None:
    """One cross entropy a token, and no auditors."""
    scenario = EarlyExit(**EVERY, threshold=0.15, calibrate="never", first_batch=0, audit_every=2, decay=None)
    layers = build(scenario)
    scenario.before_batch(_engine(layers), 0)
    tokens, labels = data()
    for layer in layers:
        layer.eval()
    loss = exit_loss(forward(layers, tokens), labels)
    plan = scenario.plan
    object.__setattr__(plan, "audit_every", 0)
    object.__setattr__(plan, "loss_weights", (0.0,) * 3 + (1.0,))  # all before leaving count nothing
    reference, left_at = dense_loss(layers, tokens, labels, scenario)
    assert (left_at < 3).any() and (left_at == 3).any()
    assert float(loss.detach()) == pytest.approx(float(reference.detach()), rel=1e-5)
    assert layers[-1].take_left() == [0] * 4  # evaluation is not counted


@pytest.mark.parametrize("left_tokens", ["invisible", "visible"])
@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (MODEL, 3),
        (MODEL, 1),
        (GPTConfig(depth=1, hidden=16, heads=2, seq_len=12, vocab_size=32), 2),
        (GPTConfig(depth=3, hidden=16, heads=2, seq_len=1, vocab_size=32), 2),
        (GPTConfig(depth=3, hidden=16, heads=2, seq_len=5, vocab_size=1), 2),
    ],
    ids=["all leave", "batch 1", "one layer", "sequence 1", "vocabulary 1"],
)
def test_edges(model: GPTConfig, batch: int, left_tokens: Any) -> None:
    """Everybody who may leave does so at the first exit: finite losses, a gradient for every parameter."""
    for confidence in ("softmax", "state", "classifier", "probability"):
        scenario = EarlyExit(**EVERY, confidence=confidence, left_tokens=left_tokens, first_batch=0)  # type: ignore[arg-type]
        layers = build(scenario, model)
        engine = _engine(layers)
        scenario.threshold = -math.inf
        scenario.before_batch(engine, 0)
        tokens, labels = data(model, batch)
        loss = exit_loss(forward(layers, tokens), labels)
        found = gradients(layers, loss)
        assert math.isfinite(loss) and all(g is not None and g.isfinite().all() for g in found.values())
        scenario.after_batch(engine, 0)
        staying = int(stays(tokens, 16).sum())
        assert scenario.active_by_block() == [tokens.numel()] + [staying] * (model.depth - 1)


# -- confidence and calibration ------------------------------------------------------------------


def test_measures_of_confidence() -> None:
    """On states and logits whose answers are known."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    before, after = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [2.0, 0.0]])
    classifier = nn.Linear(2, 1)
    measure: Any
    p = logits.softmax(-1)
    expected = {
        "softmax": [p[0, 0] - p[0, 1], 0.0], "probability": [p[0, 0], 1 / 3], "state": [1.0, 0.0],
        "classifier": torch.sigmoid(classifier(after)).flatten().tolist(),
    }  # fmt: skip
    for measure, values in expected.items():
        given = {"logits": logits, "before": before, "after": after, "classifier": classifier}
        torch.testing.assert_close(measure_confidence(measure, **given).detach(), torch.tensor(values))  # type: ignore[arg-type]


def test_the_decaying_threshold() -> None:
    """Holding scores against one number is holding confidences against CALM's threshold."""
    confidence, positions = torch.rand(200), torch.arange(200) % 50
    for threshold in (0.0, 0.3, 0.8, 1.0):
        limit = (0.9 * threshold + 0.1 * torch.exp(-4.0 * positions / 50)).clamp(0, 1)
        assert torch.equal(Decay(4.0, 50).score(confidence, positions) >= threshold, confidence >= limit)
        assert torch.equal(Decay(None, 50).score(confidence, positions) >= threshold, confidence >= threshold)


def test_auditors_tell_what_every_threshold_would_do() -> None:
    """Blocks and disagreement for each threshold are those of a model run with that threshold."""
    scenario = EarlyExit(**EVERY, audit_every=1, first_batch=0, confidence="state")
    layers = build(scenario)
    tokens, _ = data()
    head: ExitHead = layers[-1]
    predictions = []
    head.register_forward_pre_hook(lambda module, args: predictions.append(args[0].predictions))
    final = forward(layers, tokens).logits.argmax(-1).view_as(tokens)
    audit = read_audit(head.take_audit())
    assert audit.count == tokens.numel() and read_audit(head.take_audit()).count == 0
    object.__setattr__(scenario.plan, "visible", False)
    state: Any = tokens
    for layer in layers[:-1]:
        state = layer(state)
    scores = scenario.plan.decay.score(state.confidences, torch.arange(12)[:, None])
    for chosen in range(0, len(thresholds()), 40):
        blocks = differing = 0
        for b, t in itertools.product(range(3), range(12)):
            exits = [k for k in range(3) if scores[b, t, k] >= thresholds()[chosen]]
            blocks += exits[0] + 1 if exits else 4
            differing += bool(exits) and int(predictions[0][b, t, exits[0]] != final[b, t])
        assert float(audit.blocks[chosen]) == pytest.approx(blocks / 36)
        assert float(audit.differing[chosen]) == pytest.approx(differing / 36)


def test_calibration() -> None:
    """The highest threshold for a share of the work; the lowest that is consistent beyond doubt."""
    count = len(thresholds())
    blocks = torch.linspace(2, 10, count, dtype=torch.float64)
    differing = torch.linspace(0.5, 0, count, dtype=torch.float64)
    audit = Audit(blocks=blocks, differing=differing, count=400)
    chosen = audit.for_share(0.5, 10)
    assert blocks[chosen] <= 5 < blocks[chosen + 1]
    assert audit.for_share(0.1, 10) == 0 and audit.for_share(1.0, 10) == count - 1
    slack = math.sqrt(math.log(1 / 0.05) / (2 * 400))  # Hoeffding
    chosen = audit.for_consistency(0.2, 0.05)
    assert differing[chosen] <= 0.2 - slack < differing[chosen - 1]
    few = Audit(blocks=blocks, differing=differing, count=10)
    assert few.for_consistency(0.2, 0.05) == count - 1
    always = Audit(blocks=blocks, differing=differing.zero_(), count=4000)
    assert always.for_consistency(0.2, 0.05) == 0


def test_a_share_is_reached_and_reported() -> None:
    """After calibration about the target share is computed, from the batch on that the settings name."""
    scenario = EarlyExit(**EVERY, first_batch=2, calibrate_every=1, audit_every=2, target_share=0.5, decay=None)
    layers = build(scenario)
    engine = _engine(layers)
    shares = []
    for batch in range(4):
        scenario.before_batch(engine, batch)
        forward(layers, data(batch=8)[0])
        scenario.after_batch(engine, batch)
        report = scenario.report(engine)
        active, left = report["tokens computed in block"], report["tokens left after block"]
        assert active == [96 - sum(left[:block]) for block in range(4)]
        # Half of the tokens are auditors and run through all blocks, and so does one more of every other row.
        shares.append(sum(active) / (4 * 96))
    assert shares[:2] == [1.0, 1.0]
    assert all(0.65 < share < 0.85 for share in shares[2:])
    assert report["kernel"] == "SDPA row by row" and report["tokens computed"].endswith("%")


# -- settings ------------------------------------------------------------------------------------


def test_settings_without_a_meaning() -> None:
    """All problems at once: value, rule, and what the choices are."""
    settings: dict[str, Any] = {
        "first_exit": 0, "threshold": 1.5, "decay": -1.0, "target_share": 0.0, "confidence": "gut",
        "left_tokens": "gone", "audit_every": 0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="first_exit=0 must be at least 1; threshold=1.5 must be between") as error:
        EarlyExit(**settings)
    for text in ("decay=-1.0", "target_share=0.0", "'gut' must be one of softmax", "'gone'", "asks auditors"):
        assert text in str(error.value)
    with pytest.raises(ValueError, match="learns from auditors"):
        EarlyExit(confidence="classifier", audit_every=0, calibrate="never")


def test_models_that_do_not_fit() -> None:
    """Tied weights, too few blocks, layers that another scenario has changed."""
    with pytest.raises(ValueError, match="model.tied=true does not go with early exit"):
        build_layers(EarlyExit(), GPTConfig(depth=4, tied=True))
    with pytest.raises(ValueError, match="first_exit=4 must be less than model.depth=4"):
        build_layers(EarlyExit(first_exit=4), MODEL)
    with pytest.raises(ValueError, match="has made a Other"):
        EarlyExit().layers(MODEL, [LayerSpec(type("Other", (Block,), {}), MODEL)])


def test_exits_stand_where_the_settings_say() -> None:
    """The weights of their losses are CALM's: depth over the sum of depths."""
    scenario = EarlyExit(first_exit=2, exit_interval=3)
    layers = [spec.build() for spec in build_layers(scenario, GPTConfig(depth=12, hidden=8, heads=2))]
    assert [i for i, layer in enumerate(layers) if isinstance(getattr(layer, "exit", None), Exit)] == [2, 5, 8, 11]
    assert scenario.plan.loss_weights == tuple(block / 38 for block in (2, 5, 8, 11, 12))
    assert scenario.plan.weight_from(0) == pytest.approx(1.0)
