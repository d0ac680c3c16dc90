"""What pip installs: an sdist and a wheel are built as pip builds them, and the wheel is used from another folder."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dynpipe_ds", "scenarios")
FOLDERS = (*PACKAGES, "benchmarks", "conf", "docs", "tests")
FILES = sorted(
    path.name for path in ROOT.iterdir()
    if path.suffix in (".cff", ".in", ".md", ".py", ".toml") or path.name in ("LICENSE", "Makefile")
)
# Shows DeepSpeed's own log on errors only, as everywhere in the documentation.
QUIET = {"DEEPSPEED_LOG_LEVEL": "error"}

_BUILD = """
import sys
from setuptools import build_meta
print(build_meta.{hook}(sys.argv[1]))
"""


def sources(folder: str, *endings: str) -> set[str]:
    """Files of the checkout, by their path in it; without what tools leave behind."""
    found = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.suffix in endings)
    return {path.as_posix() for path in found if not any(part.startswith((".", "_build")) for part in path.parts)}


def build(hook: str, source: Path, output: Path) -> Path:
    """Call a hook of the build back-end, as pip does, without making an environment for it."""
    output.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", _BUILD.format(hook=hook), str(output)],
        cwd=source, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    return output / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of a copy, since building leaves files behind; unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / "copy" / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / "copy" / name)
    archive = build("build_sdist", folder / "copy", folder / "made")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (unpacked,) = (path.parent for path in folder.glob("*/PKG-INFO"))
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel that pip makes of the sdist."""
    return build("build_wheel", sdist, sdist.parent / "made")


def test_the_sdist_holds_what_tests_and_documentation_need(sdist: Path) -> None:
    wanted = set(FILES)
    assert len(wanted) >= 7
    for folder in FOLDERS:
        wanted |= sources(folder, ".py", ".md", ".json", ".yaml", ".png", ".typed")
    held = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert wanted <= held, sorted(wanted - held)
    assert not [name for name in held if ".pyc" in name or name.startswith(("outputs/", ".venv/"))]


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        held = set(opened.namelist())
    modules = {path for package in PACKAGES for path in sources(package, ".py")}
    configuration = {f"scenarios/{path}" for path in sources("conf", ".yaml", ".json")}
    assert len(modules) > 100 and len(configuration) > 20
    beside = {name for name in held if ".dist-info/" not in name}
    assert beside == {*modules, *configuration, "dynpipe_ds/py.typed"}


def test_the_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (info,) = {name.split("/")[0] for name in opened.namelist() if ".dist-info/" in name}
        metadata = email.message_from_bytes(opened.read(f"{info}/METADATA"))
        scripts = opened.read(f"{info}/entry_points.txt").decode()
        assert any(name.startswith(f"{info}/") and name.endswith("LICENSE") for name in opened.namelist())
    assert metadata["Name"] in ("dynpipe_ds", "dynpipe-ds") and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10" and metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier", []) and metadata["Keywords"]
    assert set(metadata.get_all("Provides-Extra", [])) == {"kubernetes", "data", "hf", "watch", "docs", "dev"}
    needed = {line.split(">")[0].split("<")[0] for line in metadata.get_all("Requires-Dist", []) if ";" not in line}
    assert {"torch", "deepspeed", "hydra-core", "ninja"} <= needed
    assert "dynpipe = dynpipe_ds.cli.main:main" in scripts


def installed(wheel: Path, folder: Path, *command: str) -> str:
    """Run a Python command with the wheel's content as it is installed, from a folder that has nothing of ours."""
    target = folder / "site"
    if not target.exists():
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(target)
    (folder / "elsewhere").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, *command], cwd=folder / "elsewhere", env={**os.environ, **QUIET, "PYTHONPATH": str(target)},
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.exhaustive
def test_an_installed_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """The command line with the processes that it starts, the training entry with its configuration, data."""
    where = "import dynpipe_ds, scenarios; print(dynpipe_ds.__file__, scenarios.__file__)"
    files = installed(wheel, tmp_path, "-c", where).splitlines()[-1]  # DeepSpeed may say something before
    assert all(path.startswith(str(tmp_path)) for path in files.split()), files
    assert "doctor" in installed(wheel, tmp_path, "-m", "dynpipe_ds", "--help")
    numerics = "from dynpipe_ds.cli.numerics import check_numerics; print({c.status for c in check_numerics()})"
    assert "{'ok'}" in installed(wheel, tmp_path, "-c", numerics)
    composed = installed(wheel, tmp_path, "-m", "scenarios.train", "--cfg", "job", "scenario=moe", "model=gpt_small")
    assert "num_experts:" in composed
    (tmp_path / "elsewhere" / "text.txt").write_text("Some text.\n" * 100, encoding="utf-8")
    told = installed(wheel, tmp_path, "-m", "scenarios.prepare", "text.txt", "prepared")
    assert "data=memmap data.path=prepared" in told
    assert json.loads((tmp_path / "elsewhere/prepared/prepared.json").read_text())["num_documents"] == 1
