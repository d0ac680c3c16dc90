"""What every benchmark writes: JSON with its environment, a Markdown table, pictures.

Each looks at the machine first (:func:`environment`). What a busy machine measured is written beside the results of an
idle one, as ``<name>.busy.json`` and so on, unless that is forced.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scenarios import machine
from scenarios.machine import Reading, busy_load, busy_words

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

COLOUR_MAP = "cividis_r"
"""Of seconds: darker means slower, as in the pages of ``dynpipe report``."""

# Okabe and Ito's palette, told apart with every common form of colour blindness; in order of lightness.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
HATCHES = ("", "//", "xx", "..", "\\\\", "--", "++")


LARGEST_JSON = 100_000
"""Bytes of a JSON file of results; larger ones are compressed."""
MACHINES = RESULTS / "machines.json"
"""Seconds of the calibration kernel on machines that were idle when results were kept."""
LOOKS, PAUSE_S = 12, 5.0
"""How often a benchmark looks for an idle machine before it begins, and the pause after each: a minute and some."""
FORCE = "BENCHMARKS_FORCE"
"""Environment variable that ``--force`` of the runner sets for the benchmarks it starts."""


def installed() -> dict[str, Any]:
    """What the numbers depend on and no load changes: processor or accelerator, versions, commit, date."""
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
    }


def environment(
    threads: int = 2, *, reading: Reading | None = None, machines: Path = MACHINES, looks: int = LOOKS
) -> dict[str, Any]:
    """The same, and how busy the machine is.

    Looks at the machine for a second and computes the calibration kernel, so call it first, before anything is started;
    prints what is wrong with the machine. While something is, it waits and looks again: what was started before may
    end, and a virtual machine's neighbours come and go.

    Args:
        threads: how many compute at the same time in the benchmark; at most the processors are tried.
        reading: of the machine, if it is known already.
        machines: file of the calibration kernel's seconds on idle machines.
        looks: at most, :data:`PAUSE_S` apart; the last one counts.
    """
    threads = min(threads, os.cpu_count() or 1)
    values = {**installed(), "forced": bool(os.environ.get(FORCE))}
    if reading is None:
        values["began"], reading = _look(threads, _known(machines).get(_machine(values, threads)))
        for _ in range(0 if values["forced"] else looks - 1):
            if not reading.reasons():
                break
            time.sleep(PAUSE_S)
            values["began"], reading = _look(threads, _known(machines).get(_machine(values, threads)))
    values |= {"load": None if reading.load is None else round(reading.load, 1), "machine": machine.as_values(reading)}
    print("".join(f"{line}\n\n" for line in head(values)), end="", flush=True)
    return values


def _look(threads: int, kept_kernel_s: float | None) -> tuple[machine.Counters, Reading]:
    return machine.count(), machine.look(threads, kept_kernel_s)


def add_force(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the option ``--force``; :func:`force` makes it hold.

    Args:
        parser: its command line.
    """
    parser.add_argument(
        "--force", action="store_true", help="write over the results of an idle machine even if this one is busy"
    )


def force(options: argparse.Namespace) -> None:
    """Let ``--force`` hold for this process and what it starts.

    Args:
        options: parsed with :func:`add_force`'s.
    """
    if options.force:
        os.environ[FORCE] = "1"


def head(values: Mapping[str, Any]) -> list[str]:
    """What stands at the top of all that is printed and written: one line if the machine was busy, none if not.

    Args:
        values: of :func:`environment`.
    """
    return busy_words(reasons(values))


def reasons(values: Mapping[str, Any]) -> list[str]:
    """Why the times of some results can't be trusted; empty for an idle machine.

    Args:
        values: of :func:`environment`; in older results only the load average is known.
    """
    if "machine" in values:
        found: list[str] = values["machine"]["reasons"]
        return found
    load = values.get("load")
    return [f"the load is {load} on {values['cores']} processors"] if busy_load(load, values["cores"]) else []


def stem(name: str, values: Mapping[str, Any]) -> str:
    """Name of a result's files, without their endings.

    Args:
        name: of the benchmark.
        values: of :func:`environment`.
    """
    return f"{name}.busy" if reasons(values) and not values.get("forced") else name


def ended(values: Mapping[str, Any]) -> dict[str, Any]:
    """An environment with what others used while the benchmark ran, for a benchmark that has looked itself.

    Args:
        values: of :func:`environment`.
    """
    values = dict(values)
    began = values.pop("began", None)
    if began is not None:
        now = machine.since(began)
        # Benchmarks start more than one rank a processor, too: their own load is no reason.
        during = Reading(cores=now.cores, others=now.others, programs=now.programs, throttled_s=now.throttled_s)
        later = [f"while it ran, {reason}" for reason in during.reasons()]
        measured = values["machine"]
        values["machine"] = {
            **measured, "others_meanwhile": now.others, "reasons": [*measured["reasons"], *later],
        }
    return values


def ending(values: Mapping[str, Any]) -> list[str]:
    """What a benchmark that only prints says at its end: one line if the machine became busy, none if not.

    Args:
        values: of :func:`environment`.
    """
    before = reasons(values)
    return busy_words([reason for reason in reasons(ended(values)) if reason not in before])


def tell(head: Sequence[str], lines: Iterable[str], *, threads: int = 2) -> None:
    """Print a benchmark's lines as they come, between what was seen of the machine before and while it ran.

    Args:
        head: lines above them.
        lines: what it measures, begun when the machine has been looked at.
        threads: how many compute at the same time.
    """
    found = environment(threads)
    print(in_words(found), *head, sep="\n", flush=True)
    for line in lines:
        print(line, flush=True)
    print(*ending(found), sep="\n", end="")


def _machine(values: Mapping[str, Any], threads: int) -> str:
    return f"{values['cpu']}, {values['cores']} cores, torch {values['torch']}, {threads} threads"


def _known(machines: Path) -> dict[str, float]:
    known: dict[str, float] = json.loads(machines.read_text(encoding="utf-8")) if machines.is_file() else {}
    return known


def remember(values: Mapping[str, Any], machines: Path = MACHINES) -> None:
    """Keep the calibration kernel's seconds of a machine that is idle, unless there is a figure of it already.

    Args:
        values: of :func:`environment`.
        machines: the file; remove a machine's line to renew its figure.
    """
    seconds = values.get("machine", {}).get("kernel_s")
    if seconds is None or reasons(values):
        return
    known = {_machine(values, values["machine"]["threads"]): seconds} | _known(machines)
    machines.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


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


def finished_runs(name: str) -> Path:
    """Folder where a benchmark keeps finished runs, so that an interrupted command goes on.

    Each version of the code has its own, so that no table has runs of two. Where files differ from the commit, nobody
    knows which runs are of the present version, so all that is there is deleted.

    Args:
        name: of the benchmark.
    """
    version = commit()
    folder = Path("outputs") / name / version
    if version.endswith("+") or version == "unknown":
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def in_words(values: Mapping[str, Any]) -> str:
    """An environment as one line of text.

    Args:
        values: of :func:`environment`, or of :func:`installed`.
    """
    where = f"{values['cpu']}, {values['cores']} cores"
    if values.get("accelerator"):
        where = f"{values['accelerator']} ({where})"
    if "load" in values:
        found = machine.in_words(values.get("machine", {}))
        where += f", load {values['load']} before{f', {found}' if found else ''}"
    return (
        f"{where}; Python {values['python']}, torch {values['torch']}, "
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


def save(folder: Path, name: str, values: Mapping[str, Any], text: str) -> Path:
    """Write ``<name>.json`` and ``<name>.md``, ``<name>.busy.json`` and ``.md`` on a busy machine; print the latter.

    Args:
        folder: where; made if it is missing.
        name: of the benchmark.
        values: what was measured; has an ``"environment"``.
        text: Markdown, without the environment.

    Returns:
        The path of what was written, without the ending: for pictures beside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = ended(values["environment"])
    path = folder / stem(name, about)
    write_json(_ending(path, "json"), {**values, "environment": about})
    lines = head(about)
    if lines and path.name != name:
        lines.append(f"Written as {path.name}.*, beside the results of an idle machine; --force writes over those.")
    whole = "\n\n".join([*lines, text, in_words(about)]) + "\n"
    _ending(path, "md").write_text(whole, encoding="utf-8")
    print(whole, flush=True)
    if RESULTS in folder.parents:
        remember(about)
    return path


def _ending(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def load(folder: Path, name: str) -> dict[str, Any] | None:
    """What :func:`save` or :func:`write_json` wrote; ``None`` if nothing did.

    Args:
        folder: where.
        name: of the benchmark.
    """
    path = folder / f"{name}.json"
    packed = path.with_name(f"{path.name}.gz")
    if packed.is_file():
        unpacked: dict[str, Any] = json.loads(gzip.decompress(packed.read_bytes()))
        return unpacked
    values: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> Path:
    """Write JSON; compressed, as ``<name>.json.gz``, where the text is larger than :data:`LARGEST_JSON`.

    Compression is deterministic: the same values give the same bytes.

    Args:
        path: ends in ``.json``; what stands there, or compressed beside it, is replaced.
        values: to write.

    Returns:
        The file that was written.
    """
    text = (json.dumps(values, indent=1) + "\n").encode()
    packed = path.with_name(f"{path.name}.gz")
    target, other = (packed, path) if len(text) > LARGEST_JSON else (path, packed)
    target.write_bytes(gzip.compress(text, mtime=0) if target is packed else text)
    other.unlink(missing_ok=True)
    return target


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
        path: file to write, with its ending or without.

    Returns:
        The path with ``.png``.
    """
    path = path if path.suffix == ".png" else _ending(path, "png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
