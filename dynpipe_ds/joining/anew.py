"""A rank that has no place in its job any more and waits at the job's door, to be taken in again.

Its process runs its script once more, as a worker that is to join. Whoever started it sees no end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from dynpipe_ds.joining.address import JOIN, LEFT, TOKEN, Address
from dynpipe_ds.ports import ANY_PORT


def wait_again(door: Address, token: str) -> NoReturn:
    """Begin this process's script anew, as a worker that waits at a door.

    Args:
        door: of a rank that goes on.
        token: what it takes to join.
    """
    begin_anew(newcomer_environment(door, token))


def newcomer_environment(door: Address, token: str) -> dict[str, str]:
    """What a process finds that is to join, and that was a rank.

    Args:
        door: where to knock.
        token: what it takes.
    """
    return {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ANY_PORT), JOIN: f"{door.host}:{door.port}", TOKEN: token, LEFT: "1",
    }  # fmt: skip


def begin_anew(environment: Mapping[str, str]) -> NoReturn:
    """Run this process's command once more in its place: whoever started it sees no end.

    Args:
        environment: variables besides those that it has.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2:
            with suppress(OSError):
                os.set_inheritable(number, False)
    program = Path(sys.executable)
    os.execve(program, [str(program), *sys.orig_argv[1:]], {**os.environ, **environment})
