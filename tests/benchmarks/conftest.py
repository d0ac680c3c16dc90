"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import pytest

from dynpipe_ds.partition import registry


@pytest.fixture(autouse=True)
def own_partitioners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay makes the paper's partitioner known by name; other tests shall not see it."""
    monkeypatch.setattr(registry, "_partitioners", dict(registry._partitioners))
