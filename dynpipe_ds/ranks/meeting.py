"""Who goes on: survivors of a lost rank agree on the members of the next world, whoever else is lost meanwhile.

They meet at the place of the lowest rank that lives, who leads. Everybody says that he is here, with a number that is
new for each meeting. When all who live are here the leader proposes members; all of them confirm; then the leader says
"go". Who is lost before that is left out of another proposal; if it is the leader, all meet at the next one's place.
A "go" that only some have heard of leads them into a world that does not come about, and from there to another meeting.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynpipe_ds.ranks.answering import Answer, RunningClock
from dynpipe_ds.ranks.place import Place, bounded, enter

MEETING_S = 60.0
"""Longest time to wait for a rank that lives and does not come."""

_STEP_S = 5.0  # for one step of the store's, in a process that lives
_POLL_S = 0.01
_ASK_EVERY_S = 0.2

Said = dict[str, Any]
"""What a survivor says of itself: plain values."""


class NoMeetingError(RuntimeError):
    """Survivors can't go on; the message says why."""


@dataclass(frozen=True)
class Agreed:
    """What all members hold when a meeting is over.

    Attributes:
        leader: lowest rank among them.
        said: what each member said, by rank in the world that broke.
        news: what the leader adds, plain values.
    """

    leader: int
    said: dict[int, Said]
    news: Said


@dataclass
class Meeting:
    """The way of one survivor to the next world.

    Args:
        rank: of this process in the world that broke.
        places: of all its ranks.
        name: of that world, the same on every rank and no other world's.
        answers: asks ranks whether they live.
        lost: ranks that are known to be lost.
        news: what this process adds if it leads; asked for each proposal, with the ranks that come.
    """

    rank: int
    places: Sequence[Place]
    name: str
    answers: Callable[[], Mapping[int, Answer]]
    lost: set[int] = field(default_factory=set)
    news: Callable[[Sequence[int]], Said] = lambda _: {}
    _store: Any = None

    def meet(self, said: Said) -> Agreed:
        """Agree.

        Args:
            said: what this process says of itself.

        Raises:
            NoMeetingError: on this rank, if it must not go on: the others could not be reached, and may go on
                without it.
        """
        self._number, self._round = secrets.token_hex(8), 0
        text = json.dumps({"number": self._number, "said": said})
        clock = RunningClock()
        while True:
            living = self._living()
            leader = min(living)
            try:
                self._store = bounded(lambda leader=leader: enter(self.places[leader]), _STEP_S)
                self._set(f"{leader}/here/{self.rank}", text)
                return self._lead() if leader == self.rank else self._follow(leader)
            except (RuntimeError, OSError) as error:  # torch's errors of stores derive from RuntimeError
                if isinstance(error, NoMeetingError):
                    raise
                if clock.tick() > MEETING_S:
                    raise NoMeetingError(f"no meeting came about in {MEETING_S:g} s ({error})") from error
                time.sleep(_POLL_S)

    # -- leading ------------------------------------------------------------------------------

    def _lead(self) -> Agreed:
        while True:
            here = self._wait_for_all()
            members = sorted(here)
            news = self.news(members)
            proposal = {"numbers": {rank: here[rank]["number"] for rank in members}, "news": news,
                        "said": {rank: here[rank]["said"] for rank in members}, "round": secrets.token_hex(8)}
            self._set(f"{self.rank}/proposal", json.dumps(proposal))
            if self._are_all_agreed(members, proposal):
                self._set(f"{self.rank}/go/{proposal['round']}", "yes")
                return Agreed(self.rank, {rank: here[rank]["said"] for rank in members}, news)

    def _wait_for_all(self) -> dict[int, Said]:
        clock, asked_s, living = RunningClock(), 0.0, self._living()
        while True:
            here = self._here(living)
            if len(here) == len(living):
                return here
            now_s = clock.tick()
            if now_s > MEETING_S:
                self.lost |= set(living) - set(here)
                self._check_majority()
            if now_s - asked_s > _ASK_EVERY_S:
                asked_s, living = now_s, self._living()
            time.sleep(_POLL_S)

    def _here(self, ranks: Sequence[int]) -> dict[int, Said]:
        return {rank: json.loads(text) for rank in ranks if (text := self._get(f"{self.rank}/here/{rank}"))}

    def _are_all_agreed(self, members: Sequence[int], proposal: Said) -> bool:
        """False if somebody was lost, or has come anew, before confirming."""
        clock, asked_s = RunningClock(), 0.0
        missing = [rank for rank in members if rank != self.rank]
        while missing:
            missing = [rank for rank in missing if not self._get(f"{self.rank}/yes/{proposal['round']}/{rank}")]
            now_s = clock.tick()
            if missing and now_s - asked_s > _ASK_EVERY_S:
                asked_s = now_s
                if not set(members) <= set(self._living()):
                    return False
                numbers = {rank: said["number"] for rank, said in self._here(missing).items()}
                if numbers != {rank: proposal["numbers"][rank] for rank in missing}:
                    return False
            if missing and now_s > MEETING_S:
                self.lost |= set(missing)
                self._check_majority()
                return False
            time.sleep(_POLL_S)
        return True

    # -- following ----------------------------------------------------------------------------

    def _follow(self, leader: int) -> Agreed:
        clock, confirmed, asked_s = RunningClock(), "", 0.0
        while True:
            text = self._get(f"{leader}/proposal")
            proposal = json.loads(text) if text else {"numbers": {}}
            if proposal["numbers"].get(str(self.rank)) == self._number:
                if proposal["round"] != confirmed:
                    confirmed = proposal["round"]
                    self._set(f"{leader}/yes/{confirmed}/{self.rank}", "yes")
                if self._get(f"{leader}/go/{confirmed}"):
                    return Agreed(leader, {int(r): said for r, said in proposal["said"].items()}, proposal["news"])
            now_s = clock.tick()
            if now_s - asked_s > _STEP_S:  # that it has ended is seen at once, since its store does not answer
                asked_s = now_s
                if leader not in self._living():
                    raise RuntimeError(f"rank {leader} was lost")
            if now_s > 2 * MEETING_S:
                raise NoMeetingError(f"rank {leader} lives and leads no meeting; it may go on without this one")
            time.sleep(_POLL_S)

    # -- who lives ----------------------------------------------------------------------------

    def _living(self) -> list[int]:
        """Ranks that may come, ascending; this one is among them."""
        answers = self.answers()
        silent = {rank for rank, answer in answers.items() if answer is Answer.SILENT} - self.lost
        self.lost |= {rank for rank, answer in answers.items() if answer is not Answer.LIVES} - {self.rank}
        self._num_silent = getattr(self, "_num_silent", 0) + len(silent - {self.rank})
        self._check_majority()
        return [rank for rank in range(len(self.places)) if rank not in self.lost]

    def _check_majority(self) -> None:
        """Who is silent may be well, on the other side of a broken network: then most ranks must be on this one."""
        if getattr(self, "_num_silent", 0) and 2 * (len(self.places) - len(self.lost)) <= len(self.places):
            raise NoMeetingError(
                f"ranks {sorted(self.lost)} are lost, some of which do not answer and may be well where this rank can't "
                "reach them; no more than half of all ranks are left here, so that they must not go on"
            )

    # -- the place ----------------------------------------------------------------------------

    def _key(self, what: str) -> str:
        return f"dynpipe_ds/meeting/{self.name}/{what}"

    def _set(self, what: str, text: str) -> None:
        bounded(lambda: self._store.set(self._key(what), text), _STEP_S)

    def _get(self, what: str) -> str:
        """What was set there; nothing if nothing was."""
        key = self._key(what)
        if not bounded(lambda: self._store.check([key]), _STEP_S):
            return ""
        return str(bounded(lambda: self._store.get(key), _STEP_S).decode())
