"""What a checkpoint's files may hold: enums as every Python writes them, and nothing that runs code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from dynpipe_ds import CheckpointError
from dynpipe_ds.host.optimizer_files import Reader


class ByGetattr:
    """Is pickled as a look-up of an attribute, as enums are by Python before 3.11.4."""

    def __init__(self, owner: Any, name: str) -> None:
        self._look_up = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._look_up


@pytest.mark.parametrize("value", [ZeroStageEnum.gradients, ByGetattr(ZeroStageEnum, "gradients")])
def test_zero_stages_are_read(value: Any, tmp_path: Path) -> None:
    torch.save({"zero_stage": value}, tmp_path / "file.pt")
    assert Reader(tmp_path).read("file.pt")["zero_stage"] is ZeroStageEnum.gradients


@pytest.mark.parametrize("value", [ByGetattr(ZeroStageEnum, "__class__"), ByGetattr(Path, "unlink")])
def test_other_attributes_are_refused(value: Any, tmp_path: Path) -> None:
    torch.save({"zero_stage": value}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="file.pt"):
        Reader(tmp_path).read("file.pt")
