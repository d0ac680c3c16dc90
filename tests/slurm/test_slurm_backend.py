"""The ``slurm`` back-end on a real cluster: a running job gives nodes back, and a waiting one gets them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster

REPOSITORY = Path(__file__).parents[2]

# Tasks 2 and 3 leave at once; task 1 must live through the resize.
SHRINKING = """
srun --no-kill -W 0 bash -c '
case $SLURM_PROCID in
  0) cd {repository} && {python} -m tests.slurm.resize {folder}; echo task 0 ends with $?; touch {folder}/done;;
  1) for _ in $(seq 600); do [ -e {folder}/done ] && break; sleep 0.1; done; echo task 1 lives;;
esac'
echo srun ends with $?
"""


def test_gives_nodes_back(cluster: SlurmCluster) -> None:
    folder = cluster.folder / "resize"
    folder.mkdir()
    script = SHRINKING.format(repository=REPOSITORY, python=sys.executable, folder=folder)
    first = cluster.submit(script, "-N4", "-n4", "--ntasks-per-node=1", "--gres=gpu:1")
    cluster.wait_for(lambda: cluster.show(first, "JobState") == "RUNNING")
    second = cluster.submit(f"echo on $SLURM_JOB_NODELIST; touch {folder}/second", "-N2", "--gres=gpu:1")
    assert cluster.show(second, "JobState") == "PENDING"
    cluster.wait_for_end(first, second)
    said = cluster.output(first)
    assert "task 0 ends with 0" in said and "task 1 lives" in said and "srun ends with 0" in said, said
    seen = json.loads((folder / "seen.json").read_text())
    assert seen["node"] == "n1" and seen["nodes_stay"] == ["n1"]
    assert "not its batch host n1" in seen["prepare"]
    assert seen["by hand"][0] != 0, "Slurm let a job drop its batch host; the back-end need not forbid it any more"
    assert seen["second started"]
    assert cluster.output(second).split() == ["on", "n[3-4]"]
    assert cluster.show(first, "NodeList") == "n[1-2]"
    for job in (first, second):
        assert cluster.show(job, "JobState") == "COMPLETED" and cluster.show(job, "ExitCode") == "0:0"
    # Without slurmdbd, Slurm 22.05 resizes a running job only once; that is noticed before anything is given up.
    assert re.match("granted|Slurm would not resize job .* now: .*try again.* only once", seen["once more"])
    print(f"asking took {seen['prepare s']:.2f} s, all of it {seen['all s']:.2f} s")


def test_without_no_kill_all_would_end(cluster: SlurmCluster) -> None:
    """Why the documentation asks for ``srun --no-kill -W 0``: with a short ``-W``, who leaves first ends the rest."""
    script = "srun -W 1 bash -c '[ $SLURM_PROCID = 1 ] || sleep 20; echo task $SLURM_PROCID lives'"
    job = cluster.submit(script, "-N2", "-n2", "--ntasks-per-node=1")
    cluster.wait_for_end(job)
    assert "task 0 lives" not in cluster.output(job)
    assert cluster.show(job, "JobState") == "FAILED"


@pytest.mark.parametrize("num_nodes", [4])
def test_the_cluster_has_its_nodes(cluster: SlurmCluster, num_nodes: int) -> None:
    job = cluster.submit("srun bash -c 'echo $SLURMD_NODENAME'", f"-N{num_nodes}", f"-n{num_nodes}")
    cluster.wait_for_end(job)
    assert sorted(cluster.output(job).split()) == [f"n{i + 1}" for i in range(num_nodes)]
