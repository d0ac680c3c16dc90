"""One cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dynpipe_ds.ports import reserved_port
from tests.slurm.cluster import SlurmCluster, why_not


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if reason := why_not():
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", num_nodes=4) as running:
        yield running


@pytest.fixture
def port() -> Iterator[int]:
    """Where the ranks of a job meet."""
    with reserved_port() as port:
        yield port
