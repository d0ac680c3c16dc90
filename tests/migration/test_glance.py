"""The head of a skeleton is ready before the body where no tensor can be overlooked; else both are made at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dynpipe_ds.migration.glance import holds_only_registered
from dynpipe_ds.migration.names import Names, no_names
from dynpipe_ds.migration.packing import Packing, make_room, unpack


class Holder(nn.Module):
    """A module with some attribute."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.held = held


def with_mark() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.mark = torch.ones(1)  # type: ignore[attr-defined]
    return module


def with_hook() -> nn.Module:
    module = nn.Linear(2, 2)
    kept = torch.ones(1)
    module.register_forward_hook(lambda *_: print(kept))
    return module


def with_tensor_hook() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.register_hook(lambda gradient: gradient)
    return module


PLAIN = {
    "torch's own": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "numbers": Holder((1, 2.0)),
    "a list": Holder([1, "two"]), "a dtype": Holder(torch.float16),
    "a function": Holder(nn.functional.relu), "a class": Holder(nn.Linear), "nothing": None,
}
NOT_PLAIN = {
    "a tensor": lambda: Holder(torch.ones(2)), "a list of tensors": lambda: Holder([torch.ones(2)]),
    "an object": lambda: Holder({"cache": 1}), "a lambda": lambda: Holder(lambda: 1),
    "a generator": lambda: Holder(torch.Generator()), "a mark": with_mark, "a hook": with_hook,
    "a tensor's hook": with_tensor_hook,
}


@pytest.mark.parametrize("what", PLAIN)
def test_plain_layers(what: str) -> None:
    assert holds_only_registered(PLAIN[what], no_names())


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_layers_that_have_to_be_looked_into(what: str) -> None:
    assert not holds_only_registered(NOT_PLAIN[what](), no_names())


def test_what_the_receiver_knows_by_name_has_no_tensor_of_the_layer() -> None:
    settings = {"cache": torch.ones(3)}
    assert holds_only_registered(Holder(settings), Names({"settings": settings}))


@pytest.mark.parametrize("held", [None, "cache"])
def test_head_and_body_say_the_same_whichever_is_first(held: str | None) -> None:
    cache = None if held is None else torch.arange(3.0)
    layer, momentum = Holder(cache), torch.ones(2, 2)
    packing = Packing(layer, "layer 0 (Holder)", [layer.inner.weight, momentum])
    tensors, (weight, moment) = make_room(packing.head, torch.device("cpu"))  # the body is not encoded yet
    assert weight is tensors.own[0] and [t is moment for t in tensors.extra] == [True]
    package = packing.finish()
    assert package.head == packing.head and len(package.tensors.own) == len(tensors.own) == (2 if held is None else 3)
    for target, source in zip(tensors.all, package.tensors.all, strict=True):
        target.detach().copy_(source)
    arrived: Any = unpack(package.body, tensors).layer
    assert torch.equal(arrived.inner.weight, layer.inner.weight) and arrived.inner.weight is weight
    assert arrived.held is None if cache is None else torch.equal(arrived.held, cache)


def test_a_tensor_that_comes_up_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the glance be wrong, the move fails on every rank instead of sending a layer that lacks something."""
    from dynpipe_ds.migration import packing

    monkeypatch.setattr(packing, "holds_only_registered", lambda *_: True)
    with pytest.raises(packing.PackingError, match="holds a tensor at held that was overlooked"):
        packing.pack(Holder(torch.ones(2)), "layer 0 (Holder)")


def test_tied_parts_are_one() -> None:
    layer = Holder()
    layer.inner.bias = layer.inner.weight  # type: ignore[assignment]
    packing = Packing(layer, "layer 0 (Holder)")
    assert len(packing.tensors.own) == 1
    arrived: Any = unpack(packing.finish().body, make_room(packing.head, torch.device("cpu"))[0]).layer
    assert arrived.inner.bias is arrived.inner.weight
