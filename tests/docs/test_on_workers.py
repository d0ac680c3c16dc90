"""Blocks of the pages whose workers join, leave and get lost, run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.docs import pages
from tests.docs.pages import ROOT
from tests.docs.test_on_ranks import after

ELASTIC = pages.blocks("docs/elastic.md", "python")[0].code
SHRINK = pages.blocks("docs/repacking.md", "python")[0].code
BETWEEN, DATA_AT = (block.code for block in pages.blocks("docs/survive.md", "python"))

# Behind the script of docs/change_one_import.md, whose loop is over: what survives, and what was frozen at the end.
GO_ON = """
import os
import signal
import sys

first_rank = os.environ["RANK"]
again = micro_batches(3, 0)
expected = islice(batches(), 3 * 8, None)
assert all(torch.equal(x, y) for _ in range(9) for x, y in zip(next(again), next(expected)))
while engine.global_steps < 18:
    if engine.global_steps == 14 and first_rank == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = float(engine.train_batch(data))
    print(f"batch {engine.global_steps}, {engine.num_stages} stages, loss {loss:.9g}", flush=True)
frozen = [i for i, layer in engine.local_layers().items() if not any(p.requires_grad for p in layer.parameters())]
print(f"frozen {[i for i in frozen if i % 2 == 0]}", flush=True)
"""


def run(script: str, folder: Path, *arguments: str, workers: int, options: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and output of ``dynpipe run``."""
    (folder / "page.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "dynpipe_ds", "run", "--workers", str(workers), *options, "--", "page.py", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=400, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stdout


def batches(output: str) -> dict[int, set[tuple[str, str]]]:
    """Batch -> number of stages and loss, as its ranks told."""
    found = defaultdict(set)
    for batch, stages, loss in re.findall(r"batch (\d+), (\d+) stages, loss (\S+)", output):
        found[int(batch)].add((stages, loss))
    return dict(found)


def test_elastic(tmp_path: Path) -> None:
    """Two join, three leave. The losses are those of two workers to whom nothing happens."""
    code, output = run(ELASTIC, tmp_path, workers=2, options=("--spares", "2"))
    assert code == 0, output
    found = batches(output)
    stages = [{stages for stages, _ in found[batch]} for batch in range(1, 31)]
    assert stages == [{"2"}] * 10 + [{"4"}] * 10 + [{"1"}] * 10
    still = re.sub(r"    if engine.global_steps == .*", "", ELASTIC, count=1, flags=re.DOTALL)
    code, output = run(still, tmp_path, workers=2)
    assert code == 0, output
    assert {batch: {loss for _, loss in told} for batch, told in found.items()} == {
        batch: {loss for _, loss in told} for batch, told in batches(output).items()
    }


def test_a_shrink(tmp_path: Path) -> None:
    code, output = run(after() + SHRINK + "print(engine.num_stages, float(loss))\n", tmp_path, workers=2)
    assert code == 0, output
    assert len(re.findall(r"\[\d\] re-packed after batch 10 from 2 to 1 stages", output)) == 2, output
    assert len(re.findall(r"\[0\] 1 \d+\.\d+", output)) == 1, output


def test_survive(tmp_path: Path) -> None:
    """One of two workers is lost. The losses are those without a loss, and as many layers are frozen.

    The script has trained before it gives its object, so what was kept until then must not be gone back to.
    """
    surviving = '"dynamic_pipeline": {"enabled": True, "survive": {"enabled": True}}'
    script = after().replace('"dynamic_pipeline": {"enabled": True}', surviving)
    assert script.count(surviving) == 1
    script += BETWEEN.replace("% 100", "% 2") + DATA_AT + GO_ON
    calm = run(script, tmp_path, "nobody", workers=2, options=("--survivors-stay",))
    lost = run(script, tmp_path, "1", workers=2, options=("--survivors-stay",))
    assert calm[0] == 0, calm[1]
    told, found = batches(calm[1]), batches(lost[1])
    assert sorted(found) == sorted(told) == list(range(11, 19)), lost[1]
    for batch in told:
        assert {loss for _, loss in found[batch]} == {loss for _, loss in told[batch]}
    assert {stages for stages, _ in found[18]} == {"1"}
    frozen = [sorted(int(i) for line in re.findall(r"frozen \[(.*)\]", output) for i in re.findall(r"\d+", line))
              for _, output in (calm, lost)]
    assert frozen == [[0, 2]] * 2
