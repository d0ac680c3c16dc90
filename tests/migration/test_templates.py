"""What has no name moves where the receiver can build the layer, and is filled with what the sender's holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from dynpipe_ds.migration.decoding import DecodingError
from dynpipe_ds.migration.names import Names
from dynpipe_ds.migration.packing import Arrived, PackingError, make_room, pack, unpack
from dynpipe_ds.migration.transport import flat_view


def move(layer: nn.Module, build: Callable[[], nn.Module]) -> Arrived:
    package = pack(layer, "layer 1 (Nameless)", has_template=True)
    assert package.warnings == ()
    buffers, _ = make_room(package.head, torch.device("cpu"))
    for buffer, tensor in zip(buffers.own, package.tensors.own, strict=True):
        flat_view(buffer).copy_(tensor.view(-1))
    return unpack(package.body, buffers, build=build)


def trained(layer: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        layer(torch.full((2, 3), 0.1 * step)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return layer


def same_bits(one: nn.Module, other: nn.Module) -> None:
    x = torch.rand(2, 3)
    first, second = one(x), other(x)
    assert torch.equal(first, second)
    for layer, output in ((one, first), (other, second)):
        layer.zero_grad()
        output.sum().backward()
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs) and torch.equal(mine.grad, theirs.grad), name


class Functions(nn.Module):
    """Lambdas that refer to the layer, and closures with state of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.rand(3))
        self.run = lambda x: self.linear(x) * self.scale
        offset, count = torch.rand(3), [0]

        def shift(x: Tensor, by: list[float] = [0.5]) -> Tensor:  # noqa: B006
            count[0] += 1
            return x + offset * count[0] * by[0]

        self.shift = shift
        self.guard = threading.Lock()
        self.linear.register_forward_hook(lambda _, __, output: output * 2)
        self.scale.register_hook(lambda gradient: gradient * 3)

    def forward(self, x: Tensor) -> Tensor:
        with self.guard:
            return self.shift(self.run(x))


def local_class() -> nn.Module:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    return nn.Sequential(nn.Linear(3, 3), Local())


class Unpicklable(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def __getstate__(self) -> Any:
        raise TypeError("not for pickling")


KINDS: dict[str, Callable[[], nn.Module]] = {
    "functions": Functions,
    "local class": local_class,
    "unpicklable": Unpicklable,
    "parametrized weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "parametrized spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "old weight norm": lambda: weight_norm(nn.Linear(3, 3)),
    "old spectral norm": lambda: spectral_norm(nn.Linear(3, 3)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_same_after_a_move(kind: str) -> None:
    torch.manual_seed(3)
    layer = trained(KINDS[kind]())
    arrived = move(layer, KINDS[kind])
    assert arrived.warnings == [] and arrived.layer is not None
    assert type(arrived.layer).__qualname__ == type(layer).__qualname__
    same_bits(layer, arrived.layer)


def test_functions_refer_to_the_layer_that_arrived() -> None:
    layer = Functions()
    arrived: Any = move(layer, Functions).layer
    assert arrived.run.__closure__[0].cell_contents is arrived and arrived.guard is not layer.guard


def test_what_training_did_to_the_structure_arrives() -> None:
    layer: Any = trained(Functions())
    layer.linear = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    layer.note = {"pruned": 0.5}
    del layer.guard
    layer.guard = threading.RLock()
    arrived: Any = move(layer, Functions).layer
    assert arrived.note == {"pruned": 0.5} and isinstance(arrived.linear, nn.Sequential)
    same_bits(layer, arrived)


def test_a_layer_with_names_for_everything_is_not_built() -> None:
    def build() -> nn.Module:
        raise AssertionError("built")

    assert move(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), build).warnings == []


def test_something_nameless_that_came_later_is_refused_where_it_is_missing() -> None:
    layer: Any = Functions()
    layer.later = lambda x: x
    with pytest.raises(DecodingError, match=r"has nothing in the place of the function test_something.*<lambda>"):
        move(layer, Functions)


def test_a_layer_that_can_be_built_only_once() -> None:
    layer = Functions()
    with pytest.raises(DecodingError, match=r"can't be built anew here \(AttributeError: original_name\)"):
        move(layer, failing)


def failing() -> nn.Module:
    raise AttributeError("original_name")


def test_only_its_hooks_stay_behind_if_they_were_all_that_is_nameless() -> None:
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda _, __, output: output * 2)
    arrived = move(layer, failing)
    assert "hooks made by its class stay behind" in arrived.warnings[0]
    assert arrived.layer is not None and not arrived.layer._forward_hooks
    arrived = move(layer, lambda: nn.Linear(3, 3))
    assert "a hook can't be carried" in arrived.warnings[0] and "has nothing" in arrived.warnings[0]


def test_a_live_layer_has_no_template() -> None:
    with pytest.raises(PackingError, match="run holds the function Functions.__init__.<locals>.<lambda>, which has no"):
        pack(Functions(), "layer 1 (Functions)")
    script = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(PackingError, match="whose state can't be read"):
        pack(nn.Sequential(script), "layer 1 (Sequential)", has_template=True)


def test_process_groups_in_a_table_of_a_package_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed's expert groups, which the engine puts into layers that are built already."""
    handle: Any = Nameless()
    monkeypatch.setattr("deepspeed.utils.groups._EXPERT_PARALLEL_GROUP", {"ep_size_1": handle})
    layer = nn.Linear(3, 3)
    layer.ep_group = handle
    package = pack(layer, "layer 1 (Linear)", names=Names())
    assert unpack(package.body, package.tensors, names=Names()).layer.ep_group is handle  # type: ignore[union-attr]


class Nameless:
    def __reduce__(self) -> Any:
        raise TypeError("can't be pickled")
