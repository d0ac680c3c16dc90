"""Moving layers, with everything that belongs to them, from one stage to another."""

from __future__ import annotations

from dynpipe_ds.migration.plan import Move, plan_moves

__all__ = ["Move", "plan_moves"]
