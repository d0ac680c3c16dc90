"""Which rank computes each expert for the tokens of each rank, as a value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index

_SIZES = re.compile(r"(\d+)x(\d+)")
_MOVED = re.compile(r"(\d+)@(\d+):(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")


@dataclass(frozen=True)
class Lanes:
    """Which rank computes each lane: the tokens of one source rank for one expert.

    Static expert parallelism, FasterMoE's shadowing (a whole column local), Pro-Prophet's subsets of devices (part of
    a column local) and all local are cases of it. ``str`` gives a short form that :meth:`parse` reads back: ``4x8``
    is static on 4 ranks with 8 experts, ``4x8 local`` all local, and in ``4x8 0@1:1 5@3:0-1,3`` rank 1 computes
    expert 0 for its own tokens and rank 3 expert 5 for those of ranks 0, 1 and 3; homes compute the rest.

    Args:
        owner: ``owner[s][e]`` is the rank that computes expert e for the tokens of rank s, ``[R][E]``.

    Raises:
        ValueError: when rows differ in length, experts don't divide evenly, or a rank does not exist.
    """

    owner: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        rows = tuple(tuple(index(rank) for rank in row) for row in self.owner)
        object.__setattr__(self, "owner", rows)
        _check_sizes(len(rows), len(rows[0]) if rows else 0)
        for source, row in enumerate(rows):
            if len(row) != len(rows[0]):
                raise ValueError(
                    f"placement with {len(row)} experts for source {source} and {len(rows[0])} for source 0: every "
                    "source needs an owner for each expert; give rows of one length"
                )
            for expert, rank in enumerate(row):
                if not 0 <= rank < len(rows):
                    raise ValueError(
                        f"placement has owner[{source}][{expert}] = {rank}: owners must be ranks from 0 to "
                        f"{len(rows) - 1}, one row a rank; name one of them"
                    )

    @classmethod
    def static(cls, num_ranks: int, num_experts: int) -> Lanes:
        """Homes compute everything: static expert parallelism.

        Args:
            num_ranks: R.
            num_experts: E, a multiple of R.

        Returns:
            The placement.

        Raises:
            ValueError: when the experts don't divide evenly.
        """
        _check_sizes(num_ranks, num_experts)
        row = tuple(expert * num_ranks // num_experts for expert in range(num_experts))
        return cls((row,) * num_ranks)

    @classmethod
    def local(cls, num_ranks: int, num_experts: int) -> Lanes:
        """Every rank computes all experts for its own tokens, as in plain data parallelism.

        Args:
            num_ranks: R.
            num_experts: E, a multiple of R.

        Returns:
            The placement.

        Raises:
            ValueError: when the experts don't divide evenly.
        """
        _check_sizes(num_ranks, num_experts)
        return cls(tuple((rank,) * num_experts for rank in range(num_ranks)))

    @classmethod
    def parse(cls, text: str) -> Lanes:
        """Read the short form back.

        Args:
            text: what ``str`` gave.

        Returns:
            The placement.

        Raises:
            ValueError: when it is no such form.
        """
        first, *rest = text.split() or [""]
        sizes = _SIZES.fullmatch(first)
        if sizes is None:
            raise ValueError(_not_a_placement(text))
        num_ranks, num_experts = int(sizes[1]), int(sizes[2])
        if rest == ["local"]:
            return cls.local(num_ranks, num_experts)
        owner = [list(row) for row in cls.static(num_ranks, num_experts).owner]
        for word in rest:
            moved = _MOVED.fullmatch(word)
            if moved is None or int(moved[1]) >= num_experts:
                raise ValueError(_not_a_placement(text))
            for source in _sources_of(moved[3]):
                if source >= num_ranks:
                    raise ValueError(_not_a_placement(text))
                owner[source][int(moved[1])] = int(moved[2])
        return cls(tuple(tuple(row) for row in owner))

    @property
    def num_ranks(self) -> int:
        """Number of ranks R."""
        return len(self.owner)

    @property
    def num_experts(self) -> int:
        """Number of experts E."""
        return len(self.owner[0])

    def home(self, expert: int) -> int:
        """Return the rank that keeps an expert's weights and optimizer state: contiguous, E / R experts a rank."""
        return expert * self.num_ranks // self.num_experts

    def copies(self, rank: int) -> tuple[int, ...]:
        """Return the experts of which a rank computes lanes without being their home, in order."""
        return tuple(
            expert for expert in range(self.num_experts)
            if self.home(expert) != rank and any(row[expert] == rank for row in self.owner)
        )  # fmt: skip

    def holders(self, expert: int) -> tuple[int, ...]:
        """Return the ranks that need an expert's weights: its home (which keeps them anyway), then those after it.

        The ranks stand in a ring, so that none is always the last one of a chain, which forwards nothing.
        """
        *others, home = self.summing_order(expert)
        needed = {row[expert] for row in self.owner}
        return home, *(rank for rank in others if rank in needed)

    def summing_order(self, expert: int) -> tuple[int, ...]:
        """Return the sources in the order in which the gradients of an expert's lanes are added up.

        From the rank after its home, around the ring, to the home itself: the same for every placement. The home's own
        tokens, which seldom are computed elsewhere, come last, so a sum does not visit the home twice for them.
        """
        first = self.home(expert) + 1
        return tuple((first + step) % self.num_ranks for step in range(self.num_ranks))

    @property
    def num_copies(self) -> int:
        """Number of copies of all ranks together."""
        return sum(len(self.copies(rank)) for rank in range(self.num_ranks))

    def check(self, num_ranks: int, num_experts: int) -> None:
        """Refuse a placement that was made for other sizes.

        Args:
            num_ranks: R of the group that is to run it.
            num_experts: E of the layer.

        Raises:
            ValueError: when either differs.
        """
        if (self.num_ranks, self.num_experts) != (num_ranks, num_experts):
            raise ValueError(
                f"placement {self} is for {self.num_ranks} ranks and {self.num_experts} experts; here are {num_ranks} "
                f"ranks and {num_experts} experts: plan one for these sizes"
            )

    def __str__(self) -> str:
        sizes = f"{self.num_ranks}x{self.num_experts}"
        if self.num_ranks > 1 and self == Lanes.local(self.num_ranks, self.num_experts):
            return f"{sizes} local"
        return " ".join((sizes, *self._moved()))

    def _moved(self) -> Iterator[str]:
        for expert in range(self.num_experts):
            column = [row[expert] for row in self.owner]
            for rank in sorted(self.holders(expert)[1:]):
                sources = [source for source, owner in enumerate(column) if owner == rank]
                yield f"{expert}@{rank}:{_in_short(sources)}"


def _check_sizes(num_ranks: int, num_experts: int) -> None:
    if num_ranks < 1 or num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"{num_experts} experts on {num_ranks} ranks: every rank must be home to as many experts, at least one; "
            "choose a number of experts that the ranks divide"
        )


def _in_short(sources: Sequence[int]) -> str:
    """Runs of numbers: ``0-2,5``."""
    starts = [sources[0], *(b for a, b in pairwise(sources) if b != a + 1)]
    ends = [*(a for a, b in pairwise(sources) if b != a + 1), sources[-1]]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _sources_of(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _not_a_placement(text: str) -> str:
    return (
        f"{text!r} is not a placement: it must be RANKSxEXPERTS, then 'local', or what is not computed at home as "
        "expert@rank:sources, such as '4x8 0@1:1 5@3:0-1,3'; give what str(lanes) printed"
    )
