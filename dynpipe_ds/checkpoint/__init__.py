"""Checkpoints that fit any partition, and that are complete or not there.

Reading order: :mod:`manifest` (what a checkpoint says of itself), :mod:`folder` (how it appears at once),
:mod:`save`, :mod:`load`; :mod:`optimizer_files` and :mod:`foreign` read what DeepSpeed wrote.
"""

from __future__ import annotations

from dynpipe_ds.checkpoint.extras import keep_in_checkpoints
from dynpipe_ds.checkpoint.manifest import CheckpointError

__all__ = ["CheckpointError", "keep_in_checkpoints"]
