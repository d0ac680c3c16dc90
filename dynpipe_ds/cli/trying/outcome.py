"""What the processes of one run have recorded, read from their files, and where two runs differ, bit for bit."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import dynpipe_ds
from dynpipe_ds.cli.show import layer_spans
from dynpipe_ds.cli.trying.settings import Settings

Event = dict[str, Any]
Digests = dict[str, str]

_OURS = str(Path(dynpipe_ds.__file__).parent)
_WARM_UP = 2  # batches whose seconds are those of a start
_SECONDARY = ("RankLostError", "FatalError", "closed by peer", "reset by peer")  # what others raise when one rank fails


@dataclass
class Process:
    """One process of the script: its events by kind, in order; its files are named by host and process id."""

    name: str
    events: dict[str, list[Event]]

    @property
    def facts(self) -> Event:
        """What its engine said of itself; empty without one."""
        return next(iter(self.events["engine"]), {})

    @property
    def end(self) -> Event:
        """What it held at the end; empty if it did not end as it should."""
        return next(iter(self.events["end"]), {})

    def losses(self, kind: str = "batch") -> list[list[str]]:
        """What was returned every time."""
        return [event["loss"] for event in self.events[kind]]


@dataclass
class Outcome:
    """One run of the script.

    Attributes:
        settings: of the run.
        ranks: processes with an engine, in order.
        errors: what was raised, each once, causes first.
        failure: what the command saw; empty if all went well.
        stacks: where each rank was when nothing went on, by rank.
    """

    settings: Settings
    ranks: list[Process] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    failure: str = ""
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def facts(self) -> Event:
        """Those of the first rank."""
        return self.ranks[0].facts if self.ranks else {}

    @property
    def complete(self) -> bool:
        """Whether every rank ended after the last batch."""
        return bool(self.ranks) and len(self.ranks) == self.facts["world"] and all(r.end for r in self.ranks)

    @property
    def num_batches(self) -> int:
        """Batches that every rank finished."""
        return min((len(rank.losses()) for rank in self.ranks), default=0)

    def told(self, kind: str) -> list[Event]:
        """Events of one kind, such as ``move``, that all ranks have alike: the first one's."""
        return self.ranks[0].events[kind] if self.ranks else []

    def held(self, what: str) -> Digests:
        """Digests of ``weights`` or ``state`` of all ranks at the end, by ``replica/layer/name``."""
        found: dict[str, set[str]] = defaultdict(set)
        for rank in self.ranks:
            for name, digest in rank.end.get(what, {}).items():
                found[f"{rank.facts['replica']}/{name}"].add(digest)
        return {name: " ".join(sorted(digests)) for name, digests in found.items()}

    def seconds(self) -> list[float]:
        """Seconds of each batch, on the rank where it took longest, without the first ones."""
        each = zip(*([b["seconds"] for b in rank.events["batch"]] for rank in self.ranks), strict=False)
        return [max(batch) for batch in each][_WARM_UP:]

    def median_s(self) -> float | None:
        """Median seconds of a batch; ``None`` if there are too few."""
        return median(found) if (found := self.seconds()) else None


def read(folder: Path, settings: Settings) -> Outcome:
    """Read what has been recorded so far."""
    processes = [_process(file) for file in sorted(folder.glob("*.events"))]
    ranks = sorted((p for p in processes if p.facts), key=lambda p: int(p.facts["rank"]))
    raised = [error for process in processes for error in process.events["error"]]
    raised.sort(key=lambda error: (_is_secondary(error), error["at_s"]))
    errors: list[str] = []
    for error in raised:
        if not any(told in error["text"] or error["text"] in told for told in errors):  # as other processes pass it on
            errors.append(f"{error['type']}: {error['text']}")
    stacks = {int(rank.facts["rank"]): _stack(folder / f"{rank.name}.stacks") for rank in ranks if not rank.end}
    return Outcome(settings, ranks, errors, "", {rank: stack for rank, stack in stacks.items() if stack})


def _is_secondary(error: Event) -> bool:
    return any(sign in f"{error['type']}: {error['text']}".partition("\n")[0] for sign in _SECONDARY)


def _process(file: Path) -> Process:
    events: dict[str, list[Event]] = defaultdict(list)
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # being written
            continue
        events[event["event"]].append(event)
    return Process(file.stem, events)


def _stack(file: Path) -> str:
    """The innermost calls of the thread that was asked, and the script's own one that led there."""
    if not file.exists():
        return ""
    text = file.read_text(encoding="utf-8").partition("Current thread")[2].partition("\n\n")[0]
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', text)
    innermost = [f"{Path(path).name}:{line} {name}" for path, line, name in frames[:3]]
    own = [f"{path}:{line} {name}" for path, line, name in frames if not _is_library(path)]
    return " < ".join(innermost + (["...", own[0]] if own else []))


def _is_library(path: str) -> bool:
    return any(part in path for part in ("site-packages", _OURS, "/lib/python", "<"))


@dataclass(frozen=True)
class Difference:
    """What differs between two runs; empty texts where nothing does.

    Attributes:
        losses: the first batch whose loss differs, and by how much.
        evaluations: the same of ``eval_batch``.
        weights: layers whose weights differ at the end.
        state: layers whose optimizer state does.
        batch: the first batch that differs, counted from 1; 0 if none.
        compared_state: how many tensors of optimizer state both runs had.
    """

    losses: str = ""
    evaluations: str = ""
    weights: str = ""
    state: str = ""
    batch: int = 0
    compared_state: int = 0

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not str(self)

    def __str__(self) -> str:
        return "; ".join(text for text in (self.losses, self.evaluations, self.weights, self.state) if text)


def compare(first: Outcome, second: Outcome) -> Difference:
    """Compare two complete runs."""
    losses, batch = _losses(first, second, "batch", "the loss of batch")
    evaluations, _ = _losses(first, second, "evaluation", "the result of evaluation")
    unread = any("unread" in rank.end for rank in (*first.ranks, *second.ranks))
    weights = "" if unread else _layers(first.held("weights"), second.held("weights"), "weights")
    a, b = first.held("state"), second.held("state")
    both = a.keys() & b.keys()  # ours keeps a tied layer's state once for every occurrence, DeepSpeed's maybe not
    state = _layers({name: a[name] for name in both}, {name: b[name] for name in both}, "optimizer state")
    return Difference(losses, evaluations, weights, state, batch, len(both))


def _losses(first: Outcome, second: Outcome, kind: str, what: str) -> tuple[str, int]:
    """The earliest that differs on any rank, and its number."""
    found = [
        (i, f"{what} {i} differs{_amount(x, y)}")
        for a, b in zip(first.ranks, second.ranks, strict=True)
        for i, (x, y) in enumerate(zip_longest(a.losses(kind), b.losses(kind)), start=1)
        if x != y
    ]
    index, text = min(found, default=(0, ""))
    return text, index


def _amount(a: list[str] | None, b: list[str] | None) -> str:
    if a is None or b is None or len(a) != len(b):
        return ": only one of the two has it"
    for x, y in zip(a, b, strict=True):
        one, other = number(x), number(y)
        if x != y and one is not None and other is not None:
            return f": {one:.9g} and {other:.9g}"
    return ""


def number(text: str) -> float | None:
    """The number that ``trying/weights.py`` wrote as text; ``None`` for a digest."""
    return None if text.startswith("#") else float.fromhex(text)


def _layers(first: Digests, second: Digests, what: str) -> str:
    differing = {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
    layers = {int(name.split("/")[1]) for name in differing}
    return f"{what} of {layer_spans(layers)} differ" if differing else ""
