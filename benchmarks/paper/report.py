"""A table with its environment, as JSON, Markdown and picture."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.paper.plots import plot_predictions
from benchmarks.record import ended, head, in_words, installed, stem, write_json

__all__ = ["Report", "plot_predictions"]

KINDS = {
    "replay": "REPLAY: layers take the time that a trace says and do not compute; engine, messages, profiles, "
    "decisions and migrations are real; nobody sleeps, time is counted",
    "sleeping replay": "SLEEPING REPLAY: the same on the machine's own time; layers wait",
    "quoted": "QUOTED: the paper's own figures; nothing was run",
    "simulation": "SIMULATION: nothing ran; batches are computed by dynpipe_ds.simulation",
    "performance model": "SIMULATION: nothing ran; layers take what the performance model of "
    "scenarios.moe.placing says",
}


@dataclass
class Report:
    """What a command writes: ``<name>.json``, ``<name>.md``, ``<name>.png`` (``<name>_quick`` for a quick run).

    Args:
        name: of the files.
        folder: where they go.
        kind: a key of :data:`KINDS`.
        quick: whether this is a short run, whose numbers are rough.
        title: heading.
        text: what the table shows.
        table: Markdown.
        notes: lines below it.
        values: all numbers.
        pictures: further pictures, by file name.
        machine: what :func:`benchmarks.record.environment` found, for numbers that depend on the machine's load.
    """

    name: str
    folder: Path
    kind: str
    quick: bool = False
    title: str = ""
    text: str = ""
    table: str = ""
    notes: list[str] = field(default_factory=list)
    values: Any = None
    pictures: list[str] = field(default_factory=list)
    machine: dict[str, Any] | None = None
    began: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc))
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def stem(self) -> str:
        """File name without ending; another one for what a busy machine measured."""
        name = f"{self.name}_quick" if self.quick else self.name
        return name if self.machine is None else stem(name, self.machine)

    def environment(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {
            "kind": KINDS[self.kind], "machine": in_words(installed()),
            "date": f"{self.began:%Y-%m-%d %H:%M} UTC", "load_before": round(self.load_before, 1),
            "load_after": round(os.getloadavg()[0], 1), "quick": self.quick, "readings": self.machine,
        }

    def save(self, plot: Callable[[Path], None] | None = None) -> None:
        """Write all files and print the Markdown.

        Args:
            plot: draws the picture into a file; None for no picture.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.machine = None if self.machine is None else ended(self.machine)
        if plot is not None:
            plot(self.folder / f"{self.stem}.png")
            self.pictures.insert(0, f"{self.stem}.png")
        about = self.environment()
        values = {"title": self.title, "environment": about, "notes": self.notes, "values": self.values}
        write_json(self.folder / f"{self.stem}.json", values)
        quick = "\n\n*Quick run: few batches, few pipelines; the numbers are rough.*" if self.quick else ""
        lines = [
            *(head(self.machine) if self.machine else []), f"# {self.title}{quick}", f"**{about['kind']}.**",
            self.text, self.table,
            "\n".join(f"- {note}" for note in self.notes), "\n".join(f"![]({name})" for name in self.pictures),
            f"{about['machine']}; begun {about['date']}; load of the machine "
            f"{about['load_before']} before, {about['load_after']} after (the run's own included).",
        ]
        text = "\n\n".join(line for line in lines if line) + "\n"
        (self.folder / f"{self.stem}.md").write_text(text, encoding="utf-8")
        print(text, flush=True)
