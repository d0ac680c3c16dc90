"""Worlds: which processes train together, and how a group of them meets to be the next one.

The one place that knows how. A world is a list of *members*, processes by an identity that they keep whatever their
rank, who meet at a :class:`~dynpipe_ds.ranks.place.Place` under a *generation*, a number that only grows. To shrink,
to grow and to go on without who was lost is the same operation:

1. all whom it concerns have the same :class:`World`: by :meth:`World.among` while the present ranks still speak to each
   other, or made of the same values wherever these come from (:attr:`World.plain`);
2. :meth:`World.check`: what can fail is tried while the old world still works, with newcomers up to a group of all;
3. members call :meth:`World.regroup`, ranks that leave :meth:`World.leave`. All old groups are destroyed; the first
   member looks whether everybody has come, and says for all whether they begin. If not, all who came raise
   :class:`NobodyMetError`, and may regroup as another world, of a higher generation.

``torch.distributed`` can shrink a group only with NCCL and grow none; destroying all groups and meeting again works
with every back-end, takes hundredths of a second, and needs neither the launcher's store nor rank 0.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from dynpipe_ds.ranks.agreement import gather
from dynpipe_ds.ranks.answering import RunningClock
from dynpipe_ds.ranks.heartbeat import group_timeout
from dynpipe_ds.ranks.place import Place, bounded, enter, open_place

if TYPE_CHECKING:
    from dynpipe_ds.host.pipeline import Pipeline

MEETING_S = 30.0
"""Longest time to wait for all members, who close their connections first."""

TRYING_S = 8.0
"""Longest time that reaching newcomers may take."""

_POLL_S = 0.005

_generation = 0
_identity: tuple[int, str] = 0, ""  # of which process
_last_kind: tuple[str, torch.device | None, float] | None = None
_launchers_store: Any = None  # back-ends may look into it until all have left their groups


class NobodyMetError(RuntimeError):
    """A world did not come about since some member did not come; those who came all hear of it and have no groups."""


def identity() -> str:
    """What names this process in every world, whatever its rank."""
    global _identity
    if _identity[0] != os.getpid():
        _identity = os.getpid(), secrets.token_hex(8)
    return _identity[1]


def generation() -> int:
    """The greatest number of a world that this process was to be in; 0 where the launcher's is the only one."""
    return _generation


class World:
    """A world that is to be, as a member of it sees it, or a rank that leaves.

    Args:
        members: identities, by rank in it.
        place: where they meet.
        generation: its number, greater than that of every world that one of them was in.
        newcomers: members who were not in the world before.
        leaving: identities of who was in the world before and is no member.
        lost: finds out, on the first member, whether somebody will not come: says who, or nothing.
        timeout_s: of its process group; by default that of the present one.

    Attributes:
        members: as given.
        generation: as given.
        leaving: as given.
    """

    def __init__(
        self, members: Sequence[str], place: Place, generation: int, *, newcomers: Collection[str] = (),
        leaving: Iterable[str] = (), lost: Callable[[], str] = str, timeout_s: float | None = None,
    ) -> None:
        self.members, self.generation, self.leaving = tuple(members), generation, tuple(leaving)
        self._place, self._newcomers, self._lost = Place(*place), frozenset(newcomers), lost
        self._backend, self._device, known_s = _kind()
        self._timeout_s = known_s if timeout_s is None else timeout_s
        self._me = identity()
        self._store: Any = None

    @classmethod
    def among(cls, members: Sequence[int | str], *, lost: Callable[[], str] = str) -> World:
        """A world of present ranks and newcomers, with a number of its own; collective over all present ranks.

        Args:
            members: by rank there: a present rank, or a newcomer's identity. The same on every rank; the first rank
                among them holds the place.
            lost: as above.

        Raises:
            RuntimeError: on every rank, if there can be no place.
        """
        global _generation
        _generation += 1  # also if it comes to nothing: what was said of it stays at the place
        holder = next(member for member in members if isinstance(member, int))
        here: Place | str = ""
        try:
            here = open_place() if dist.get_rank() == holder else ""
        except (OSError, RuntimeError) as error:
            here = f"{type(error).__name__}: {error}"
        everyone = gather((identity(), here))
        place, names = everyone[holder][1], [name for name, _ in everyone]
        if isinstance(place, str):
            raise RuntimeError(f"rank {holder} has no place for the others to meet ({place})")
        stay = [names[member] if isinstance(member, int) else member for member in members]
        return cls(
            stay, place, _generation, newcomers=[member for member in members if isinstance(member, str)],
            leaving=[name for name in names if name not in stay], lost=lost,
        )

    @property
    def plain(self) -> dict[str, Any]:
        """What a newcomer makes the same world of: ``World(**plain)``."""
        return {
            "members": list(self.members), "place": list(self._place), "generation": self.generation,
            "newcomers": sorted(self._newcomers),
        }

    def instead(self, members: Sequence[str]) -> World:
        """What others begin if this one does not come about; to be made while the old world works.

        Args:
            members: identities, by rank.
        """
        return World(members, self._place, self.generation + 1)

    @property
    def rank(self) -> int:
        """This process's rank in it."""
        return self.members.index(self._me)

    # -- while the old world works ------------------------------------------------------------

    def check(self) -> None:
        """Try what :meth:`leave` and :meth:`regroup` rely on, while going back is still possible.

        With newcomers, collective over all members: they are connected to each other, for a trial.

        Raises:
            RuntimeError: if this process can't reach the place, or another member in time.
        """
        self._tell("reach")
        bounded(lambda: self._at().get(self._key("reach", self._me)))
        if self._newcomers and self._me in self.members:
            self._gather_at("trying", TRYING_S, "go")
            bounded(self._try_to_connect, TRYING_S)

    def _try_to_connect(self) -> None:
        trial: Any = dist.ProcessGroupGloo(
            PrefixStore(self._prefix("trial"), self._at()), self.rank, len(self.members),
            timedelta(seconds=TRYING_S),
        )
        trial.barrier().wait()

    def say(self, what: str, text: str = "yes") -> None:
        """Leave a word for all who are concerned.

        Args:
            what: its name.
            text: itself, not empty.
        """
        bounded(lambda: self._at().set(self._prefix(what), text))

    def hear(self, *what: str, patience_s: float = MEETING_S) -> str:
        """What somebody said.

        Args:
            *what: its name; of several, the first one that is said.
            patience_s: longest time to wait for it, in seconds that this process runs.

        Raises:
            RuntimeError: if nobody says it in time.
        """
        keys, clock = [self._prefix(name) for name in what], RunningClock()
        while True:
            for key in keys:
                if self._is_said(key):
                    return str(bounded(partial(self._at().get, key)).decode())
            if clock.tick() > patience_s:
                raise RuntimeError(f"nobody said {what[0]!r} in {patience_s:g} s; timed out")
            time.sleep(_POLL_S)

    # -- going over ---------------------------------------------------------------------------

    def leave(self) -> None:
        """Give up all groups and wait until the members have done so; the process can end then."""
        _destroy()
        self.hear("begin")

    def say_goodbye(self) -> None:
        """Tell the members that this process ends now."""
        self._tell("gone")

    def wait_for_leaving(self) -> None:
        """Wait until those who leave are at their end.

        Raises:
            RuntimeError: if they aren't in time.
        """
        keys = [self._key("gone", name) for name in self.leaving]
        bounded(lambda: self._at().wait(keys, timedelta(seconds=MEETING_S)))

    def regroup(self) -> None:
        """Give up all groups and begin this world; collective over its members.

        Raises:
            NobodyMetError: on all who came, if not all came.
        """
        global _generation, _launchers_store
        if dist.is_initialized():
            _launchers_store = _launchers_store or _root(dist.distributed_c10d._get_default_store())
            _destroy()
        try:
            self._gather_at("begin", MEETING_S)  # bounded, while a back-end's patience is not
        finally:
            _generation = self.generation
        size = len(self.members)
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(size))
        dist.init_process_group(
            self._backend, store=PrefixStore(self._prefix("store"), self._at()), rank=self.rank, world_size=size,
            timeout=timedelta(seconds=self._timeout_s), device_id=self._device if size > 1 else None,
        )

    def _gather_at(self, what: str, patience_s: float, *or_else: str) -> None:
        """Wait until all members have come to a point; the first one looks, and says for all whether they have.

        Args:
            what: the point.
            patience_s: longest time that it may take.
            *or_else: what else may be said to those who wait.
        """
        self._tell(what)
        if self.rank == 0:
            self.say(what, self._all_came(what, patience_s) or "yes")
        said = self.hear(what, *or_else, patience_s=patience_s + TRYING_S)
        if said != "yes":
            raise NobodyMetError(said)

    def _all_came(self, what: str, patience_s: float) -> str:
        """Why not all members came to a point; nothing if they did."""
        missing, clock = list(self.members), RunningClock()
        while True:
            missing = [name for name in missing if not self._is_said(self._key(what, name))]
            if not missing:
                return ""
            gone = self._lost()
            if gone or clock.tick() > patience_s:
                ranks = ", ".join(str(self.members.index(name)) for name in missing)
                said = f"members {ranks} of generation {self.generation} did not come in {patience_s:g} s"
                return gone or f"{said}, timed out"  # words by which the guard looks for lost ranks
            time.sleep(_POLL_S)

    def _is_said(self, key: str) -> bool:
        return bool(bounded(lambda: self._at().check([key])))

    # -- the place ----------------------------------------------------------------------------

    def _at(self) -> Any:
        if self._store is None:
            self._store = enter(self._place)
        return self._store

    def _prefix(self, what: str) -> str:
        return f"dynpipe_ds/world/{self.generation}/{what}"

    def _key(self, what: str, name: str) -> str:
        return f"{self._prefix(what)}/{name}"

    def _tell(self, what: str) -> None:
        bounded(lambda: self._at().set(self._key(what, self._me), "yes"))


def _kind() -> tuple[str, torch.device | None, float]:
    """Back-end, device and timeout of the present process group; of the last one where there is none."""
    global _last_kind
    if dist.is_initialized():
        _last_kind = dist.get_backend(), _bound_device(), group_timeout().total_seconds()
    assert _last_kind is not None, "worlds follow on each other"
    return _last_kind


def _destroy() -> None:
    # DeepSpeed's function also drops the groups that its own modules remember.
    deepspeed.comm.destroy_process_group()


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
