"""``make gpu``, rehearsed on a CPU: its measurements, its report, and what it says without a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import (
    cuda_tests,
    engines,
    exactness,
    facts,
    install,
    kernels,
    look,
    main,
    moving,
    processes,
    profiling,
    staged,
    wheels,
)
from benchmarks.gpu.job import Job
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.timing import Spread
from benchmarks.gpu.transports import ORDER, chosen
from benchmarks.record import ROOT, environment
from tests.benchmarks.test_record import IDLE
from tests.distributed.ranks import run_ranks

PATIENCE_S = 200.0


def job(module: str, rank: int, size: int, folder: str, **options: str) -> Job:
    return Job(module, "cpu", True, rank, size, 0, time.time() + PATIENCE_S, folder, options)


# -- measurements --------------------------------------------------------------------------------


def alone(rank: int, folder: str) -> dict[str, Any]:
    """What one process measures."""
    torch.use_deterministic_algorithms(True)
    return {
        exactness.ONE: exactness.measure(job("exactness", rank, 1, folder, cut=exactness.ONE)),
        "profiling": profiling.measure(job("profiling", rank, 1, folder)),
        "engines": engines.measure(job("engines", rank, 1, folder)),
        **{name: kernels.measure(job("kernels", rank, 1, folder, scenario=name)) for name in kernels.SCENARIOS},
    }


def both(rank: int, folder: str) -> dict[str, Any]:
    """What two measure."""
    return {
        exactness.MOVING: exactness.measure(job("exactness", rank, 2, folder, cut=exactness.MOVING)),
        "moving": moving.measure(job("moving", rank, 2, folder)),
    }


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All that is measured, in small, with few batches."""
    folder = str(tmp_path_factory.mktemp("gpu"))
    found = {**run_ranks(alone, 1, folder)[0], **run_ranks(both, 2, folder)[0]}
    return {name: Outcome(values, "", 1.0) for name, values in found.items()}


@pytest.mark.exhaustive
def test_the_bits_of_one_stage_and_of_moving_layers_are_compared(parts: dict[str, Outcome]) -> None:
    one, moved = (parts[name].values for name in (exactness.ONE, exactness.MOVING))
    for precision, found in moved.items():
        assert exactness.differences(one[precision], found) == []
        assert len({tuple(cut) for cut in found["partitions"]}) == 3, "layers moved twice"
        assert set(found["layers"]) == set(map(str, range(8)))
        spoilt = json.loads(json.dumps(found))
        spoilt["losses"][3] = (1.0).hex()
        spoilt["layers"]["5"]["state"] = "other"
        assert [text.split(":")[0] for text in exactness.differences(one[precision], spoilt)] == [
            "the loss of batch 3", "the optimizer state of 1 of 8 layers (5)"
        ]
    assert not exactness.is_wrong(parts)
    other = Outcome({"bf16": {**moved["bf16"], "losses": ["0x0"] * 6}}, "", 1.0)
    assert exactness.is_wrong({**parts, exactness.MOVING: other})
    text = exactness.text(parts)
    assert text.count("the same bits") == 2 and text.count("not measured") == 2, "one run was left out here"


@pytest.mark.exhaustive
def test_digests_tell_weights_from_state(parts: dict[str, Outcome]) -> None:
    """And differ from layer to layer, but for layers that have no state yet."""
    layers = parts[exactness.ONE].values["fp32"]["layers"].values()
    assert len({digest for layer in layers for digest in layer.values()}) == 2 * len(layers)


@pytest.mark.exhaustive
def test_profiling_is_measured_in_pairs(parts: dict[str, Outcome]) -> None:
    rows = parts["profiling"].values
    assert set(rows) == set(profiling.SIZES)
    for row in rows.values():
        assert len(row["with_s"]) == len(row["without_s"]) > 0 and min(row["with_s"]) > 0
        assert row["accounted_s"] > 0 and min(row["layer_backward_s"]) > 0
    assert "own accounting" in profiling.text(parts)


@pytest.mark.exhaustive
def test_engines_are_measured_in_turns(parts: dict[str, Outcome]) -> None:
    found = parts["engines"].values
    assert len({len(seconds) for seconds in found["seconds"].values()}) == 1 and found["overhead_s"]["profiling"] > 0
    lines = engines.text(parts).splitlines()
    assert sum(name in line for name in engines.SECTIONS for line in lines) == len(engines.SECTIONS)


@pytest.mark.exhaustive
def test_a_move_is_compared_with_as_many_plain_bytes(parts: dict[str, Outcome]) -> None:
    rows = parts["moving"].values["rows"]
    assert [row["precision"] for row in rows] == ["fp32", "bf16"]
    for row in rows:
        assert row["bytes_moved"] >= 3 * row["layer_bytes"] > 0, "weights and two moments"
        assert len(row["move_s"]) == len(row["plain_s"]) > 0
    assert "of the plain rate" in moving.text(parts)


@pytest.mark.exhaustive
def test_every_scenario_has_its_blocks_timed(parts: dict[str, Outcome]) -> None:
    for name in kernels.SCENARIOS:
        rows = parts[name].values["rows"]
        assert len(rows) >= 4 and not [row for row in rows if "error" in row], (name, rows)
        assert all(min(row["layer_s"]) > 0 and len(row["layer_s"]) == len(row["dense_s"]) for row in rows)
    text = kernels.text({name: parts[name] for name in kernels.SCENARIOS})
    assert text.count("### ") == 6 and "experts: loop" in text


# -- the back-end of two processes on one device -------------------------------------------------


def collectives(rank: int) -> None:
    if staged.NAME.upper() not in vars(dist.Backend):
        dist.Backend.register_backend(staged.NAME, staged.StagedGroup, devices=["cpu", "cuda"])
    group = dist.new_group(backend=staged.NAME)
    assert group is not None and dist.get_backend(group) == staged.NAME
    total = torch.arange(6.0).view(2, 3).t() * (rank + 1)
    dist.all_reduce(total, group=group)
    assert torch.equal(total, 3 * torch.arange(6.0).view(2, 3).t()), "with strides"
    most = torch.tensor([rank, -rank])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    assert most.tolist() == [1, 0]
    told = torch.full((2,), float(rank))
    dist.broadcast(told, 1, group=group)
    assert told.eq(1).all()
    rows = [torch.empty(2, dtype=torch.bfloat16) for _ in range(2)]
    dist.all_gather(rows, torch.full((2,), float(rank), dtype=torch.bfloat16), group=group)
    assert [row[0].item() for row in rows] == [0, 1]
    flat, part = torch.empty(4), torch.empty(4)
    dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)), group=group)
    dist.all_to_all_single(part, torch.arange(4.0) + 10 * rank, group=group)
    assert flat.tolist() == [0, 0, 1, 1] and part.tolist() == [2.0 * rank, 2 * rank + 1, 2 * rank + 10, 2 * rank + 11]
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": 0}, {"rank": 1}]
    got = [torch.zeros(3, 2).t(), torch.zeros((), dtype=torch.int64)]
    sent = [torch.arange(6.0).view(2, 3) + rank, torch.tensor(rank)]
    operations = [dist.P2POp(dist.irecv, tensor, 1 - rank, group) for tensor in got]
    works = dist.batch_isend_irecv(operations + [dist.P2POp(dist.isend, t, 1 - rank, group) for t in sent])
    sent[0].fill_(-1.0)  # what is under way is a copy
    for work in works:
        work.wait()
        work.wait()
    assert torch.equal(got[0], torch.arange(6.0).view(2, 3) + 1 - rank) and int(got[1]) == 1 - rank
    dist.barrier(group=group)


@pytest.mark.exhaustive
def test_what_deepspeed_and_the_library_ask_of_a_group() -> None:
    run_ranks(collectives, 2)


def test_the_first_backend_that_works_is_used() -> None:
    failed, works = Outcome({}, "Duplicate GPU detected", 1.0), Outcome({"send_s": [1.0], "num_bytes": 1}, "", 1.0)
    assert chosen({}) == chosen(dict.fromkeys(ORDER, failed)) == staged.NAME
    assert chosen({**dict.fromkeys(ORDER, failed), "gloo": works}) == "gloo"


# -- processes -----------------------------------------------------------------------------------


def test_the_spread_of_numbers() -> None:
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 1)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]).text(10, ".0f") == "30 (20 to 40)"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Processes of a module that this test writes."""
    def start(code: str, size: int = 1, budget_s: float = 60.0) -> Outcome:
        (tmp_path / "sitecustomize.py").write_text(
            "import sys, types\nsys.modules['torch'] = types.SimpleNamespace(set_num_threads=lambda n: None)\n"
            "module = types.ModuleType('benchmarks.gpu.told')\nsys.modules['benchmarks.gpu.told'] = module\n"
            f"exec({code!r}, vars(module))\n"
        )
        monkeypatch.setattr(processes, "ROOT", tmp_path)
        (tmp_path / "benchmarks").exists() or os.symlink(ROOT / "benchmarks", tmp_path / "benchmarks")
        return processes.run(
            "told", device="cpu", small=True, size=size, budget_s=budget_s, folder=tmp_path / "told", options={"a": "b"}
        )

    return start


def test_what_a_process_measures_comes_back(told: Any) -> None:
    done = told("def measure(job): return job.options | {'rank': job.rank}", size=2)
    assert done.values == {"a": "b", "rank": 0} and done.error == ""


def test_what_was_measured_before_a_failure_counts(told: Any) -> None:
    failing = "if job.rank: raise ValueError('no such kernel')"
    code = f"def measure(job):\n job.keep({{'half': 1}})\n {failing}\n while True: pass"
    done = told(code, size=2)
    assert done.values == {"half": 1} and done.error == "process 1: ValueError: no such kernel"


def test_a_process_that_hangs_or_dies_is_told(told: Any) -> None:
    hung = told("import time\ndef measure(job):\n job.keep({'half': 1}); time.sleep(600)", budget_s=2.0)
    assert hung.error == "not done in 2 s and ended" and hung.seconds < 30 and hung.values in ({}, {"half": 1})
    died = told("import os\ndef measure(job): print('last words', flush=True); os.abort()")
    assert "ended with -6" in died.error and "last words" in died.error


# -- the report ----------------------------------------------------------------------------------


def stubbed(monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, Outcome]) -> None:
    def run(module: str, *, folder: Path, **_: Any) -> Outcome:
        return outcomes.get(module, Outcome({}, f"{module} does not work", 1.0))

    monkeypatch.setattr(main.processes, "run", run)
    monkeypatch.setattr(main, "environment", lambda **_: environment(reading=IDLE))


@pytest.mark.exhaustive
def test_one_that_fails_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Outcome({"half": 1}, "CUDA error:\nout of memory", 3.0)
    stubbed(monkeypatch, {"moving": parts["moving"], "engines": failed})
    assert main.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    report, values = (tmp_path / "report.md").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert report.splitlines()[0] == "# One GPU, rehearsed" and "says nothing about a GPU" in report
    assert [line[3:] for line in report.splitlines() if line.startswith("## ")] == [m.title for m in main.MEASUREMENTS]
    assert "- *engines* failed: CUDA error: out of memory" in report and "of the plain rate" in report
    assert "Used below: **staged**" in report, "no back-end worked here"
    assert values["rehearsal"] and values["measurements"]["moving"]["moving"]["values"] == parts["moving"].values
    assert values["environment"].keys() == environment(reading=IDLE).keys()
    assert values["command"].endswith(str(tmp_path))
    assert "moving: done" in capsys.readouterr().out


def test_a_device_that_others_use_is_told() -> None:
    idle = {"device": "X", "utilization.gpu": "0 %", "taken_bytes": 5 * 10**8, "environment": {}}
    busy = {**idle, "utilization.gpu": "97 %", "taken_bytes": 3 * 10**10}
    assert "busy" not in facts.text({"facts": Outcome(idle, "", 1.0)})
    text = facts.text({"facts": Outcome(busy, "", 1.0)})
    assert "**The device was busy before:** 97 % in use, 30.0 GB taken" in text and "| device | X |" in text


def test_bits_that_differ_are_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = {"tests": [{"test": "tests/test_x.py::test", "outcome": "failed", "seconds": 1.0, "why": "assert a | b"}]}
    stubbed(monkeypatch, {"cuda_tests": Outcome(failing, "", 1.0), "facts": Outcome({}, "", 1.0)})
    assert main.main(["--device", "cpu", "--only", "tests", "--out", str(tmp_path)]) == 1
    assert "1 failed" in (tmp_path / "report.md").read_text()
    stubbed(monkeypatch, {"cuda_tests": Outcome({"tests": []}, "", 1.0), "facts": Outcome({}, "", 1.0)})
    assert main.main(["--device", "cpu", "--only", "tests", "--out", str(tmp_path)]) == 0


def test_when_the_time_is_up_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stubbed(monkeypatch, {})
    assert main.main(["--device", "cpu", "--started", "1000", "--out", str(tmp_path)]) == 1
    assert "not started: the time was up" in (tmp_path / "report.md").read_text()


def test_all_ends_in_ten_minutes() -> None:
    parts = [part for measurement in main.MEASUREMENTS for part in measurement.parts]
    assert sum(part.budget_s for part in parts) <= 60 * main.MINUTES + 60, "if most of them took all that they may"
    options = main.arguments(["--device", "cuda", "--started", "1000"])
    assert 1000 + 9.5 * 60 < options.until_s < 1000 + 10 * 60


def test_a_rehearsal_overwrites_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.arguments(["--device", "cuda"]).out == ROOT / "benchmarks/results/gpu"
    monkeypatch.setenv("DEVICE", "cpu")
    assert main.arguments([]).device == "cpu" and main.arguments([]).out == ROOT / "outputs/gpu"


# -- without a device ----------------------------------------------------------------------------


@pytest.mark.skipif(look.num_devices() > 0, reason="this machine has a CUDA device")
def test_without_a_device_one_line_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no CUDA device" in said and "DEVICE=cpu make gpu" in said
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu.look"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, said)


def test_a_torch_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(look, "num_devices", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(["--device", "cuda"]) == 2
    assert f"torch {torch.__version__}" in capsys.readouterr().err


def test_the_files_with_tests_for_a_device_are_found() -> None:
    found = cuda_tests.files(ROOT)
    assert {"tests/scenarios/test_moe.py", "tests/measure/test_recorder_on_cuda.py"} <= set(found)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.main", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + (tmp_path / "report.md").read_text()
    report = (tmp_path / "report.md").read_text()
    assert report.count("the same bits") == 4 and "failed:" not in report


# -- the machine without network -----------------------------------------------------------------


def test_what_is_gathered_has_no_torch() -> None:
    names = {pin.split("==")[0] for pin in wheels.pins()}
    assert {"deepspeed", "numpy", "pytest", "ninja", "hydra-core", "omegaconf"} <= names
    assert not names & {"torch", "triton", "dynpipe-ds", "ruff"} and all("==" in pin for pin in wheels.pins())


def make_wheel(folder: Path, name: str) -> None:
    """A package with one module that says who it is."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "here = 'from a wheel'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", kind)
        wheel.writestr(f"{info}/RECORD", "")


def test_a_torch_with_cuda_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    for name in ("torch", "triton", "nvidia_cublas", "hjson"):
        make_wheel(tmp_path, name)
    assert [Path(path).name.split("-")[0] for path in install.chosen(tmp_path, with_torch=False)] == ["hjson"]
    assert len(install.chosen(tmp_path, with_torch=True)) == 4


def test_missing_wheels_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "packages_with_torch", list)
    assert "make wheels WHEELS=" in install.install(tmp_path, tmp_path / "venv")
    make_wheel(tmp_path, "hjson")
    assert "CUDA_TORCH=torch==" in install.install(tmp_path, tmp_path / "venv")
    assert not (tmp_path / "venv").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_there", [False, True])
def test_an_environment_is_made_of_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """Torch comes from its wheel, or from where it is; both without network."""
    gathered, elsewhere = tmp_path / "wheels", tmp_path / "site-packages"
    gathered.mkdir()
    elsewhere.mkdir()
    for name in ("torch", "hjson"):
        make_wheel(gathered, name)
        (elsewhere / f"{name}.py").write_text("here = 'elsewhere'\n")
    monkeypatch.setattr(install, "packages_with_torch", lambda: [str(elsewhere)] if is_there else [])
    assert install.install(gathered, tmp_path / "venv") == ""
    code = "import hjson, torch; print(hjson.here, '/', torch.here)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run([tmp_path / "venv/bin/python", "-c", code], capture_output=True, text=True, env=environment)
    assert said.stdout.strip() == f"from a wheel / {'elsewhere' if is_there else 'from a wheel'}", said.stderr
