"""Making the world of processes smaller: old process groups go, the survivors form new ones.

The one place that knows how. ``torch.distributed`` can shrink a group only with NCCL; destroying all groups and
meeting again under another prefix of the same store works with every back-end, takes hundredths of a second
and leaves one way to do it. Survivors keep the order of their ranks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from dynpipe_ds.ranks.answering import RunningClock
from dynpipe_ds.ranks.heartbeat import group_timeout

if TYPE_CHECKING:
    from dynpipe_ds.host.pipeline import Pipeline

_LET_GO_S = 30
"""Longest time to wait for all survivors to have closed their connections."""

_STORE_S = _LET_GO_S + 5
"""Longest time for anything that the store does."""

_generation = 0


class World:
    """The process group as it is, and the way to a smaller one.

    Args:
        leaving: global ranks that go.
    """

    def __init__(self, leaving: Iterable[int]) -> None:
        self.leaving = frozenset(leaving)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._generation = _generation
        self.survivors = [rank for rank in range(self.size) if rank not in self.leaving]
        self._store = _root(dist.distributed_c10d._get_default_store())

    def check(self) -> None:
        """Try what :meth:`leave` and :meth:`regroup` rely on, while going back is still possible.

        Raises:
            RuntimeError: if this rank can't reach the store where the survivors are to meet.
        """
        key = self._key("reach", self.rank)
        _bounded(lambda: self._store.set(key, "yes"))
        _bounded(lambda: self._store.get(key))

    def leave(self) -> None:
        """Give up all groups and wait until the survivors have done so; the process can end then."""
        _destroy()
        self._wait_for_survivors()

    def say_goodbye(self) -> None:
        """Tell the survivors that this rank ends now."""
        _bounded(lambda: self._store.set(self._key("gone", self.rank), "yes"))

    def wait_for_leaving(self) -> None:
        """Wait until the ranks that leave are at their end.

        Raises:
            RuntimeError: if they aren't in time.
        """
        self._wait_for("gone", self.leaving)

    def _key(self, what: str, rank: int) -> str:
        return f"dynpipe_ds/world/{self._generation}/{what}/{rank}"

    def _wait_for_survivors(self) -> None:
        self._wait_for("let_go", self.survivors)

    def _wait_for(self, what: str, ranks: Iterable[int]) -> None:
        keys = [self._key(what, rank) for rank in ranks]
        _bounded(lambda: self._store.wait(keys, timedelta(seconds=_LET_GO_S)))

    def regroup(self) -> None:
        """Give up all groups and join the survivors' new world; collective over the survivors."""
        global _generation
        backend, device, timeout = dist.get_backend(), _bound_device(), group_timeout()
        _destroy()
        _bounded(lambda: self._store.set(self._key("let_go", self.rank), "yes"))
        self._wait_for_survivors()  # bounded, while meeting in the new world would take the back-end's patience
        _generation += 1
        rank, size = self.survivors.index(self.rank), len(self.survivors)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group(
            backend, store=PrefixStore(f"dynpipe_ds/world/{_generation}", self._store), rank=rank,
            world_size=size, timeout=timeout, device_id=device if size > 1 else None,
        )


def _destroy() -> None:
    # DeepSpeed's function also drops the groups that its own modules remember.
    deepspeed.comm.destroy_process_group()


def _bounded(action: Callable[[], object]) -> None:
    """Use the store, which lives in another process: if that one is stopped, no timeout of the store's own counts."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:
            failures.append(error)

    thread, clock = threading.Thread(target=run, name="dynpipe_ds store", daemon=True), RunningClock()
    thread.start()
    while thread.is_alive():
        if clock.tick() > _STORE_S:
            raise RuntimeError(f"the store where the ranks meet did not answer for {_STORE_S} s; timed out")
        thread.join(0.25)
    if failures:
        raise failures[0]


def _root(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _bound_device() -> torch.device | None:
    device: torch.device | None = dist.group.WORLD.bound_device_id  # type: ignore[union-attr]
    return device


class Groups:
    """Process groups of a pipeline by role, so that what holds the old ones can be given the new ones.

    Args:
        module: the pipeline module.
    """

    def __init__(self, module: Any) -> None:
        grid = module._grid
        self._by_role = {
            "world": dist.group.WORLD,
            "world clone": groups._WORLD_GROUP,
            "module": module.world_group,
            "stage": grid.dp_proc_group,
            "pipeline": grid.pp_proc_group,
            "model": grid.ds_model_proc_group,
            "slice": grid.slice_proc_group,
        }

    @property
    def world_clone(self) -> Any:
        """DeepSpeed's second group of all ranks, if it made one."""
        return self._by_role["world clone"]

    def hand_over(self, new: Groups, holders: Iterable[Any]) -> None:
        """Replace old groups by new ones of the same role in the attributes of some objects.

        Args:
            new: taken after the world was rebuilt.
            holders: objects; attributes that are a group, or a list of groups, are looked at.
        """
        renewed = {id(old): new._by_role[role] for role, old in self._by_role.items() if old is not None}
        for holder in holders:
            attributes = vars(holder)
            for name, value in attributes.items():
                if isinstance(value, list) and any(id(item) in renewed for item in value):
                    attributes[name] = [renewed.get(id(item), item) for item in value]
                elif id(value) in renewed:
                    attributes[name] = renewed[id(value)]


def holders_of_groups(pipeline: Pipeline) -> Sequence[Any]:
    """Objects of an engine that hold process groups: itself, its optimizer and the optimizer's parameters."""
    found: list[Any] = [pipeline.engine]
    if pipeline.has_optimizer:
        found.append(pipeline.engine.optimizer)
    parameters: list[nn.Parameter] = list(pipeline.engine.module.parameters())
    return [*found, *parameters, *pipeline.placeholders]
