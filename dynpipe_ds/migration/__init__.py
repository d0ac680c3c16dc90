"""Moving layers, with everything that belongs to them, from one stage to another."""

from __future__ import annotations

from dynpipe_ds.migration.moves import Move, plan_moves
from dynpipe_ds.migration.shards import FlatLayout, Piece, Place, ShardTransfer, least_bytes, plan_transfers

__all__ = ["FlatLayout", "Move", "Piece", "Place", "ShardTransfer", "least_bytes", "plan_moves", "plan_transfers"]
