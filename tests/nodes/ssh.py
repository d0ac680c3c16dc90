"""Two 'nodes' that are this machine: an ssh server of the user's own on two loopback addresses, with keys of its own.

Nothing of the system or of the user's ssh configuration is read or changed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

from dynpipe_ds.ports import reserved_port

PACKAGES = "openssh-server openssh-client pdsh"
NODES = {"node1": "127.0.0.1", "node2": "127.0.0.2"}

_SERVER = """\
Port {port}
{addresses}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile {folder}/sshd.pid
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
LogLevel VERBOSE
"""
_CLIENT = """\
Host {name}
  HostName {address}
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def why_not() -> str | None:
    """The reason why no server can be started here; ``None`` if one can."""
    missing = [name for name in ("sshd", "ssh", "ssh-keygen", "pdsh") if _find(name) is None]
    return f"{', '.join(missing)} not installed (apt-get install {PACKAGES})" if missing else None


class SshNodes:
    """Starts with ``with``; ``path`` is a folder whose ``ssh`` knows the nodes, for the front of ``PATH``.

    Args:
        folder: for keys, configuration and log; made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "bin"
        self._server: subprocess.Popen[bytes] | None = None
        self._port = contextlib.ExitStack()

    def __enter__(self) -> SshNodes:
        self.path.mkdir(parents=True)
        for key in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True)
        port = self._port.enter_context(reserved_port())
        addresses = "\n".join(f"ListenAddress {address}" for address in NODES.values())
        self._write("sshd_config", _SERVER.format(port=port, addresses=addresses, folder=self.folder))
        self._write("ssh_config", "".join(
            _CLIENT.format(name=name, address=address, port=port, folder=self.folder) for name, address in NODES.items()
        ))  # fmt: skip
        self._write("bin/ssh", f'#!/bin/sh\nexec {_find("ssh")} -F {self.folder}/ssh_config "$@"\n')
        (self.path / "ssh").chmod(0o755)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where the server of root locks itself in before a login
        command = [str(_find("sshd")), "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / "sshd.log").open("wb") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log)
        self._wait_until_reachable()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.terminate()
        self._server.wait(timeout=10)
        self._port.close()

    def connections(self) -> dict[str, int]:
        """How often each node has been connected to so far."""
        log = (self.folder / "sshd.log").read_text(errors="replace")
        return {node: log.count(f" on {address} port ") for node, address in NODES.items()}

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def _wait_until_reachable(self) -> None:
        for node in NODES:
            deadline_s = time.monotonic() + 10
            while subprocess.run([self.path / "ssh", node, "true"], capture_output=True, check=False).returncode:
                if time.monotonic() > deadline_s:
                    self.__exit__()
                    raise TimeoutError(f"{node}: {(self.folder / 'sshd.log').read_text(errors='replace')[-2000:]}")
                time.sleep(0.1)


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
