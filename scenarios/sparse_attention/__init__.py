"""Attention that computes only pairs of tokens with the same hash, in buckets that vary by layer and batch."""

from __future__ import annotations

from scenarios.sparse_attention.attention import HashSparseAttention, HashSparseBlock
from scenarios.sparse_attention.schedule import SparseAttention

__all__ = ["HashSparseAttention", "HashSparseBlock", "SparseAttention"]
