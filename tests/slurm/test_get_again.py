"""A job of two nodes gets a third one by another job, which Slurm takes away again with a warning; no loss differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.distributed.models import run_and_digest
from tests.distributed.ranks import run_ranks
from tests.slurm.cluster import SlurmCluster
from tests.slurm.elastic import GROW_AFTER, RUN, WARNED_AFTER

REPOSITORY = Path(__file__).parents[2]

TRAINING = """\
export MASTER_ADDR=127.0.0.1 MASTER_PORT={port} DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
srun --no-kill -W 0 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
  exec {python} -m tests.slurm.elastic {folder}'
echo srun ends with $?
"""
JOINING = """\
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
srun --no-kill -W 0 {python} -m dynpipe_ds join {folder}/door.json -- {python} -m tests.slurm.elastic {folder}
"""


def test_a_node_is_got_and_left_in_time(cluster: SlurmCluster, port: int) -> None:
    folder = cluster.folder / "elastic"
    folder.mkdir()
    values = {"folder": folder, "python": sys.executable}
    where = ("--chdir", str(REPOSITORY), "--ntasks-per-node=1", "--gres=gpu:1")
    first = cluster.submit(TRAINING.format(port=port, **values), "-N2", *where)
    cluster.wait_for((folder / "ready").exists, timeout_s=120)
    second = cluster.submit(JOINING.format(**values), "-N1", *where)
    cluster.wait_for((folder / "grown").exists, timeout_s=120)
    # As Slurm warns the steps of a job that is preempted or runs out of time (GraceTime, --signal).
    cluster.run("scancel", "--signal=TERM", second)
    (folder / "warned").touch()
    cluster.wait_for_end(first, second, timeout_s=120)
    said = cluster.output(first) + cluster.output(second)
    assert cluster.show(first, "JobState") == cluster.show(second, "JobState") == "COMPLETED", said
    assert "srun ends with 0" in said and cluster.show(first, "NumNodes") == "2", said
    (node,) = cluster.names(cluster.show(second, "NodeList"))
    assert node not in cluster.names(cluster.show(first, "NodeList"))
    assert f"{node}: leaves: re-packed after batch {WARNED_AFTER + 1} from 3 to 2 stages" in said, said

    report = json.loads((folder / "losses.json").read_text())
    assert [event[:3] for event in report["events"]] == [[GROW_AFTER + 1, 2, 3], [WARNED_AFTER + 1, 3, 2]]
    assert report["losses"] == run_ranks(run_and_digest, RUN.num_stages, RUN)[0][0]
    print(f"{said}\nseconds: {[event[3] for event in report['events']]}")
