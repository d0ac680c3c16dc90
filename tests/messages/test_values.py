"""Values are taken apart and put together as they were, or named if they can't cross."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dynpipe_ds.messages.values import (
    CantCross,
    holds_plain_values,
    obstacle,
    put_together,
    shown,
    take_apart,
    tensors_in,
)


class Pair(NamedTuple):
    """Found by its name on the other side."""

    first: Any
    second: Any


class Image(Tensor):
    """A tensor class of somebody's own."""


X, Y = torch.arange(3.0), torch.ones(2, 2, dtype=torch.float8_e5m2)

VALUES: dict[str, Any] = {
    "tensor": X,
    "None": None,
    "empty": ((), [], {}),
    "plain": (True, False, 0, -(2**70), 1.5, -0.0, math.inf, 2 - 1j, "", "ü\ud800", torch.int8, torch.Size([2, 0])),
    "list of one": [X],
    "nested": {"a": [X, (None, {1: Y, None: [X]})], (2, True): OrderedDict(z=1, b=Y)},
    "named": Pair(X, [Pair(None, Y)]),
    "torch's own named": torch.max(torch.eye(3), 1),
    "parameter": nn.Parameter(X.clone()),
}


def alike(a: Any, b: Any) -> bool:
    """Equal, and of the same types everywhere."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a is b
    if isinstance(a, dict):
        return alike([*a.items()], [*b.items()])
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(alike, a, b))
    return repr(a) == repr(b)


def told(structure: Any) -> Any:
    """What arrives of a structure that is sent as JSON."""
    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    return frozen(json.loads(json.dumps(structure)))


@pytest.mark.parametrize("name", VALUES)
def test_there_and_back(name: str) -> None:
    value = VALUES[name]
    structure, tensors = take_apart(value)
    assert told(structure) == structure and hash(structure) == hash(told(structure))
    again = put_together(told(structure), tensors)
    assert alike(again, value)
    assert len({*map(id, tensors)}) == len(tensors) == len({*map(id, tensors_in(value))})
    assert obstacle(value) is None


def test_containers_are_new_and_tensors_the_same() -> None:
    value = {"a": [X], "b": X}
    structure, tensors = take_apart(value)
    again = put_together(structure, tensors)
    again["a"].append(1)
    again["c"] = 2
    assert len(tensors) == 1 and value.keys() == {"a", "b"} and value["a"] == [X]


def test_numbers_compare_by_type_and_bits() -> None:
    structures = [take_apart(value)[0] for value in (1, True, 1.0, 1 + 0j, 0.0, -0.0, "1", 0, False)]
    assert len({*structures}) == len(structures)
    assert take_apart(math.nan)[0] == take_apart(-float("inf") + float("inf"))[0] == take_apart(float("nan"))[0]
    assert all(holds_plain_values(structure) for structure in structures)
    assert holds_plain_values(take_apart([X, {"a": 1}])[0])
    assert not holds_plain_values(take_apart((X, [None, Pair(X, None)]))[0])


def test_in_words() -> None:
    value = (X, None, [1.5, "a"], {"k": Pair(Y, X)})
    assert shown(take_apart(value)[0]) == "(tensor 0, None, [1.5, 'a'], {'k': Pair(tensor 1, tensor 0)})"


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


Here = namedtuple("Elsewhere", "a")  # type: ignore[name-match]  # noqa: PYI024 - not found by its name

CANT: dict[str, tuple[Any, str]] = {
    "set": ({1}, "a value of type set"),
    "inside": ((X, [0, {"a": object()}]), r"a value of type object \(at \[1\]\[1\]\['a'\]\)"),
    "class of dicts": (defaultdict(list), "a value of type collections.defaultdict"),
    "class that looks like a dict": (UserDict(), "a value of type collections.UserDict"),
    "module": (nn.Linear(1, 1), r"a value of type torch\.nn\.modules\.linear\.Linear"),
    "device": (torch.device("cpu"), "a value of type torch.device"),
    "named tuple without its name": (Here(1), r"a value of type tests\.messages\.test_values\.Elsewhere"),
    "tensor of a class": (torch.zeros(2).as_subclass(Image), r"a tensor of type tests\.messages\.test_values\.Image"),
    "sparse": (torch.eye(2).to_sparse(), r"a tensor of layout torch\.sparse_coo"),
    "dtype": (torch.empty(2, dtype=torch.bits8), r"a tensor of dtype torch\.bits8"),
    "elsewhere": ({"a": torch.zeros(2, device="meta")}, r"a tensor on the device meta, .*\(at \['a'\]\)"),
    "tensor as key": ({X: 1}, "a dict with a tensor as key"),
    "holds itself": (itself(), "a container in more than 32 others"),
}


@pytest.mark.parametrize("name", CANT)
def test_what_cant_cross_is_named(name: str) -> None:
    value, message = CANT[name]
    with pytest.raises(CantCross, match="^" + message):
        take_apart(value)
    assert obstacle(value) is not None


def test_nothing_that_arrives_is_run_or_imported() -> None:
    structure, _ = take_apart(Pair(1, 2))
    assert isinstance(structure, tuple)
    names = (
        "os:system", "tests.messages.test_values:alike", "antigravity:Pair", "builtins:tuple",
        "collections:OrderedDict",
    )
    for name in names:
        with pytest.raises(LookupError, match=f"^{name} is no named tuple that this process has loaded"):
            put_together((structure[0], name, *structure[2:]), [])
