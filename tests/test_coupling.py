"""What a function layer leaves behind for a later one or for the loss."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from dynpipe_ds.coupling import find_couplings

STASH: dict[str, Any] = {}
LIST: list[Any] = []
SETTINGS = {"scale": 2.0}
SHARED, OTHER = SimpleNamespace(aux=None), SimpleNamespace(aux=None)


def to_dict(x: Tensor) -> Tensor:
    STASH["x"] = x
    return x


def from_dict(x: Tensor) -> Tensor:
    return x + STASH.pop("x")


def to_list(x: Tensor) -> Tensor:
    LIST.append(x)
    return x


def from_list(output: Tensor, _: Tensor) -> Tensor:
    return output + sum(LIST)


def scale(x: Tensor) -> Tensor:
    x[0] = 1
    return x * SETTINGS["scale"]


def to_object(x: Tensor) -> Tensor:
    SHARED.aux = x
    return x


def from_object(output: Tensor, _: Tensor) -> Tensor:
    return output + SHARED.aux


def from_other(output: Tensor, _: Tensor) -> Tensor:
    return output + OTHER.aux


def to_argument(stash: Any, x: Tensor) -> Tensor:
    stash.losses["aux"] = x
    return x


def with_a_local_of_that_name(x: Tensor) -> Tensor:
    SHARED = SimpleNamespace()  # noqa: N806
    SHARED.aux = x
    return x


def no_loss(output: Tensor, _: Tensor) -> Tensor:
    return output.aux


class Model:
    """Stands for a pipeline module with a layer and a loss of its own."""

    def stash(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        hidden, self.moe_loss = inputs
        return hidden

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return output - labels + self.moe_loss

    def plain_loss(self, output: Tensor, labels: Tensor) -> Tensor:
        self.last = output - labels
        return self.last

    def report(self) -> dict[str, Any]:
        return {"moe": self.moe_loss, "last": self.last}

    def read(self, x: Tensor) -> Tensor:
        return (lambda y: y * self.moe_loss)(x)


def found(layers: list[Any], *readers: Any) -> list[tuple[int, int]]:
    names = [getattr(layer, "__name__", "layer") for layer in layers]
    return [(c.writer, c.reader) for c in find_couplings(layers, names, readers)]


SPEC = LayerSpec(nn.Linear, 2, 2)


def test_containers() -> None:
    assert found([SPEC, to_dict, SPEC, from_dict, SPEC], no_loss) == [(1, 3)]
    assert found([to_dict, from_dict, SPEC, from_dict]) == [(0, 3)], "up to the last reader"
    assert found([to_list, SPEC, to_list, SPEC], from_list) == [(0, 3), (2, 3)]
    assert found([to_list, SPEC, to_list, SPEC], no_loss) == [], "writing more is not reading"
    assert found([scale, SPEC, scale], no_loss) == [], "what is only read, by both"
    assert found([from_dict, to_dict], no_loss) == []


def test_attributes_of_the_same_object() -> None:
    assert found([to_object, SPEC, SPEC], from_object) == [(0, 2)]
    assert found([to_object, SPEC, SPEC], from_other) == []
    assert found([to_object, SPEC, SPEC], no_loss) == []
    assert found([with_a_local_of_that_name, SPEC, SPEC], from_object) == []
    assert found([SPEC, to_object], from_object) == [], "on the loss's stage anyway"


def test_methods_partials_and_closures() -> None:
    model, other = Model(), Model()
    assert found([SPEC, model.stash, SPEC, SPEC], model.loss) == [(1, 3)]
    assert found([SPEC, model.stash, SPEC, SPEC], model.plain_loss) == []
    assert found([SPEC, model.stash, SPEC, SPEC], model.plain_loss, model.report) == [(1, 3)]
    assert found([SPEC, model.stash, SPEC, SPEC], other.loss) == []
    assert found([SPEC, model.stash, SPEC, model.read, SPEC]) == [(1, 3)]

    stash = SimpleNamespace(losses={})

    def loss(output: Tensor, _: Tensor) -> Tensor:
        return output + stash.losses["aux"]

    assert found([partial(to_argument, stash), SPEC], loss) == [(0, 1)]
    tied = TiedLayerSpec("k", nn.Linear, 2, 2, forward_fn=lambda module, x: model.read(x) * model.moe_loss)
    assert found([model.stash, SPEC, tied, SPEC]) == [(0, 2)]
    assert found([SPEC, nn.ReLU(), len, SPEC], nn.CrossEntropyLoss()) == []


def test_what_is_said() -> None:
    model = Model()
    (coupling,) = find_couplings([model.stash, SPEC, SPEC], ["stash", "Linear", "Linear"], [model.loss])
    assert coupling.what == "layer 0 (stash) sets moe_loss, which loss reads" and [*coupling.cuts()] == [1, 2]
