"""A layer on a device as bytes and tensors, and back: every tensor lands on the kind of device that it came from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dynpipe_ds.migration.packing import TensorSpec, make_room, pack, unpack
from dynpipe_ds.migration.transport import flat_view
from tests.devices import ON_DEVICES, device_of


class Mixed(nn.Module):
    """Parameters of two types on the device, one of them transposed, and a buffer and a number on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, device=device).t())
        self.halves = nn.Parameter(torch.randn(7, device=device).bfloat16()[1:], requires_grad=False)
        self.register_buffer("on_host", torch.arange(4))
        self.register_buffer("on_device", torch.randn(2, device=device))
        self.scale = 0.5


@ON_DEVICES
def test_a_layer_arrives_as_it_left(kind: str) -> None:
    device = device_of(kind)
    layer = Mixed(device)
    sent = {"exp_avg": torch.randn(3, 5, device=device), "step": torch.tensor(3.0), "of": layer.weight}
    package = pack(layer, "layer 3 (Mixed)", sent, device=device)
    assert package.warnings == ()
    empty, extra = make_room(package.head, device)
    for room, tensor in zip((*empty.own, *empty.extra), (*package.tensors.own, *package.tensors.extra), strict=True):
        assert room.device.type == tensor.device.type
        flat_view(room).copy_(tensor.view(-1))
    arrived = unpack(package.body, empty, device=device).layer
    assert isinstance(arrived, Mixed) and arrived.scale == 0.5 and extra["of"] is arrived.weight
    for mine, its in zip(tensors(layer), tensors(arrived), strict=True):
        assert same(mine, its) and TensorSpec.of(mine) == TensorSpec.of(its), "kernels choose by layout and alignment"
    assert same(sent["exp_avg"], extra["exp_avg"]) and extra["step"].device.type == "cpu"
    assert arrived.on_host.device.type == "cpu" and arrived.on_device.device.type == device.type


def tensors(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


def same(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b) and a.requires_grad == b.requires_grad
