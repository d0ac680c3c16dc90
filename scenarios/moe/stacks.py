"""Experts that a model brings, shared out by the replicas of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynpipe_ds import building_replica
from scenarios.moe.experts import add_rows, take_rows
from scenarios.moe.sharded import LaneProducts, SharedExperts, keep_own_rows

if TYPE_CHECKING:
    from dynpipe_ds.hf import ExpertStacks


class SharedStacks(SharedExperts):
    """Gated experts of a block of Mixtral or LLaMA-MoE; the block's router stays as it is.

    Args:
        stacks: the experts. Of these the replica that is being built keeps its share, ``E/R``; all where it is alone.

    Attributes:
        num_experts: ``E``.
        is_sharded: whether it is a share.
    """

    def __init__(self, stacks: ExpertStacks) -> None:
        super().__init__()
        for name, weight in stacks.weights.items():
            self.register_parameter(name, weight)
        self._gate_up, self._down, self.activation = stacks.gate_up, stacks.down, stacks.activation
        replica = building_replica()
        self.num_experts, self.is_sharded = len(stacks.weights[stacks.down]), replica.count > 1
        if self.is_sharded:
            keep_own_rows(self, self._names, replica)

    def forward(self, tokens: Tensor, chosen: Tensor, gates: Tensor | None) -> Tensor:
        """Add up the weighted answers of the chosen experts; collective over the replicas that share them.

        Args:
            tokens: ``[T, hidden]``.
            chosen: experts of each, ``[T, K]``.
            gates: their weights ``[T, K]``; ``None`` for 1.

        Returns:
            ``[T, hidden]``.
        """
        experts, order = chosen.flatten().sort(stable=True)
        token = order // chosen.shape[1]
        counts = torch.bincount(experts, minlength=self.num_experts)
        rows = take_rows(tokens, token)
        answers = self.run_shared(rows, counts) if self.is_sharded else self._run_alone(rows, counts)
        if gates is not None:
            answers = answers * gates.flatten().index_select(0, order)[:, None]
        return add_rows(answers.to(tokens.dtype), token, len(tokens))

    def expert_weights(self) -> dict[str, nn.Parameter]:
        """This replica's own weights of experts, by name; empty if it has all of them."""
        return {name: getattr(self, name) for name in self._names} if self.is_sharded else {}

    def run_lanes(self, rows: Tensor, lanes: LaneProducts) -> Tensor:
        """Compute the rows of this rank's lanes.

        Args:
            rows: lane by lane, ``[N, hidden]``.
            lanes: multiplies each with its expert's weights.

        Returns:
            ``[N, hidden]``.
        """
        return lanes.multiply(lanes.apart(self._gated, *(lanes.multiply(rows, n) for n in self._gate_up)), self._down)

    def _run_alone(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute all experts here."""
        matrices = {name: getattr(self, name).unbind(0) for name in self._names}  # one gradient for a whole stack

        def mlp(part: Tensor, expert: int) -> Tensor:
            middle = self._gated(*(F.linear(part, matrices[name][expert]) for name in self._gate_up))
            return F.linear(middle, matrices[self._down][expert])

        if not len(rows):
            return mlp(rows, 0)  # no product, but the graph is whole
        parts = enumerate(rows.split(counts.tolist()))
        return torch.cat([mlp(part, expert) for expert, part in parts if len(part)])

    def _gated(self, *gate_up: Tensor) -> Tensor:
        """What goes down, of gate and up, or of one tensor with both."""
        gate, up = gate_up if len(gate_up) == 2 else gate_up[0].chunk(2, dim=-1)
        return self.activation(gate) * up

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._gate_up, self._down)
