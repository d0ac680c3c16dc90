"""Tests that run on a CUDA device, and the same on a CPU, where they are rehearsed."""

from __future__ import annotations

import pytest
import torch

from dynpipe_ds.host import accelerator

ON_DEVICES = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
"""Gives ``kind``; one of the two runs, the other is skipped."""


def device_of(kind: str) -> torch.device:
    """The device, if DeepSpeed uses one of that kind; else the test is skipped."""
    if kind != accelerator.kind():
        pytest.skip(f"DeepSpeed uses {accelerator.kind()}")
    return torch.device(kind)
