"""Every test process computes with one thread, as the ranks do: another number of threads gives other last bits.

Tests that are marked ``cuda`` are skipped where there is no device, or DeepSpeed was not told to use it: other tests'
ranks are on the CPU.
"""

import os

import pytest
import torch

from dynpipe_ds.planning import agree_on_pace
from tests.matrix import mark_combinations

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def python_pace() -> None:
    """Planning is as fast as in Python, whatever ran in this process before: what it may look at follows from that."""
    agree_on_pace(is_compiled=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tell combinations from new values, before ``-m`` chooses; skip what needs a device that is not there."""
    mark_combinations(items)
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") == "cuda":
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and DS_ACCELERATOR=cuda"))
