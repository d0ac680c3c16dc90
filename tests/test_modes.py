"""Lasting tensors are ordinary ones, wherever they are made."""

from __future__ import annotations

import pytest
import torch

from dynpipe_ds.modes import in_ordinary_mode, ordinary_mode


@pytest.mark.parametrize("outside", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_tensors_are_ordinary_inside(outside: type) -> None:
    @in_ordinary_mode
    def make(size: int) -> torch.Tensor:
        return torch.ones(size, requires_grad=True) * 2

    with outside():
        made = make(2)
        with ordinary_mode():
            other = torch.ones(2)
        state = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    assert state == (outside is torch.inference_mode, outside is torch.enable_grad)
    assert not made.is_inference() and made.requires_grad and not other.is_inference()
    assert make.__name__ == "make"
