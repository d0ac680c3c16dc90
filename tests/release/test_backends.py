"""Back-ends by name, ``exit``, ``callback``, and what ``slurm`` says where there is no Slurm."""

from __future__ import annotations

import json
import multiprocessing
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from dynpipe_ds.config import SECTION, parse_config
from dynpipe_ds.release import Constraints, ReleaseBackend, ReleaseError, base, make_backend, slurm
from dynpipe_ds.release.callback import CallbackBackend
from dynpipe_ds.release.exit import ExitBackend
from dynpipe_ds.release.slurm import SlurmBackend
from dynpipe_ds.release.stay import StayBackend

given_back: list[tuple[Any, ...]] = []


def give_back(*args: Any) -> None:
    """A site's own function."""
    given_back.append(args)
    if len(args[0]) > 2:
        raise PermissionError("not so many")


def make(release: dict[str, Any]) -> ReleaseBackend:
    return make_backend(parse_config({SECTION: {"repack": {"release": release}}}).repack.release)


class Recording(ReleaseBackend):
    """A site's own back-end."""

    def __init__(self, queue: str, limit: int = 3) -> None:
        self.arguments = (queue, limit)

    def release(self, ranks: Any, nodes: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("release", "cls"),
    [
        ({"backend": "exit"}, ExitBackend),
        ({"backend": "stay"}, StayBackend),
        ({"backend": "slurm", "job_id": "1"}, SlurmBackend),
        ({"backend": "callback", "command": ["true"]}, CallbackBackend),
    ],
)
def test_by_name(release: dict[str, Any], cls: type[ReleaseBackend]) -> None:
    assert type(make(release)) is cls


def test_a_site_s_own() -> None:
    made = make({"backend": f"{__name__}:Recording", "queue": "long"})
    assert isinstance(made, Recording) and made.arguments == ("long", 3)
    assert made.constraints() == Constraints() and made.node_name() and made.workers_leave_first
    made.check()
    made.prepare([1], [])
    made.verify()


@pytest.mark.parametrize(
    ("release", "text"),
    [
        ({"backend": "nowhere.at_all:Thing"}, "No module named 'nowhere'.*every rank can import"),
        ({"backend": f"{__name__}:Missing"}, "has no attribute 'Missing'.*must be one of exit, stay, slurm"),
        ({"backend": f"{__name__}:give_back"}, "is no release back-end; derive it from"),
        ({"backend": f"{__name__}:Recording"}, "refuses the options {}: .*queue"),
        ({"backend": f"{__name__}:Recording", "queue": "a", "size": 1}, "refuses the options .*size"),
        ({"backend": "dynpipe_ds.release:ReleaseBackend"}, "abstract"),
    ],
)
def test_a_site_s_own_that_is_refused(release: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(release)


def _leave() -> None:
    print("last words", end="")
    ExitBackend().leave()


def test_exit() -> None:
    """It demands nothing, tells nobody, and ends the process at once with 0."""
    backend = ExitBackend()
    assert backend.constraints() == Constraints() and backend.workers_leave_first
    backend.check()
    backend.prepare([1], ["a"])
    backend.release([1], ["a"])
    backend.verify()
    process = multiprocessing.get_context("fork").Process(target=_leave)
    process.start()
    process.join(10)
    assert process.exitcode == 0


# -- callback ---------------------------------------------------------------------------------------------------

SCRIPT = """\
#!{python}
import json, sys
print("all is well")
print("no such queue:", sys.argv[1], file=sys.stderr)
open(sys.argv[2], "w").write(json.dumps(sys.argv[3:]))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "give back"
    path.write_text(SCRIPT.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_command(script: str, tmp_path: Path) -> None:
    """Placeholders are filled in, whatever else is in the arguments; no shell is in between."""
    out = tmp_path / "out"
    arguments = ["{ranks}", "--nodes={nodes}", '{"n": {num_ranks}}', "$HOME; echo {other}"]
    backend = make({"backend": "callback", "command": [script, "0", str(out), *arguments], "whole_nodes": True})
    assert backend.constraints() == Constraints(whole_nodes=True)
    backend.check()
    backend.release([2, 3], ["b"])
    assert json.loads(out.read_text()) == ["2,3", "--nodes=b", '{"n": 2}', "$HOME; echo {other}"]


def test_command_that_fails(script: str, tmp_path: Path) -> None:
    backend = make({"backend": "callback", "command": [script, "7", str(tmp_path / "out")]})
    with pytest.raises(ReleaseError, match="ended with exit code 7: no such queue: 7"):
        backend.release([1], [])


def test_command_that_takes_too_long() -> None:
    backend = make({"backend": "callback", "command": ["sleep", "60"], "timeout_s": 0.1})
    with pytest.raises(ReleaseError, match="timed out after 0.1 seconds"):
        backend.release([1], [])


def test_command_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "not executable"
    file.touch()
    for name in ("no-such-command", str(file)):
        with pytest.raises(ReleaseError, match="is no executable command on this node"):
            make({"backend": "callback", "command": [name]}).check()


def test_function() -> None:
    backend = make({"backend": "callback", "function": f"{__name__}:give_back", "lowest_stay": True})
    assert backend.constraints() == Constraints(lowest_stay=True)
    backend.check()
    given_back.clear()
    backend.release([2, 3], ["b"])
    assert given_back == [((2, 3), ("b",))]
    with pytest.raises(ReleaseError, match="give_back raised PermissionError: not so many"):
        backend.release([1, 2, 3], ["b"])


@pytest.mark.parametrize("name", ["nowhere.at_all:give_back", f"{__name__}:missing", f"{__name__}:SCRIPT"])
def test_function_that_is_not_there(name: str) -> None:
    with pytest.raises(ReleaseError, match="repack.release.function = .*(every rank can import|not a function)"):
        make({"backend": "callback", "function": name}).check()


# -- slurm, without Slurm ---------------------------------------------------------------------------------------


def test_no_scontrol() -> None:
    with pytest.raises(ReleaseError, match="repack.release.scontrol = 'no-scontrol': no such command on this node"):
        SlurmBackend(scontrol="no-scontrol", job_id="1").check()


def test_outside_of_a_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SLURM_JOB_ID", "SLURMD_NODENAME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ReleaseError, match="SLURM_JOB_ID = None, SLURMD_NODENAME = None: .* not started by srun"):
        SlurmBackend(scontrol="true").check()


SCONTROL = """\
#!/bin/sh
case "$*" in
  "show job 7") cat "$(dirname "$0")/job";;
  "show config") cat "$(dirname "$0")/config";;
  "show hostnames n[1-4]") printf 'n1\\nn2\\nn3\\nn4\\n';;
  "show hostnames n[1-2]") printf 'n1\\nn2\\n';;
  "update JobId=7 JobName=x NodeList=n9") . "$(dirname "$0")/rename";;
  "update JobId=7 NodeList=n1,n2") . "$(dirname "$0")/update";;
  *) echo "unexpected: $*" >&2; exit 9;;
esac
"""
SHOWN = """\
JobId=7 JobName=x NodeList=n9
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState={state} Reason=None Dependency=(null)
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList={nodes}
   BatchHost=n1
"""


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Answers as ``scontrol`` does, to show what can't be provoked on a real one at will."""
    monkeypatch.setattr(slurm, "_ENDING_S", 0.0)
    monkeypatch.setattr(base, "_RETRY_S", 0.01)
    path = tmp_path / "scontrol"
    path.write_text(SCONTROL)
    path.chmod(0o755)
    (tmp_path / "rename").write_text("exit 0\n")
    (tmp_path / "job").write_text(SHOWN.format(state="RUNNING", nodes="n[1-4]"))
    return path


def test_what_the_first_task_asks_at_start(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the job is known, and whether running jobs may shrink at all; the other tasks ask nothing."""
    config = scontrol.parent / "config"
    config.write_text("SchedulerType = sched/backfill\nSchedulerParameters     = bf_interval=2\n")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    backend = SlurmBackend(scontrol=str(scontrol))
    backend.check()
    assert backend.node_name() == "n1"
    config.write_text("SchedulerParameters     = bf_interval=2,disable_job_shrink,defer\n")
    with pytest.raises(ReleaseError, match="SchedulerParameters has disable_job_shrink: this Slurm does not resize"):
        backend.check()
    with pytest.raises(ReleaseError, match="Slurm does not show job 8"):
        SlurmBackend(scontrol=str(scontrol), job_id="8").check()
    monkeypatch.setenv("SLURM_PROCID", "1")
    backend.check()


def test_slurm_that_is_busy_for_a_moment(scontrol: Path) -> None:
    """Refused twice because the last change is still being written down; tried again."""
    (scontrol.parent / "after").write_text(SHOWN.format(state="RUNNING", nodes="n[1-2]"))
    (scontrol.parent / "update").write_text(
        'cd "$(dirname "$0")"; echo x >>tries; if [ "$(wc -l <tries)" -lt 3 ]; then\n'
        'echo "Job update not available right now, the DB index is being set, try again in a bit for job 7" >&2\n'
        "exit 1; fi; cp after job\n"
    )
    backend = SlurmBackend(job_id="7", scontrol=str(scontrol))
    assert backend.constraints() == Constraints(nodes_stay=frozenset({"n1"}), whole_nodes=True)
    backend.prepare([2, 3], ["n3", "n4"])
    backend.release([2, 3], ["n3", "n4"])
    backend.verify()
    assert (scontrol.parent / "tries").read_text() == "x\n" * 3


def test_slurm_that_complains_yet_resizes(scontrol: Path) -> None:
    (scontrol.parent / "after").write_text(SHOWN.format(state="RUNNING", nodes="n[1-2]"))
    (scontrol.parent / "update").write_text(
        'cd "$(dirname "$0")"; cp after job; echo "Unable to write resize script" >&2; exit 1\n'
    )
    backend = SlurmBackend(job_id="7", scontrol=str(scontrol))
    backend.release([2, 3], ["n3", "n4"])
    backend.verify()


def test_slurm_that_refuses(scontrol: Path) -> None:
    (scontrol.parent / "update").write_text('echo "Access/permission denied for job 7" >&2; exit 1\n')
    backend = SlurmBackend(job_id="7", scontrol=str(scontrol))
    with pytest.raises(ReleaseError, match="refused to resize job 7 to n1,n2: Access/permission denied for job 7; the"):
        backend.release([2, 3], ["n3", "n4"])


def test_slurm_that_says_yes_and_does_nothing(scontrol: Path) -> None:
    (scontrol.parent / "update").write_text("exit 0\n")
    backend = SlurmBackend(job_id="7", scontrol=str(scontrol), timeout_s=2.0)
    backend.release([2, 3], ["n3", "n4"])
    with pytest.raises(ReleaseError, match="job 7 has the nodes n1,n2,n3,n4 2 s after its resize to n1,n2"):
        backend.verify()


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("Access/permission denied", "would not resize job 7 now: Access/permission denied$"),
        ("DB index is being set, try again in a bit", r"now: DB index .* \(without slurmdbd, .* resized only once\)"),
    ],
)
def test_slurm_that_would_refuse(scontrol: Path, said: str, text: str) -> None:
    """Noticed before anything has changed."""
    (scontrol.parent / "rename").write_text(f'echo "{said}" >&2; exit 1\n')
    with pytest.raises(ReleaseError, match=text):
        SlurmBackend(job_id="7", scontrol=str(scontrol)).prepare([2, 3], ["n3", "n4"])


def test_slurm_job_that_does_not_run(scontrol: Path) -> None:
    (scontrol.parent / "job").write_text(SHOWN.format(state="COMPLETING", nodes="n[1-4]"))
    with pytest.raises(ReleaseError, match="Slurm job 7 is COMPLETING: only a running job can be resized"):
        SlurmBackend(job_id="7", scontrol=str(scontrol)).prepare([3], ["n4"])
    with pytest.raises(ReleaseError, match="Slurm does not show job 8: unexpected: show job 8"):
        SlurmBackend(job_id="8", scontrol=str(scontrol)).constraints()


@pytest.mark.parametrize("nodes", [[], ["n1"], ["n1", "n9"], ["n1", "n2", "n3", "n4"]])
def test_slurm_nodes_that_can_not_go(scontrol: Path, nodes: list[str]) -> None:
    with pytest.raises(ReleaseError, match="must be some nodes of job 7 .* not all, and not its batch host n1"):
        SlurmBackend(job_id="7", scontrol=str(scontrol)).prepare([1], nodes)


def test_slurm_nodes_of_other_jobs(scontrol: Path) -> None:
    """Workers joined from a job of their own: it gives them back by ending, and this job keeps its nodes."""
    backend = SlurmBackend(job_id="7", scontrol=str(scontrol))
    backend.prepare([4], ["n9"])
    backend.release([4], ["n9"])
    backend.verify()  # any change of the job would have been unexpected
