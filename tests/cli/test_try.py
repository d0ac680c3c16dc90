"""``dynpipe try``: a script as users write them, untouched, on two ranks; what is equal, what differs, what fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynpipe_ds.cli.main import INTERRUPTED
from dynpipe_ds.cli.trying.moves import RandomMoves
from dynpipe_ds.cli.trying.outcome import Outcome, Process, compare, read
from dynpipe_ds.cli.trying.reasons import explain
from dynpipe_ds.cli.trying.settings import (
    DEEPSPEED,
    DENSE_CUTS,
    MOVING,
    NO_CLIPPING,
    NO_DROPOUT,
    PLAIN_ADAM,
    SEED_LAYERS,
    STILL,
    WAYS,
    Settings,
)
from dynpipe_ds.ports import reserved_port
from tests.cli.conftest import Command, Done
from tests.matrix import mostly

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's, in which no process is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = set(psutil.process_iter())
    with reserved_port() as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        yield tmp_path
    ours = [p for p in set(psutil.process_iter()) - before if str(SCRIPT) in " ".join(_command_line(p))]
    assert not ours


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def write_config(**changes: Any) -> str:
    """The user's JSON file."""
    Path("ds.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
    return "ds.json"


def start(*options: object, **changes: Any) -> list[object]:
    """The user's start command."""
    return ["--", sys.executable, SCRIPT, "--deepspeed_config", write_config(**changes), *options]


def way(done: Done, name: str) -> Any:
    """What the result says of a way."""
    return done.json["ways"][name]


@pytest.mark.exhaustive
def test_own_classes_and_a_json_file(dynpipe: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits are equal; the script's classes stay its own; its sitecustomize runs; its checkpoints stay."""
    site = place / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import sys\nopen({str(place / 'own')!r}, 'a').write(f'{{sys.orig_argv[1:2]}}\\n')\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
    before = SCRIPT.read_bytes()
    done = dynpipe(
        "--json", "try", "--batches", 6, "--folder", "tried", *start("--own-engine", "--evaluate", "--save", "saved")
    )
    assert done.code == 0, done
    assert [way(done, name)["batches"] for name in WAYS] == [6, 6, 6]
    assert way(done, STILL)["equal"] and way(done, MOVING)["equal"]
    assert len(set(way(done, MOVING)["losses"])) == 6, "it trains"
    assert way(done, DEEPSPEED)["facts"]["engine"] == way(done, MOVING)["facts"]["engine"] == "OwnEngine"
    moves = way(done, MOVING)["moves"]
    assert len(moves) == 2 and all(m["before"] != m["after"] for m in moves)
    assert way(done, STILL)["moves"] == [] == way(done, DEEPSPEED)["warnings"]
    assert way(done, MOVING)["weights_compared"] == 12 and way(done, MOVING)["state_compared"] == 36
    assert done.json["cost"]["accounted_s"] > 0
    assert (place / "own").read_text().count("train.py") == 3
    assert not (place / "saved").exists()
    assert SCRIPT.read_bytes() == before
    assert json.loads((place / "tried" / "result.json").read_text()) == done.json


@pytest.mark.exhaustive
def test_a_first_partition_that_is_refused(dynpipe: Command) -> None:
    """DeepSpeed's class runs it; ours says why not and what helps, and is not tried a second time."""
    section = {"pinned_cuts": [5], "memory_cap_bytes": -1}
    done = dynpipe("try", "--batches", 2, "--timeout", 60, *start(dynamic_pipeline=section))
    assert done.code == 1
    assert "FAILED   dynpipe_ds: ValueError: 1 problem in section" in done.out, done
    assert 'memory_cap_bytes = -1: must be null, a number of bytes >= 1, a size such as "16GiB"' in done.out
    assert "dynpipe_ds, moving" not in done.out and "also:" not in done.out, "one error, however many processes say it"


@pytest.mark.exhaustive
def test_ranks_that_wait_for_nobody(dynpipe: Command) -> None:
    """Bounded, with the way and where each rank is."""
    done = dynpipe("try", "--timeout", 20, *start("--hang-after", 1))
    assert done.code == 1
    assert "FAILED   DeepSpeed's class: nothing was finished for 20 s, after batch 2" in done.out, done
    stack = next(line for line in done.out.splitlines() if "rank 1 was at" in line)
    assert "barrier" in stack and f"{SCRIPT}:" in stack and "wait_for_nobody" in stack


@pytest.mark.exhaustive
def test_a_launcher(dynpipe: Command) -> None:
    """DeepSpeed's own, whose processes import DeepSpeed, too."""
    launcher = [Path(sys.executable).parent / "deepspeed", "--num_accelerators", 2, "--master_port"]
    script = [os.environ["MASTER_PORT"], SCRIPT, "--deepspeed_config", write_config()]
    done = dynpipe("--json", "try", "--batches", 5, "--", *launcher, *script)
    assert done.code == 0 and way(done, MOVING)["equal"], done
    assert [way(done, name)["ranks"] for name in WAYS] == [2, 2, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("flat", [False, True])
def test_clipping_is_shown_to_be_the_reason(dynpipe: Command, flat: bool) -> None:
    """DeepSpeed's norm counts the first stage only; with clipping off in all ways nothing differs."""
    changes = {"zero_optimization": {"stage": 1}} if flat else {}
    done = dynpipe("--json", "try", "--batches", 5, *start(gradient_clipping=0.001, **changes))
    (reason,) = done.json["reasons"]
    assert done.code == 0 and reason["shown"] and reason["text"].startswith("gradient clipping"), done
    assert not way(done, STILL)["equal"] and "weights of layers" in way(done, STILL)["differs"]


@pytest.mark.exhaustive
def test_dropout_is_shown_to_be_the_reason(dynpipe: Command) -> None:
    done = dynpipe("try", "--batches", 5, *start("--dropout", 0.2))
    assert done.code == 0 and "because  random numbers without seed_layers" in done.out, done
    assert "(shown: with seed_layers=True in both ways all bits are equal)" in done.out
    assert "losses of this run may differ" in done.out
    seeded = dynpipe("try", "--batches", 5, *start("--dropout", 0.2, "--seed-layers"))
    assert seeded.code == 0 and "all bits are equal" in seeded.out, seeded


@pytest.mark.exhaustive
def test_the_layout_at_a_cut_is_shown_to_be_the_reason(dynpipe: Command) -> None:
    """As in GPT-NeoX, whose layers transpose what they get."""
    done = dynpipe("--json", "try", "--batches", 5, *start("--transposed"))
    (reason,) = done.json["reasons"]
    assert done.code == 0 and reason["shown"] and reason["text"].startswith("memory layout"), done
    assert way(done, MOVING)["same_as_still"] and not way(done, MOVING)["equal"]


@pytest.mark.exhaustive
def test_flags_under_no_grad_are_shown_to_be_the_reason(dynpipe: Command) -> None:
    """As in qlora-pipe, whose mask wants a gradient in evaluation, too."""
    done = dynpipe("--json", "try", "--batches", 5, *start("--flagged", "--evaluate"))
    (reason,) = done.json["reasons"]
    assert done.code == 0 and reason["shown"] and reason["text"].startswith("flags in evaluation"), done
    assert way(done, STILL)["differs"].startswith("the result of evaluation 1 differs")
    assert way(done, MOVING)["same_as_still"] and not way(done, MOVING)["equal"]


@pytest.mark.exhaustive
def test_a_script_that_is_not_repeatable(dynpipe: Command) -> None:
    done = dynpipe("try", "--batches", 3, *start("--not-repeatable"))
    assert done.code == 1 and "the script is not repeatable: two runs with DeepSpeed's class differ" in done.out, done


@pytest.mark.exhaustive
def test_a_script_that_uses_ours_already(dynpipe: Command) -> None:
    """The first way runs it with the section off, so the others have something to be compared with."""
    section = {"enabled": True, "rebalance_every": "auto", "horizon_batches": 5, "pinned_cuts": [2]}
    done = dynpipe("--json", "try", "--batches", 5, *start("--ours", gradient_clipping=0.001, dynamic_pipeline=section))
    assert [way(done, name)["facts"]["ours"] for name in WAYS] == [False, True, True], done
    assert done.code == 0 and done.json["reasons"][0]["shown"], "clipping differs, since the first way is DeepSpeed's"
    assert all(2 not in move["after"] for move in way(done, MOVING)["moves"])


@pytest.mark.exhaustive
def test_a_script_that_ends_by_itself(dynpipe: Command) -> None:
    """Three stages; weights are compared all the same."""
    done = dynpipe("--json", "try", "--batches", 50, *start("--batches", 5, "--ranks", 3))
    assert done.code == 0 and way(done, MOVING)["batches"] == 5, done
    assert way(done, MOVING)["weights_compared"] == 12


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('hello')", "no pipeline engine was built in a Python process that reads PYTHONPATH"),
        ("raise SystemExit('no data')", "ended with code 1 and no pipeline engine was built"),
    ],
)
def test_a_command_without_a_pipeline(dynpipe: Command, code: str, said: str) -> None:
    """It is shown what the command printed last."""
    done = dynpipe("try", "--", sys.executable, "-c", code)
    assert done.code == 1 and said in done.out and ("hello" in done.out or "no data" in done.out), done


def test_wrong_usage(dynpipe: Command, place: Path) -> None:
    (place / "full").mkdir()
    (place / "full" / "file").touch()
    for arguments, said in [
        ([], "there is no command to try; give the one that starts your script after --"),
        (["--", "no-such-command"], "no-such-command: No such file or directory; give the command that starts"),
        (["--timeout", "1,2", "--", "true"], "argument --timeout: '1,2' must be finite seconds >= 0"),
        (["--folder", "full", "--", "true"], "--folder full: must be empty or not there yet; name another one"),
    ]:
        done = dynpipe("try", *arguments)
        assert done.code == 2 and said in done.err, done


# -- parts, in this process -------------------------------------------------------------------


class FakeEngine:
    """Stages that refuse one cut."""

    num_stages, partition = 3, (0, 2, 4, 6)

    class module:  # noqa: N801
        pinned_cuts = (3,)

    class dynamic_config:  # noqa: N801
        pinned_cuts = [5]

    def repartition(self, boundaries: tuple[int, ...]) -> None:
        if 1 in boundaries:
            raise ValueError("that cut is pinned")
        self.partition = boundaries


def test_moves_are_the_same_everywhere_legal_and_go_on_after_a_refusal() -> None:
    told: list[list[tuple[str, Any]]] = []
    for _ in range(2):
        events: list[tuple[str, Any]] = []
        moves = RandomMoves(FakeEngine(), 1, lambda event, events=events, **values: events.append((event, values)))
        for batch in range(20):
            moves.move(batch)
        told.append([(e, {k: v for k, v in values.items() if k != "seconds"}) for e, values in events])
    assert told[0] == told[1]
    refused = [values for event, values in told[0] if event == "refused"]
    assert {v["text"] for v in refused} == {"that cut is pinned"} and all(1 in v["boundaries"] for v in refused)
    assert len({tuple(v["boundaries"]) for v in refused}) == len(refused) > 0, "each is asked for once"
    assert not any(event == "move" and {1, 3, 5} & {*values["after"]} for event, values in told[0])


def outcome(
    which: str, losses: list[float], weight: str = "a", changes: tuple[str, ...] = (), **facts: Any
) -> Outcome:
    """A run on one rank."""
    known = {
        "rank": 0, "world": 1, "stages": 2, "replicas": 1, "replica": "0.0", "clipping": 0.0, "dropout": None,
        "compiled_adam": False,
        "seed_layers": False, "checkpointing": 0, "tied_on_one_stage": False, "strided": 0, **facts,
    }  # fmt: skip
    events = {
        "engine": [known], "batch": [{"loss": [loss.hex()], "seconds": 0.1} for loss in losses], "evaluation": [],
        "end": [{"weights": {"3/weight": weight}, "state": {}}],
        "crossing": [{"outputs": 1}], "flagged": [], "strided": [{}] * known.pop("strided"),
    }  # fmt: skip
    return Outcome(Settings(which, 8, 2, 0, changes), [Process("here-1", events)])


def test_the_first_batch_and_the_layers_that_differ() -> None:
    found = compare(outcome(DEEPSPEED, [3.0, 2.0, 1.0]), outcome(STILL, [3.0, 2.5, 1.5], "b"))
    assert found.batch == 2 and str(found) == "the loss of batch 2 differs: 2 and 2.5; weights of layer 3 differ"
    assert compare(outcome(DEEPSPEED, [3.0]), outcome(STILL, [3.0, 2.0])).losses.endswith("only one of the two has it")
    assert compare(outcome(DEEPSPEED, [3.0]), outcome(STILL, [3.0])).equal


CLIPPED, SEEDED, LAID = "gradient clipping", "random numbers without seed_layers", "memory layout"


@pytest.mark.parametrize(
    ("facts", "of_ours", "of_moves", "reasons"),
    [
        ({"clipping": 1.0}, {NO_CLIPPING}, set(), [CLIPPED]),
        ({"clipping": 1.0, "dropout": "layer 2"}, {NO_CLIPPING}, set(), [CLIPPED]),
        ({"clipping": 1.0, "dropout": "layer 2"}, set(), {SEED_LAYERS}, [SEEDED]),
        ({"clipping": 1.0, "strided": 1}, {DENSE_CUTS}, set(), [LAID]),
        ({"compiled_adam": True, "dropout": "layer 2"}, {PLAIN_ADAM}, set(), ["DeepSpeed's compiled Adam"]),
        ({"clipping": 1.0, "strided": 1}, {NO_CLIPPING, DENSE_CUTS}, {SEED_LAYERS}, [CLIPPED, LAID, SEEDED]),
        ({"dropout": "layer 2", "clipping": 1.0}, {NO_CLIPPING, NO_DROPOUT}, set(), [CLIPPED, "dropout under"]),
        ({"dropout": "layer 2", "seed_layers": True}, set(), {NO_DROPOUT}, ["dropout: a layer draws its masks"]),
    ],
)  # fmt: skip
def test_a_reason_is_what_takes_the_difference_away(
    facts: dict[str, Any], of_ours: set[str], of_moves: set[str], reasons: list[str]
) -> None:
    """Nothing that makes no difference is named; what moves is compared with what does not."""

    def run(which: str, changes: tuple[str, ...] = (), batches: int | None = None) -> Outcome:
        loss = 1.0 + (which != DEEPSPEED and not of_ours <= {*changes})
        return outcome(which, [loss + 2 * (which == MOVING and not of_moves <= {*changes})], changes=changes, **facts)

    found = explain({which: run(which, ()) for which in WAYS}, run)
    assert all(reason.text.startswith(wanted) for reason, wanted in zip(found, reasons, strict=True)), found
    assert all(reason.shown for reason in found)


def test_what_no_change_takes_away_is_not_called_shown() -> None:
    def run(which: str, changes: tuple[str, ...] = (), batches: int | None = None) -> Outcome:
        return outcome(which, [1.0 + (which != DEEPSPEED)], clipping=1.0, replicas=3)

    (reason,) = explain({which: run(which, ()) for which in WAYS}, run)
    assert not reason.shown and reason.text.startswith("3 replicas: ours adds gradients in the order of the replicas")

    def other(which: str, changes: tuple[str, ...] = (), batches: int | None = None) -> Outcome:
        losses = [1.0, 2.0 + (which == MOVING), 3.0]
        return outcome(which, losses[:batches], "b" if which == MOVING else "a", replicas=3)

    (reason,) = explain({which: other(which, ()) for which in WAYS}, other)
    assert reason.text == (
        "not known; it is not random numbers without seed_layers: the script is repeatable, and dynpipe_ds, moving "
        "differs from dynpipe_ds; after batch 1 weights of layer 3 differ"
    )


def test_a_change_that_the_script_can_not_take_is_told() -> None:
    def run(which: str, changes: tuple[str, ...] = (), batches: int | None = None) -> Outcome:
        loss = 1.0 + (which != DEEPSPEED and NO_CLIPPING not in changes)
        found = outcome(which, [loss], clipping=1.0, changes=changes)
        found.failure = "TypeError: no clipping" if NO_CLIPPING in changes else ""
        return found

    first, second = explain({which: run(which, ()) for which in WAYS}, run)
    assert not first.shown and first.text.endswith(
        '(not shown: DeepSpeed\'s class with "gradient_clipping": 0 fails, TypeError: no clipping)'
    )
    assert second.text == "not known: the script is repeatable, and dynpipe_ds differs from DeepSpeed's class"


def test_causes_come_before_what_follows_from_them(tmp_path: Path) -> None:
    """A rank that loses the connection raises before the launcher says why."""
    said = [
        {"type": "RuntimeError", "text": "[pair.cc:553] Connection closed by peer [127.0.0.1]:26509.", "at_s": 1.0},
        {"type": "RankLostError", "text": "rank 0 ended while batch 2 was trained", "at_s": 2.0},
        {"type": "ProcessRaisedException", "text": "\n-- Process 0:\nclosed by peer, ValueError: bad", "at_s": 3.0},
    ]
    events = "".join(json.dumps({"event": "error", **error}) + "\n" for error in said)
    (tmp_path / "here-1.events").write_text(events, encoding="utf-8")
    errors = read(tmp_path, Settings(DEEPSPEED, 8, 2, 0)).errors
    assert [error.partition(":")[0] for error in errors] == ["ProcessRaisedException", "RuntimeError", "RankLostError"]


def test_what_is_not_repeatable_has_no_other_reason() -> None:
    losses = iter([1.0, 2.0, 3.0, 4.0, 5.0])

    def run(which: str, changes: tuple[str, ...] = (), batches: int | None = None) -> Outcome:
        return outcome(which, [next(losses)], clipping=1.0)

    (reason,) = explain({which: run(which, ()) for which in WAYS}, run)
    assert not reason.shown and reason.text.startswith("the script is not repeatable")


COMPILES = """
import os, sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(os.environ["TORCH_EXTENSIONS_DIR"] + "/adam/lock").try_acquire()
print("begun", flush=True)
time.sleep(600)
"""


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", mostly(SIGNALS, SIGNALS[:1]))
def test_who_ends_it_ends_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Nobody waits for the lock of a compilation that was ended; those of others stay."""
    for name in ("adam", "lamb"):
        (tmp_path / name).mkdir()
    (tmp_path / "lamb" / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    script = [sys.executable, "-c", COMPILES]
    command = [sys.executable, "-m", "dynpipe_ds", "try", "--folder", str(tmp_path / "out"), "--", *script]

    def as_a_terminal_starts_it() -> None:
        """A shell lets what it starts in the background ignore Ctrl-C, ``nohup`` a hang-up, and so what that starts."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    tried = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=as_a_terminal_starts_it
    )
    log = tmp_path / "out" / "run-1" / "output.log"
    while not (log.exists() and log.read_text()):
        assert tried.poll() is None
        time.sleep(0.05)
    (child,) = psutil.Process(tried.pid).children()
    tried.send_signal(number)
    said = tried.communicate()[1]
    assert tried.returncode == (INTERRUPTED if number == signal.SIGINT else 128 + number) and not child.is_running()
    assert said.endswith("\ndynpipe try: interrupted\n") == (number == signal.SIGINT)
    assert sorted(tmp_path.glob("*/lock")) == [tmp_path / "lamb" / "lock"]
