"""A real Slurm cluster of several nodes on this machine, from the distribution's packages.

Everything lives in one folder and on free ports of the loopback device, so nothing of the system is changed and two
clusters don't meet. Authentication is switched off (``auth/none``): no munge, no key. By hand::

    python -m tests.slurm.cluster 4          # prints the environment to use, until Ctrl-C
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dynpipe_ds.ports import reserved_port

PACKAGES = "slurmctld slurmd slurm-client"
_DAEMONS_AND_TOOLS = ("slurmctld", "slurmd", "scontrol", "sbatch", "srun", "squeue", "sinfo", "scancel")

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmctldTimeout=30
SlurmdTimeout=30
GresTypes=gpu
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=n[1-{num_nodes}] Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=500 Gres=gpu:1"


def why_not() -> str | None:
    """The reason why no cluster can be started here; ``None`` if one can."""
    missing = [name for name in _DAEMONS_AND_TOOLS if _find(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install {PACKAGES})"
    if os.geteuid() != 0:
        return "Slurm's daemons need root to start jobs"
    return None


class SlurmCluster:
    """Starts with ``with``; nodes are called n1, n2, ...

    Args:
        folder: for configuration, state and logs; empty or missing.
        num_nodes: how many nodes, with two processors and one (pretended) GPU each.
    """

    def __init__(self, folder: Path, num_nodes: int = 4) -> None:
        self.folder, self.num_nodes = folder, num_nodes
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._ports = contextlib.ExitStack()

    def __enter__(self) -> SlurmCluster:
        self._configure()
        try:
            self._start("slurmctld")
            for i in range(self.num_nodes):
                self._start("slurmd", "-N", f"n{i + 1}")
            self.wait_for(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(self.num_nodes))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--user", getpass.getuser())
            self.wait_for(lambda: not self.run("squeue", "-h"), timeout_s=15)
        self._stop()

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """Run a Slurm command; returns its standard output.

        Raises:
            RuntimeError: with all that it said, if it failed.
        """
        done = subprocess.run(
            command, env=self.env, cwd=cwd or self.folder, text=True, timeout=60, check=False,
            capture_output=True, stdin=subprocess.DEVNULL,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch script; its output goes to ``<folder>/<job id>.out``.

        Args:
            script: the text of a shell script; ``#SBATCH`` lines count.
            *options: of ``sbatch``.

        Returns:
            The job's id.
        """
        with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".sh", delete=False) as file:
            file.write(script if script.startswith("#!") else f"#!/bin/bash\n{script}")
        return self.run("sbatch", "--parsable", "-o", f"{self.folder}/%j.out", *options, file.name).strip()

    def output(self, job: str) -> str:
        """What a job has written so far."""
        file = self.folder / f"{job}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def show(self, job: str, key: str) -> str:
        """A value of ``scontrol show job``."""
        for word in self.run("scontrol", "-o", "show", "job", job).split():
            name, _, value = word.partition("=")
            if name == key:
                return value
        raise KeyError(key)

    def names(self, nodes: str) -> list[str]:
        """The nodes of a list such as ``n[1-2]``."""
        return self.run("scontrol", "show", "hostnames", nodes).split()

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
        """Wait until something is so.

        Raises:
            TimeoutError: with the queue and the daemons' last words.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                logs = "".join(
                    f"\n{file.name}: ...{file.read_text(errors='replace')[-600:]}" for file in self.folder.glob("*.log")
                )
                queue = self.run("squeue", check=False)
                raise TimeoutError(f"not so after {timeout_s:g} s; the queue:\n{queue}{logs}")
            time.sleep(0.1)

    def wait_for_end(self, *jobs: str, timeout_s: float = 60.0) -> None:
        """Wait until jobs have ended, in whatever way."""
        running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        self.wait_for(lambda: all(self.show(job, "JobState") not in running for job in jobs), timeout_s)

    def _configure(self) -> None:
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        ports = [self._ports.enter_context(reserved_port()) for _ in range(self.num_nodes + 1)]
        names = [f"n{i + 1}" for i in range(self.num_nodes)]
        nodes = "\n".join(_NODE.format(name=n, host=host, port=p) for n, p in zip(names, ports[1:], strict=True))
        self._write("slurm.conf", _CONFIG.format(
            host=host, port=ports[0], user=getpass.getuser(), folder=self.folder, nodes=nodes,
            num_nodes=self.num_nodes,
        ))
        self._write("gres.conf", "".join(f"NodeName={name} Name=gpu Count=1 File=/dev/null\n" for name in names))
        self._write("cgroup.conf", "CgroupPlugin=autodetect\nCgroupAutomount=no\n")

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def _start(self, daemon: str, *arguments: str) -> None:
        command = [str(_find(daemon)), "-D", *arguments]
        log = (self.folder / f"{daemon}{''.join(arguments)}.out").open("wb")
        with log:
            self._daemons.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.folder))

    def _stop(self) -> None:
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._ports.close()


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def main(arguments: Sequence[str] | None = None) -> None:
    """Start a cluster and keep it until interrupted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("num_nodes", type=int, nargs="?", default=4)
    num_nodes = parser.parse_args(arguments).num_nodes
    if reason := why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, SlurmCluster(Path(folder) / "slurm", num_nodes) as cluster:
        print(cluster.run("sinfo", "-N", "-l"))
        print(f"export SLURM_CONF={cluster.env['SLURM_CONF']}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(1)


if __name__ == "__main__":
    main()
