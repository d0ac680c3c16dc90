"""Tokens that are still in the model, packed row by row, and causal attention over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scenarios.kernels import Task, choose


@dataclass(frozen=True)
class ActiveRows:
    """Where the active tokens of a micro-batch are.

    Attributes:
        index: their places in the flattened ``[batch * seq]``, increasing, ``[n]``.
        lengths: number of them in each row, ``[batch]``.
        seq_len: length of a row in tokens.
    """

    index: Tensor
    lengths: list[int]
    seq_len: int

    @classmethod
    def of(cls, active: Tensor) -> ActiveRows:
        """Find them; ``active`` is boolean, ``[batch, seq]``. On an accelerator this waits for the flags."""
        return cls(active.flatten().nonzero().squeeze(1), active.sum(1).tolist(), active.shape[1])

    @property
    def count(self) -> int:
        """Number of active tokens."""
        return self.index.shape[0]

    @property
    def everywhere(self) -> bool:
        """Whether no token has left."""
        return self.count == len(self.lengths) * self.seq_len

    @property
    def positions(self) -> Tensor:
        """Position of every active token in its row, ``[n]``."""
        return self.index % self.seq_len

    def slots(self) -> Tensor:
        """Places in ``[batch * longest]`` when every row is padded to the longest, ``[n]``."""
        lengths = torch.tensor(self.lengths, device=self.index.device)
        starts = lengths.cumsum(0) - lengths
        row = self.index // self.seq_len
        place = torch.arange(self.count, device=self.index.device)
        return row * max(self.lengths) + place - starts[row]


def task_of(*, visible: bool) -> Task:
    """Say what is computed.

    Args:
        visible: whether tokens that left stay keys and values.
    """
    return "attention to all tokens" if visible else "attention among tokens that stayed"


def attend(q: Tensor, k: Tensor, v: Tensor, rows: ActiveRows) -> Tensor:
    """Causal attention of the active tokens.

    Args:
        q: queries of the active tokens, ``[n, heads, head_dim]``.
        k: keys, of the active tokens alone (those that left are invisible) or of all tokens,
            ``[batch * seq, heads, head_dim]`` (they stay visible).
        v: values, shaped as ``k``.
        rows: where the active tokens are.

    Returns:
        ``[n, heads, head_dim]``.
    """
    visible = k.shape[0] != q.shape[0]
    kernel = choose(task_of(visible=visible), q.device, q.dtype).name
    if kernel == "SDPA row by row":
        return attend_row_by_row(q, k, v, rows)
    if kernel == "FlashAttention varlen":
        return _attend_varlen(q, k, v, rows)
    return attend_padded(q, k, v, rows)


def attend_row_by_row(q: Tensor, k: Tensor, v: Tensor, rows: ActiveRows) -> Tensor:
    """Run SDPA once for each row, on exactly its tokens; arguments as for :func:`attend`.

    On a CPU one call a row costs little, and a padded row would cost what its padding costs.
    """
    visible = k.shape[0] != q.shape[0]
    key_lengths = [rows.seq_len] * len(rows.lengths) if visible else rows.lengths
    parts = [tensor.split(lengths) for tensor, lengths in ((q, rows.lengths), (k, key_lengths), (v, key_lengths))]
    positions = rows.positions.split(rows.lengths)
    outputs = []
    for row, (q_row, k_row, v_row) in enumerate(zip(*parts, strict=True)):
        if rows.lengths[row]:
            mask = _sees(positions[row], rows.seq_len) if visible else None
            heads_first = [tensor.transpose(0, 1)[None] for tensor in (q_row, k_row, v_row)]
            y = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, is_causal=not visible)
            outputs.append(y[0].transpose(0, 1))
    return torch.cat(outputs) if outputs else v  # without tokens: empty, but with a gradient


def attend_padded(q: Tensor, k: Tensor, v: Tensor, rows: ActiveRows) -> Tensor:
    """Run SDPA once, with every row padded to the longest; arguments as for :func:`attend`.

    A causal mask keeps tokens from the padding behind them, so invisible tokens need no mask of their own.
    """
    visible = k.shape[0] != q.shape[0]
    if not rows.count:
        return v
    batch, longest, slots = len(rows.lengths), max(rows.lengths), rows.slots()

    def padded(x: Tensor) -> Tensor:
        whole = x.new_zeros(batch * longest, *x.shape[1:]).index_copy(0, slots, x)
        return whole.unflatten(0, (batch, longest)).transpose(1, 2)

    mask = None
    if visible:
        k, v = (x.unflatten(0, (batch, rows.seq_len)).transpose(1, 2) for x in (k, v))
        # Padding stands at position 0, which sees one key: a row without any would be NaN.
        place = rows.index.new_zeros(batch * longest).index_copy(0, slots, rows.positions)
        mask = _sees(place, rows.seq_len).view(batch, 1, longest, rows.seq_len)
    else:
        k, v = padded(k), padded(v)
    y = F.scaled_dot_product_attention(padded(q), k, v, attn_mask=mask, is_causal=not visible)
    return y.transpose(1, 2).flatten(0, 1).index_select(0, slots)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, rows: ActiveRows) -> Tensor:
    """Run FlashAttention on the packed rows as they are (CUDA, half precision)."""
    from torch.nn.attention.varlen import varlen_attn

    if not rows.count:
        return v
    ends = torch.tensor([0, *rows.lengths], device=q.device).cumsum(0, dtype=torch.int32)
    longest = max(rows.lengths)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    y: Tensor = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
    return y


def _sees(positions: Tensor, seq_len: int) -> Tensor:
    """Which keys of a whole row queries at some positions may see, ``[queries, seq]``."""
    return positions[:, None] >= torch.arange(seq_len, device=positions.device)
