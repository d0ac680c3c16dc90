"""docs/repacking.md: every configuration is valid; docs/extending.md: the example of an own back-end works."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynpipe_ds.config import SECTION, parse_config
from dynpipe_ds.release import ReleaseError, make_backend
from tests.distributed.configs import BY_HAND
from tests.distributed.models import Run, make_engine, run_and_digest, train
from tests.distributed.ranks import run_ranks

DOCUMENT = Path(__file__).parents[2] / "docs" / "repacking.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
CONFIGURATIONS = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]
OWN = (DOCUMENT.parent / "extending.md").read_text(encoding="utf-8").split("## A release back-end\n")[1]


def test_configurations() -> None:
    releases = [parse_config(block).repack.release for block in CONFIGURATIONS]
    assert [release.backend for release in releases] == ["exit", "stay", "slurm", "kubernetes", "callback", "callback"]
    assert all(parse_config(block).repack.enabled for block in CONFIGURATIONS)


def test_batch_script() -> None:
    """It is a shell script, and its step survives that tasks leave."""
    (script,) = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "\nsrun --no-kill -W 0 " in script


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example saved under the name that its configuration gives it."""
    (code,) = re.findall(r"```python\n(.*?)```", OWN, re.DOTALL)
    (tmp_path / "spool_backend.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # ranks inherit it
    importlib.invalidate_caches()
    yield code


def own(folder: Path, **options: Any) -> dict[str, Any]:
    (text,) = re.findall(r"```json\n(.*?)```", OWN, re.DOTALL)
    repack = json.loads(text)[SECTION]["repack"]
    assert repack["enabled"] and repack["release"]["backend"] == "spool_backend:SpoolBackend"
    return {**repack, "release": {**repack["release"], "folder": str(folder), **options}}


def test_own_back_end_is_short_and_says_what_is_wrong(example: str, tmp_path: Path) -> None:
    assert len([line for line in example.splitlines() if line.strip()]) <= 30
    missing = make_backend(parse_config({SECTION: {"repack": own(tmp_path / "nowhere")}}).repack.release)
    with pytest.raises(ReleaseError, match="nowhere: does not exist on this node; mount it"):
        missing.check()
    backend = make_backend(parse_config({SECTION: {"repack": own(tmp_path, timeout_s=0.1)}}).repack.release)
    backend.release([1], ["b"])
    with pytest.raises(ReleaseError, match="is still there after 0.1 s; is the daemon running"):
        backend.verify()


def train_and_repack(_rank: int, run: Run) -> list[float]:
    engine = make_engine(run)
    losses = train(engine, run, lambda engine, batch: engine.repack(1) if batch == 2 else None)
    engine.dynamic.repacker.giving_back.wait()
    return losses


def test_own_back_end_while_training(example: str, tmp_path: Path) -> None:
    """A daemon takes the worker back; the losses are those of both workers."""
    run = Run(2, num_batches=4, config={
        SECTION: {**BY_HAND, "repack": {**own(tmp_path), "enabled": False}},
    })
    seen: list[Any] = []
    stop = threading.Event()
    daemon = threading.Thread(target=_daemon, args=(tmp_path / "give_back.json", seen, stop))
    daemon.start()
    try:
        shrunk = run_ranks(train_and_repack, 2, run, may_leave={1})
    finally:
        stop.set()
        daemon.join()
    assert [order["ranks"] for order in seen] == [[1]]
    assert shrunk[0] == run_ranks(run_and_digest, 2, Run(2, num_batches=4))[0][0]


def _daemon(file: Path, seen: list[Any], stop: threading.Event) -> None:
    while not stop.is_set():
        if file.exists() and (text := file.read_text()):
            seen.append(json.loads(text))
            file.unlink()
        time.sleep(0.02)
