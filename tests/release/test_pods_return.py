"""Pods of ``docs/kubernetes/elastic.yaml`` that go and come again: its command lines, one process tree a pod.

There is no cluster: the pods share this machine, the manifest's host name and ports are replaced by free ones here, and
the test does what controllers and the kubelet do. It starts pods, gives them their names and the secret, and ends them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_validate", reason="pip install dynpipe_ds[dev]")

from dynpipe_ds.config import SECTION, parse_config
from dynpipe_ds.ports import reserved_port
from tests.distributed.models import run_and_digest
from tests.distributed.ranks import run_ranks
from tests.release import pod_training
from tests.release.api_server import load_manifest
from tests.release.pod_training import GOES_IN, GROW_AFTER, RUN, STAGES

REPOSITORY = Path(__file__).parents[2]
MANIFEST = REPOSITORY / "docs" / "kubernetes" / "elastic.yaml"
HOST, MEETING, DOOR = "train-0.train", "29500", "29600"
WAIT_S = 240.0


def section() -> dict[str, Any]:
    """What the manifest's comment says of the DeepSpeed JSON."""
    (text,) = re.findall(r"# In the DeepSpeed JSON: (.*)", MANIFEST.read_text(encoding="utf-8"))
    found: dict[str, Any] = json.loads(f"{{{text}}}")
    return found


def container(kind: str) -> dict[str, Any]:
    """The only container of a workload's pods."""
    (found,) = load_manifest(MANIFEST)[kind]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_the_manifest_belongs_together() -> None:
    """Valid (by loading); who joins knocks where the first pod listens, with the same word."""
    objects = load_manifest(MANIFEST)
    config = parse_config({SECTION: section() | {"enabled": True}})
    assert str(config.elastic.port) == DOOR and config.repack.leave_on == "SIGTERM" and config.survive.enabled
    job, starts, joins = objects["Job"], container("Job"), container("Deployment")
    environment = {entry["name"]: entry.get("value") for entry in starts["env"]}
    assert environment["WORLD_SIZE"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert environment["MASTER_ADDR"] == HOST == f"{job['metadata']['name']}-0.{objects['Service']['metadata']['name']}"
    assert objects["Service"]["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert f" dynpipe join {HOST}:{DOOR} -- train.py" in joins["command"][2]
    words = [[entry for entry in one["env"] if entry["name"] == "DYNPIPE_TOKEN"] for one in (starts, joins)]
    assert words[0] == words[1]
    assert words[0][0]["valueFrom"]["secretKeyRef"] == {"name": objects["Secret"]["metadata"]["name"], "key": "token"}
    assert starts["image"] == joins["image"]
    assert objects["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 60


class Pods:
    """Starts the manifest's pods in a folder that they share; ends those that are left.

    Args:
        folder: with ``train.py`` and its JSON.
        ports: what stands for the manifest's ports here.
    """

    def __init__(self, folder: Path, ports: dict[str, str]) -> None:
        self._folder, self._ports = folder, ports
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, kind: str, name: str, **more: str) -> str:
        """Start one as the kubelet does: the container's command, its variables, its name."""
        found = container(kind)
        variables = {entry["name"]: entry.get("value", "word") for entry in found["env"]}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ours = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        environment = {**os.environ, **ours, **{k: self._here(v) for k, v in variables.items()}, **more}
        with (self._folder / f"{name}.log").open("wb") as log:
            self._started[name] = subprocess.Popen(
                [self._here(word) for word in found["command"]], cwd=self._folder, stdout=log, stderr=log,
                env={**environment, "HOSTNAME": name}, start_new_session=True,
            )  # fmt: skip
        return name

    def _here(self, text: str) -> str:
        for written, here in {HOST: "127.0.0.1", **self._ports}.items():
            text = text.replace(written, here)
        return text

    def terminate(self, name: str) -> None:
        """As the kubelet does when a pod is deleted: to the container's first process; it has time to end."""
        self._started[name].send_signal(signal.SIGTERM)

    def kill(self, name: str) -> None:
        """As when a node is gone: all processes of the pod, without a warning."""
        with suppress(ProcessLookupError):
            os.killpg(self._started[name].pid, signal.SIGKILL)

    def code(self, name: str) -> int:
        """How a pod ended, when it has."""
        return self._started[name].wait(timeout=WAIT_S)

    def output(self, name: str) -> str:
        """What a pod printed."""
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def seen(self, name: str) -> dict[str, Any]:
        """What a pod's training wrote."""
        found: dict[str, Any] = json.loads((self._folder / f"{name}.json").read_text())
        return found

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until something is so; fail at once if a pod has failed."""
        until = time.monotonic() + WAIT_S
        while not condition():
            failed = {name: self.output(name) for name, pod in self._started.items() if pod.poll() not in (None, 0, -9)}
            assert not failed and time.monotonic() < until, failed or {n: self.output(n) for n in self._started}
            time.sleep(0.1)

    def end(self) -> None:
        """End all."""
        for name, pod in self._started.items():
            self.kill(name)
            pod.wait(timeout=20)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """A shared folder with the job in it, and no pods yet."""
    with ExitStack() as stack:
        ports = {written: str(stack.enter_context(reserved_port())) for written in (MEETING, DOOR)}
        told = section() | {"enabled": True, "rebalance_every": "never"}
        told["elastic"]["port"] = int(ports[DOOR])
        told["repack"]["enabled"] = False  # the script says when
        (tmp_path / "ds_config.json").write_text(json.dumps({SECTION: told}))
        (tmp_path / "train.py").write_text(Path(pod_training.__file__).read_text(encoding="utf-8"))
        made = Pods(tmp_path, ports)
        stack.callback(made.end)
        yield made


def new_pod(pods: Pods) -> str:
    """A pod of the Deployment, which gives each a name that no other had."""
    return pods.start("Deployment", f"train-more-{secrets.token_hex(3)}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["deleted", "killed"])
def test_a_pod_goes_and_another_returns(how: str, pods: Pods, tmp_path: Path) -> None:
    """The job goes on without it, and grows again with a new process of another name; no loss differs."""
    job = [pods.start("Job", f"train-{index}", JOB_COMPLETION_INDEX=str(index)) for index in range(2)]
    first = new_pod(pods)
    pods.wait_for(lambda: len([*tmp_path.glob("grown-*")]) == STAGES)
    getattr(pods, {"deleted": "terminate", "killed": "kill"}[how])(first)
    if how == "killed":
        pods.code(first)
    (tmp_path / "gone").touch()
    assert pods.code(first) == {"deleted": 0, "killed": -signal.SIGKILL}[how], pods.output(first)
    second = new_pod(pods)
    for name in (*job, second):
        pods.wait_for(lambda name=name: (tmp_path / f"{name}.json").exists())
        assert pods.code(name) == 0, pods.output(name)

    losses = run_ranks(run_and_digest, RUN.num_stages, RUN)[0][0]
    gone = [[GOES_IN + 1, STAGES, STAGES - 1]] * (how == "deleted")
    grown = [[batch + 1, STAGES - 1, STAGES] for batch in GROW_AFTER]
    for name in job:
        assert pods.seen(name)["losses"] == losses
        assert pods.seen(name)["events"] == [grown[0], *gone, grown[1]], pods.output(name)
    returned = pods.seen(second)
    assert returned["first"] == GROW_AFTER[1] + 1 and returned["losses"] == losses[returned["first"] :]
    if how == "deleted":
        left = pods.seen(first)
        assert left["losses"] == losses[left["first"] : GOES_IN] and left["pid"] != returned["pid"]
