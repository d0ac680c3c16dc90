"""A layer as bytes and tensors, and back: what arrives is what left."""

from __future__ import annotations

import copy
import enum
import logging
import math
import os
import pickle
import threading
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynpipe_ds.migration.decoding import Decoder, DecodingError
from dynpipe_ds.migration.names import no_names
from dynpipe_ds.migration.packing import PackingError, make_room, pack, unpack
from dynpipe_ds.migration.transport import flat_view

CPU = torch.device("cpu")


def journey(layer: nn.Module | None, extra: Any = None) -> tuple[nn.Module | None, Any]:
    """Send a layer through bytes and buffers, as a migration does."""
    package = pack(layer, "layer 3 (Test)", extra)
    assert package.warnings == ()
    return arrive(package)


def arrive(package: Any) -> tuple[Any, Any]:
    buffers, extra = make_room(package.head, CPU)  # before anything has come
    fill(buffers.own, package.tensors.own)
    arrived = unpack(package.body, buffers)  # while the others are under way
    fill(buffers.extra, package.tensors.extra)
    assert arrived.warnings == []
    return arrived.layer, extra


def fill(buffers: list[Tensor], tensors: list[Tensor]) -> None:
    for buffer, tensor in zip(buffers, tensors, strict=True):
        assert tensor.is_contiguous() and not tensor.requires_grad
        assert (buffer.numel(), buffer.dtype) == (tensor.numel(), tensor.dtype)
        flat_view(buffer).copy_(tensor.view(-1))


def give_identity(layer: int, module: nn.Module) -> None:
    """Fill every parameter and buffer from (layer, its index, element)."""
    with torch.no_grad():
        for index, tensor in enumerate((*module.parameters(), *module.buffers())):
            if tensor.is_floating_point():
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * layer + 100 * index)


def has_identity(layer: int, module: nn.Module) -> bool:
    twin = copy.deepcopy(module)
    give_identity(layer, twin)
    pairs = zip(module.state_dict().values(), twin.state_dict().values(), strict=True)
    return all(torch.equal(tensor, expected) for tensor, expected in pairs)


class Mixed(nn.Module):
    """Parameters and buffers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 3)
        self.small = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(41))
        self.register_buffer("bytes", torch.arange(4, dtype=torch.uint8))
        self.register_buffer("complex", torch.tensor([1 + 2j, 3 - 4j]))
        self.register_buffer("nothing", None)
        self.register_buffer("temporary", torch.ones(2), persistent=False)


def test_every_tensor_keeps_its_identity() -> None:
    for layer in range(3):
        module = Mixed()
        give_identity(layer, module)
        arrived, _ = journey(module)
        assert type(arrived) is Mixed and has_identity(layer, arrived)
        assert list(arrived.state_dict()) == list(module.state_dict())
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            other = arrived.get_parameter(name) if isinstance(tensor, nn.Parameter) else arrived.get_buffer(name)
            assert other is not tensor and other.dtype == tensor.dtype and torch.equal(other, tensor)
        assert arrived.nothing is None and "temporary" not in arrived.state_dict()


def test_the_original_is_left_as_it_is() -> None:
    module = Mixed()
    give_identity(1, module)
    pointers = [p.data_ptr() for p in module.parameters()]
    package = pack(module, "layer 1 (Mixed)")
    assert [p.data_ptr() for p in module.parameters()] == pointers and has_identity(1, module)
    shared = {tensor.data_ptr() for tensor in package.tensors.own if tensor.numel()}
    assert {pointer for pointer in pointers if pointer} <= shared, "contiguous tensors are not copied"


def test_frozen_parameters_and_user_attributes() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].weight.requires_grad_(False)
    module[1].bias.original_name = "transformer.h.3.bias"  # type: ignore[union-attr]
    module[1].bias.tags = {"decay": False}  # type: ignore[union-attr]
    module.note = ["user", 1.5]  # type: ignore[assignment]
    arrived, _ = journey(module)
    assert [p.requires_grad for p in arrived.parameters()] == [False, True, True, True]
    assert arrived[1].bias.original_name == "transformer.h.3.bias"
    assert arrived[1].bias.tags == {"decay": False}
    assert arrived.note == ["user", 1.5]


def test_training_mode_of_each_part() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1)))
    module.train()
    module[1].eval()
    arrived, _ = journey(module)
    assert [m.training for m in arrived.modules()] == [m.training for m in module.modules()]
    assert [m.training for m in arrived.modules()] == [True, True, False, False, False]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))
        self.alias = self.scale
        self.again = self.first


def test_tensors_shared_inside_a_layer_stay_shared() -> None:
    module = Shared()
    package = pack(module, "layer 0 (Shared)")
    assert len(package.tensors.own) == 4, "a shared tensor travels once"
    arrived, _ = arrive(package)
    assert arrived.first.weight is arrived.second.weight and arrived.again is arrived.first
    assert arrived.alias is arrived.scale
    assert len(list(arrived.parameters())) == len(list(module.parameters())) == 3


def test_optimizer_state_travels_with_its_layer() -> None:
    module = nn.Linear(2, 2)
    state = [{"step": torch.tensor(7.0), "exp_avg": torch.arange(4.0).view(2, 2)}, {"momentum_buffer": None}]
    arrived, (groups, states) = journey(module, ([0, None], state))
    assert groups == [0, None] and states[1] == {"momentum_buffer": None}
    assert torch.equal(states[0]["exp_avg"], state[0]["exp_avg"]) and states[0]["step"] == 7.0
    assert torch.equal(arrived.weight, module.weight)


def test_non_contiguous_tensors_keep_their_values() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    module.register_buffer("window", torch.arange(20)[3:15:2])
    module.register_buffer("row", torch.ones(1, 3).expand(4, 3))
    arrived, _ = journey(module)
    for name in ("weight", "window", "row"):
        assert torch.equal(getattr(arrived, name), getattr(module, name))


def test_a_transposed_parameter_keeps_its_strides() -> None:
    """Kernels choose by strides, so that another layout could mean other bits."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    module.image = nn.Parameter(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
    package = pack(module, "layer 0 (Module)")
    assert package.tensors.own[0].data_ptr() == module.weight.data_ptr(), "dense tensors are not copied"
    arrived, _ = arrive(package)
    assert torch.equal(arrived.weight, module.weight) and torch.equal(arrived.image, module.image)
    assert arrived.weight.stride() == module.weight.stride()
    assert arrived.image.is_contiguous(memory_format=torch.channels_last)


def triple(x: Tensor) -> Tensor:
    return x * 3


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_and_function_attributes() -> None:
    module = nn.Linear(2, 2)
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    module.pattern = dense.to_sparse_csr()  # type: ignore[assignment]
    module.coordinates = dense.to_sparse_coo()  # type: ignore[assignment]
    module.activation = torch.nn.functional.gelu  # type: ignore[assignment]
    module.scale = triple  # type: ignore[assignment]
    arrived, _ = journey(module)
    assert arrived.pattern.layout == torch.sparse_csr and torch.equal(arrived.pattern.to_dense(), dense)
    assert arrived.coordinates.layout == torch.sparse_coo and torch.equal(arrived.coordinates.to_dense(), dense)
    assert arrived.activation is torch.nn.functional.gelu and arrived.scale is triple


@dataclass
class Reference:
    """A plain object with tensors, such as a frozen copy of the layer's weights."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)


def test_plain_objects_with_tensors() -> None:
    module = nn.Linear(2, 2)
    module.reference = Reference({"weight": torch.full((2, 2), 5.0)}, [0.25])  # type: ignore[assignment]
    package = pack(module, "layer 0 (Linear)")
    assert len(package.tensors.own) == 3, "its tensors travel apart from the skeleton"
    arrived, _ = arrive(package)
    assert arrived.reference == Reference(arrived.reference.weights, [0.25])
    assert torch.equal(arrived.reference.weights["weight"], torch.full((2, 2), 5.0))


def test_a_tensor_keeps_its_place_in_a_line_of_memory() -> None:
    """BLAS rounds by it; weights of memory-mapped files begin anywhere."""
    module = nn.Linear(8, 8)
    module.weight = nn.Parameter(torch.rand(8 * 8 + 14)[14:].view(8, 8))
    arrived, _ = journey(module)
    assert arrived.weight.data_ptr() % 64 == module.weight.data_ptr() % 64 == 56
    assert torch.equal(arrived.weight, module.weight) and arrived.bias.storage_offset() == 0
    again, _ = journey(arrived)
    assert again.weight.data_ptr() % 64 == 56 and torch.equal(again.weight, module.weight)


def test_large_tensors_are_not_in_the_skeleton() -> None:
    module = nn.Linear(512, 512)
    package = pack(module, "layer 0 (Linear)")
    assert len(package.head) + len(package.body) < 10_000


def test_a_function_layer() -> None:
    assert journey(None, ([], [])) == (None, ([], []))


# -- hooks ------------------------------------------------------------------------------------


def add_one(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output + 1


def double_input(_module: nn.Module, inputs: Any) -> Any:
    return (inputs[0] * 2,)


def halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad /= 2


def test_hooks_are_carried() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(add_one)
    module.register_forward_pre_hook(double_input)
    module[0].weight.register_hook(partial(torch.mul, torch.tensor(10.0)))
    module[0].bias.register_post_accumulate_grad_hook(halve_gradient)
    x = torch.ones(1, 2)
    arrived, _ = journey(module)
    assert torch.equal(arrived(x), module(x))
    for m in (module, arrived):
        m(x).sum().backward()
    assert torch.equal(arrived[0].weight.grad, module[0].weight.grad)
    assert torch.equal(arrived[0].bias.grad, module[0].bias.grad)
    assert torch.equal(arrived[0].bias.grad * 40, arrived[0].weight.grad[:, 0])


def test_a_frozen_parameter_keeps_its_hooks() -> None:
    module = nn.Linear(2, 2)
    module.weight.register_hook(partial(torch.mul, torch.tensor(10.0)))
    module.bias.register_post_accumulate_grad_hook(halve_gradient)
    module.requires_grad_(False)
    arrived, _ = journey(module)
    assert not arrived.weight.requires_grad and not arrived.bias.requires_grad
    arrived.requires_grad_(True)
    arrived(torch.ones(1, 2)).sum().backward()
    assert torch.equal(arrived.weight.grad, torch.full((2, 2), 10.0))
    assert torch.equal(arrived.bias.grad, torch.full((2,), 0.5))


def test_an_activation_that_a_layer_keeps_arrives_without_its_graph() -> None:
    module = nn.Linear(2, 2)
    module.balance = module(torch.ones(1, 2)).square().mean()  # as DeepSpeed's MoE layers keep their auxiliary loss
    module.balance.register_hook(lambda gradient: gradient)
    arrived, _ = journey(module)
    assert torch.equal(arrived.balance, module.balance) and not arrived.balance.requires_grad


def test_new_hooks_do_not_displace_carried_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks are numbered by process: the new owner must not give a carried number away again."""
    module = nn.Linear(2, 2)
    handle = module.register_forward_hook(add_one)
    package = pack(module, "layer 0 (Linear)")
    monkeypatch.setattr(RemovableHandle, "next_id", handle.id)  # as on a rank with fewer hooks
    arrived, _ = arrive(package)
    arrived.register_forward_hook(add_one)
    assert torch.allclose(arrived(torch.zeros(2)), arrived.bias + 2)


def nameless_hook() -> Any:
    factor = 2

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return output * factor

    return hook


def test_nameless_hooks_stay_behind_with_a_warning() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(nameless_hook())
    module[0].register_forward_hook(add_one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package = pack(module, "layer 3 (Sequential)")  # says so only when the move succeeds
    (text,) = package.warnings
    assert text.startswith("layer 3 (Sequential): forward_hook <function nameless_hook") and "of 0 can't be" in text
    x = torch.ones(1, 2)
    plain = nn.functional.linear(x, module[0].weight, module[0].bias)
    assert torch.equal(module(x), plain * 2 + 1), "the original keeps both, in order"
    assert torch.equal(arrive(package)[0](x), plain + 1)


def test_nameless_parameter_attributes_and_tensor_hooks_stay_behind() -> None:
    module = nn.Linear(2, 2)
    module.weight.guard = lambda: None  # type: ignore[attr-defined]
    module.bias.register_hook(lambda g: g)
    package = pack(module, "layer 2 (Linear)")
    assert len(package.warnings) == 2
    assert "layer 2 (Linear): attribute 'guard' of weight can't be carried" in " ".join(package.warnings)
    assert "tensor hook" in " ".join(package.warnings)
    arrived, _ = arrive(package)
    assert not hasattr(arrived.weight, "guard") and hasattr(module.weight, "guard")


def test_attributes_of_parameters_may_have_the_names_of_methods() -> None:
    """As in GPT-NeoX and Megatron-DeepSpeed: ``bias.stride = 1``."""
    module = nn.Linear(2, 3)
    for name in ("stride", "detach", "is_contiguous", "size", "dim"):
        setattr(module.bias, name, 1)
    arrived, _ = journey(module)
    assert arrived.bias.stride == 1 and torch.equal(arrived.bias, module.bias)


# -- what can't be carried --------------------------------------------------------------------


def nameless(x: int) -> Any:
    return lambda: x


class Runs:
    """Asks for a function to be called where it arrives."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (nameless(1), "the function nameless.<locals>.<lambda>, which has no name"),
        ((x for x in ()), "a builtins.generator, whose state can't be read"),
        (Runs(), "it is made by calling posix.system"),
        (nn.Parameter(torch.zeros(1)).as_subclass(type("Special", (Tensor,), {})), "a tensor of class"),
    ],
    ids=["lambda", "generator", "call", "subclass"],
)
def test_what_has_no_name_is_refused_by_path(value: Any, reason: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].settings = {"guard": [value]}  # type: ignore[assignment]
    with pytest.raises(PackingError) as caught:
        pack(module, "layer 5 (Sequential)")
    text = str(caught.value)
    assert text.startswith("layer 5 (Sequential) can't be carried to another process: 0.settings['guard'][0] holds ")
    assert reason in text and "LayerSpec" in text


class Guarded(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.guard = nameless(2)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "guard"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.guard = nameless(3)


def test_the_remedy_works() -> None:
    arrived, _ = journey(Guarded())
    assert arrived.guard() == 3


def test_nothing_that_arrives_is_run() -> None:
    """A skeleton that names a class or function in the stream itself is refused before it is looked up."""
    package = pack(nn.Linear(2, 2), "layer 0 (Linear)")
    tensors, _ = make_room(package.head, CPU)
    with pytest.raises(pickle.UnpicklingError, match="no plain value"):
        unpack(pickle.dumps(Runs()), tensors)
    with pytest.raises(pickle.UnpicklingError, match="no plain value"):
        make_room(pickle.dumps(Runs()), CPU)


def test_only_data_is_made_by_calling() -> None:
    decoder = Decoder([], no_names())
    with pytest.raises(DecodingError, match="not among what may be called"):
        decoder.decode(("call", 0, ("named", "os", "system"), ("tuple", ["true"]), None, None, None))


def test_locks_loggers_generators_and_methods() -> None:
    module = nn.Linear(2, 2)
    module.guard, module.log = threading.RLock(), logging.getLogger("a.b")  # type: ignore[assignment]
    module.event, module.numbers = threading.Event(), torch.Generator().manual_seed(5)  # type: ignore[assignment]
    module.run, module.array = module.forward, np.arange(3)  # type: ignore[assignment]
    module.kinds = (torch.float16, torch.strided, torch.Size([1]), math, Color.RED)  # type: ignore[assignment]
    torch.rand(3, generator=module.numbers)
    arrived, _ = journey(module)
    with arrived.guard, module.guard:
        assert arrived.log is module.log and not arrived.event.is_set()
    assert torch.equal(torch.rand(3, generator=arrived.numbers), torch.rand(3, generator=module.numbers))
    assert arrived.run.__self__ is arrived and arrived.array.tolist() == [0, 1, 2] and arrived.kinds == module.kinds


class Color(enum.Enum):
    RED = 1
