"""Which kernel computes what on which device: one table for all scenarios."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from scenarios.scenario import Engine

Task = Literal[
    "attention within hash buckets", "attention among tokens that stayed", "attention to all tokens",
    "experts", "pruned elements", "pruned blocks", "sum of rows",
]  # fmt: skip

NEVER = 2.0
"""A share of zeros that no weight has."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to compute something, and where it can be used.

    Attributes:
        name: as settings and reports have it.
        device: type of device; ``None`` for any.
        dtypes: types of the numbers; none for any.
        least_size: of every size that :func:`choose` is told of.
        multiple_of: what must divide each of them.
        capability: least one of a CUDA device.
        is_there: whether this build of torch has it.
        pays_from: share of zeros in a weight from which it is faster than the dense product.
    """

    name: str
    device: str | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    least_size: int = 1
    multiple_of: int = 1
    capability: tuple[int, int] = (0, 0)
    is_there: Callable[[], bool] = lambda: True
    pays_from: float = 0.0

    def works(self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
        """Say whether it can be used.

        Args:
            device: where.
            dtype: of what is computed.
            sizes: those that matter to it.
        """
        return (
            self.device in (None, device.type)
            and (not self.dtypes or dtype in self.dtypes)
            and all(size >= self.least_size and size % self.multiple_of == 0 for size in sizes)
            and self.is_there()
            and (self.capability == (0, 0) or torch.cuda.get_device_capability(device) >= self.capability)
        )


# The first one that works is taken. Shares of zeros are what `python -m benchmarks.layers.main --scenario pruning`
# measures. On CUDA dense products run on tensor cores, cuSPARSE does not. 16-bit weights are computed in float32 as
# CSR, while their dense product is twice as fast.
KERNELS: Mapping[Task, tuple[Kernel, ...]] = {
    "attention within hash buckets": (
        Kernel(name="flex", device="cuda", least_size=16),  # its tiles; on a CPU it has no backward
        Kernel(name="sdpa"),
    ),
    "attention among tokens that stayed": (
        Kernel(name="SDPA row by row", device="cpu"),
        Kernel(name="FlashAttention varlen", dtypes=(torch.float16, torch.bfloat16)),
        Kernel(name="SDPA padded"),
    ),
    "attention to all tokens": (
        Kernel(name="SDPA row by row", device="cpu"),
        Kernel(name="SDPA padded, masked"),
    ),
    "experts": (
        Kernel(
            name="grouped_mm", device="cuda", dtypes=(torch.bfloat16,), multiple_of=8, capability=(8, 0),
            is_there=lambda: hasattr(F, "grouped_mm"),
        ),
        Kernel(name="loop"),
    ),
    "pruned elements": (
        Kernel(
            name="CSR (MKL)", device="cpu", dtypes=(torch.float32,), pays_from=0.8,
            is_there=torch.backends.mkl.is_available,
        ),
        Kernel(
            name="CSR (MKL)", device="cpu", dtypes=(torch.bfloat16,), pays_from=0.92,
            is_there=torch.backends.mkl.is_available,
        ),
        Kernel(name="CSR (cuSPARSE)", device="cuda", dtypes=(torch.float32,), pays_from=0.98),
        Kernel(name="CSR (cuSPARSE)", device="cuda", pays_from=NEVER),
        Kernel(name="CSR (MKL)", pays_from=NEVER),
    ),
    "pruned blocks": (
        # On an H200, 1.8 times the dense product with 90% zeros (docs/pruning.md).
        Kernel(name="gathered bmm", device="cuda", dtypes=(torch.float16, torch.bfloat16), pays_from=NEVER),
        Kernel(name="gathered bmm", pays_from=0.35),
    ),
    "sum of rows": (
        Kernel(name="index_add", device="cpu"),
        Kernel(name="index_put"),  # sorts first; index_add_ is atomic elsewhere, in any order
    ),
}  # fmt: skip


def choose(task: Task, device: torch.device, dtype: torch.dtype = torch.float32, *sizes: int) -> Kernel:
    """Return the kernel for a task.

    Args:
        task: what is computed.
        device: where.
        dtype: of what is computed.
        *sizes: of weights or heads, those that matter.
    """
    return next(kernel for kernel in KERNELS[task] if kernel.works(device, dtype, sizes))


def names(task: Task) -> list[str]:
    """Name the kernels for a task, the best ones first."""
    return list(dict.fromkeys(kernel.name for kernel in KERNELS[task]))


def in_use(task: Task, engine: Engine, *sizes: int) -> str:
    """Name the kernel that the layers of this stage use, for reports.

    Args:
        task: what is computed.
        engine: holds the layers.
        *sizes: as for :func:`choose`.
    """
    parameters = (parameter for layer in engine.local_layers().values() for parameter in layer.parameters())
    return choose(task, engine.device, next((p.dtype for p in parameters), torch.float32), *sizes).name


def sum_rows(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Add up rows by index, in an order that does not change from run to run.

    Args:
        rows: ``[N, width]``.
        index: where each goes, ``[N]``.
        num_rows: rows of the result.
    """
    total = rows.new_zeros(num_rows, rows.shape[1])
    if choose("sum of rows", rows.device).name == "index_add":
        return total.index_add_(0, index, rows)
    return total.index_put_((index,), rows, accumulate=True)
