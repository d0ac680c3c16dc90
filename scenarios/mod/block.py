"""A block that most tokens bypass, around any transformer block."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from scenarios.gpt import Activation, GPTConfig
from scenarios.mod.routing import Choice, Predictor, Router, num_chosen, top_tokens, wanted_tokens

Inference = Literal["predictor", "top_k"]


class RoutedBlock(nn.Module):
    """A block that computes its router's top tokens; the others pass by on the residual stream.

    After Raposo et al., *Mixture-of-Depths* (2024), equation 1: a chosen token ``x`` becomes
    ``x + r * f(x)``, where ``r`` is its score and ``f`` what the block adds to the stream, attention among
    the chosen tokens included; any other token stays ``x``. The choice has no gradient, the score has one
    as the factor ``r``.

    In evaluation a predictor chooses, token by token, since a rank would look into the future.

    Args:
        config: the model's size and kind.
        block: the block to wrap; its ``forward`` takes ``positions`` if the model's are rotary.
        capacity: share of each sequence's tokens that are computed, in [0, 1]; may be set at any time.
        inference: who chooses in evaluation, ``"predictor"`` or ``"top_k"`` (as in training).
        predictor_width: middle of the predictor.
        predictor_weight: factor of the predictor's gradient.
    """

    def __init__(
        self,
        config: GPTConfig,
        block: LayerSpec,
        *,
        capacity: float = 0.125,
        inference: Inference = "predictor",
        predictor_width: int = 64,
        predictor_weight: float = 0.1,
    ) -> None:
        super().__init__()
        self.block = block.build()
        self.router = Router(config.hidden)
        self.predictor = Predictor(config.hidden, predictor_width)
        self.capacity = capacity
        self.inference = inference
        self.predictor_weight = predictor_weight
        self.rotary = config.positions == "rotary"
        self.forget_counts()

    def forget_counts(self) -> None:
        """Start counting anew."""
        self.num_tokens = self.num_computed = self.num_judged = 0
        self._num_right: Tensor | int = 0

    def counts(self) -> tuple[int, int, int, int]:
        """Tell what was counted in training: tokens, those computed, those predicted, those predicted right."""
        return self.num_tokens, self.num_computed, self.num_judged, int(self._num_right)

    def forward(self, activation: Activation) -> Activation:
        """Map the stream ``[batch, seq, hidden]`` to the same shape.

        With an extra loss beside it, that gets what the inner block adds, and the predictor's gradient: a
        term of value 0, so that the loss stays the language model's.
        """
        stream = activation if isinstance(activation, Tensor) else activation[0]
        batch, seq, _ = stream.shape
        count = num_chosen(self.capacity, seq)
        self._count(tokens=batch * seq, computed=batch * count)
        if count == 0:
            return activation
        scores = self.router(stream)
        if count == seq:
            return self._compute(activation, scores)
        if not self.training and self.inference == "predictor":
            return self._compute(activation, scores, wanted_tokens(self.predictor(stream) > 0))
        choice = top_tokens(scores, count)
        output = self._compute(activation, scores, choice)
        if not self.training or isinstance(output, Tensor):
            return output
        return output[0], output[1] + self._predictor_loss(stream, choice)

    def _compute(self, activation: Activation, weights: Tensor, choice: Choice | None = None) -> Activation:
        """Run the block on the chosen tokens alone, or on all, and add its weighted answers to the stream."""
        stream, *extra_loss = (activation,) if isinstance(activation, Tensor) else activation
        flat, tokens, where = stream.flatten(0, 1), stream, {}
        if choice is not None:
            # Rows of a matrix: gathering along the sequences is several times slower on a CPU.
            firsts = stream.shape[1] * torch.arange(stream.shape[0], device=stream.device)
            rows = (choice.tokens + firsts[:, None]).flatten()
            tokens = flat.index_select(0, rows).view(*choice.tokens.shape, -1)
            weights = weights.gather(1, choice.tokens)
            weights = weights if choice.counts is None else weights * choice.counts
            where = {"positions": choice.tokens} if self.rotary else {}
        output = self.block((tokens, *extra_loss) if extra_loss else tokens, **where)
        answer = output if isinstance(output, Tensor) else output[0]
        change = (answer - tokens) * weights[..., None].to(stream.dtype)
        summed = stream + change if choice is None else flat.index_add(0, rows, change.flatten(0, 1)).view_as(stream)
        return summed if isinstance(output, Tensor) else (summed, output[1])

    def _predictor_loss(self, stream: Tensor, choice: Choice) -> Tensor:
        """Ask the predictor for the choice that was made; its gradient does not reach the stream."""
        logits = self.predictor(stream)
        chosen = torch.zeros_like(logits).scatter_(1, choice.tokens, 1.0)
        right = ((logits > 0) == (chosen > 0)).sum()
        self._count(judged=chosen.numel(), right=right)
        loss = F.binary_cross_entropy_with_logits(logits, chosen)
        return self.predictor_weight * (loss - loss.detach())

    def _count(self, *, tokens: int = 0, computed: int = 0, judged: int = 0, right: Tensor | int = 0) -> None:
        """Add up in training; a checkpointed block counts twice, which leaves the shares."""
        if self.training:
            self.num_tokens += tokens
            self.num_computed += computed
            self.num_judged += judged
            self._num_right = self._num_right + right
