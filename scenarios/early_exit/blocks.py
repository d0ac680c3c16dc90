"""Embedding and blocks of a model whose tokens may leave."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenarios.early_exit.exits import Exit
from scenarios.early_exit.rows import ActiveRows, attend
from scenarios.early_exit.state import AUDITOR, LAST, STILL_IN, ExitPlan, ExitState
from scenarios.gpt import Attention, Block, Embedding, GPTConfig, rotate


class ExitEmbedding(Embedding):
    """The embedding, with no token having left."""

    def __init__(self, config: GPTConfig, plan: ExitPlan) -> None:
        super().__init__(config)
        self.audit_every = plan.audit_every
        self.num_slots = max(1, plan.num_exits)  # no empty tensor crosses a boundary

    def forward(self, tokens: Tensor) -> ExitState:
        """Map token ids ``[batch, seq]`` to the state that the first block is given."""
        stream = super().forward(tokens)
        assert isinstance(stream, Tensor)
        slots = (*tokens.shape, self.num_slots)
        return ExitState(
            stream=stream,
            tokens=tokens,
            exits=self._choose_auditors(tokens),
            loss=stream.new_zeros((), dtype=torch.float32),
            confidences=stream.new_zeros(slots, dtype=torch.float32),
            predictions=tokens.new_zeros(slots),
        )


    def _choose_auditors(self, tokens: Tensor) -> Tensor:
        """Mark who never leaves.

        Auditors are evenly spaced, from a start that depends on the row's text: no position is preferred, and
        no random number is drawn.
        """
        exits = torch.full_like(tokens, STILL_IN)
        exits[:, -1] = LAST
        if self.training and self.audit_every:
            spaced = tokens.sum(1, keepdim=True) + torch.arange(tokens.shape[1], device=tokens.device)
            exits.masked_fill_(spaced % self.audit_every == 0, AUDITOR)
        return exits


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

    def keep_part(self, part: str) -> None:
        """Let go of the other half; the exit stands behind the MLP."""
        super().keep_part(part)
        if part == "attention":
            self.exit = None

    def make_attention(self, config: GPTConfig) -> nn.Module:
        """Build attention that knows of active tokens."""
        return ActiveAttention(config)

    def forward(self, activation: tuple[Tensor, ...]) -> ExitState:
        """Transform the active tokens of an :class:`ExitState`, and let some leave if there is an exit."""
        state = ExitState(*activation)
        rows = ActiveRows.of(state.exits < 0)
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
        if self.part != "mlp":
            x = x + self.dropout(self._attend(flat, x, rows))
        return x if self.part == "attention" else self.add_mlp(x)

    def _attend(self, flat: Tensor, x: Tensor, rows: ActiveRows) -> Tensor:
        if self.visible and rows.count:
            everything = self.norm1(flat)
            return self.attention.of_active(everything.index_select(0, rows.index), rows, everything)
        return self.attention.of_active(self.norm1(x), rows, None)


class WholeExitBlock(ExitBlock):
    """One whose exit compares the states before and behind the block: it can't be cut into halves."""

    part_names = ()
