"""A GPT as a list of pipeline layers, shared by all scenarios.

Every layer takes one tensor and returns one tensor, so a stage boundary may fall between any two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Size and kind of a GPT.

    Attributes:
        depth: number of transformer blocks.
        hidden: width of the residual stream.
        heads: attention heads; must divide ``hidden``.
        seq_len: longest sequence in tokens.
        vocab_size: number of token ids; 256 for bytes.
        positions: ``"learned"`` (a vector a position, added to the embedding) or ``"rotary"``
            (queries and keys are rotated in every block).
        mlp_ratio: width of the MLP's middle over ``hidden``.
        dropout: probability, on the outputs of attention and MLP.
        tied: whether the head uses the embedding's weight (two layers of one ``TiedLayerSpec``).
    """

    depth: int = 12
    hidden: int = 256
    heads: int = 4
    seq_len: int = 128
    vocab_size: int = 256
    positions: Literal["learned", "rotary"] = "learned"
    mlp_ratio: int = 4
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have, all problems at once."""
        problems = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("depth", "hidden", "heads", "seq_len", "vocab_size", "mlp_ratio")
            if getattr(self, name) < 1
        ]
        if not problems and self.hidden % self.heads:
            problems.append(f"heads={self.heads} must divide hidden={self.hidden}")
        elif not problems and self.positions == "rotary" and (self.hidden // self.heads) % 2:
            problems.append(
                f"hidden / heads = {self.hidden // self.heads} must be even for rotary positions"
            )
        if self.positions not in ("learned", "rotary"):
            problems.append(f"positions={self.positions!r} must be 'learned' or 'rotary'")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout={self.dropout} must be in [0, 1)")
        if problems:
            raise ValueError("model: " + "; ".join(problems))


class Embedding(nn.Module):
    """Token embedding, plus learned positions when the config says so."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.vocab_size, config.hidden) * INIT_STD)
        self.positions: nn.Parameter | None = None
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.randn(config.seq_len, config.hidden) * INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids ``[batch, seq]`` to activations ``[batch, seq, hidden]``."""
        x = F.embedding(tokens, self.weight)
        return x if self.positions is None else x + self.positions[: tokens.shape[1]]


def rotary_table(seq_len: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (RoFormer, Su et al. 2021, equation 34).

    Args:
        seq_len: number of positions.
        head_dim: width of a head; even.

    Returns:
        Two tensors ``[seq_len, head_dim / 2]``, the angle of pair ``i`` at position ``t`` being
        ``t * 10000 ** (-2 i / head_dim)``.
    """
    rate = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.arange(seq_len, dtype=torch.float32)[:, None] * rate
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(x[i], x[i + head_dim / 2])`` of ``[..., seq, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[: x.shape[-2]].to(x.dtype), sin[: x.shape[-2]].to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)
        self.rotary = config.positions == "rotary"
        if self.rotary:
            cos, sin = rotary_table(config.seq_len, config.hidden // config.heads)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.rotary:
            q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, hidden))


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.mlp_ratio * config.hidden)
        self.down = nn.Linear(config.mlp_ratio * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """A pre-LN transformer block: attention and MLP, each behind a LayerNorm and a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        # Residual projections start smaller, so that the stream's variance does not grow with depth
        # (GPT-2, Radford et al. 2019, section 2.3).
        scaled = {id(self.attention.out), id(self.mlp.down)}
        for module in self.modules():
            if isinstance(module, nn.Linear):
                std = INIT_STD / math.sqrt(2 * config.depth) if id(module) in scaled else INIT_STD
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class FinalNorm(nn.LayerNorm):
    """The LayerNorm before a tied head (an untied :class:`Head` has its own)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.hidden)


class Head(nn.Module):
    """Final LayerNorm and the projection to logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.project = nn.Linear(config.hidden, config.vocab_size, bias=False)
        nn.init.normal_(self.project.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations ``[batch, seq, hidden]`` to logits ``[batch, seq, vocab]``."""
        return self.project(self.norm(x))


def _project_with_embedding(embedding: Embedding, x: Tensor) -> Tensor:
    """Use the embedding's weight as the head's (tied models)."""
    return F.linear(x, embedding.weight)


def gpt_layers(config: GPTConfig) -> list[LayerSpec]:
    """List the layers of a GPT: embedding, ``depth`` blocks, head.

    Args:
        config: the model's size and kind.

    Returns:
        ``depth + 2`` specs (``depth + 3`` when tied: the final norm is then a layer of its own).
    """
    blocks = [LayerSpec(Block, config) for _ in range(config.depth)]
    if not config.tied:
        return [LayerSpec(Embedding, config), *blocks, LayerSpec(Head, config)]
    head = TiedLayerSpec("embedding", Embedding, config, forward_fn=_project_with_embedding)
    return [
        TiedLayerSpec("embedding", Embedding, config),
        *blocks,
        LayerSpec(FinalNorm, config),
        head,
    ]


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats a token, computed in float32.

    Args:
        logits: ``[batch, seq, vocab]``.
        labels: next token ids, ``[batch, seq]``.

    Returns:
        A scalar tensor.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
