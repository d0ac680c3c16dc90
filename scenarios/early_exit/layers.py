"""The layers of a GPT whose tokens may leave: what passes between them, the blocks, the exits, the head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenarios.early_exit.confidence import Audit, Decay, Measure, measure_confidence, thresholds
from scenarios.early_exit.rows import ActiveRows, attend
from scenarios.gpt import Attention, Block, Embedding, GPTConfig, Head, init_linear, rotate

STILL_IN = -1


class ExitState(NamedTuple):
    """What passes from layer to layer; all shapes are fixed, whoever leaves.

    Attributes:
        stream: residual stream ``[batch, seq, hidden]``; a token that left keeps the state it left with.
        tokens: token ids ``[batch, seq]``, the labels of the exits one position later.
        exits: the exit at which each token left, ``STILL_IN`` until then, ``[batch, seq]``.
        loss: of the exits so far, float32 scalar.
        confidences: of each exit that a token has passed, 0 elsewhere, ``[batch, seq, exits]``, float32.
        predictions: the likeliest next token by each exit, same shape, int64.
    """

    stream: Tensor
    tokens: Tensor
    exits: Tensor
    loss: Tensor
    confidences: Tensor
    predictions: Tensor


class ExitOutput(NamedTuple):
    """What the last layer returns: predictions of the tokens that no exit has accounted for.

    Attributes:
        logits: ``[n, vocab]``.
        places: of these tokens in the flattened ``[batch * seq]``, ``[n]``.
        weights: of their cross entropies in the loss, ``[n]``.
        loss: of all exits, float32 scalar.
    """

    logits: Tensor
    places: Tensor
    weights: Tensor
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class ExitPlan:
    """What all layers know of the exits.

    Attributes:
        blocks: number of blocks before each exit, the last one being the head's: all of them.
        loss_weights: of each exit's cross entropy, the head's included.
        measure: of confidence.
        decay: of the threshold over positions.
        visible: whether tokens that left are keys and values in later blocks.
        audit_every: one position in so many never leaves while training; 0 for the last position alone.
    """

    blocks: tuple[int, ...]
    loss_weights: tuple[float, ...]
    measure: Measure
    decay: Decay
    visible: bool
    audit_every: int

    @property
    def num_exits(self) -> int:
        """Exits before the head."""
        return len(self.blocks) - 1

    def weight_from(self, exit_index: int) -> float:
        """Sum the weights from an exit on: what a token counts that leaves there."""
        return math.fsum(self.loss_weights[exit_index:])

    def stays(self, positions: Tensor, seq_len: int, *, training: bool) -> Tensor:
        """Say which tokens never leave: the last position, whose label the tokens do not tell, and auditors."""
        behind = seq_len - 1 - positions
        return behind % self.audit_every == 0 if training and self.audit_every else behind == 0


class ExitEmbedding(Embedding):
    """The embedding, with no token having left."""

    def __init__(self, config: GPTConfig, plan: ExitPlan) -> None:
        super().__init__(config)
        self.num_slots = max(1, plan.num_exits)  # no empty tensor crosses a boundary

    def forward(self, tokens: Tensor) -> ExitState:
        """Map token ids ``[batch, seq]`` to the state that the first block is given."""
        stream = super().forward(tokens)
        assert isinstance(stream, Tensor)
        slots = (*tokens.shape, self.num_slots)
        return ExitState(
            stream=stream,
            tokens=tokens,
            exits=torch.full_like(tokens, STILL_IN),
            loss=stream.new_zeros((), dtype=torch.float32),
            confidences=stream.new_zeros(slots, dtype=torch.float32),
            predictions=tokens.new_zeros(slots),
        )


class ActiveAttention(Attention):
    """The usual attention, also for active tokens alone."""

    def of_active(self, normed: Tensor, rows: ActiveRows, everything: Tensor | None) -> Tensor:
        """Attend from the active tokens.

        Args:
            normed: their normalised states, ``[n, hidden]``.
            rows: where they are.
            everything: normalised states of all tokens, ``[batch * seq, hidden]``, where those that left are
                visible.

        Returns:
            ``[n, hidden]``.
        """
        hidden = normed.shape[1]
        positions = rows.positions
        if everything is None:
            q, k, v = self._heads(self.qkv(normed)).unbind(1)
            key_positions = positions
        else:
            # Only keys and values of the tokens that left are needed: no query, hence no output.
            q_weight, kv_weight = self.qkv.weight.split([hidden, 2 * hidden])
            q_bias, kv_bias = self.qkv.bias.split([hidden, 2 * hidden])
            q = self._heads(F.linear(normed, q_weight, q_bias)).squeeze(1)
            k, v = self._heads(F.linear(everything, kv_weight, kv_bias)).unbind(1)
            key_positions = torch.arange(everything.shape[0], device=normed.device) % rows.seq_len
        if self.rotary:
            q, k = self._rotate(q, positions), self._rotate(k, key_positions)
        return self.out(attend(q, k, v, rows).flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        """Split ``[n, parts * hidden]`` into ``[n, parts, heads, head_dim]``."""
        return x.unflatten(1, (-1, self.heads, self.out.in_features // self.heads))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``[n, heads, head_dim]``."""
        return rotate(x.transpose(0, 1), self.cos[positions], self.sin[positions]).transpose(0, 1)


class Exit(nn.Module):
    """A small head behind a block: predicts, adds to the loss, and lets the confident tokens leave.

    Args:
        config: the model's size and kind.
        plan: of all exits.
        number: which of them this is.
    """

    def __init__(self, config: GPTConfig, plan: ExitPlan, number: int) -> None:
        super().__init__()
        self.plan = plan
        self.number = number
        self.threshold = math.inf  # nobody leaves
        self.norm = nn.LayerNorm(config.hidden)
        self.project = nn.Linear(config.hidden, config.vocab_size, bias=False)
        init_linear(self.project)
        self.classifier: nn.Linear | None = None
        if plan.measure == "classifier":
            self.classifier = nn.Linear(config.hidden, 1)
            init_linear(self.classifier)

    def forward(self, state: ExitState, rows: ActiveRows, before: Tensor, after: Tensor) -> ExitState:
        """Look at the active tokens.

        Args:
            state: as the block has left it.
            rows: where the active tokens are.
            before: their states before the block, ``[n, hidden]``.
            after: their states behind it.

        Returns:
            The state with this exit's loss, confidences and predictions, and with those marked that left.
        """
        logits = self.project(self.norm(after)).float()
        confidence = measure_confidence(
            self.plan.measure, logits=logits.detach(), before=before, after=after, classifier=self.classifier
        )
        positions = rows.positions
        leaves = self.plan.decay.score(confidence.detach(), positions) >= self.threshold
        leaves &= ~self.plan.stays(positions, rows.seq_len, training=self.training)
        where = rows.index, torch.full_like(rows.index, self.number)
        exits = torch.where(leaves, where[1], STILL_IN)
        return state._replace(
            exits=state.exits.flatten().index_copy(0, rows.index, exits).view_as(state.exits),
            loss=state.loss + self._loss(state.tokens, rows, logits, leaves),
            confidences=state.confidences.flatten(0, 1).index_put(where, confidence).view_as(state.confidences),
            predictions=state.predictions.flatten(0, 1)
            .index_put(where, logits.argmax(-1))
            .view_as(state.predictions),
        )

    def _loss(self, tokens: Tensor, rows: ActiveRows, logits: Tensor, leaves: Tensor) -> Tensor:
        """Weigh the cross entropies of the active tokens.

        A token that leaves here keeps this prediction, so it stands for all later exits as well. Evaluation
        counts nothing but the prediction that a token left with.
        """
        labels = tokens.roll(-1, dims=1).flatten()[rows.index]
        goes_on = self.plan.loss_weights[self.number] if self.training else 0.0
        goes = self.plan.weight_from(self.number) if self.training else 1.0
        weights = torch.where(leaves, goes, goes_on) * (rows.positions < rows.seq_len - 1)
        return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / tokens.numel()


class ExitBlock(Block):
    """A block that computes only the tokens still in the model: gathered, computed, scattered back.

    Args:
        config: the model's size and kind.
        plan: of all exits.
        number: of the exit behind this block, or ``None``.
    """

    attention: ActiveAttention

    def __init__(self, config: GPTConfig, plan: ExitPlan, number: int | None = None) -> None:
        super().__init__(config)
        self.visible = plan.visible
        self.exit = None if number is None else Exit(config, plan, number)

    def make_attention(self, config: GPTConfig) -> nn.Module:
        """Build attention that knows of active tokens."""
        return ActiveAttention(config)

    def forward(self, activation: tuple[Tensor, ...]) -> ExitState:
        """Transform the active tokens of an :class:`ExitState`, and let some leave if there is an exit."""
        state = ExitState(*activation)
        rows = ActiveRows.of(state.exits == STILL_IN)
        flat = state.stream.flatten(0, 1)
        if rows.everywhere:
            before, after = flat, self.transform(state.stream).flatten(0, 1)
            whole = after
        else:
            before = flat.index_select(0, rows.index)
            after = self.transform_active(flat, before, rows)
            whole = flat.index_copy(0, rows.index, after)
        state = state._replace(stream=whole.view_as(state.stream))
        return state if self.exit is None else self.exit(state, rows, before, after)

    def transform_active(self, flat: Tensor, x: Tensor, rows: ActiveRows) -> Tensor:
        """Transform the active tokens.

        Args:
            flat: states of all tokens, ``[batch * seq, hidden]``.
            x: those of the active ones, ``[n, hidden]``.
            rows: where they are.

        Returns:
            ``[n, hidden]``.
        """
        if self.visible and rows.count:
            everything = self.norm1(flat)
            contribution = self.attention.of_active(everything.index_select(0, rows.index), rows, everything)
        else:
            contribution = self.attention.of_active(self.norm1(x), rows, None)
        x = x + self.dropout(contribution)
        return x + self.dropout(self.mlp(self.norm2(x)))


class ExitHead(Head):
    """The model's head: predicts the tokens that reached the end, and keeps the accounts of all exits.

    Buffers count since they were last cleared, while training:

    * ``left``: tokens that left at each exit, and those that reached the end.
    * ``audit``: for each threshold that could be chosen, blocks that the auditors would have run through, and
      how many would have been predicted differently than here. ``audited``: their number.
    """

    left: Tensor
    audit: Tensor
    audited: Tensor

    def __init__(self, config: GPTConfig, plan: ExitPlan) -> None:
        super().__init__(config)
        self.plan = plan
        self.register_buffer("left", torch.zeros(plan.num_exits + 1, dtype=torch.int64), persistent=False)
        self.register_buffer("audit", torch.zeros(2, len(thresholds()), dtype=torch.int64), persistent=False)
        self.register_buffer("audited", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, activation: tuple[Tensor, ...]) -> ExitOutput:
        """Map an :class:`ExitState` to logits of the tokens that are still in."""
        state = ExitState(*activation)
        rows = ActiveRows.of(state.exits == STILL_IN)
        logits = self.project(self.norm(state.stream.flatten(0, 1).index_select(0, rows.index)))
        predictions = logits.detach().argmax(-1)
        loss = state.loss
        if self.training and self.plan.measure == "classifier" and self.plan.num_exits:
            loss = loss + self._classifier_loss(state, rows, predictions)
        # Recomputation under activation checkpointing runs with gradients, its first pass without.
        if self.training and torch.is_grad_enabled():
            self._count(state, predictions, rows)
        last, all_weights = (self.plan.loss_weights[-1], self.plan.weight_from(0)) if self.training else (1.0, 1.0)
        # No exit could take the last position into account, so here it counts for all of them.
        weights = torch.where(rows.positions == rows.seq_len - 1, all_weights, last) / state.tokens.numel()
        return ExitOutput(logits, rows.index, weights, loss)

    def _classifier_loss(self, state: ExitState, rows: ActiveRows, predictions: Tensor) -> Tensor:
        """Teach each exit's classifier whether its prediction is the last one (CALM, section 3.5).

        Binary cross entropy, the mean over exits and over the tokens that reached the end: for the others
        the last layer's prediction is not known.
        """
        confidences = state.confidences.flatten(0, 1).index_select(0, rows.index)
        same = state.predictions.flatten(0, 1).index_select(0, rows.index) == predictions[:, None]
        return F.binary_cross_entropy(confidences, same.float())

    @torch.no_grad()
    def _count(self, state: ExitState, predictions: Tensor, rows: ActiveRows) -> None:
        """Note who left where, and what the auditors tell."""
        plan, seq_len = self.plan, rows.seq_len
        exits = state.exits.flatten()
        numbers = torch.arange(plan.num_exits, device=exits.device)
        by_exit = (exits[:, None] == numbers).sum(0)
        self.left += torch.cat((by_exit, (exits == STILL_IN).sum()[None]))
        if not plan.num_exits or not plan.audit_every:
            return
        final = torch.zeros_like(exits).index_copy(0, rows.index, predictions).view_as(state.exits)
        positions = torch.arange(seq_len, device=exits.device)
        positions = positions[plan.stays(positions, seq_len, training=True)]
        scores = plan.decay.score(state.confidences[:, positions], positions[:, None]).flatten(0, 1)
        same = (state.predictions[:, positions] == final[:, positions, None]).flatten(0, 1)
        # The exit at which each auditor would have left, for every threshold: [auditors, thresholds].
        tried = thresholds().to(scores.device)
        first = (scores.cummax(1).values[:, :, None] < tried).sum(1)
        blocks = torch.tensor(plan.blocks, device=exits.device)[first].sum(0)
        differs = ~torch.cat((same, torch.ones_like(same[:, :1])), dim=1)
        self.audit += torch.stack((blocks, differs.gather(1, first).sum(0)))
        self.audited += len(scores)

    def take_left(self) -> list[int]:
        """Return and clear how many tokens left at each exit, and how many at none."""
        left: list[int] = self.left.tolist()
        self.left.zero_()
        return left

    def take_audit(self) -> list[int]:
        """Return and clear what the auditors told: their number, then both rows of ``audit``."""
        told: list[int] = [int(self.audited), *self.audit.flatten().tolist()]
        self.forget_audit()
        return told

    def forget_audit(self) -> None:
        """Start the accounts for the next calibration."""
        self.audit.zero_()
        self.audited.zero_()


def read_audit(told: Sequence[int]) -> Audit:
    """Turn the summed numbers of :meth:`ExitHead.take_audit` into means.

    Args:
        told: summed over replicas.
    """
    count = max(1, told[0])
    blocks, differing = torch.tensor(told[1:], dtype=torch.float64).view(2, -1) / count
    return Audit(blocks=blocks, differing=differing, count=told[0])


def exit_loss(output: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Add the loss of the tokens that reached the end to that of the exits.

    Args:
        output: an :class:`ExitOutput`.
        labels: next token ids, ``[batch, seq]``.

    Returns:
        A scalar: while training, the weighted cross entropies of all exits, a mean over tokens; in evaluation
        the mean cross entropy of the predictions that tokens left with.
    """
    logits, places, weights, loss = output
    entropies = F.cross_entropy(logits.float(), labels.flatten()[places], reduction="none")
    return (entropies * weights).sum() + loss
