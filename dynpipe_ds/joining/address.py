"""Where a job's door is, as processes tell each other: environment variables, and the file of the door.

Who starts processes needs these names and nothing else, so torch is not imported here.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import NamedTuple

TOKEN = "DYNPIPE_TOKEN"
"""Environment variable with the word that newcomers must know."""

DOOR_FILE = "DYNPIPE_DOOR_FILE"
"""Environment variable that stands for ``elastic.enabled`` and ``elastic.door_file``; ``dynpipe run`` sets it."""

JOIN = "DYNPIPE_JOIN"
"""Environment variable that says where to knock."""

LEFT = "DYNPIPE_LEFT"
"""Environment variable of a process that was a rank of the job: the door was there, so none is to be waited for."""


class Address(NamedTuple):
    """Where a door is.

    Attributes:
        host: name or number.
        port: of the door.
    """

    host: str
    port: int


def find_token() -> str:
    """The word that newcomers must know: the user's, or a new one that nobody can guess."""
    return os.environ.get(TOKEN) or secrets.token_hex(16)


def write_door_file(path: Path, address: Address, token: str) -> None:
    """Write what who may join needs, for the file's owner alone; whole or not at all.

    Raises:
        OSError: if it can't be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"address": f"{address.host}:{address.port}", "token": token}, file)
    os.replace(partial, path)


def find_door(where: str) -> tuple[Address, str]:
    """Address and token that a text stands for.

    Args:
        where: ``HOST:PORT``, or a file that a job's first rank has written.

    Raises:
        ValueError: if it is neither, with the remedy.
    """
    token, address = os.environ.get(TOKEN, ""), where
    if Path(where).is_file():
        content = json.loads(Path(where).read_text(encoding="utf-8"))
        token, address = token or str(content["token"]), str(content["address"])
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"{where!r} is neither HOST:PORT nor a file that the job has written; give the address that the job's log "
            "tells, or the file in elastic.door_file"
        )
    if not token:
        raise ValueError(f"{TOKEN} is not set: it is the word that lets workers join; set what the job's ranks have")
    return Address(host.strip("[]"), int(port)), token
