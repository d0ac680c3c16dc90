"""How busy a machine is, from readings that are made up; what this machine does meanwhile does not matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scenarios import machine
from scenarios.machine import Counters, Reading, between, calibrate, family, median_and_scatter

IDLE = Reading(
    cores=2, load=0.3, others=0.05, threads=2, kernel_s=0.0051, scatter=0.03, kept_kernel_s=0.005, throttled_s=0.0
)


def test_an_idle_machine_has_no_reasons() -> None:
    assert IDLE.reasons() == [] and IDLE.slower == pytest.approx(0.02)
    assert Reading(cores=2).reasons() == [], "what can't be read is no reason"
    assert Reading(**{**vars(IDLE), "load": 9.0}).reasons() == [], "what ran a minute ago is over"


@pytest.mark.parametrize(("changed", "reason"), [
    ({"others": 1.5, "programs": {"cc1plus": 1.0, "python": 0.5}},
     "others use 1.5 of 2 processors (cc1plus 1.0, python 0.5)"),
    ({"others": 0.3}, "others use 0.3 of 2 processors"),
    ({"load": 40.4, "others": None}, "the load is 40.4 on 2 processors"),
    ({"quota": 1.5}, "the control group may use 1.5 processors, 2 are needed"),
    ({"throttled_s": 0.25}, "the control group was held back for 0.25 s"),
    ({"scatter": 0.38}, "a fixed computation scatters by 38%"),
    ({"kernel_s": 0.0075}, "it takes 50% longer than when the machine was idle"),
])  # fmt: skip
def test_every_reason_is_told(changed: dict[str, object], reason: str) -> None:
    assert Reading(**{**vars(IDLE), **changed}).reasons() == [reason]  # type: ignore[arg-type]


def test_others_are_who_does_not_belong_to_this_program() -> None:
    """Ten seconds: 12 s of processors, 5 s of them own; a compiler took 5 s, something that has ended 2 s."""
    before = Counters(100.0, 50.0, 7.0, {1: ("cc", 20.0), 2: ("sh", 1.0), 4: ("worker/1", 90.0)}, 3.0)
    after = Counters(110.0, 62.0, 12.0, {1: ("cc", 22.0), 2: ("sh", 1.1), 3: ("cc", 3.0), 4: ("worker/2", 90.0)}, 3.5)
    found = between(before, after, cores=4, load=1.5, quota=None)
    assert found.others == pytest.approx(0.7) and found.throttled_s == pytest.approx(0.5)
    assert found.programs == {"cc": pytest.approx(0.5)}, "both compilers; the shell is not worth a name"
    nothing = between(before, before, cores=4, load=None, quota=None)
    assert nothing.others == 0 and not nothing.reasons()


def test_a_family_is_a_process_and_what_it_started() -> None:
    assert family(5, [(9, 7), (5, 1), (7, 5), (8, 1), (6, 5), (1, 0)]) == {5, 6, 7, 9}
    assert family(0, [(0, 0), (1, 0)]) == {0, 1}, "the first process may be its own parent"


def test_what_a_program_starts_is_its_own() -> None:
    """While it runs, and when it has ended; processor seconds, which no other program lengthens."""
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True); input()"
    before = machine.count()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"done\n"
        running = machine.count()
        assert child.pid not in running.programs_s and running.own_s - before.own_s > 0.25
        child.communicate(b"\n")
    assert machine.count().own_s - before.own_s > 0.25
    reading = machine.since(before)
    assert reading.others is not None and reading.others >= 0 and reading.cores >= 1


def test_of_a_rank_the_launcher_and_all_it_started_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.getppid() in machine.count().programs_s
    monkeypatch.setenv("RANK", "0")
    assert os.getppid() not in machine.count().programs_s


def test_the_kernel_is_computed_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    products = []
    original = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: products.append(a) or original(a, b))
    threads = torch.get_num_threads()
    median_s, scatter = calibrate(2, repeats=3)
    assert len(products) == 2 * 8 * (3 + 10) and len({id(square) for square in products}) == 2
    assert median_s > 0 <= scatter and torch.get_num_threads() == threads


def test_scatter() -> None:
    assert median_and_scatter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == (4.0, 1.0)


def test_looking_puts_all_readings_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order: others while nothing of ours runs, then the kernel."""
    counted = iter([Counters(0.0, 0.0, 0.0, {}, 1.0), Counters(1.0, 1.5, 0.1, {1: ("cc", 1.2)}, 1.0)])
    monkeypatch.setattr(machine, "count", lambda: next(counted))
    monkeypatch.setattr(machine, "_SAMPLE_S", 0.0)
    monkeypatch.setattr(machine, "calibrate", lambda threads: (0.006 * threads, 0.02))
    monkeypatch.setattr(machine, "throttled_s", lambda: 1.25)
    found = machine.look(2, kept_kernel_s=0.01)
    assert found.others == pytest.approx(1.4) and found.programs == {"cc": pytest.approx(1.2)}
    assert (found.threads, found.kernel_s, found.scatter) == (2, 0.012, 0.02)
    assert found.throttled_s == pytest.approx(0.25) and found.slower == pytest.approx(0.2)


def test_control_groups(tmp_path: Path) -> None:
    """Version 2 with a limit on the parent, version 1 in a container, and none at all."""
    own = tmp_path / "cgroup"
    own.write_text("0::/jobs/one\n", encoding="utf-8")
    group = tmp_path / "v2" / "jobs" / "one"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("max 100000\n", encoding="utf-8")
    (group.parent / "cpu.max").write_text("150000 100000\n", encoding="utf-8")
    (group / "cpu.stat").write_text("usage_usec 7\nnr_throttled 2\nthrottled_usec 1500000\n", encoding="utf-8")
    assert machine.quota(tmp_path / "v2", own) == 1.5
    assert machine.throttled_s(tmp_path / "v2", own) == 1.5
    own.write_text("5:memory:/x\n4:cpu,cpuacct:/docker/abc\n", encoding="utf-8")
    group = tmp_path / "v1" / "cpu,cpuacct"  # the container's own group is mounted here
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("50000\n", encoding="utf-8")
    (group / "cpu.cfs_period_us").write_text("100000\n", encoding="utf-8")
    (group / "cpu.stat").write_text("nr_throttled 0\nthrottled_time 250000000\n", encoding="utf-8")
    assert machine.quota(tmp_path / "v1", own) == 0.5
    assert machine.throttled_s(tmp_path / "v1", own) == 0.25
    (group / "cpu.cfs_quota_us").write_text("-1\n", encoding="utf-8")
    assert machine.quota(tmp_path / "v1", own) is None
    assert machine.quota(tmp_path / "none", tmp_path / "none") is machine.throttled_s(tmp_path / "none", own) is None


def test_in_words() -> None:
    assert machine.busy_words([]) == []
    (line,) = machine.busy_words(["one", "two"])
    assert line == "BUSY MACHINE: one; two. Times are not those of an idle machine."
    values = json.loads(json.dumps(machine.as_values(IDLE)))
    assert values["reasons"] == []
    assert machine.in_words(values) == (
        "others use 0.05 of 2 processors, calibration kernel 5.10 ms on 2 threads, scatter 3% (5.00 ms when idle)"
    )
    unknown = machine.as_values(Reading(cores=2, kernel_s=0.005, scatter=0.0))
    assert machine.in_words(unknown).endswith("(no figure of an idle machine kept)")
