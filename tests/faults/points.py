"""Named points of a run at which a test makes a rank fail: by ``kill -9``, or by raising."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True)
class Point:
    """A moment: before or after the n-th call of a function of the library.

    Attributes:
        name: what to call it.
        target: ``"module:attribute"`` or ``"module:Class.attribute"``.
        after: whether the call is done first.
        call: which call of it, counted from 1.
    """

    name: str
    target: str
    after: bool = False
    call: int = 1

    def arm(self, action: Callable[[], Any]) -> AbstractContextManager[Any]:
        """Do something at this point of this process, once.

        Args:
            action: may raise, or not return at all.
        """
        module, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, attribute)
        calls = iter(range(1, 1_000_000))

        def run(*args: Any, **kwargs: Any) -> Any:
            now = next(calls) == self.call
            if now and not self.after:
                action()
            result = original(*args, **kwargs)
            if now and self.after:
                action()
            return result

        return patch.object(owner, attribute, run)


def kill() -> None:
    """End this process as the kernel would, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


ENGINE = "dynpipe_ds.engine:DynamicPipelineEngine."
MIGRATE = "dynpipe_ds.migration.migrate:"
OPTIMIZER = "dynpipe_ds.migration.optimizer_state:PlainOptimizer."

# The job of harness.py moves layers after its fourth batch; call=5 is in the middle of training after that.
POINTS = [
    Point("profiling: before the first batch", ENGINE + "_train_batch"),
    Point("profiling: recorder starts", "dynpipe_ds.profiling:BatchRecorder.start", call=2),
    Point("profiling: in the middle of a forward", "tests.distributed.models:Block.forward", call=30),
    Point("profiling: before the backward", "torch.autograd:backward", call=9),
    Point("profiling: before the optimizer step", ENGINE + "_take_model_step", call=3),
    Point("profiling: after the optimizer step", ENGINE + "_take_model_step", after=True, call=3),
    Point("profiling: before profiles are exchanged", "dynpipe_ds.balancing:gather_profile", call=3),
    Point("profiling: after profiles were exchanged", "dynpipe_ds.balancing:gather_profile", after=True, call=3),
    Point("planning: before the plan", ENGINE + "_plan"),
    Point("planning: after the choice, before the vote", ENGINE + "_choose", after=True),
    Point("planning: before ranks compare their plans", "dynpipe_ds.balancing:same_everywhere", call=2),
    Point("planning: after the plan", ENGINE + "_plan", after=True),
    Point("migration: before it", MIGRATE + "Migration.run"),
    Point("migration: a layer is packed", MIGRATE + "Migration._pack"),
    Point("migration: all is packed, before the vote", MIGRATE + "Migration._pack", after=True),
    Point("migration: before skeletons travel", MIGRATE + "Migration._exchange_skeletons"),
    Point("migration: memory is allocated", MIGRATE + "Migration._allocate"),
    Point("migration: before tensors travel", MIGRATE + "Migration._transfer"),
    Point("migration: after tensors travelled", MIGRATE + "Migration._transfer", after=True),
    Point("migration: layers put together", MIGRATE + "Migration._unpack", after=True),
    Point("migration: before the module takes them in", "dynpipe_ds.module:DynamicPipelineModule.install"),
    Point("migration: after the module took them in",
          "dynpipe_ds.module:DynamicPipelineModule.install", after=True),
    Point("migration: the optimizer prepared", OPTIMIZER + "prepare", after=True),
    Point("migration: before state is filled in", OPTIMIZER + "fill"),
    Point("migration: after state was filled in", OPTIMIZER + "fill", after=True),
    Point("migration: before caches are renewed", ENGINE + "_settle"),
    Point("migration: after it, before callbacks", "dynpipe_ds.balancing:write_rebalance"),
]  # fmt: skip
