"""A GPT as a list of pipeline layers, shared by all scenarios.

What passes from layer to layer is the residual stream, one tensor. In a model whose layers add to the
loss (a router's balance, say) it is a pair: the stream, and the sum of what the layers so far have added.
Everything a layer needs comes in by that door, so a stage boundary may fall between any two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

INIT_STD = 0.02

_EXTRA_LOSS = "_extra_loss"

# The stream [batch, seq, hidden], or a pair of it and the extra loss, a float32 scalar.
Activation = Tensor | tuple[Tensor, Tensor]


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
        split_blocks: whether attention and MLP of a block are two layers; ``"auto"``: where a stage has few blocks.
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
    split_blocks: bool | Literal["auto"] = False

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


def on_stream(function: Callable[[Tensor], Tensor], activation: Activation) -> Activation:
    """Apply a function to the stream; an extra loss that comes with it is passed on.

    Args:
        function: from ``[batch, seq, hidden]`` to any shape.
        activation: what the layer was given.

    Returns:
        The result in place of the stream.
    """
    if isinstance(activation, Tensor):
        return function(activation)
    stream, extra_loss = activation
    return function(stream), extra_loss


class Embedding(nn.Module):
    """Token embedding, plus learned positions when the config says so.

    Args:
        config: the model's size and kind.
        extra_loss: whether the layers of this model add to the loss.
    """

    def __init__(self, config: GPTConfig, *, extra_loss: bool = False) -> None:
        super().__init__()
        self.extra_loss = extra_loss
        self.weight = nn.Parameter(torch.randn(config.vocab_size, config.hidden) * INIT_STD)
        self.positions: nn.Parameter | None = None
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.randn(config.seq_len, config.hidden) * INIT_STD)

    def forward(self, tokens: Tensor) -> Activation:
        """Map token ids ``[batch, seq]`` to the stream ``[batch, seq, hidden]``, and an extra loss of 0."""
        x = F.embedding(tokens, self.weight)
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]]
        return (x, torch.zeros((), device=x.device)) if self.extra_loss else x


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
    cos, sin = (table[..., : x.shape[-2], :].to(x.dtype) for table in (cos, sin))
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def init_linear(linear: nn.Linear, *, depth: int | None = None) -> None:
    """Draw the weights of a linear layer as GPT-2 does (Radford et al. 2019, section 2.3).

    Args:
        linear: gets normal weights and a bias of 0.
        depth: number of blocks, for the projections that add to the stream: they start smaller, so that
            the stream's variance does not grow with depth.
    """
    nn.init.normal_(linear.weight, std=INIT_STD if depth is None else INIT_STD / math.sqrt(2 * depth))
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)
        init_linear(self.qkv)
        init_linear(self.out, depth=config.depth)
        self.rotary = config.positions == "rotary"
        if self.rotary:
            cos, sin = rotary_table(config.seq_len, config.hidden // config.heads)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape.

        Args:
            x: tokens in the order of their positions.
            positions: position of every token in the text, ``[batch, seq]``, where some are left out;
                0, 1, 2, … without it.
        """
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.rotary:
            cos, sin = self.cos, self.sin
            if positions is not None:
                cos, sin = cos[positions][:, None], sin[positions][:, None]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, hidden))


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.mlp_ratio * config.hidden)
        self.down = nn.Linear(config.mlp_ratio * config.hidden, config.hidden)
        init_linear(self.up)
        init_linear(self.down, depth=config.depth)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """A pre-LN transformer block: attention and MLP, each behind a LayerNorm and a residual.

    A scenario's block overrides :meth:`make_attention`, :meth:`make_mlp` or :meth:`transform`. A module
    inside that adds to the loss says so with :func:`add_extra_loss` while it runs.

    Attributes:
        part: which of :attr:`part_names` it is, if it is not the whole block (see ``dynpipe_ds.split_layers``).
    """

    part_names: ClassVar[tuple[str, ...]] = ("attention", "mlp")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.part: str | None = None
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = self.make_attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = self.make_mlp(config)
        self.dropout = nn.Dropout(config.dropout)

    def make_attention(self, config: GPTConfig) -> nn.Module:
        """Build what maps the normalised stream to attention's contribution."""
        return Attention(config)

    def make_mlp(self, config: GPTConfig) -> nn.Module:
        """Build what maps the normalised stream to the MLP's contribution."""
        return MLP(config)

    def forward(self, activation: Activation, **where: Tensor) -> Activation:
        """Map the stream ``[batch, seq, hidden]`` to the same shape; add up extra losses, if any.

        Args:
            activation: the stream, or a pair.
            **where: ``positions`` of the tokens, for :class:`Attention`, where some are left out.
        """
        if isinstance(activation, Tensor):
            return self.transform(activation, **where)
        stream, extra_loss = activation
        stream = self.transform(stream, **where)
        return stream, extra_loss + take_extra_losses(self)

    def transform(self, x: Tensor, **where: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        if self.part != "mlp":
            x = x + self.dropout(self.attention(self.norm1(x), **where))
        return x if self.part == "attention" else self.add_mlp(x)

    def add_mlp(self, x: Tensor) -> Tensor:
        """Add the MLP's contribution to ``[..., hidden]``."""
        if self.part == "mlp" and self.training and self.dropout.p:
            self.dropout(torch.zeros_like(x))  # the draws that the attention of a whole block makes first
        return x + self.dropout(self.mlp(self.norm2(x)))

    def keep_part(self, part: str) -> None:
        """Let go of the other half, whose names stay and hold nothing.

        Args:
            part: one of :attr:`part_names`.
        """
        self.part = part
        for name in ("norm2", "mlp") if part == "attention" else ("norm1", "attention"):
            setattr(self, name, None)


def add_extra_loss(module: nn.Module, loss: Tensor) -> None:
    """Add a term to the loss of the micro-batch that runs; call it in ``forward``.

    The block that holds the module picks the term up within the same call, so no cut can part them.

    Args:
        module: a module inside a :class:`Block` of a model with ``extra_loss``.
        loss: scalar, weighted as it shall count.
    """
    object.__setattr__(module, _EXTRA_LOSS, loss)


def take_extra_losses(block: nn.Module) -> Tensor | float:
    """Sum what the modules of a block have added in this call, and forget it."""
    total: Tensor | float = 0.0
    for module in block.modules():
        loss = module.__dict__.pop(_EXTRA_LOSS, None)
        if loss is not None:
            total = total + loss.float()
    return total


class FinalNorm(nn.LayerNorm):
    """The LayerNorm before a tied head (an untied :class:`Head` has its own)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.hidden)

    def forward(self, activation: Activation) -> Activation:
        """Normalise the stream ``[batch, seq, hidden]``."""
        return on_stream(super().forward, activation)


class Head(nn.Module):
    """Final LayerNorm and the projection to logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.project = nn.Linear(config.hidden, config.vocab_size, bias=False)
        nn.init.normal_(self.project.weight, std=INIT_STD)

    def forward(self, activation: Activation) -> Activation:
        """Map the stream ``[batch, seq, hidden]`` to logits ``[batch, seq, vocab]``."""
        return on_stream(lambda x: self.project(self.norm(x)), activation)


def _project_with_embedding(embedding: Embedding, activation: Activation) -> Activation:
    """Use the embedding's weight as the head's (tied models)."""
    return on_stream(lambda x: F.linear(x, embedding.weight), activation)


def gpt_layers(config: GPTConfig, *, extra_loss: bool = False) -> list[LayerSpec]:
    """List the layers of a GPT: embedding, ``depth`` blocks, head.

    Args:
        config: the model's size and kind.
        extra_loss: whether layers shall be able to add to the loss.

    Returns:
        ``depth + 2`` specs (``depth + 3`` when tied: the final norm is then a layer of its own).
    """
    blocks = [LayerSpec(Block, config) for _ in range(config.depth)]
    if not config.tied:
        return [LayerSpec(Embedding, config, extra_loss=extra_loss), *blocks, LayerSpec(Head, config)]
    tied = functools.partial(TiedLayerSpec, "embedding", Embedding, config, extra_loss=extra_loss)
    return [tied(), *blocks, LayerSpec(FinalNorm, config), tied(forward_fn=_project_with_embedding)]


def loss_fn(output: Activation, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats a token, computed in float32, plus what the layers have added.

    Args:
        output: logits ``[batch, seq, vocab]``, or a pair of them and the extra loss.
        labels: next token ids, ``[batch, seq]``.

    Returns:
        A scalar tensor.
    """
    logits, extra_loss = (output, 0.0) if isinstance(output, Tensor) else output
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) + extra_loss
