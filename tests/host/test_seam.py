"""Only host/ knows DeepSpeed, and every name of it that is used anywhere is in the one list.

How the second is decided: by the name of the variable or attribute that a name is taken from (``engine``,
``self._engine``, ``wrapper``, ``module._grid``, ...), in a class that is derived from DeepSpeed's also ``self`` and
``super()``. Of what is taken from it, DeepSpeed's are the names that its own classes have or assign and torch's have
not; all others are ours. Names that are put together while the program runs are not seen.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from dynpipe_ds.host import names

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "dynpipe_ds").rglob("*.py"))

ENGINE, MODULE, ZERO, BF16 = names.ENGINE, names.MODULE, names.ZERO, names.BF16
GRID = "deepspeed.runtime.pipe.topology:PipelineParallelGrid"
TOPOLOGY = "deepspeed.runtime.pipe.topology:ProcessTopology"
SPEC = "deepspeed.pipe:TiedLayerSpec", "deepspeed.pipe:LayerSpec"
PARTS = "deepspeed.utils.tensor_fragment:tensor_fragment", "deepspeed.utils.tensor_fragment:fragment_address"
ADAMS = "deepspeed.ops.adam:FusedAdam", "deepspeed.ops.adam:DeepSpeedCPUAdam"
PARAMETER = "deepspeed.utils.mixed_precision_linkage", ZERO, BF16, MODULE

OF_VARIABLE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("engine", "_engine"), (ENGINE,)),
    **dict.fromkeys(("module", "_module"), (MODULE,)),
    **dict.fromkeys(("optimizer", "wrapper"), (ZERO, BF16, *ADAMS)),
    "PipelineEngine": (ENGINE,),
    **dict.fromkeys(("grid", "_grid", "mpu"), (GRID,)),
    **dict.fromkeys(("topology", "_topo"), (TOPOLOGY,)),
    **dict.fromkeys(("spec", "layer"), SPEC),
    **dict.fromkeys(("mapping", "address", "hp_fragment_address", "lp_fragment_address"), PARTS),
    **dict.fromkeys(("parameter", "placeholder", "weight"), PARAMETER),
    "pipe_schedule": ("deepspeed.runtime.pipe.schedule:PipeSchedule",),
    "training_dataloader": ("deepspeed.runtime.dataloader:DeepSpeedDataLoader",),
    "checkpoint_engine": ("deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine",),
    "inner": ("deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine",),
    "own": ("deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine",),
    "_config": ("deepspeed.runtime.config:DeepSpeedConfig",),
    "config_class": ("deepspeed.runtime.config:DeepSpeedConfig",),
    "accelerator": ("deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator",),
}
OF_CLASS = {"RecordingWriter": ("deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine",)}
OF_CALL = {
    "get_accelerator": ("deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator",),
    "get_cuda_rng_tracker": ("deepspeed.runtime.activation_checkpointing.checkpointing:CudaRNGStatesTracker",),
}


class Use(NamedTuple):
    """A name that is taken from an object of DeepSpeed's."""

    owners: tuple[str, ...]
    name: str
    line: int


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_only_host_imports_deepspeed(file: Path) -> None:
    place = file.relative_to(ROOT / "dynpipe_ds")
    imports = list(imports_of_deepspeed(file.read_text(encoding="utf-8")))
    assert place.parts[0] == "host" or not imports, f"{place}:{imports}: ask a function of dynpipe_ds/host instead"


def test_no_import_escapes() -> None:
    source = """
import deepspeed.comm as dist
from deepspeed import comm
def later():
    from deepspeed.pipe import LayerSpec
    importlib.import_module("deepspeed.ops")
    import_module(f"deepspeed.{name}")
    __import__("deepspeed")
import deepspeed_tools
importlib.metadata.version("deepspeed")
"""
    assert list(imports_of_deepspeed(source)) == [2, 3, 5, 6, 7, 8]


def imports_of_deepspeed(source: str) -> Iterator[int]:
    """Lines that import it."""
    for node in ast.walk(ast.parse(source)):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [node.module or ""]
        elif isinstance(node, ast.Call) and _last(node.func) in ("import_module", "__import__", "find_spec"):
            found = [text.value for text in ast.walk(node) if isinstance(text, ast.Constant)][:1]
        if any(str(name).split(".")[0] == "deepspeed" for name in found):
            yield node.lineno  # type: ignore[attr-defined]


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_every_name_of_deepspeeds_is_listed(file: Path) -> None:
    unlisted = [f"line {use.line}: {use.name} of {', '.join(use.owners)}" for use in uses(file) if not is_listed(use)]
    assert not unlisted, f"{file.relative_to(ROOT)}: put it into names.NEEDED: {unlisted}"


@pytest.mark.parametrize(
    ("owner", "name"),
    [(ENGINE, "_running_engine_backward"), (MODULE, "_local_start"), (GRID, "pp_proc_group"), (ZERO, "grad_accum"),
     ("deepspeed.utils.groups", "_clone_world_group"), ("deepspeed.pipe", "PipelineModule")],
)  # fmt: skip
def test_a_name_that_is_taken_off_the_list_is_found(monkeypatch: pytest.MonkeyPatch, owner: str, name: str) -> None:
    monkeypatch.setitem(names.NEEDED, owner, names.Needed())
    assert any(use.name == name and not is_listed(use) for file in FILES for use in uses(file))


def test_nothing_is_listed_that_is_not_used() -> None:
    """Taken from an object of DeepSpeed's, or a text, for what is set and removed by name."""
    used = {(owner, use.name) for file in FILES for use in uses(file) for owner in use.owners}
    texts = {node.value for file in FILES for node in ast.walk(_tree(file)) if isinstance(node, ast.Constant)}
    for owner in names.NEEDED:
        unused = {name for name in listed(owner) if (owner, name) not in used and name not in texts}
        assert unused <= ({"forward"} if owner == MODULE else set()), owner  # which torch's modules have, too


def is_listed(use: Use) -> bool:
    return any(f"{owner}:{use.name}" in names.NEEDED or use.name in listed(owner) for owner in use.owners)


def listed(owner: str) -> set[str]:
    needed = names.NEEDED.get(owner, names.Needed())
    return {*needed.names, *needed.attributes, *needed.hooks, *needed.optional}


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def uses(file: Path) -> tuple[Use, ...]:
    """What a file takes from objects and modules of DeepSpeed's."""
    tree, module = _tree(file), ".".join(file.relative_to(ROOT).with_suffix("").parts)
    found: list[Use] = []
    modules: dict[str, str] = {}
    ours: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "deepspeed":
                    modules[alias.asname or "deepspeed"] = alias.name if alias.asname else "deepspeed"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if _is_module(inner):
                    modules[alias.asname or alias.name] = inner
                else:
                    found.append(Use((str(node.module),), alias.name, node.lineno))
        elif isinstance(node, ast.ImportFrom):  # a module of ours may be called as something of theirs
            ours |= {alias.asname or alias.name for alias in node.names}

    def visit(node: ast.AST, cls: tuple[str, ...]) -> None:
        if isinstance(node, ast.ClassDef):
            cls = OF_CLASS.get(node.name) or derived().get((module, node.name), ())
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and cls and member.name in theirs(cls):
                    found.append(Use(cls, member.name, member.lineno))
        for owners, name in _taken(node, cls, modules, ours):
            found.append(Use(owners, name, node.lineno))  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            visit(child, cls)

    visit(tree, ())
    return tuple(found)


def _taken(
    node: ast.AST, cls: tuple[str, ...], modules: dict[str, str], ours: set[str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(node, ast.Attribute):
        source, name = node.value, node.attr
    elif isinstance(node, ast.Call) and _last(node.func) in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
        if not (isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str)):
            return
        source, name = node.args[0], node.args[1].value
    else:
        return
    path = ast.unparse(source)
    if path.split(".")[0] in modules and "(" not in path:
        module = path.replace(path.split(".")[0], modules[path.split(".")[0]], 1)
        if _is_module(module) and not _is_module(f"{module}.{name}") and not name.startswith("__"):
            yield (module,), name
        return
    last = _last(source)
    owners = OF_CALL.get(last, ()) if isinstance(source, ast.Call) else OF_VARIABLE.get(last, ())
    if path in ("self", "super()"):
        owners = cls
    if path not in ours and name in theirs(owners):
        yield owners, name


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return _last(node.func)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, AttributeError, ValueError):
        return False


@cache
def derived() -> dict[tuple[str, str], tuple[str, ...]]:
    """Our classes that are derived from DeepSpeed's, by module and name."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for owner in names.NEEDED:
        classes = [names._find(owner)] if ":" in owner else []
        while classes:
            cls = classes.pop()
            found.setdefault((cls.__module__, cls.__name__), (owner,))
            classes += type.__subclasses__(cls)
    return found


@cache
def theirs(owners: tuple[str, ...]) -> frozenset[str]:
    """Names that DeepSpeed's code of some owners has or assigns, and torch's has not."""
    found: set[str] = set()
    for owner in owners:
        for name, value in names._members(names._find(owner)):
            found |= {name} if ":" in owner else set()
            for code in names._codes(value):
                found.update(names._assigned(code))
    common = {*dir(nn.Module), *vars(nn.Module()), *dir(Optimizer), "param_groups", "state"}
    common |= set(dir(Tensor)) if owners == PARAMETER else set()
    return frozenset(name for name in found - common if not (name.startswith("__") and name.endswith("__")))
