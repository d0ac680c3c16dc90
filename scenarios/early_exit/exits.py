"""Exits between blocks, the head behind all of them, and the loss that they add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenarios.early_exit.confidence import Audit, measure_confidence, thresholds
from scenarios.early_exit.rows import ActiveRows
from scenarios.early_exit.state import AUDITOR, STILL_IN, ExitOutput, ExitPlan, ExitState
from scenarios.gpt import GPTConfig, Head, init_linear


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
        exits = state.exits.flatten()[rows.index]
        leaves &= exits == STILL_IN
        where = rows.index, torch.full_like(rows.index, self.number)
        exits = torch.where(leaves, where[1], exits)
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


class ExitHead(Head):
    """The model's head: predicts the tokens that reached the end, and keeps the accounts of all exits.

    Buffers count since they were last cleared (the scenario does that after every batch), while training:

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
        rows = ActiveRows.of(state.exits < 0)
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
        """Teach each exit's classifier whether its prediction is the last layer's (CALM).

        Binary cross entropy, the mean over exits and over the tokens that reached the end: for the others
        the last layer's prediction is not known.
        """
        confidences = state.confidences.flatten(0, 1).index_select(0, rows.index)
        same = state.predictions.flatten(0, 1).index_select(0, rows.index) == predictions[:, None]
        return F.binary_cross_entropy(confidences, same.float())

    @torch.no_grad()
    def _count(self, state: ExitState, predictions: Tensor, rows: ActiveRows) -> None:
        """Note who left where, and what the auditors tell."""
        plan = self.plan
        exits = state.exits.flatten()
        numbers = torch.arange(plan.num_exits, device=exits.device)
        by_exit = (exits[:, None] == numbers).sum(0)
        self.left += torch.cat((by_exit, (exits < 0).sum()[None]))
        if not plan.num_exits or not plan.audit_every:
            return
        final = torch.zeros_like(exits).index_copy(0, rows.index, predictions)
        auditors = (exits == AUDITOR).nonzero().squeeze(1)
        confidences = state.confidences.flatten(0, 1)[auditors]
        scores = plan.decay.score(confidences, (auditors % rows.seq_len)[:, None])
        same = state.predictions.flatten(0, 1)[auditors] == final[auditors, None]
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
        counts: list[int] = [int(self.audited), *self.audit.flatten().tolist()]
        self.audit.zero_()
        self.audited.zero_()
        return counts


def read_audit(counts: Sequence[int]) -> Audit:
    """Turn the summed numbers of :meth:`ExitHead.take_audit` into means.

    Args:
        counts: summed over replicas.
    """
    count = max(1, counts[0])
    blocks, differing = torch.tensor(counts[1:], dtype=torch.float64).view(2, -1) / count
    return Audit(blocks=blocks, differing=differing, count=counts[0])


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
