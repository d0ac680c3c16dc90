"""One report of all that was measured: Markdown to read, JSON to compute with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.gpu.processes import Outcome

REHEARSAL = "**A rehearsal on a CPU: it shows that the program runs, and says nothing about a GPU.**"


def write(
    folder: Path, about: Mapping[str, Any], sections: Sequence[tuple[str, str]],
    outcomes: Mapping[str, Mapping[str, Outcome]],
) -> None:
    """Write ``report.md`` and ``report.json``, each at once.

    Args:
        folder: made if it is missing.
        about: device (``"cuda"`` or ``"cpu"``), environment, command, date and seconds so far.
        sections: titles and texts.
        outcomes: what each part of each measurement came to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_rehearsal = about["device"] != "cuda"
    values = {
        **about, "rehearsal": is_rehearsal,
        "measurements": {name: {part: asdict(o) for part, o in parts.items()} for name, parts in outcomes.items()},
    }
    _replace(folder / "report.json", json.dumps(values, indent=1) + "\n")
    _replace(folder / "report.md", markdown(about, sections, is_rehearsal=is_rehearsal))


def markdown(about: Mapping[str, Any], sections: Sequence[tuple[str, str]], *, is_rehearsal: bool) -> str:
    """The report to read."""
    head = ["# One GPU" + (", rehearsed" if is_rehearsal else ""), *record.head(about["environment"])]
    if is_rehearsal:
        head.append(REHEARSAL)
    head.append(
        f"`{about['command']}`, {about['date']}, {about['seconds']:.0f} s. How each number is taken: "
        f"benchmarks/gpu/README.md.\n\n{record.in_words(about['environment'])}"
    )
    return "\n\n".join([*head, *(f"## {title}\n\n{text}" for title, text in sections)]) + "\n"


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
