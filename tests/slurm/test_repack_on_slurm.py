"""A four-node job re-packs to two nodes while it trains; a waiting job gets the others; no loss differs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.distributed.models import run_and_digest
from tests.distributed.ranks import run_ranks
from tests.slurm.cluster import SlurmCluster
from tests.slurm.train import RUN

REPOSITORY = Path(__file__).parents[2]

ENVIRONMENT = "MASTER_ADDR=127.0.0.1 DS_ACCELERATOR=cpu OMP_NUM_THREADS=1"
WAITING = "date +%s.%N >{folder}/start; echo on $SLURM_JOB_NODELIST; touch {folder}/second"


def training_script(folder: Path, port: int) -> str:
    """The batch script of the documentation, with another program and, on one machine, another address."""
    text = (REPOSITORY / "docs" / "repacking.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for pattern, replacement in (
        (r"MASTER_ADDR=\$\(.*\) MASTER_PORT=29500", f"{ENVIRONMENT} MASTER_PORT={port}"),
        (r"python train.py --deepspeed_config ds_config.json", f"{sys.executable} -m tests.slurm.train {folder}"),
    ):
        script, count = re.subn(pattern, replacement, script)
        assert count == 1, pattern
    return f"{script}echo srun ends with $?\ndate +%s.%N >{folder}/end\n"


def test_nodes_go_back_while_training(cluster: SlurmCluster, port: int) -> None:
    folder = cluster.folder / "training"
    folder.mkdir()
    first = cluster.submit(training_script(folder, port), "--chdir", str(REPOSITORY))
    cluster.wait_for(lambda: cluster.show(first, "JobState") == "RUNNING")
    second = cluster.submit(WAITING.format(folder=folder), "-N2", "--gres=gpu:1")
    assert cluster.show(second, "JobState") == "PENDING"
    cluster.wait_for_end(first, second, timeout_s=250)
    said = cluster.output(first)
    assert "srun ends with 0" in said and cluster.show(first, "JobState") == "COMPLETED", said

    assert sum(": leaves: " in line for line in said.splitlines()) == 2, said
    assert cluster.show(first, "NodeList") in ("n[1-2]", "n[1,3]", "n[1,4]"), said
    left, taken = cluster.names(cluster.show(first, "NodeList")), cluster.names(cluster.output(second).split()[1])
    assert sorted(left + taken) == ["n1", "n2", "n3", "n4"]
    assert float((folder / "start").read_text()) < float((folder / "end").read_text())

    report = json.loads((folder / "losses.json").read_text())
    unshrunk = run_ranks(run_and_digest, RUN.num_stages, RUN)
    assert report["losses"] == unshrunk[0][0]
    assert report["world"] == 2
    print(f"{said}\nthe second job ran on {taken}; decision to next batch: {report['seconds']:.2f} s")
