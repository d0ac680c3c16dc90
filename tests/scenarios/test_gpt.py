"""The shared GPT layers."""

from __future__ import annotations

import math

import pytest
import torch

from scenarios.gpt import Block, GPTConfig, gpt_layers, loss_fn, rotary_table, rotate
from tests.scenarios.fakes import TINY


def build(config: GPTConfig) -> list[torch.nn.Module]:
    """Build all layers from one seed."""
    torch.manual_seed(0)
    return [spec.build() for spec in gpt_layers(config)]


def forward(layers: list[torch.nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    """Run layers one after the other, each from one tensor to one tensor."""
    x = tokens
    for layer in layers:
        x = layer(x)
        assert isinstance(x, torch.Tensor)
    return x


def config(**changes: object) -> GPTConfig:
    """Change the tiny model."""
    return GPTConfig(**{**TINY.__dict__, **changes})


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_token_sees_only_its_past(positions: str) -> None:
    """Changing token t changes the logits from t on, and no earlier ones."""
    layers = build(config(positions=positions))
    tokens = torch.randint(32, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 32
    before, after = forward(layers, tokens), forward(layers, changed)
    assert before.shape == (1, 12, 32)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_order_of_tokens_matters(positions: str) -> None:
    """Without positions, attention could not tell the order of the tokens before the last one."""
    layers = build(config(positions=positions))
    tokens = torch.arange(12)[None]
    swapped = tokens.clone()
    swapped[0, [1, 5]] = swapped[0, [5, 1]]
    assert not torch.allclose(forward(layers, tokens)[0, -1], forward(layers, swapped)[0, -1])


def test_rotation_depends_on_distance_alone() -> None:
    """The product of a rotated query and key is a function of their distance (RoFormer, eq. 16)."""
    torch.manual_seed(0)
    cos, sin = rotary_table(20, 8)
    q, k = torch.randn(8), torch.randn(8)
    rows = [rotate(x.expand(20, 8), cos, sin) for x in (q, k)]
    products = rows[0] @ rows[1].T
    for distance in (0, 3, 11):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)
    torch.testing.assert_close(rows[0].norm(dim=1), q.norm().expand(20))


def test_first_loss_is_that_of_guessing() -> None:
    """A fresh model knows nothing: the loss is about log(vocabulary)."""
    tokens = torch.randint(32, (4, 12))
    loss = loss_fn(forward(build(TINY), tokens), tokens).detach()
    assert float(loss) == pytest.approx(math.log(32), abs=0.05)


def test_untied_layers() -> None:
    """Embedding, blocks, head."""
    specs = gpt_layers(TINY)
    assert [spec.typename.__name__ for spec in specs] == ["Embedding", *["Block"] * 4, "Head"]


def test_tied_layers_share_one_key() -> None:
    """The head projects with the embedding's weight."""
    specs = gpt_layers(config(tied=True))
    assert specs[0].key == specs[-1].key == "embedding"
    embedding = specs[0].build()
    x = torch.randn(1, 3, 16)
    assert torch.equal(specs[-1].forward_fn(embedding, x), x @ embedding.weight.T)


def test_residual_projections_start_smaller() -> None:
    """GPT-2's scaling by the number of residual layers."""
    torch.manual_seed(0)
    block = Block(GPTConfig(depth=50, hidden=64, heads=2))
    assert float(block.mlp.down.weight.detach().std()) == pytest.approx(0.002, rel=0.1)
    assert float(block.mlp.up.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_all_problems_in_one_message() -> None:
    """A user fixes the model's size in one go."""
    with pytest.raises(ValueError, match="depth=0.*positions='none'.*dropout=1.0"):
        GPTConfig(depth=0, positions="none", dropout=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="heads=3 must divide hidden=256"):
        GPTConfig(heads=3)
    with pytest.raises(ValueError, match="even for rotary"):
        GPTConfig(hidden=12, heads=4, positions="rotary")


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_tokens_that_are_left_out_leave_the_positions_of_the_others(positions: str) -> None:
    """With their positions given, the first tokens of a text answer the same without the later ones."""
    block = build(config(positions=positions))[1]
    x, where = torch.randn(3, 5, 16), torch.arange(5).expand(3, 5)
    torch.testing.assert_close(block(x), block(x, positions=where), atol=1e-6, rtol=0)
    shifted = block(x, positions=where + 4)
    torch.testing.assert_close(block(x), shifted, atol=1e-5, rtol=0)  # distances alone matter
    stretched = block(x, positions=where * 2)
    assert torch.allclose(block(x), stretched) == (positions == "learned")
