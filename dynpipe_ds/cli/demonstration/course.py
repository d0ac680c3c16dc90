"""The demonstration's course: what its processes know of it, and who waits for them, which imports no torch."""

from __future__ import annotations

NUM_BLOCKS = 10
NUM_LAYERS = NUM_BLOCKS + 2
NUM_FROZEN = NUM_LAYERS // 2
FREEZE_AT = 8
"""The batch, counted from 0, before which the first :data:`NUM_FROZEN` layers stop training."""

NUM_BATCHES = 32
WINDOW = 4
"""Batches that one run trains before the other has its turn."""

STATIC, DYNAMIC = RUNS = ("static", "dynamic")

EVENTS, PICTURE = "events.jsonl", "timeline.png"
"""Files that the first process writes."""
