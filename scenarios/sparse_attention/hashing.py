"""Codes of queries and keys: locality-sensitive hashing by random directions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def draw_directions(heads: int, head_dim: int, buckets: int, *, seed: int) -> Tensor:
    """Draw the random directions of the hash, from a generator of their own.

    Args:
        heads: attention heads; each has its own directions.
        head_dim: width of a head.
        buckets: number of codes; even, or 1 for none.
        seed: same seed, same directions, on any device.

    Returns:
        ``[heads, head_dim, buckets / 2]`` in float32 on the CPU, normally distributed, unit length.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = heads, head_dim, buckets // 2
    return F.normalize(torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu"), dim=1)


@torch.no_grad()
def hash_codes(vectors: Tensor, directions: Tensor) -> Tensor:
    """Hash vectors: the number of the random direction, or of its opposite, that is nearest.

    The cross-polytope hash (Andoni et al. 2015) as Reformer uses it (Kitaev et al. 2020, section 2):
    ``argmax([x R, -x R])``. Vectors at a small angle get the same code with a high probability. A
    vector's length does not matter, and no other vector does.

    Args:
        vectors: ``[batch, seq, heads, head_dim]``.
        directions: ``[heads, head_dim, buckets / 2]``.

    Returns:
        ``[batch, seq, heads]`` of int64, from 0 to ``buckets - 1``; all 0 without directions.
    """
    half = directions.shape[-1]
    if half == 0:
        return torch.zeros(vectors.shape[:-1], dtype=torch.int64, device=vectors.device)
    products = torch.einsum("bshd,hdr->bshr", vectors, directions.to(vectors.dtype))
    nearest = products.abs().argmax(dim=-1, keepdim=True)
    return (nearest + half * (products.gather(-1, nearest) < 0)).squeeze(-1)
