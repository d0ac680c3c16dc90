"""Who goes on: survivors of a lost rank agree on the members of the next world, whoever else is lost meanwhile.

They meet at the place of the first of them that lives, who leads. Everybody says that he is here, with a number that is
new for each meeting. When all who live are here the leader proposes members; all of them confirm; then the leader says
"go". Who is lost before that is left out of another proposal; if it is the leader, all meet at the next one's place.
A "go" that only some have heard of leads them into a world that does not come about, and from there to another meeting.

Processes are named by what they are called in every world, and stand in the order that their ranks have: so those who
already were in a world that broke at once, and those who were not in it yet, find each other.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from dynpipe_ds.ranks.answering import Address, Answer, RunningClock, ask
from dynpipe_ds.ranks.place import Place, bounded, enter

MEETING_S = 30.0
"""Longest time to wait for a rank that lives and does not come."""

_STEP_S = 5.0  # for one step of the store's, in a process that lives
_POLL_S = 0.01
_ASK_EVERY_S = 0.2

Said = dict[str, Any]
"""What a survivor says of itself: plain values."""


class NoMeetingError(RuntimeError):
    """Survivors can't go on; the message says why."""


class Person(NamedTuple):
    """A process, as the others know it.

    Attributes:
        identity: what it is called in every world.
        place: that it holds.
        address: where it is asked.
    """

    identity: str
    place: Place
    address: Address


def ask_people(people: Sequence[Person], patience_s: float) -> dict[str, Answer]:
    """Ask processes whether they live.

    Args:
        people: whom.
        patience_s: longest time to wait for a reply, in seconds that this process runs.

    Returns:
        By identity.
    """
    answers = ask({number: one.address for number, one in enumerate(people)}, patience_s)
    return {one.identity: answers[number] for number, one in enumerate(people)}


@dataclass(frozen=True)
class Agreed:
    """What all members hold when a meeting is over.

    Attributes:
        members: identities, in their order; the first one led.
        said: what each member said.
        news: what the leader adds, plain values.
        place: of the leader.
    """

    members: tuple[str, ...]
    said: dict[str, Said]
    news: Said
    place: Place


@dataclass
class Meeting:
    """The way of one survivor to the next world.

    Args:
        me: identity of this process.
        people: everybody who may come, and this process, in the same order wherever the same ones are meant.
        answers: asks whether they live.
        lost: identities of those who are known to be lost.
        news: what this process adds if it leads; asked for each proposal, with the members and what they said.
    """

    me: str
    people: Sequence[Person]
    answers: Callable[[Sequence[Person]], Mapping[str, Answer]]
    lost: set[str] = field(default_factory=set)
    news: Callable[[Mapping[str, Said]], Said] = lambda _: {}
    _silent: set[str] = field(default_factory=set)
    _store: Any = None
    _number: str = ""

    def meet(self, said: Said) -> Agreed:
        """Agree.

        Args:
            said: what this process says of itself.

        Raises:
            NoMeetingError: on this rank, if it must not go on: the others could not be reached, and may go on
                without it.
        """
        self._number = secrets.token_hex(8)
        self._note([one for one in self.people if one.identity in self.lost])
        text = json.dumps({"number": self._number, "said": said})
        clock = RunningClock()
        while True:
            leader = self._living()[0]
            try:
                self._store = bounded(partial(enter, leader.place), _STEP_S)
                self._set(f"{leader.identity}/here/{self.me}", text)
                return self._lead(leader) if leader.identity == self.me else self._follow(leader)
            except (RuntimeError, OSError) as error:  # torch's errors of stores derive from RuntimeError
                if isinstance(error, NoMeetingError):
                    raise
                if clock.tick() > MEETING_S:
                    raise NoMeetingError(f"no meeting came about in {MEETING_S:g} s ({error})") from error
                time.sleep(_POLL_S)

    # -- leading ------------------------------------------------------------------------------

    def _lead(self, me: Person) -> Agreed:
        while True:
            here = self._wait_for_all()
            said = {name: one["said"] for name, one in here.items()}
            proposal = {
                "round": secrets.token_hex(8), "numbers": {name: one["number"] for name, one in here.items()},
                "said": said, "news": self.news(said),
            }
            self._set(f"{self.me}/proposal", json.dumps(proposal))
            if self._are_all_agreed(proposal):
                self._set(f"{self.me}/go/{proposal['round']}", "yes")
                return self._agreed(proposal, me)

    def _agreed(self, proposal: Said, leader: Person) -> Agreed:
        return Agreed(tuple(proposal["said"]), proposal["said"], proposal["news"], leader.place)

    def _wait_for_all(self) -> dict[str, Said]:
        clock, asked_s, living = RunningClock(), 0.0, self._names()
        while True:
            here = self._here(living)
            if len(here) == len(living):
                return here
            now_s = clock.tick()
            if now_s > MEETING_S:
                self._leave_out(set(living) - set(here))
            if now_s - asked_s > _ASK_EVERY_S:
                asked_s, living = now_s, self._names()
            time.sleep(_POLL_S)

    def _here(self, names: Collection[str]) -> dict[str, Said]:
        return {name: json.loads(text) for name in names if (text := self._get(f"{self.me}/here/{name}"))}

    def _are_all_agreed(self, proposal: Said) -> bool:
        """False if somebody was lost, or has come anew, before confirming."""
        clock, asked_s, numbers = RunningClock(), 0.0, proposal["numbers"]
        missing = [name for name in numbers if name != self.me]
        while missing:
            missing = [name for name in missing if not self._get(f"{self.me}/yes/{proposal['round']}/{name}")]
            now_s = clock.tick()
            if missing and now_s - asked_s > _ASK_EVERY_S:
                asked_s = now_s
                if not set(numbers) <= set(self._names()):
                    return False
                if {n: s["number"] for n, s in self._here(missing).items()} != {n: numbers[n] for n in missing}:
                    return False
            if missing and now_s > MEETING_S:
                self._leave_out(set(missing))
                return False
            time.sleep(_POLL_S)
        return True

    # -- following ----------------------------------------------------------------------------

    def _follow(self, leader: Person) -> Agreed:
        clock, confirmed, asked_s = RunningClock(), "", 0.0
        while True:
            text = self._get(f"{leader.identity}/proposal")
            proposal = json.loads(text) if text else {"numbers": {}}
            if proposal["numbers"].get(self.me) == self._number:
                if proposal["round"] != confirmed:
                    confirmed = proposal["round"]
                    self._set(f"{leader.identity}/yes/{confirmed}/{self.me}", "yes")
                if self._get(f"{leader.identity}/go/{confirmed}"):
                    return self._agreed(proposal, leader)
            now_s = clock.tick()
            if now_s - asked_s > _STEP_S:  # that it has ended is seen at once, since its store does not answer
                asked_s = now_s
                if leader.identity not in self._names():
                    raise RuntimeError("the leader was lost")
            if now_s > 2 * MEETING_S:
                raise NoMeetingError("the leader lives and leads no meeting; it may go on without this process")
            time.sleep(_POLL_S)

    # -- who lives ----------------------------------------------------------------------------

    def _living(self) -> list[Person]:
        """Who may come; this process is among them."""
        self._note(self._left())
        return self._left()

    def _names(self) -> list[str]:
        return [one.identity for one in self._living()]

    def _left(self) -> list[Person]:
        return [one for one in self.people if one.identity not in self.lost]

    def _note(self, people: Sequence[Person]) -> None:
        answers = self.answers([one for one in people if one.identity != self.me])
        self.lost |= {name for name, answer in answers.items() if answer is not Answer.LIVES}
        self._silent |= {name for name, answer in answers.items() if answer is Answer.SILENT}
        self._check_majority()

    def _leave_out(self, names: set[str]) -> None:
        """Who lives and does not come may be on his way to another world."""
        self.lost |= names
        self._silent |= names
        self._check_majority()

    def _check_majority(self) -> None:
        """Who is silent may be well, on the other side of a broken network: then most ranks must be on this one."""
        if self._silent and 2 * len(self._left()) <= len(self.people):
            raise NoMeetingError(
                f"{len(self.lost)} of {len(self.people)} ranks are lost, some of which do not answer and may be well "
                "beyond the reach of this one; no more than half of all are left here, so that they must not go on"
            )

    # -- the place ----------------------------------------------------------------------------

    def _key(self, what: str) -> str:
        return f"dynpipe_ds/meeting/{what}"

    def _set(self, what: str, text: str) -> None:
        bounded(lambda: self._store.set(self._key(what), text), _STEP_S)

    def _get(self, what: str) -> str:
        """What was set there; nothing if nothing was."""
        key = self._key(what)
        if not bounded(lambda: self._store.check([key]), _STEP_S):
            return ""
        return str(bounded(lambda: self._store.get(key), _STEP_S).decode())
