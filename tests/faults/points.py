"""Named points of a run at which a test makes a rank fail: by ``kill -9``, or by raising."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True)
class Point:
    """A moment: before or after the n-th call of a function of the library.

    Attributes:
        name: what to call it, opened by the phase.
        target: ``"module:attribute"`` or ``"module:Class.attribute"``.
        after: whether the call is done first.
        call: which call of it, counted from 1.
        batch: calls count from this batch on.
        victim: the only rank that comes by; ``None`` if all do.
        tag: what every checkpoint of the run is called; ``None`` if each has a name of its own.
        exchange: whether the file system can swap two folders in one step.
    """

    name: str
    target: str
    after: bool = False
    call: int = 1
    batch: int = 0
    victim: int | None = None
    tag: str | None = None
    exchange: bool = True

    @property
    def phase(self) -> str:
        """What goes on at this point, for example ``"saving"``."""
        return self.name.partition(":")[0]

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


def kill(note: str) -> None:
    """End this process as the kernel would, without a word.

    Args:
        note: file that takes the time.
    """
    with open(note, "w") as file:
        file.write(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


TRAINING_LOOP = "dynpipe_ds.training:Training."
BALANCER = "dynpipe_ds.decide.balancer:Balancer."
HOOKS = "dynpipe_ds.host.hooks:Hooks."
STAGE = "dynpipe_ds.stage:Stage."
PIPELINE = "dynpipe_ds.host.pipeline:Pipeline."
MIGRATE = "dynpipe_ds.migration.migrate:"
STAGE_OPTIMIZER = "dynpipe_ds.host.optimizers.stage_optimizer:StageOptimizer."
OPTIMIZER = "dynpipe_ds.host.optimizers.stage_optimizer:PlainOptimizer."

SAVE = "dynpipe_ds.checkpoint.save:Saving."
FOLDER = "dynpipe_ds.checkpoint.folder:"
LOAD = "dynpipe_ds.checkpoint.load:Loading."
TRANSFER = "dynpipe_ds.migration.transport:Transfer."

# The job of harness.py saves after every second batch and moves layers after its fourth.
TRAINING = [
    Point("profiling: before the first batch", TRAINING_LOOP + "_train_batch"),
    Point("profiling: recorder starts", "dynpipe_ds.measure.recorder:BatchRecorder.start", call=2),
    Point("profiling: in the middle of a forward", "tests.distributed.models:Block.forward", call=30),
    Point("profiling: before the backward", "torch.autograd:backward", call=9),
    Point("profiling: before the optimizer step", HOOKS + "_take_model_step", call=3),
    Point("profiling: after the optimizer step", HOOKS + "_take_model_step", after=True, call=3),
    Point("profiling: before profiles are exchanged", "dynpipe_ds.measure.profiler:gather_profile", call=3),
    Point("profiling: after profiles were exchanged", "dynpipe_ds.measure.profiler:gather_profile", after=True, call=3),
    Point("planning: before the plan", BALANCER + "decide"),
    Point("planning: after the choice, before the vote", BALANCER + "choose", after=True),
    Point("planning: before ranks compare their plans", "dynpipe_ds.training:disagreement"),
    Point("planning: after the plan", TRAINING_LOOP + "_disagreement", after=True),
    Point("migration: before it", MIGRATE + "Migration.run"),
    Point("migration: a layer is packed", MIGRATE + "Migration._pack"),
    Point("migration: before heads travel", MIGRATE + "Migration._exchange_heads"),
    Point("migration: memory is allocated", MIGRATE + "Migration._allocate"),
    Point("migration: before bodies travel", MIGRATE + "Migration._post_bodies"),
    Point("migration: before tensors travel", TRANSFER + "start"),
    Point("migration: before bodies are read", MIGRATE + "Migration._read_bodies"),
    Point("migration: tensors are under way", TRANSFER + "finish"),
    Point("migration: after tensors travelled", TRANSFER + "finish", after=True),
    Point("migration: layers put together", MIGRATE + "Migration._unpack", after=True),
    Point("migration: before the module takes them in", "dynpipe_ds.module:DynamicPipelineModule.install"),
    Point("migration: after the module took them in",
          "dynpipe_ds.module:DynamicPipelineModule.install", after=True),
    Point("migration: the optimizer prepared", OPTIMIZER + "prepare", after=True),
    Point("migration: before state is filled in", OPTIMIZER + "fill"),
    Point("migration: after state was filled in", OPTIMIZER + "fill", after=True),
    Point("migration: after the last vote", STAGE_OPTIMIZER + "commit"),
    Point("migration: before caches are renewed", STAGE + "settle"),
    Point("migration: after it, before callbacks", "dynpipe_ds.training:write_rebalance"),
]  # fmt: skip


# From batch 2 on there is one checkpoint, and the next is saved after the layers have moved.
SAVING = [
    Point("saving: before it", SAVE + "run", batch=2),
    Point("saving: the tag is agreed on", SAVE + "_agree_on_tag", after=True, batch=2),
    Point("saving: before there is a folder", FOLDER + "start", batch=2, victim=0),
    Point("saving: the folder is made", FOLDER + "start", after=True, batch=2, victim=0),
    Point("saving: before DeepSpeed's files", "dynpipe_ds.checkpoint.save:write_files", batch=2),
    Point("saving: before the first file", "torch:save", batch=2),
    Point("saving: after the first file", "torch:save", after=True, batch=2),
    Point("saving: before the second file", "torch:save", call=2, batch=2),
    Point("saving: before the third file", "torch:save", call=3, batch=2),
    Point("saving: before a checksum", FOLDER + "fingerprint", call=2, batch=2),
    Point("saving: before our files", SAVE + "_write_our_files", batch=2),
    Point("saving: before what single replicas own", "dynpipe_ds.checkpoint.save:owned_content", call=2, batch=2),
    Point("saving: after our files", SAVE + "_write_our_files", after=True, batch=2),
    Point("saving: before the manifest's share", SAVE + "_describe", batch=2),
    Point("saving: before shares are gathered", SAVE + "_gather", batch=2),
    Point("saving: after shares were gathered", SAVE + "_gather", after=True, batch=2),
    Point("saving: while the first rank finishes", SAVE + "_finish", batch=2, victim=2),
    Point("saving: before the manifest", SAVE + "_manifest", batch=2, victim=0),
    Point("saving: before the manifest's file", "pathlib:Path.write_text", batch=2, victim=0),
    Point("saving: after the manifest's file", "pathlib:Path.write_text", after=True, batch=2, victim=0),
    Point("saving: before it gets its name", FOLDER + "publish", batch=2, victim=0),
    Point("saving: it has its name", FOLDER + "publish", after=True, batch=2, victim=0),
    Point("saving: before latest", FOLDER + "write_latest", batch=2, victim=0),
    Point("saving: before latest is replaced", "os:replace", batch=2, victim=0),
    Point("saving: latest is replaced", "os:replace", after=True, batch=2, victim=0),
    Point("saving: all is done", SAVE + "run", after=True, batch=2),
    Point("saving: before the disk", FOLDER + "DiskSync.__init__", batch=2),
    Point("saving: on the way to the disk", FOLDER + "sync", call=3, batch=2),
    Point("saving: while waiting for the disk", FOLDER + "DiskSync.wait", batch=2),
    Point("saving the first: before its name", FOLDER + "publish", victim=0),
    Point("saving the first: it has its name", FOLDER + "publish", after=True, victim=0),
    Point("saving the first: latest is there", FOLDER + "write_latest", after=True, victim=0),
    Point("saving over it: before the exchange", FOLDER + "_exchange", batch=2, victim=0, tag="last"),
    Point("saving over it: after the exchange", FOLDER + "_exchange", after=True, batch=2, victim=0, tag="last"),
    Point("saving over it: the old one removed", "shutil:rmtree", after=True, batch=2, victim=0, tag="last"),
    Point("saving over it: before two renames", "os:rename", batch=2, victim=0, tag="last", exchange=False),
    Point("saving over it: between two renames",
          "os:rename", after=True, batch=2, victim=0, tag="last", exchange=False),
    Point("saving over it: after two renames",
          "os:rename", after=True, call=2, batch=2, victim=0, tag="last", exchange=False),
]  # fmt: skip

LOADING = [
    Point("loading: before the tag", "dynpipe_ds.checkpoint.checkpoints:latest_tag"),
    Point("loading: after the tag", "dynpipe_ds.checkpoint.checkpoints:latest_tag", after=True),
    Point("loading: before the manifest", LOAD + "_read_manifest", victim=0),
    Point("loading: the manifest is read", LOAD + "_read_manifest", after=True, victim=0),
    Point("loading: all know the manifest", LOAD + "_find_manifest", after=True),
    Point("loading: before checksums", LOAD + "_verify_share"),
    Point("loading: in the middle of checksums", FOLDER + "verify", call=3),
    Point("loading: before it is compared with the model", LOAD + "_check"),
    Point("loading: before the partition is chosen", LOAD + "_choose_partition", victim=0),
    Point("loading: before files are read", LOAD + "_read"),
    Point("loading: in the middle of reading", "dynpipe_ds.host.optimizer_files:Reader.read", call=3),
    Point("loading: before rows are cut", "dynpipe_ds.checkpoint.owned:Rows.weights"),
    Point("loading: before layers move", TRAINING_LOOP + "move_layers"),
    Point("loading: while layers move", TRANSFER + "start"),
    Point("loading: after layers moved", TRAINING_LOOP + "move_layers", after=True),
    Point("loading: before weights", LOAD + "_load_layers"),
    Point("loading: after weights", LOAD + "_load_layers", after=True),
    Point("loading: before the optimizer hears of parameters", LOAD + "_announce_parameters"),
    Point("loading: before optimizer state", LOAD + "_load_optimizer"),
    Point("loading: in the middle of optimizer state", "dynpipe_ds.checkpoint.load:restore_state"),
    Point("loading: after optimizer state", LOAD + "_load_optimizer", after=True),
    Point("loading: before counters", LOAD + "_load_counters"),
    Point("loading: before random streams", "dynpipe_ds.checkpoint.extras:_set_random_streams"),
    Point("loading: all is done", LOAD + "run", after=True),
]  # fmt: skip

POINTS = TRAINING + SAVING + LOADING
