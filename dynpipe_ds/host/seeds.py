"""Seeding what layers draw from, as cheaply as it must be before every layer of every micro-batch."""

from __future__ import annotations

import random

import numpy
import torch

from dynpipe_ds.host import accelerator


def seed_streams(seed: int) -> None:
    """Seed every stream that a layer can draw from here: Python's, NumPy's, torch's and the device's.

    DeepSpeed's ``set_random_seed`` seeds those, too, and by ``torch.manual_seed`` the streams of all other makes of
    devices. For each make that this process has not started, a stack trace is written down: together a millisecond,
    as much as a small layer takes.

    Args:
        seed: at least 0.
    """
    seed = int(seed)  # partitioning may leave numpy's
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)
    accelerator.seed(seed % 2**63)
