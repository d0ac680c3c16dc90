"""What pip installs: an sdist and a wheel are built as pip builds them, and the wheel is used from another folder."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("dynpipe_ds", "scenarios", "benchmarks", "conf", "docs", "tests")
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
        opened.extractall(folder)
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


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Nothing but ``dynpipe_ds`` lands in site-packages: no ``scenarios``, no ``conf``, no ``tests``."""
    with zipfile.ZipFile(wheel) as opened:
        held = set(opened.namelist())
    modules = sources("dynpipe_ds", ".py")
    assert len(modules) > 100
    beside = {name for name in held if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in beside} == {"dynpipe_ds"}
    assert beside == {*modules, "dynpipe_ds/py.typed"}


def read_metadata(source: Path, output: Path) -> email.message.Message:
    """What a build of these sources would say of itself."""
    folder = build("prepare_metadata_for_build_wheel", source, output)
    return email.message_from_bytes((folder / "METADATA").read_bytes())


def links(description: str) -> list[str]:
    """Where a description's links and pictures lead, code left out."""
    text = re.sub(r"```.*?```", "", description, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_a_package_index_gets_no_relative_link(sdist: Path, tmp_path: Path) -> None:
    """With the repository's address in CITATION.cff they lead there; without it they are text."""
    assert any(not target.startswith("http") for target in links((ROOT / "README.md").read_text(encoding="utf-8")))
    copy = shutil.copytree(sdist, tmp_path / "copy")
    citation = (copy / "CITATION.cff").read_text(encoding="utf-8")
    without = re.sub(r"^repository-code:.*\n", "", citation, flags=re.MULTILINE)
    for given in ("", "https://example.org/dynpipe"):
        file = without + f'repository-code: "{given}"\n' * bool(given)
        (copy / "CITATION.cff").write_text(file, encoding="utf-8")
        metadata = read_metadata(copy, tmp_path / f"made{len(given)}")
        description, urls = metadata.get_payload(), dict(u.split(", ") for u in metadata.get_all("Project-URL", []))
        targets = [target for target in links(description) if not target.startswith("#")]
        assert all(re.match(r"https?://", target) for target in targets), targets
        assert urls["Paper that it follows"] == "https://arxiv.org/abs/2505.14864"
        assert ("Source" in urls) == bool(given) == any(target.startswith(given or "-") for target in targets)
        files = [t.removeprefix(f"{given}/blob/main/").partition("#")[0] for t in targets if "/blob/main/" in t]
        assert all((ROOT / name).exists() for name in files)


def test_the_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (info,) = {name.split("/")[0] for name in opened.namelist() if ".dist-info/" in name}
        metadata = email.message_from_bytes(opened.read(f"{info}/METADATA"))
        scripts = opened.read(f"{info}/entry_points.txt").decode()
        assert any(name.startswith(f"{info}/") and name.endswith("LICENSE") for name in opened.namelist())
    assert metadata["Name"] in ("dynpipe_ds", "dynpipe-ds") and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10" and metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier", []) and metadata["Keywords"]
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == {"kubernetes", "data", "hf", "peft", "scenarios", "fast", "watch", "docs", "dev"}
    needed = {line.split(">")[0].split("<")[0] for line in metadata.get_all("Requires-Dist", []) if ";" not in line}
    assert {"torch", "deepspeed", "pydantic", "ninja"} <= needed and not {"hydra-core", "tqdm"} & needed
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
    """The command line with the processes that it starts."""
    where = "import dynpipe_ds; print(dynpipe_ds.__file__)"
    file = installed(wheel, tmp_path, "-c", where).splitlines()[-1]  # DeepSpeed may say something before
    assert file.startswith(str(tmp_path)), file
    assert "doctor" in installed(wheel, tmp_path, "-m", "dynpipe_ds", "--help")
    numerics = "from dynpipe_ds.cli.numerics import check_numerics; print({c.status for c in check_numerics()})"
    assert "{'ok'}" in installed(wheel, tmp_path, "-c", numerics)
    values = json.loads(installed(wheel, tmp_path, "-m", "dynpipe_ds", "demo", "--json"))
    assert values["good"] and values["moves"]
