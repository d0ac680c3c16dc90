"""DeepSpeed's own pipeline examples: a vision model taken apart into modules and functions, or ``LayerSpec``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.utils import RepeatingLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.clients.life import SAVED_AFTER, Client, compare
from tests.distributed.configs import ADAMW, BY_HAND, UNCLIPPED, ZERO

CLASSES, SIDE = 5, 8


class Net(nn.Module):
    """An AlexNet for thumbnails."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, padding=1),
        )
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(48, 24), nn.ReLU(inplace=True), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, CLASSES)
        )


def joined(net: Net) -> list[Any]:
    """Live modules and a function."""
    return [*net.features, net.pool, lambda x: torch.flatten(x, 1), *net.classifier]


def specs() -> list[Any]:
    return [
        LayerSpec(nn.Conv2d, 3, 8, 3, padding=1), LayerSpec(nn.ReLU, inplace=True), LayerSpec(nn.MaxPool2d, 2),
        LayerSpec(nn.Conv2d, 8, 12, 3, padding=1), nn.functional.relu, LayerSpec(nn.AdaptiveAvgPool2d, 2),
        partial(torch.flatten, start_dim=1), LayerSpec(nn.Dropout, 0.2),
        LayerSpec(nn.Linear, 48, 24), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 24, CLASSES),
    ]


class Thumbnails(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(i)
        return torch.randn(3, SIDE, SIDE, generator=generator), i % CLASSES


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10**9,
        **UNCLIPPED, **ADAMW, **more,
        "dynamic_pipeline": BY_HAND,
    }


def engine(base: type, kind: str, more: dict[str, Any]) -> Any:
    deepspeed.runtime.utils.set_random_seed(7)
    if kind == "modules":
        net = base(joined(Net()), loss_fn=nn.CrossEntropyLoss(), num_stages=2, partition_method="parameters")
    else:  # with dropout, which without seeds of its own would depend on the cut
        net = base(
            specs(), loss_fn=nn.CrossEntropyLoss(), num_stages=2, partition_method="uniform", seed_layers=True
        )
    built, *_ = deepspeed.initialize(
        model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=config(**more),
    )
    # What ``training_data`` does, without worker processes.
    built.set_dataloader(RepeatingLoader(DataLoader(Thumbnails(), batch_size=2)))
    return built


def batches(start: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = Thumbnails()
    while True:
        pairs = [data[(start + k) % len(data)] for k in range(2)]
        yield torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])
        start += 2


def train(engine: Any, _: Any) -> Any:
    """On the data that the engine has."""
    return engine.train_batch()


def load(engine: Any, folder: str) -> None:
    engine.load_checkpoint(folder)
    if engine.data_iterator is not None:
        for _ in range(SAVED_AFTER * engine.micro_batches):
            next(engine.data_iterator)


MOVES = {1: (0, 1, 11), 2: (0, 8, 11), 4: (0, 3, 11), 5: (0, 5, 11)}


def client(kind: str, more: dict[str, Any]) -> Client:
    return Client(
        partial(engine, kind=kind, more=more), batches, 2, MOVES, train=train, load=load,
        deepspeed_resumes=kind == "modules",
    )


def test_examples(tmp_path: Any) -> None:
    compare([client("modules", {}), client("specs", ZERO)], tmp_path)


@pytest.mark.exhaustive
def test_examples_the_other_way_round(tmp_path: Any) -> None:
    compare([client("modules", ZERO), client("specs", {})], tmp_path)
