"""What every benchmark writes: JSON with its environment, a Markdown table, pictures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

# Okabe and Ito's palette, told apart with every common form of colour blindness; in order of lightness.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
HATCHES = ("", "//", "xx", "..", "\\\\", "--", "++")


def environment() -> dict[str, Any]:
    """What the numbers depend on: processor or accelerator, versions, commit, date, load."""
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    host = accelerator.device_name() == "cpu"
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "accelerator": None if host else torch.cuda.get_device_name() if torch.cuda.is_available() else
        accelerator.device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
        "numpy": version("numpy"),
        "commit": commit(),
        "date": date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The checked-out commit, with a ``+`` where files differ from it; ``unknown`` outside a checkout."""
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout
            for arguments in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--", "*.py", "*.yaml"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+" if changes.strip() else "")


def in_words(values: Mapping[str, Any]) -> str:
    """An environment as one line of text.

    Args:
        values: of :func:`environment`.
    """
    machine = f"{values['cpu']}, {values['cores']} cores"
    if values.get("accelerator"):
        machine = f"{values['accelerator']} ({machine})"
    return (
        f"{machine}, load {values['load']} before; Python {values['python']}, torch {values['torch']}, "
        f"DeepSpeed {values['deepspeed']}; commit {values['commit']}, {values['date']}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    Args:
        head: names of the columns.
        rows: cells.
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save(folder: Path, name: str, values: Mapping[str, Any], text: str) -> None:
    """Write ``<name>.json`` and ``<name>.md`` and print the latter.

    Args:
        folder: where; made if it is missing.
        name: of the benchmark.
        values: what was measured; has an ``"environment"``.
        text: Markdown, without the environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    whole = f"{text}\n\n{in_words(values['environment'])}\n"
    (folder / f"{name}.md").write_text(whole, encoding="utf-8")
    print(whole, flush=True)


def load(folder: Path, name: str) -> dict[str, Any] | None:
    """What :func:`save` wrote; ``None`` if it never did.

    Args:
        folder: where.
        name: of the benchmark.
    """
    path = folder / f"{name}.json"
    values: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return values


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """A figure that needs no display.

    Args:
        width_inches: of the whole picture.
        height_inches: the same.
    """
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a picture; missing folders are made.

    Args:
        figure: of :func:`new_figure`.
        path: file to write.

    Returns:
        The path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
