"""Starting training as a script does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch.utils.checkpoint import checkpoint

from dynpipe_ds._versions import is_older
from dynpipe_ds.host.names import version

# Before, DeepSpeed's own asks for a stream of the device, which a CPU has not.
_LEAST_CHECKPOINTING_ON_CPU = "0.19.8"


def initialize(**arguments: Any) -> Any:
    """The engine that ``deepspeed.initialize`` makes."""
    return deepspeed.initialize(**arguments)[0]


def activation_checkpointing() -> Callable[..., Any]:
    """DeepSpeed's activation checkpointing, or torch's where DeepSpeed's does not run on a CPU."""
    if is_older(version(), _LEAST_CHECKPOINTING_ON_CPU):
        return partial(checkpoint, use_reentrant=True)
    function: Callable[..., Any] = checkpointing.checkpoint
    return function
