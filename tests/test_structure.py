"""Planning is apart from execution, and what is below knows nothing of what is above."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dynpipe_ds

PACKAGE = Path(dynpipe_ds.__file__).parent
PURE = (
    "placement", "partition", "schedule", "simulation", "planning", "decide", "measure.profile", "config", "sections",
)  # fmt: skip
"""What decides: values in, values out, the same on every rank."""
EXECUTES = ("torch.distributed", *(f"dynpipe_ds.{name}" for name in (
    "checkpoint", "engine", "host", "measure.gather", "measure.profiler", "measure.recorder", "messages", "migration",
    "module", "ranks", "run", "stage", "training",
)))  # fmt: skip
ABOVE = {  # of a folder or file, what may not be imported there, also for types
    "migration": ("stage", "training", "run", "engine", "checkpoint", "repacking"),
    "measure": ("stage", "training", "run", "engine", "decide"),
    "host": ("stage", "training", "run", "engine", "checkpoint.load", "checkpoint.save", "repacking"),
    "stage": ("training", "run", "engine", "decide", "checkpoint", "repacking", "measure"),
    "checkpoint": ("training", "engine", "repacking"),
    "repacking": ("training", "engine", "checkpoint"),
    "joining": ("training", "engine"),
    "training": ("engine",),
}


def files(name: str) -> list[Path]:
    path = PACKAGE / name.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imported(file: Path, *, lazily: bool) -> set[str]:
    """Full names of what a file imports, inside functions as well if asked."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if lazily else tree.body
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def under(names: set[str], roots: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if any(name == root or name.startswith(f"{root}.") for root in roots))


@pytest.mark.parametrize("name", PURE)
def test_what_decides_executes_nothing(name: str) -> None:
    """But for DeepSpeed's own partitioner, which ``balanced`` asks when it is called."""
    for file in files(name):
        assert not under(imported(file, lazily=False), EXECUTES), file


@pytest.mark.parametrize("name", ABOVE)
def test_nothing_knows_what_is_above_it(name: str) -> None:
    for file in files(name):
        above = tuple(f"dynpipe_ds.{above}" for above in ABOVE[name])
        assert not under(imported(file, lazily=True), above), file


def circle(folder: Path) -> list[str]:
    """Modules of a folder that import each other in a circle, also for types; empty if there is none."""
    modules = {file.stem: file for file in folder.glob("*.py") if file.stem != "__init__"}
    package = ".".join(("dynpipe_ds", *folder.relative_to(PACKAGE).parts))
    needs = {name: imported(file, lazily=True) for name, file in modules.items()}
    needed = {name: {other for other in modules if f"{package}.{other}" in found} for name, found in needs.items()}
    while free := {name for name, others in needed.items() if not others & needed.keys()}:
        needed = {name: others for name, others in needed.items() if name not in free}
    return sorted(needed)


FOLDERS = sorted({file.parent for file in PACKAGE.rglob("*.py")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_modules_of_a_folder_import_each_other_in_a_circle(folder: Path) -> None:
    assert not circle(folder)
