"""docs/nodes.md, with Slurm: the batch script as written, on two nodes of a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes import page
from tests.slurm.cluster import SlurmCluster


@pytest.mark.exhaustive
def test_the_batch_script_as_written(cluster: SlurmCluster, tmp_path: Path) -> None:
    """It trains on two nodes, with the losses of the same job without Slurm."""
    (script,) = (block for block in page.blocks("bash") if block.startswith("#!/bin/bash"))
    folder = page.write_job(cluster.folder / "nodes")
    env = page.environment()
    passed = ",".join(f"{name}={env[name]}" for name in ("PATH", "PYTHONPATH", "DEEPSPEED_LOG_LEVEL"))
    job = cluster.submit(script, "--chdir", str(folder), f"--export=ALL,{passed}")
    cluster.wait_for_end(job, timeout_s=120)
    said = cluster.output(job)
    assert cluster.show(job, "JobState") == "COMPLETED", said
    assert len(cluster.names(cluster.show(job, "NodeList"))) == 2 and cluster.show(job, "NumTasks") == "2"
    assert page.losses(said) == page.local_losses(tmp_path / "local")
