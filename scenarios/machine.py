"""How busy the machine is: what others use of its processors, and how long a fixed computation takes now.

A benchmark looks before it measures, a job of ``scenarios.train`` at what others used while it trained. Readings are
values; what follows from one is computed from it alone.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

BUSY = "BUSY MACHINE"
"""How the line begins that stands above times of a busy machine."""

MOST_OTHERS = 0.10  # of the processors, used by other programs
MOST_SCATTER = 0.10  # between the quartiles of the kernel's repeats, of their median
MOST_SLOWER = 0.25  # of the kernel, against the figure of an idle machine; idle virtual machines differ by 15%
_SAMPLE_S = 1.0
_NAMED = 0.05  # of one processor: programs that use less are not named
_REPEATS, _WARM_UP = 60, 10


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was read of a machine; ``None`` for what can't be read on it.

    Attributes:
        cores: its processors.
        load: the load average of the last minute.
        others: processors that were busy, but not with this program and what it started; a hypervisor's other guests
            count, too.
        programs: the busiest other programs, with the processors they used.
        quota: processors that the control group may use.
        throttled_s: seconds for which it was held back while this was read.
        threads: how many computed the kernel at the same time.
        kernel_s: median seconds of the kernel; ``None`` if it was not computed.
        scatter: between its quartiles, as a share of the median.
        kept_kernel_s: its seconds when this machine was idle; ``None`` if that is not known.
    """

    cores: int
    load: float | None = None
    others: float | None = None
    programs: Mapping[str, float] = field(default_factory=dict)
    quota: float | None = None
    throttled_s: float | None = None
    threads: int = 1
    kernel_s: float | None = None
    scatter: float | None = None
    kept_kernel_s: float | None = None

    @property
    def slower(self) -> float | None:
        """How much longer the kernel takes than on the idle machine, as a share; ``None`` if that is not known."""
        return self.kernel_s / self.kept_kernel_s - 1 if self.kernel_s and self.kept_kernel_s else None

    def reasons(self) -> list[str]:
        """Why times can't be trusted; empty on an idle machine.

        The load average still remembers what ran a minute ago, a benchmark before this one for example: it counts only
        where nothing better can be read.
        """
        found = []
        if self.others is not None and self.others > MOST_OTHERS * self.cores:
            named = ", ".join(f"{name} {used:.1f}" for name, used in self.programs.items())
            found.append(f"others use {self.others:.1f} of {self.cores} processors{f' ({named})' if named else ''}")
        if self.others is None and busy_load(self.load, self.cores):
            found.append(f"the load is {self.load:.1f} on {self.cores} processors")
        if self.quota is not None and self.quota < min(self.threads, self.cores):
            found.append(f"the control group may use {self.quota:g} processors, {self.threads} are needed")
        if self.throttled_s:
            found.append(f"the control group was held back for {self.throttled_s:.2f} s")
        if self.scatter is not None and self.scatter > MOST_SCATTER:
            found.append(f"a fixed computation scatters by {self.scatter:.0%}")
        if self.slower is not None and self.slower > MOST_SLOWER:
            found.append(f"it takes {self.slower:.0%} longer than when the machine was idle")
        return found


def busy_load(load: float | None, cores: int) -> bool:
    """Whether a load average tells of more than a benchmark of one rank a processor leaves behind.

    Args:
        load: of the last minute; ``None`` if it is not known.
        cores: processors.
    """
    return load is not None and load > cores + 1


@dataclass(frozen=True)
class Counters:
    """What a machine has counted since its start; two of them make a :class:`Reading`.

    Attributes:
        at_s: when it was read.
        busy_s: processor seconds of all programs, the hypervisor's other guests included.
        own_s: those of this program and what it started.
        programs_s: name and seconds of every other running process.
        throttled_s: seconds for which the control group was held back.
    """

    at_s: float
    busy_s: float
    own_s: float
    programs_s: Mapping[int, tuple[str, float]]
    throttled_s: float | None


def count() -> Counters:
    """Read the machine's counters now."""
    times = psutil.cpu_times()
    idle = ("idle", "iowait", "guest", "guest_nice")  # guests are counted as users, too
    busy_s = sum(getattr(times, name) for name in times._fields if name not in idle)
    processes = [
        process.info for process in psutil.process_iter(["pid", "ppid", "name", "cpu_times"])
        if process.info["cpu_times"] is not None
    ]
    own = family(_root(), ((info["pid"], info["ppid"]) for info in processes))
    others_s = {
        info["pid"]: (str(info["name"]), info["cpu_times"].user + info["cpu_times"].system)
        for info in processes if info["pid"] not in own
    }  # fmt: skip
    own_s = sum(sum(info["cpu_times"][:4]) for info in processes if info["pid"] in own)  # with children that have ended
    return Counters(time.monotonic(), busy_s, own_s, others_s, throttled_s())


def _root() -> int:
    """The process that everything of this program was started by: of a rank, the launcher."""
    return os.getppid() if "RANK" in os.environ else os.getpid()


def family(root: int, parents: Iterable[tuple[int, int]]) -> set[int]:
    """A process and all that it started.

    Args:
        root: the process.
        parents: (process, its parent) of all processes, in any order.
    """
    children: dict[int, list[int]] = {}
    for process, parent in parents:
        children.setdefault(parent, []).append(process)
    found, left = set[int](), [root]
    while left:
        found.add(process := left.pop())
        left += [child for child in children.get(process, []) if child not in found]
    return found


def between(before: Counters, after: Counters, *, cores: int, load: float | None, quota: float | None) -> Reading:
    """What others did between two counts.

    Args:
        before: the first count.
        after: the second one.
        cores: processors of the machine.
        load: load average at the end.
        quota: processors that the control group may use.
    """
    passed_s = max(after.at_s - before.at_s, 1e-9)
    others = (after.busy_s - before.busy_s - (after.own_s - before.own_s)) / passed_s
    used: dict[str, float] = {}
    for process, (name, seconds) in after.programs_s.items():
        _, earlier_s = before.programs_s.get(process, (name, 0.0))  # some change their names
        used[name] = used.get(name, 0.0) + (seconds - earlier_s) / passed_s
    busiest = sorted(((s, name) for name, s in used.items() if s > _NAMED), reverse=True)[:3]
    known = after.throttled_s is not None and before.throttled_s is not None
    return Reading(
        cores=cores, load=load, others=max(0.0, others), programs={name: seconds for seconds, name in busiest},
        quota=quota, throttled_s=after.throttled_s - before.throttled_s if known else None,  # type: ignore[operator]
    )


def since(before: Counters) -> Reading:
    """What others did since a count.

    Args:
        before: of :func:`count`.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return between(before, count(), cores=os.cpu_count() or 1, load=load, quota=quota())


def look(threads: int, kept_kernel_s: float | None = None) -> Reading:
    """Look at the machine for a second while this program does nothing, then compute the kernel.

    Args:
        threads: how many compute at the same time, as many as the benchmark will.
        kept_kernel_s: the kernel's seconds when this machine was idle, if they are known.
    """
    before = count()
    time.sleep(_SAMPLE_S)
    rest = since(before)
    kernel_s, scatter = calibrate(threads)
    held_back_s = throttled_s()
    known = held_back_s is not None and before.throttled_s is not None
    return Reading(**{
        **vars(rest), "threads": threads, "kernel_s": kernel_s, "scatter": scatter, "kept_kernel_s": kept_kernel_s,
        "throttled_s": held_back_s - before.throttled_s if known else None,  # type: ignore[operator]
    })


def calibrate(threads: int, repeats: int = _REPEATS) -> tuple[float, float]:
    """Time a fixed computation on some threads at once: products of matrices that fit a cache, and a sum that does not.

    Args:
        threads: how many.
        repeats: of each, after some that are not counted.

    Returns:
        Median seconds of a repeat, and the distance of the quartiles as a share of it; those of the slowest thread.
    """
    import torch

    def run(found: list[float]) -> None:
        torch.set_num_threads(1)
        square, long = torch.full((256, 256), 0.5), torch.ones(2**20)
        for _ in range(_WARM_UP + repeats):
            start_s = time.perf_counter()
            for _ in range(8):
                torch.mm(square, square)
                long.sum()
            found.append(time.perf_counter() - start_s)

    before = torch.get_num_threads()
    times: list[list[float]] = [[] for _ in range(threads)]
    workers = [threading.Thread(target=run, args=(found,)) for found in times]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.set_num_threads(before)
    return max(median_and_scatter(found[_WARM_UP:]) for found in times)


def median_and_scatter(seconds: Sequence[float]) -> tuple[float, float]:
    """The median, and the distance of the quartiles as a share of it.

    Args:
        seconds: at least two.
    """
    low, median, high = statistics.quantiles(seconds, n=4)
    return median, (high - low) / median


_SYSTEM = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def quota(system: Path = _SYSTEM, own: Path = _OWN_GROUP) -> float | None:
    """Processors that the control group may use; ``None`` without a limit, or where it can't be read.

    Args:
        system: where control groups are mounted.
        own: tells to which this process belongs.
    """
    found = []
    for folder in _groups(system, own):
        words = _text(folder / "cpu.max").split()  # version 2
        words = words or (_text(folder / "cpu.cfs_quota_us") + " " + _text(folder / "cpu.cfs_period_us")).split()
        if len(words) == 2 and words[0].isdigit():  # not "max", not -1
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def throttled_s(system: Path = _SYSTEM, own: Path = _OWN_GROUP) -> float | None:
    """Seconds for which the control group was held back so far; ``None`` where that can't be read.

    Args:
        system: where control groups are mounted.
        own: tells to which this process belongs.
    """
    units = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # version 2, version 1
    found = [
        int(line.split()[1]) * units[line.split()[0]]
        for folder in _groups(system, own) for line in _text(folder / "cpu.stat").splitlines()
        if line.split()[0] in units
    ]  # fmt: skip
    return max(found, default=None)


def _groups(system: Path, own: Path) -> list[Path]:
    """Folders of the own group: in a container it is mounted at the root, elsewhere below it, with its parents."""
    folders = []
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = system / controllers if controllers else system
        place = root / path.lstrip("/")
        folders += [place, *(parent for parent in place.parents if parent.is_relative_to(root))]
    return list(dict.fromkeys(folders))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def as_values(reading: Reading) -> dict[str, Any]:
    """A reading as values that JSON can hold, with its reasons.

    Args:
        reading: any.
    """
    return {**vars(reading), "programs": dict(reading.programs), "reasons": reading.reasons()}


def busy_words(reasons: Sequence[str]) -> list[str]:
    """What stands above times of a busy machine, as one line; none on an idle one.

    Args:
        reasons: of :meth:`Reading.reasons`.
    """
    return [f"{BUSY}: {'; '.join(reasons)}. Times are not those of an idle machine."] if reasons else []


def in_words(values: Mapping[str, Any]) -> str:
    """A reading as one line of text.

    Args:
        values: of :func:`as_values`.
    """
    parts = []
    if values.get("others") is not None:
        parts.append(f"others use {values['others']:.2f} of {values['cores']} processors")
    if values.get("kernel_s") is not None:
        kept_s = values.get("kept_kernel_s")
        kept = "no figure of an idle machine kept" if kept_s is None else f"{1e3 * kept_s:.2f} ms when idle"
        parts.append(
            f"calibration kernel {1e3 * values['kernel_s']:.2f} ms on {values['threads']} threads, scatter "
            f"{values['scatter']:.0%} ({kept})"
        )
    return ", ".join(parts)
