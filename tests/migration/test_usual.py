"""Which modules are as most are: they travel without a word on their empty tables."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from torch import nn

from dynpipe_ds.migration import usual
from dynpipe_ds.migration.packing import make_room, pack, unpack
from dynpipe_ds.migration.usual import TABLES, is_usual


class WithState(nn.Module):
    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()


class WithSlots(nn.Module):
    __slots__ = ("more",)


class WithNew(nn.Module):
    def __new__(cls) -> WithNew:
        return super().__new__(cls)


class WithReduce(nn.Module):
    def __reduce__(self) -> Any:
        return WithReduce, ()


def test_classes_that_say_how_they_are_pickled_are_asked() -> None:
    assert all(map(is_usual, (nn.Linear, nn.Sequential, nn.Module)))
    assert not any(map(is_usual, (WithState, WithSlots, WithNew, WithReduce, torch.jit.ScriptModule)))


def carried(module: nn.Module) -> nn.Module:
    package = pack(module, "layer 0 (Test)")
    tensors, _ = make_room(package.head, torch.device("cpu"))
    for target, source in zip(tensors.own, package.tensors.own, strict=True):
        target.detach().copy_(source.view(target.shape))
    arrived = unpack(package.body, tensors).layer
    assert arrived is not None
    return arrived


def test_tables_are_there_and_are_the_modules_own() -> None:
    first, second = (carried(nn.Sequential(nn.Linear(2, 3), nn.ReLU())) for _ in range(2))
    for module in (*first.modules(), *second.modules()):
        assert vars(module).keys() >= vars(nn.Module()).keys()
        assert all(type(vars(module)[name]) is kind for name, kind in TABLES.items())
    tables = [id(vars(m)[name]) for m in (*first.modules(), *second.modules()) for name in TABLES]
    assert len(set(tables)) == len(tables)


def test_a_table_that_two_modules_share_is_one_table_where_they_arrive() -> None:
    """As after ``copy.copy``, which takes the tables over."""
    pair = nn.Sequential(nn.ReLU(), nn.ReLU())
    pair[1]._forward_hooks = pair[0]._forward_hooks
    pair[1]._buffers = pair[0]._buffers
    first, second = carried(pair)
    assert first._forward_hooks is second._forward_hooks and first._buffers is second._buffers
    assert first._parameters is not second._parameters


def test_what_is_in_tables_arrives() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    module.eval()
    module[0].register_buffer("late", torch.arange(3), persistent=False)
    arrived = carried(module)
    assert not arrived.training and arrived[0]._non_persistent_buffers_set == {"late"}
    assert arrived[0].late.tolist() == [0, 1, 2] and list(arrived[0].state_dict()) == list(module[0].state_dict())


def test_it_works_where_classes_have_no_getstate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.11 objects have none by themselves, so that asking a class for it fails."""
    class WithoutState(type(nn.Module)):  # type: ignore[misc]
        def __getattribute__(cls, name: str) -> object:
            if name == "__getstate__":
                raise AttributeError(name)
            return super().__getattribute__(name)

    class Old(nn.Module, metaclass=WithoutState):
        pass

    monkeypatch.setattr(nn, "Module", Old)
    module = runpy.run_path(str(usual.__file__))
    assert module["is_usual"](Old) and not module["is_usual"](WithState)
