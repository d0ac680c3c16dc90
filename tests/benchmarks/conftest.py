"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import record
from dynpipe_ds.partition import registry
from tests.distributed.ranks import start_fork_server


@pytest.fixture(autouse=True, scope="session")
def fork_server() -> None:
    """Later tests of this process fork from what is started here, and need more imported than benchmarks do."""
    start_fork_server()


@pytest.fixture(autouse=True, scope="module")
def own_partitioners() -> Iterator[None]:
    """Replay makes the paper's partitioner known by name; other tests shall not see it."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(registry, "_partitioners", dict(registry._partitioners))
        yield


@pytest.fixture(autouse=True)
def waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests keep a machine busy themselves: who measures would wait a minute for an idle moment."""
    monkeypatch.setenv(record.FORCE, "1")
