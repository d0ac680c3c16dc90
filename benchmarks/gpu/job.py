"""What one measuring process is told, and how it hands over what it finds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_FEW = 2


@dataclass(frozen=True)
class Job:
    """One process's part of a measurement.

    Attributes:
        module: in this package, with a ``measure(job)``.
        device: ``"cuda"``, or ``"cpu"`` in a rehearsal.
        small: whether sizes are those of a rehearsal.
        rank: number of this process.
        size: how many there are; all use device 0.
        port: where they meet.
        until_s: the :func:`time.time` at which they are ended.
        folder: where they may write.
        options: what the measurement wants to be told.
    """

    module: str
    device: str
    small: bool
    rank: int
    size: int
    port: int
    until_s: float
    folder: str
    options: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """As one argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read back what :meth:`to_json` gave."""
        return cls(**json.loads(text))

    @property
    def left_s(self) -> float:
        """Seconds until the processes are ended."""
        return self.until_s - time.time()

    def at_most(self, number: int) -> int:
        """How often to repeat something: a few times in a rehearsal."""
        return min(number, _FEW) if self.small else number

    @property
    def values_path(self) -> Path:
        """Where the first process writes what it measured."""
        return Path(self.folder) / "values.json"

    @property
    def error_path(self) -> Path:
        """Where this process writes why it failed."""
        return Path(self.folder) / f"error{self.rank}.txt"

    def keep(self, values: Mapping[str, Any]) -> None:
        """Hand over what was measured so far: it counts even if this process is ended later."""
        if self.rank == 0:
            new = self.values_path.with_suffix(".new")
            new.write_text(json.dumps(values), encoding="utf-8")
            os.replace(new, self.values_path)
