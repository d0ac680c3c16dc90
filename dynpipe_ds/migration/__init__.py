"""Moving layers, with everything that belongs to them, from one stage to another."""

from __future__ import annotations

from dynpipe_ds.migration.moves import Move, plan_moves

__all__ = ["Move", "plan_moves"]
