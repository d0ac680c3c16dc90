"""The one table of kernels: there is always one, and it is the best that works."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from scenarios.kernels import KERNELS, NEVER, Task, choose, names, sum_rows
from scenarios.pruning.linear import Form

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF, SINGLE = torch.bfloat16, torch.float32


def test_there_is_a_kernel_for_every_task_everywhere() -> None:
    assert set(KERNELS) == set(get_args(Task))
    for task in KERNELS:
        assert choose(task, torch.device("xpu"), torch.float64, 3).name == KERNELS[task][-1].name


@pytest.mark.parametrize(
    ("task", "device", "dtype", "sizes", "name"),
    [
        ("attention within hash buckets", CPU, SINGLE, (64,), "sdpa"),
        ("attention within hash buckets", CUDA, SINGLE, (64,), "flex"),
        ("attention within hash buckets", CUDA, SINGLE, (8,), "sdpa"),
        ("attention among tokens that stayed", CPU, HALF, (), "SDPA row by row"),
        ("attention among tokens that stayed", CUDA, HALF, (), "FlashAttention varlen"),
        ("attention among tokens that stayed", CUDA, SINGLE, (), "SDPA padded"),
        ("attention to all tokens", CUDA, HALF, (), "SDPA padded, masked"),
        ("experts", CPU, HALF, (64, 64), "loop"),
        ("experts", CUDA, HALF, (64, 64), "grouped_mm"),
        ("experts", CUDA, SINGLE, (64, 64), "loop"),
        ("experts", CUDA, HALF, (64, 12), "loop"),
        ("pruned elements", CPU, SINGLE, (), "CSR (MKL)"),
        ("pruned elements", CUDA, SINGLE, (), "CSR (cuSPARSE)"),
        ("pruned blocks", CUDA, HALF, (), "gathered bmm"),
    ],
)
def test_the_best_that_works(
    task: Task, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", object(), raising=False)
    assert choose(task, device, dtype, *sizes).name == name and name in names(task)


def test_what_an_older_device_or_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", object(), raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    assert choose("experts", CUDA, HALF, 64).name == "loop"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    assert choose("experts", CUDA, HALF, 64).name == "grouped_mm"
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert choose("experts", CUDA, HALF, 64).name == "loop"


def test_the_share_of_zeros_that_pays() -> None:
    """By device and type; blocks are dense products, so less is enough; the user's own share wins."""
    weight = torch.zeros(4, 4)
    if torch.backends.mkl.is_available():
        assert [Form().is_small(share, weight) for share in (0.79, 0.8)] == [False, True]
        assert [Form().is_small(share, weight.bfloat16()) for share in (0.91, 0.92)] == [False, True]
    assert not Form().is_small(1.0, weight.double())
    assert [Form("block").is_small(share, weight) for share in (0.3, 0.4)] == [False, True]
    assert choose("pruned blocks", CUDA, HALF).pays_from == NEVER and choose("pruned blocks", CUDA).pays_from < 1
    assert Form(crossover=0.1).is_small(0.1, weight.double()) and not Form(crossover=NEVER).is_small(1.0, weight)


def test_sum_rows() -> None:
    found = sum_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([2, 0, 2]), 3)
    assert found.tolist() == [[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]]
