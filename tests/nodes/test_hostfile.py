"""docs/nodes.md, with a hostfile: as written on two nodes by ssh and pdsh, and with one launcher a node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynpipe_ds.ports import reserved_port
from tests.nodes import page
from tests.nodes.ssh import SshNodes, why_not

VENV = "/opt/train/venv/bin"  # the page's

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[SshNodes]:
    if reason := why_not():
        pytest.skip(reason)
    with SshNodes(tmp_path / "ssh") as running:
        yield running


def hostfile_and_variables() -> tuple[str, str]:
    hosts, variables = page.blocks("")
    assert hosts.split() == ["node1", "slots=1", "node2", "slots=1"]
    return hosts, variables


def command_lines() -> list[list[str]]:
    """What the page types, from the first ``deepspeed`` on: with a hostfile, and once a node."""
    lines = [line for block in page.blocks("bash") for line in block.splitlines() if line.startswith("deepspeed ")]
    assert len(lines) == 3
    return [line.partition("#")[0].split() for line in lines]


def test_as_written_by_ssh(nodes: SshNodes, tmp_path: Path) -> None:
    """Command, hostfile and variables are the page's; only where the environment lies and the port are ours."""
    folder, (hosts, variables) = page.write_job(tmp_path / "job"), hostfile_and_variables()
    (folder / "hostfile").write_text(hosts, encoding="utf-8")
    assert VENV in variables
    variables = variables.replace(VENV, str(Path(sys.executable).parent)) + page.not_passed_on()
    (folder / ".deepspeed_env").write_text(variables, encoding="utf-8")
    command, env, before = command_lines()[0], page.environment(), nodes.connections()
    with reserved_port() as port:
        command[1:1] = ["--master_port", str(port)]
        output = page.run(command, folder, {**env, "PATH": f"{nodes.path}:{env['PATH']}"})
    assert "node1: batch 0" in output, output[-2000:]
    assert all(count > before[node] for node, count in nodes.connections().items())
    assert page.losses(output) == page.local_losses(tmp_path / "local")


def test_one_launcher_a_node(tmp_path: Path) -> None:
    """Without ssh; the address of node1 is this machine's."""
    folder, (hosts, _) = page.write_job(tmp_path / "job"), hostfile_and_variables()
    (folder / "hostfile").write_text(hosts, encoding="utf-8")
    started = []
    with reserved_port() as port:
        for command in command_lines()[1:]:
            command[command.index("--master_addr") + 1] = "127.0.0.1"
            command[1:1] = ["--master_port", str(port)]
            started.append(subprocess.Popen(
                command, cwd=folder, env=page.environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ))  # fmt: skip
        outputs = [launcher.communicate(timeout=120)[0] for launcher in started]
    assert [launcher.returncode for launcher in started] == [0, 0], outputs
    assert "loss" not in outputs[1], "rank 0 is on the first node"
    assert page.losses(outputs[0]) == page.local_losses(tmp_path / "local")
