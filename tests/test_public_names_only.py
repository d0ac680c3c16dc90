"""Scenarios and benchmarks are what users could have written: they import public names, and look at nothing private."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_public_api import ROOT, api

FILES = sorted(
    path.relative_to(ROOT).as_posix() for name in ("scenarios", "benchmarks") for path in (ROOT / name).rglob("*.py")
)
# Private names of DeepSpeed's, of which these benchmarks are about.
OF_DEEPSPEED = {
    "benchmarks/replay/run.py": {"_INSTRUCTION_MAP"},
    "benchmarks/replicas/main.py": {"_reduce_non_expert_gradients"},
}
OF_PYTHON = {"_replace", "_fields", "_asdict", "_exit"}  # of named tuples, and of os


PUBLIC_VALUES = frozenset(name for name, _ in api.names())


def public() -> set[str]:
    """Names that the page lists, and the packages that have some."""
    return {*PUBLIC_VALUES, *(package.__name__ for package in api.packages())}


def imported(tree: ast.AST) -> Iterator[str]:
    """Every name of ours that is imported, or reached from an imported package, by its full path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (path := dotted(node)).startswith("dynpipe_ds."):
            yield path


def dotted(node: ast.expr) -> str:
    """``a.b.c``; empty for anything else than names and attributes."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner else ""  # type: ignore[attr-defined]


def private(tree: ast.AST) -> Iterator[str]:
    """Attributes with an underscore of anything but ``self``, ``cls``, ``super()`` and torch's own namespaces."""
    for node in ast.walk(tree):
        name, of = None, None
        if isinstance(node, ast.Attribute):
            name, of = node.attr, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            if node.func.id in ("getattr", "setattr", "hasattr", "delattr") and isinstance(node.args[1], ast.Constant):
                name, of = str(node.args[1].value), node.args[0]
        if name is None or of is None or not name.startswith("_") or name.startswith("__"):
            continue
        is_super = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
        if not is_super and dotted(of).split(".")[0] not in ("self", "cls", "torch") or dotted(of).startswith("self."):
            yield name


@pytest.mark.parametrize("file", FILES)
def test_public_names_only(file: str) -> None:
    """In what is imported, and in what is looked at."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    ours = {name for name in imported(tree) if name.split(".")[0] == "dynpipe_ds"}
    # What is reached through a public name, a class's method say, is checked where names are private.
    wrong = {name for name in ours - public() if name.rpartition(".")[0] not in PUBLIC_VALUES}
    assert not wrong, f"import public names (docs/api.md), not {', '.join(wrong)}"
    looked_at = set(private(tree)) - OF_PYTHON
    assert looked_at == OF_DEEPSPEED.get(file, set()), f"{', '.join(looked_at)}: private attributes of other objects"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from dynpipe_ds.host.install import install", {"dynpipe_ds.host.install.install"}),
        ("import dynpipe_ds.decide.controller", {"dynpipe_ds.decide.controller"}),
        ("import dynpipe_ds\ndynpipe_ds.host.install", {"dynpipe_ds.host", "dynpipe_ds.host.install"}),
        ("from dynpipe_ds.hf import causal_lm_layers\nfrom dynpipe_ds import hf, FatalError", set()),
        ("import dynpipe_ds\nraise dynpipe_ds.FatalError", set()),
    ],
)
def test_imports_that_are_not_public_are_found(code: str, found: set[str]) -> None:
    assert set(imported(ast.parse(code))) - public() == found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("engine._recorder.marks", {"_recorder"}),
        ("self.engine._controller", {"_controller"}),
        ("getattr(engine, '_num_batches')", {"_num_batches"}),
        ("contender.engine.module._local_start = 3", {"_local_start"}),
        ("self._mine; cls._count; super()._load(); torch.ops.aten._scaled; x.__dict__; engine.partition", set()),
    ],
)
def test_private_attributes_are_found(code: str, found: set[str]) -> None:
    assert set(private(ast.parse(code))) == found
