"""How a rank of the entry ends before there is anything to save."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scenarios.ranks import ASKED, ENDED

_RANK = """
import atexit, os, signal
from scenarios.ranks import end_quietly
atexit.register(os.kill, os.getpid(), signal.SIGTERM)  # comes while Python shuts down, when no handler is left
atexit.register(signal.signal, signal.SIGTERM, signal.SIG_DFL)
end_quietly()
"""


def test_a_rank_that_starts_when_all_are_asked_to_end_ends_at_once(tmp_path: Path) -> None:
    """The signal that is sent to whoever listens finds it alive or gone, never half gone: that would be a failure."""
    (tmp_path / ASKED).touch()
    done = subprocess.run(
        [sys.executable, "-c", _RANK], env={**os.environ, "RANK": "0", ASKED: str(tmp_path)}, check=False, timeout=60
    )
    assert done.returncode == 0 and (tmp_path / ENDED).exists()
