"""``dynpipe doctor --numerics``: it finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from dynpipe_ds.cli.checks import Check
from dynpipe_ds.cli.numerics import check_numerics, rank
from dynpipe_ds.cli.numerics.check import check_mode
from dynpipe_ds.cli.numerics.compare import compare, merge
from dynpipe_ds.cli.numerics.model import COURSES, MODES, Mode
from dynpipe_ds.cli.numerics.record import NORM, WEIGHT, WHOLE, Quantity, Record
from dynpipe_ds.cli.numerics.reference import train_undivided
from dynpipe_ds.cli.pair import start, wait
from dynpipe_ds.cli.running import Processes
from dynpipe_ds.ports import reserved_port
from tests.cli.conftest import Command
from tests.cli.mutants import MUTANTS, Patches
from tests.distributed.ranks import run_ranks

TYPICAL = [
    "dropped_clip", "norm_of_the_first_stage", "gradient_divided_twice", "tied_gradients_added_once_too_few",
    "layers_dropped_by_a_stale_count", "lost_layer",
]  # fmt: skip

BREAKING = [name for name, mutant in MUTANTS.items() if mutant.breaks]
OTHERS = [name for name in MUTANTS if name not in (*TYPICAL, *BREAKING)]

by_name: dict[str, Mode] = {mode.name: mode for mode in MODES}


def train_mutants(_rank: int, folder: str, names: list[str]) -> None:
    """Each in the mode where it shows, on a cut that stays and one that moves, in a folder of its own."""
    for name in names:
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        with Patches() as patches:
            MUTANTS[name].apply(patches)
            rank.run_rank(place, [by_name[MUTANTS[name].mode]], [COURSES[1], COURSES[3]])
    rank.run_rank(Path(folder), [by_name["ZeRO-1"]], COURSES)  # and without a fault, in all courses


@pytest.fixture(scope="module")
def references() -> dict[str, Record]:
    """What the undivided model gives, by mode."""
    return {mode.name: train_undivided(mode) for mode in MODES}


def told(checks: list[Check]) -> str:
    """All problems."""
    return "\n".join(f"{check.name}: {check.found}" for check in checks if check.status == "problem")


@pytest.mark.exhaustive
def test_what_is_installed_is_right(dynpipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command; it leaves neither files nor processes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = dynpipe("doctor", "--numerics", "--json")
    found = [check for check in done.json["checks"] if check["name"].startswith("numerics")]
    assert [check["name"] for check in found] == [f"numerics {mode.name}" for mode in MODES]
    for check in found:
        assert check["status"] == "ok", check
        assert re.fullmatch(r"4 cuts, 4 batches: .* within \de-\d\d|.* within 0e\+00", check["found"].split(" (")[0])
        assert "equal bits for every cut" in check["found"]
    assert not list(tmp_path.glob("dynpipe-*"))
    assert not [p for p in psutil.Process().children(recursive=True) if "numerics.rank" in " ".join(p.cmdline())]


@pytest.mark.parametrize(
    "names", [pytest.param(TYPICAL, id="feared"), pytest.param(OTHERS, id="others", marks=pytest.mark.exhaustive)]
)
def test_faults_are_found_in_their_mode(names: list[str], tmp_path: Path, references: dict[str, Record]) -> None:
    """One pair of processes for all: to start them takes longer than to train."""
    run_ranks(train_mutants, 2, str(tmp_path), names, timeout_s=280)
    for name in names:
        mode = by_name[MUTANTS[name].mode]
        found = told(list(check_mode(tmp_path / name, mode, references[mode.name])))
        assert MUTANTS[name].told in found, f"{name}: {found or 'not found'}"
    (check,) = check_mode(tmp_path, by_name["ZeRO-1"], references["ZeRO-1"])
    assert check.status == "ok" and "equal bits for every cut" in check.found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gradient_divided_twice", *BREAKING])
def test_the_command_finds_faults(name: str) -> None:
    """Also those that end a rank, or let it wait for ever."""
    command = (sys.executable, "-m", "tests.cli.mutants", name)
    checks = check_numerics(command, patience_s=20.0 if MUTANTS[name].breaks else 60.0)
    assert MUTANTS[name].told in told(checks) and told(checks), f"{name}: {checks}"
    assert all(check.remedy for check in checks if check.status == "problem")


def test_it_says_what_differs_where_and_by_how_much(references: dict[str, Record]) -> None:
    """Quantity, layers, cut, batch, amount; and what the cut before the moves was."""
    mode, reference = MODES[0], references[MODES[0].name]
    runs = {course: {q: tensor.clone() for q, tensor in reference.items()} for course in COURSES}
    for layer in (1, 2, 5):
        runs[COURSES[0]][Quantity(1, WEIGHT, layer, "up")] *= 1.5
    del runs[COURSES[1]][Quantity(2, WEIGHT, 4, "bias")]
    runs[COURSES[2]][Quantity(0, NORM)] *= float("nan")
    runs[COURSES[3]][Quantity(3, WEIGHT, 4, "down")] *= 1 + 1e-6
    problems = compare(mode, reference, runs).problems
    assert problems[0] == (
        "cut [0 1 8], batch 2: weights of layers 1-2, 5 off by 5.0e-01, as a share of the undivided model's "
        "(allowed 1e-04)"
    )
    assert problems[1].startswith("cut [0 4 8], batch 3: weights of layer 4 missing")
    assert problems[2].startswith("cut [0 7 8], batch 1: gradient norm off by nan")
    assert len(problems) == 3  # one course that agrees within the tolerance is compared with none


def test_bits_count_between_cuts(references: dict[str, Record]) -> None:
    mode, reference = MODES[0], references[MODES[0].name]
    runs = {course: {q: tensor.clone() for q, tensor in reference.items()} for course in COURSES}
    runs[COURSES[3]][Quantity(3, WEIGHT, 4, "down")] *= 1 + 1e-6
    assert compare(mode, reference, runs).problems == [
        "cut [0 2 8] (moved from [0 6 8]), batch 4: weights of layer 4: other bits than with cut [0 1 8]"
    ]


def test_a_layer_on_no_stage_and_one_on_both(references: dict[str, Record]) -> None:
    """Two stages that say something else of the whole model, too."""
    reference = references["fp32"]
    whole = {q: tensor for q, tensor in reference.items() if q.layer == WHOLE}
    stages = [
        {**whole, **{q: tensor for q, tensor in reference.items() if q.layer in layers}}
        for layers in (range(0, 4), range(3, 7))
    ]
    merged, problems = merge((stages[0], stages[1]))
    assert problems == ["after batch 1 layer 3 is on 2 stages, layer 7 is on no stage"]
    assert len(merged) < len(reference)
    stages[1][Quantity(1, NORM)] = stages[1][Quantity(1, NORM)] * 2
    assert merge((stages[0], stages[1]))[1][1] == "gradient norm after batch 2 differs between the two stages"


def rank_that(tmp_path: Path, code: str) -> tuple[str, ...]:
    """A process that does something else instead of training."""
    script = tmp_path / "rank.py"
    script.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{code}", encoding="utf-8")
    return (sys.executable, str(script))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("print('no space'); sys.exit(3 * rank)", "the start of the processes: rank 1 ended with code 3: no space"),
        ("time.sleep(1e6 if rank else 0)", "no progress for 5 s: the start of the processes"),
        (
            "for rank in range(2):\n    open(f'progress-{rank}', 'w').write('fp32')\ntime.sleep(1e6)",
            "no progress for 1 s: fp32",
        ),
        (
            "print(file=open(f'progress-{rank}', 'w'), end=f'fp32, batch {rank}', flush=True)\n"
            "while not os.path.exists('progress-1') or not open('progress-1').read(): time.sleep(0.01)\n"
            "rank or os.kill(os.getpid(), 9)\n"
            "time.sleep(1e6)",
            "rank 0 at fp32, batch 0; rank 1 at fp32, batch 1: rank 0 ended with code -9: it printed nothing",
        ),
        ("assert os.environ['MASTER_ADDR'] == '127.0.0.1' and 'SLURM_PROCID' not in os.environ", ""),
    ],
)  # fmt: skip
def test_processes_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, found: str) -> None:
    """Named, with where they were and what they printed last; none is left."""
    monkeypatch.setenv("SLURM_PROCID", "5")
    folder = tmp_path / "folder"
    folder.mkdir()
    before = set(psutil.Process().children())
    patience_s = 1.0 if "no progress" in found else 60.0
    with reserved_port() as port, Processes(folder) as processes:
        start(processes, folder, rank_that(tmp_path, code), port)
        failure = wait(processes, folder, patience_s)
    assert failure.startswith(found) if found else failure == ""
    assert set(psutil.Process().children()) <= before


def test_processes_that_end_without_training_are_a_problem(tmp_path: Path) -> None:
    checks = check_numerics(rank_that(tmp_path, ""))
    assert told(checks) == "numerics: the processes ended before all was trained"


@pytest.mark.exhaustive
def test_a_rank_ends_with_its_parent(tmp_path: Path) -> None:
    """Whose end of its standard input closes; else it would wait for the other rank."""
    with reserved_port() as port:
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = subprocess.run(
            [sys.executable, "-m", "dynpipe_ds.cli.numerics.rank", str(tmp_path)], env={**os.environ, **environment},
            stdin=subprocess.DEVNULL, capture_output=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 1
