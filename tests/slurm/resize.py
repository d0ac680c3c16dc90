"""What task 0 of a four-node job does in ``test_slurm_backend``: gives two nodes back.

Run as ``python -m tests.slurm.resize FOLDER``; writes what it saw to ``FOLDER/seen.json``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dynpipe_ds.release import ReleaseError
from dynpipe_ds.release.options import SlurmOptions
from dynpipe_ds.release.registry import make_backend


def main(folder: Path) -> None:
    """Try what is refused, then give back n3 and n4, then wait for the job that was queued for two nodes."""
    backend = make_backend(SlurmOptions())
    backend.check()
    seen: dict[str, Any] = {"node": backend.node_name(), "nodes_stay": sorted(backend.constraints().nodes_stay)}
    try:
        backend.prepare([0], ["n1"])
    except ReleaseError as error:
        seen["prepare"] = str(error)
    job = subprocess.run(["printenv", "SLURM_JOB_ID"], capture_output=True, text=True, check=True).stdout.strip()
    by_hand = subprocess.run(
        ["scontrol", "update", f"JobId={job}", "NodeList=n3,n4"], capture_output=True, text=True, check=False
    )
    seen["by hand"] = [by_hand.returncode, by_hand.stderr.strip()]
    started = time.monotonic()
    backend.prepare([2, 3], ["n3", "n4"])
    seen["prepare s"] = time.monotonic() - started
    backend.release([2, 3], ["n3", "n4"])
    backend.verify()
    seen["all s"] = time.monotonic() - started
    deadline = time.monotonic() + 30
    while not (folder / "second").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen["second started"] = (folder / "second").exists()
    try:
        backend.prepare([1], ["n2"])
        seen["once more"] = "granted"
    except ReleaseError as error:
        seen["once more"] = str(error)
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
