"""``slurm``: a running job gives nodes back by ``scontrol update JobId=... NodeList=<those that stay>``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynpipe_ds.release.base import Constraints, ReleaseBackend, ReleaseError, poll
from dynpipe_ds.release.options import SlurmOptions

_ENDING_S = 1.0  # from a worker's last sign of life to the end of its process, which Slurm must not have to force
# Slurm refuses a change until the last one is in its accounting (ESLURM_JOB_SETTING_DB_INX); without one, for good.
_FOR_A_MOMENT = re.compile(r"try again|not available right now|temporarily", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """What ``scontrol show job`` says.

    Args:
        name: what the user called it.
        state: such as ``RUNNING``.
        nodes: its nodes, in Slurm's order.
        batch_host: node on which the batch script runs; ``None`` without one.
    """

    name: str
    state: str
    nodes: tuple[str, ...]
    batch_host: str | None


class SlurmBackend(ReleaseBackend):
    """Shrinks the Slurm job that the training runs in; whole nodes only, the batch host stays.

    The job's step must be started with ``srun --no-kill -W 0``, or Slurm ends all tasks when the first ones leave.
    Tasks still alive on a node that goes are killed, so the workers leave first. Slurm writes a script with the new
    environment into the working folder, so ``scontrol`` runs in a temporary one; whether it worked is judged by what
    the job shows then, not by its messages.

    Workers that joined from another job go back with it, when its last task has ended; this one is not resized then.
    """

    def __init__(self, **given: Any) -> None:
        options = SlurmOptions(**given)
        self._job_id = options.job_id or os.environ.get("SLURM_JOB_ID", "")
        self._scontrol = options.scontrol
        self._timeout_s = options.timeout_s
        self._expected: tuple[str, ...] = ()

    def check(self) -> None:
        """Look for ``scontrol`` and for the job; the first task also asks Slurm about them."""
        if shutil.which(self._scontrol) is None:
            raise ReleaseError(
                f"repack.release.scontrol = {self._scontrol!r}: no such command on this node; install Slurm's client "
                f"tools there or give its path"
            )
        if not self._job_id or "SLURMD_NODENAME" not in os.environ:
            raise ReleaseError(
                f"SLURM_JOB_ID = {self._job_id or None!r}, SLURMD_NODENAME = {os.environ.get('SLURMD_NODENAME')!r}: "
                f"this process was not started by srun inside a Slurm job; start it so, or use the back-end 'exit'"
            )
        if os.environ.get("SLURM_PROCID") != "0":
            return  # thousands of tasks at once would be too many for Slurm's controller
        self._job()
        settings = self._run("show", "config").stdout
        if re.search(r"^SchedulerParameters\s*=.*\bdisable_job_shrink\b", settings, re.MULTILINE):
            raise ReleaseError(
                "SchedulerParameters has disable_job_shrink: this Slurm does not resize running jobs; ask its "
                "administrators, or use the back-end 'exit'"
            )

    def node_name(self) -> str:
        """Slurm's name of the node, which need not be its host name."""
        return os.environ["SLURMD_NODENAME"]

    def constraints(self) -> Constraints:
        """Whole nodes, and the one where the batch script runs stays."""
        job = self._job()
        stay = frozenset() if job.batch_host is None else frozenset({job.batch_host})
        return Constraints(nodes_stay=stay, whole_nodes=True)

    def prepare(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        """Make sure that the job runs, may be changed, and may give these nodes back.

        Giving the job the name that it has is the change that is tried: it needs the same permission as a resize, and
        is refused in the same way while the last resize has not been written down.
        """
        job = self._job()
        if job.state != "RUNNING":
            raise ReleaseError(f"Slurm job {self._job_id} is {job.state}: only a running job can be resized")
        if not self._of_this_job(job, nodes):
            return
        self._staying(job, nodes)
        tried = self._run("update", f"JobId={self._job_id}", f"JobName={job.name}")
        if tried.returncode:
            raise ReleaseError(f"Slurm would not resize job {self._job_id} now: {_one_line(tried)}{_hint(tried)}")

    def release(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        """Resize the job to the other nodes."""
        job = self._job()
        if not self._of_this_job(job, nodes):
            self._expected = job.nodes
            return
        self._expected = self._staying(job, nodes)
        time.sleep(_ENDING_S)
        update = ("update", f"JobId={self._job_id}", f"NodeList={','.join(self._expected)}")

        def refusal() -> subprocess.CompletedProcess[str] | None:
            done = self._run(*update)
            return None if done.returncode == 0 or self._job().nodes == self._expected else done

        refused = poll(refusal, lambda done: done is None or not _FOR_A_MOMENT.search(done.stderr), self._timeout_s)
        if refused is not None:
            raise ReleaseError(
                f"Slurm refused to resize job {self._job_id} to {','.join(self._expected)}: {_one_line(refused)}"
                f"{_hint(refused)}; the nodes {','.join(nodes)} stay idle in the job until it ends"
            )

    def verify(self) -> None:
        """Wait until the job shows the nodes that stay, and no others."""
        nodes = poll(lambda: self._job().nodes, lambda nodes: nodes == self._expected, self._timeout_s)
        if nodes != self._expected:
            raise ReleaseError(
                f"Slurm job {self._job_id} has the nodes {','.join(nodes)} {self._timeout_s:g} s after its "
                f"resize to {','.join(self._expected)}; look at 'scontrol show job {self._job_id}'"
            )

    @staticmethod
    def _of_this_job(job: Job, nodes: Sequence[str]) -> bool:
        """Whether some of the nodes are this job's; the others' workers joined from jobs of their own."""
        return not nodes or any(node in job.nodes for node in nodes)

    def _staying(self, job: Job, nodes: Sequence[str]) -> tuple[str, ...]:
        stay = tuple(node for node in job.nodes if node not in nodes)
        if not nodes or not stay or job.batch_host in nodes:
            raise ReleaseError(
                f"nodes to give back = {','.join(nodes) or 'none'}: must be some nodes of job {self._job_id} "
                f"({','.join(job.nodes)}), not all, and not its batch host {job.batch_host}"
            )
        return stay

    def _job(self) -> Job:
        shown = self._run("show", "job", self._job_id)
        name = re.search(r"^JobId=\S+ (?:\S+=\S+ )*?JobName=(.*)$", shown.stdout, re.MULTILINE)
        state, nodes, host = (
            re.search(rf"^\s+{key}=(\S+)", shown.stdout, re.MULTILINE) for key in ("JobState", "NodeList", "BatchHost")
        )
        if shown.returncode != 0 or name is None or state is None or nodes is None:
            raise ReleaseError(f"Slurm does not show job {self._job_id}: {_one_line(shown)}")
        names = self._run("show", "hostnames", nodes[1])
        return Job(name[1], state[1], tuple(names.stdout.split()), host[1] if host else None)

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = (self._scontrol, *arguments)
        try:
            with tempfile.TemporaryDirectory() as folder:
                return subprocess.run(
                    command, capture_output=True, text=True, timeout=self._timeout_s, cwd=folder, check=False,
                    stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"},
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ReleaseError(f"{' '.join(command)}: {error}; is Slurm's controller reachable?") from error


def _one_line(done: subprocess.CompletedProcess[str]) -> str:
    text = " ".join((done.stderr or done.stdout).split())
    return text or f"exit code {done.returncode}"


def _hint(done: subprocess.CompletedProcess[str]) -> str:
    if not _FOR_A_MOMENT.search(done.stderr):
        return ""
    return " (without slurmdbd, Slurm lets a running job be resized only once)"
