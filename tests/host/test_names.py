"""The one list of DeepSpeed's names: it is true, it is complete, and what breaks it is reported at start."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import deepspeed
import pytest
import torch

import dynpipe_ds
from dynpipe_ds.cli.checks import check_versions
from dynpipe_ds.host import install, names


def test_the_installed_deepspeed_has_and_calls_all_of_it() -> None:
    assert names.missing_names() == []
    assert names.hooks_never_called() == []


def test_a_name_is_listed_once() -> None:
    for owner, needed in names.NEEDED.items():
        listed = [*needed.names, *needed.attributes, *needed.hooks, *needed.optional]
        assert sorted(listed) == sorted(set(listed)), owner


@pytest.mark.parametrize(("owner", "attribute"), [(names.ENGINE, "grad_layer"), (names.ZERO, "averaged_gradients")])
def test_an_attribute_that_no_constructor_sets_any_more(
    monkeypatch: pytest.MonkeyPatch, owner: str, attribute: str
) -> None:
    """No engine is built: what is looked for is the statement that sets it."""
    _rename(monkeypatch, owner, attribute, f"{attribute}_of_batch")
    with pytest.raises(install.DeepSpeedVersionError, match=rf"has no {owner}\.{attribute}, which dynpipe_ds needs"):
        install.check_version()


def test_assignments_are_found_as_dis_finds_them() -> None:
    """Also past 255 names."""
    source = "\n".join(["def many(x):", *(f"  x.name_{i} = x.other_{i}" for i in range(400))])
    scope: dict[str, Any] = {}
    exec(source, scope)
    functions = [scope["many"], *(function for _, function in _functions(deepspeed.PipelineEngine))]
    for function in functions:
        expected = [step.argval for step in dis.get_instructions(function) if step.opname == "STORE_ATTR"]
        assert list(names._assigned(function.__code__)) == expected


HOOKS = [(owner, hook) for owner, needed in names.NEEDED.items() for hook in needed.hooks if ":" in owner]


@pytest.mark.parametrize(("owner", "hook"), HOOKS, ids=[hook for _, hook in HOOKS])
def test_a_hook_thatinstall_calls_by_another_name(monkeypatch: pytest.MonkeyPatch, owner: str, hook: str) -> None:
    """DeepSpeed still has the method, and calls a new one: value, rule, remedy, and the doctor says the same."""
    _rename(monkeypatch, owner, hook, f"{hook}_anew")
    rule = rf"never calls (?:[\w.:]+, )*{owner}\.{hook}(?:, [\w.:]+)*, in place of which dynpipe_ds puts its own"
    with pytest.raises(install.DeepSpeedVersionError, match=rf"{rule}\. Install a supported release: pip install"):
        install.check_version()
    (check,) = (check for check in check_versions() if check.name == "deepspeed")
    assert check.status == "problem" and re.search(rule, check.found)


def test_a_hook_on_a_way_that_nobody_goes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not enough that some method calls it."""
    engine = deepspeed.PipelineEngine
    monkeypatch.setattr(engine, "_old_train_batch", engine.train_batch, raising=False)
    another = (lambda self, data_iter=None: self._run(data_iter)).__code__
    monkeypatch.setattr(engine, "train_batch", FunctionType(another, vars(sys.modules[engine.__module__])))
    assert "deepspeed:PipelineEngine._exec_schedule" in names.hooks_never_called()


@pytest.mark.parametrize("replaced", ["train_batch", "__init__"])
def test_functions_of_a_script_are_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch, replaced: str) -> None:
    """They may call DeepSpeed's by a global name, which is not followed."""
    monkeypatch.setattr(deepspeed.PipelineEngine, replaced, lambda *args, **kwargs: None)
    assert names.missing_names() == names.hooks_never_called() == []


def test_a_decorated_function_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed.PipelineEngine, "train_batch", torch.no_grad()(deepspeed.PipelineEngine.train_batch))
    assert not names._is_patched(deepspeed.PipelineEngine) and not names.hooks_never_called()
    _rename(monkeypatch, names.ENGINE, "_exec_schedule", "_run_schedule")
    assert f"{names.ENGINE}._exec_schedule" in names.hooks_never_called()


def test_every_override_is_listed() -> None:
    """Ours of DeepSpeed's methods: with an underscore DeepSpeed calls them, the others the user may."""
    for owner, base in ((names.ENGINE, deepspeed.PipelineEngine), (names.MODULE, deepspeed.PipelineModule)):
        needed = names.NEEDED[owner]
        theirs = {name for cls in base.__mro__ if cls.__module__.startswith("deepspeed") for name in vars(cls)}
        for cls in _subclasses(base):
            ours = {name for name in theirs & vars(cls).keys() if not re.fullmatch("__.*__", name)}
            assert ours <= {*needed.hooks, *needed.names}, cls
            assert {name for name in ours if name[0] == "_"} <= set(needed.hooks), cls


def _subclasses(cls: type) -> Iterator[type]:
    for derived in cls.__subclasses__():
        if derived.__module__.startswith(dynpipe_ds.__name__):
            yield derived
        yield from _subclasses(derived)


def _functions(cls: type) -> list[tuple[str, FunctionType]]:
    return [(name, value) for name, value in vars(cls).items() if isinstance(value, FunctionType)]


def _rename(monkeypatch: pytest.MonkeyPatch, owner: str, old: str, new: str) -> None:
    """Let all of DeepSpeed's code of a class, and of its bases, use another name for something."""
    for cls in names._find(owner).__mro__:
        if not cls.__module__.startswith("deepspeed"):
            continue
        for name, function in _functions(cls):
            monkeypatch.setattr(cls, name, _renamed(function, old, new))
        if "_INSTRUCTION_MAP" in vars(cls):
            instructions = {key: _renamed(function, old, new) for key, function in cls._INSTRUCTION_MAP.items()}
            monkeypatch.setattr(cls, "_INSTRUCTION_MAP", instructions)


def _renamed(function: FunctionType, old: str, new: str) -> FunctionType:
    """The function, with another name for something that it uses."""

    def rename(code: Any) -> Any:
        constants = tuple(rename(c) if isinstance(c, type(code)) else c for c in code.co_consts)
        return code.replace(co_names=tuple(new if n == old else n for n in code.co_names), co_consts=constants)

    made = FunctionType(
        rename(function.__code__), function.__globals__, function.__name__, function.__defaults__,
        tuple(_renamed_cell(cell, old, new) for cell in function.__closure__ or ()) or None,
    )  # fmt: skip
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _renamed_cell(cell: Any, old: str, new: str) -> Any:
    try:
        inner = cell.cell_contents
    except ValueError:
        return cell
    return type(cell)(_renamed(inner, old, new)) if isinstance(inner, FunctionType) else cell
