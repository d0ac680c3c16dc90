"""Causal attention among tokens of the same code, computed for those pairs only.

All functions take ``q, k, v`` as ``[batch, seq, heads, head_dim]`` and return the same shape. A query attends
keys of its code at its own position and before; one that finds none gives 0. Tokens are sorted by their codes
(stable, so positions rise within a bucket), attention runs bucket by bucket, and the results go back to their
positions (Pagliardini et al. 2023, section 3.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scenarios.sparse_attention.groups import lay_out, runs, size_class


def shared_codes_attention(q: Tensor, k: Tensor, v: Tensor, codes: Tensor, buckets: int) -> Tensor:
    """Attend among tokens of the same code, where a token's query and key share one.

    Within a bucket this is plain causal attention. Padding stands behind a bucket's tokens, so causality hides
    it from them.

    Args:
        q: queries.
        k: keys.
        v: values.
        codes: ``[batch, seq, heads]``, below ``buckets``.
        buckets: number of codes.
    """
    group, sizes = _groups(codes, buckets)
    slots, order = size_class(sizes).sort(stable=True)
    layout = lay_out(group, sizes, size_class(sizes), order)
    rows = [_rows(x).index_select(0, layout.row_of_slot) for x in (q, k, v)]
    classes = runs(slots[:, None])
    pieces = [x.split([n * size for (size,), n in classes]) for x in rows]
    done = []
    for ((size,), n), *qkv in zip(classes, *pieces, strict=True):
        batch = [x.view(n, 1, size, -1) for x in qkv]
        done.append(F.scaled_dot_product_attention(*batch, is_causal=True).flatten(0, 2))
    return torch.cat(done).index_select(0, layout.slot_of_row).view(q.shape)


def separate_codes_attention(
    q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor, buckets: int
) -> Tensor:
    """Attend where the query's code equals the key's, each having its own.

    Args:
        q: queries.
        k: keys.
        v: values.
        q_codes: ``[batch, seq, heads]``, below ``buckets``.
        k_codes: same.
        buckets: number of codes.
    """
    q_group, q_sizes = _groups(q_codes, buckets)
    k_group, k_sizes = _groups(k_codes, buckets)
    used = (q_sizes + k_sizes > 0).long()
    # A bucket with queries only, or with keys only, gets a slot of padding for what it lacks.
    q_slots, k_slots = size_class(q_sizes.maximum(used)), size_class(k_sizes.maximum(used))
    order = torch.argsort(q_slots * (int(k_slots.max()) + 1) + k_slots, stable=True)
    q_layout = lay_out(q_group, q_sizes, q_slots, order)
    k_layout = lay_out(k_group, k_sizes, k_slots, order)
    visible = visible_keys(q_group, k_group, k_sizes, q_codes.shape)
    visible_of_slot = visible.clamp(min=1)[q_layout.row_of_slot]
    classes = runs(torch.stack((q_slots, k_slots), dim=1)[order])
    q_pieces = [n * q_size for (q_size, _), n in classes]
    k_pieces = [n * k_size for (_, k_size), n in classes]
    pieces = [
        _rows(q).index_select(0, q_layout.row_of_slot).split(q_pieces),
        _rows(k).index_select(0, k_layout.row_of_slot).split(k_pieces),
        _rows(v).index_select(0, k_layout.row_of_slot).split(k_pieces),
    ]
    done = []
    for ((q_size, k_size), n), limit, *qkv in zip(classes, visible_of_slot.split(q_pieces), *pieces, strict=True):
        batch = [x.view(n, 1, size, -1) for x, size in zip(qkv, (q_size, k_size, k_size), strict=True)]
        mask = torch.arange(k_size, device=q.device) < limit.view(n, 1, q_size, 1)
        done.append(F.scaled_dot_product_attention(*batch, attn_mask=mask).flatten(0, 2))
    found = torch.cat(done).index_select(0, q_layout.slot_of_row)
    return found.masked_fill((visible == 0)[:, None], 0.0).view(q.shape)


def visible_keys(q_group: Tensor, k_group: Tensor, k_sizes: Tensor, shape: torch.Size) -> Tensor:
    """Count for each query the keys of its code at its position or before.

    Sorted by position, these are the first of the bucket's keys.

    Args:
        q_group: ``[R]``, group of each query.
        k_group: ``[R]``, group of each key.
        k_sizes: ``[G]``, keys of each group.
        shape: batch, sequence and heads of the rows.

    Returns:
        ``[R]`` of int64.
    """
    seq = shape[1]
    position = torch.arange(seq, device=q_group.device)[None, :, None].expand(shape).reshape(-1)
    keys = (k_group * seq + position).sort().values
    before = torch.searchsorted(keys, q_group * seq + position, right=True)
    return before - (k_sizes.cumsum(0) - k_sizes)[q_group]


def count_pairs(q_codes: Tensor, k_codes: Tensor, buckets: int) -> Tensor:
    """Count the pairs of a query and a key that attention computes.

    Args:
        q_codes: ``[batch, seq, heads]``, below ``buckets``.
        k_codes: same; the same tensor where codes are shared.
        buckets: number of codes.

    Returns:
        A scalar of int64.
    """
    group, sizes = _groups(k_codes, buckets)
    if q_codes is k_codes:
        return (sizes * (sizes + 1)).sum() // 2
    return visible_keys(_groups(q_codes, buckets)[0], group, sizes, q_codes.shape).sum()


def flex_codes_attention(q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor) -> Tensor:
    """Attend as the other functions do, by FlexAttention over the sorted tokens.

    Sorting makes the pairs of a bucket neighbours, so most of the kernel's blocks are empty and skipped.

    Args:
        q: queries.
        k: keys.
        v: values.
        q_codes: ``[batch, seq, heads]``.
        k_codes: same.
    """
    q_codes, q_order = q_codes.transpose(1, 2).sort(dim=-1, stable=True)
    k_codes, k_order = k_codes.transpose(1, 2).sort(dim=-1, stable=True)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (q_codes[b, h, i] == k_codes[b, h, j]) & (q_order[b, h, i] >= k_order[b, h, j])

    batch, seq, heads, _ = q.shape
    flex_attention, create_block_mask = _flex(q.device.type)
    mask = create_block_mask(allowed, batch, heads, seq, seq, device=q.device)
    sorted_y = flex_attention(
        _reorder(q.transpose(1, 2), q_order),
        _reorder(k.transpose(1, 2), k_order),
        _reorder(v.transpose(1, 2), k_order),
        block_mask=mask,
    )
    return _reorder(sorted_y, q_order.argsort(dim=-1)).transpose(1, 2)


@functools.cache
def _flex(device_type: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return FlexAttention and the maker of its masks, compiled where there is something to gain."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device_type != "cuda":
        return flex_attention, create_block_mask
    return torch.compile(flex_attention), torch.compile(create_block_mask)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """Reorder the tokens of ``[batch, heads, seq, head_dim]`` by ``[batch, heads, seq]``."""
    return x.gather(2, order[..., None].expand(x.shape))


def _groups(codes: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Number the groups of codes ``[batch, seq, heads]``: the group of each row, and the groups' sizes."""
    batch, _, heads = codes.shape
    first = torch.arange(batch * heads, device=codes.device).view(batch, 1, heads) * buckets
    group = (first + codes).reshape(-1)
    # Not torch.bincount: on CUDA that waits for the device.
    sizes = group.new_zeros(batch * heads * buckets).scatter_add_(0, group, torch.ones_like(group))
    return group, sizes


def _rows(x: Tensor) -> Tensor:
    """Flatten ``[batch, seq, heads, head_dim]`` to ``[R, head_dim]``."""
    return x.reshape(-1, x.shape[-1])
