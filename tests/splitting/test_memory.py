"""Between its halves a backward keeps about as much as the forward did, and nothing after them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dynpipe_ds.splitting.halves import backward_inputs
from tests.splitting.blocks import Attention, InPlace, Mlp


class Storages(TorchDispatchMode):
    """Knows all memory that operations inside have filled, and how much of it is still there.

    Args:
        others: tensors that do not count.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._others:
                    self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def num_bytes(self) -> int:
        """What is still there."""
        return sum(size for storage, size in self._known.values() if not storage.expired())


class Wide(nn.Module):
    """Attention and an MLP of the usual proportions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, 4), Mlp()
        self.mlp.norm, self.mlp.up, self.mlp.down = (
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class Tripled(nn.Module):
    """A function of the user's own, so that nothing is let go of before the end of the first half."""

    def forward(self, x: Tensor) -> Tensor:
        tripled: Tensor = InPlace.apply(x)  # type: ignore[no-untyped-call]
        return tripled


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("last", [nn.Identity, Tripled])
def test_what_is_kept(last: type[nn.Module], has_gradients: bool) -> None:
    stage = nn.Sequential(*(Wide() for _ in range(3)), last())
    if has_gradients:
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
    x, gradient = torch.randn(4, 64, 32, requires_grad=True), torch.randn(4, 64, 32)
    others = [*stage.parameters(), *(p.grad for p in stage.parameters() if p.grad is not None), x, gradient]
    with Storages(others) as storages:
        y = stage(x)
        kept = storages.num_bytes
        half = backward_inputs([y], [gradient], [x])
        del y
        between = storages.num_bytes
        half.run()
        after = storages.num_bytes
    own = sum(parameter.nbytes for parameter in stage.parameters())
    assert kept > 3 * 12 * x.nbytes and between <= 1.1 * kept
    assert after <= x.nbytes + (0 if has_gradients else own) + 100, "the input's gradient alone is left"
