"""All scenarios with real compute: static uniform, static parameters and ours, in turns, next to the ideal.

python -m benchmarks.scenarios.main [--quick] [--only pruning moe] [--intervals 1 4] [--set model.depth=8]
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.ranks import Send, on_ranks
from benchmarks.record import RESULTS, add_force, environment, force, save
from benchmarks.scenarios.contenders import EARLY, SCENARIOS, as_values, build_runs, read_settings, train_in_turns
from benchmarks.scenarios.pictures import save_heat_map, save_rates, save_timeline
from benchmarks.scenarios.summary import text
from scenarios.settings import Settings

NAME = "scenarios"
FULL = ("run.batches=50", "run.window=3", "run.warmup_batches=2")
QUICK = ("run.batches=18", "run.window=2", "run.warmup_batches=2", "ds.gradient_accumulation_steps=4")
SETTLED_FULL, SETTLED_QUICK = 32, 8
"""First batch of the windows at the end: all changes are over, and ours had time to notice."""


def run_rank(send: Send, scenario: str, options: argparse.Namespace) -> None:
    """Train one scenario's runs on this rank."""
    settings = _settings(scenario, options)
    runs = build_runs(settings, options.intervals)
    train_in_turns(runs, settings)
    _, *windows = settings.run.windows()
    send({
        "windows": [[window.start, window.stop] for window in windows],
        "settled": _settled(options),
        "num_batches": settings.run.batches,
        "runs": {name: as_values(run) for name, run in runs.items()},
    })


def _settings(scenario: str, options: argparse.Namespace) -> Settings:
    overrides = [f"scenario={scenario}", *(QUICK if options.quick else FULL)]
    if options.quick:
        overrides += EARLY[scenario]
    return read_settings([*overrides, *options.set])


def _settled(options: argparse.Namespace) -> int:
    return SETTLED_QUICK if options.quick else SETTLED_FULL


def check_length(scenario: str, options: argparse.Namespace) -> None:
    """Refuse runs that end before the model has changed: nothing could be told of the end.

    Args:
        scenario: any of them; all train as many batches.
        options: as given.

    Raises:
        ValueError: for such runs.
    """
    run = _settings(scenario, options).run
    _, *windows = run.windows()
    if not any(window.start >= _settled(options) for window in windows):
        raise ValueError(
            f"run.batches = {run.batches}, run.window = {run.window}: no window begins at batch {_settled(options)} or "
            f"later, when models have changed; train more batches, {_settled(options) + run.window} or a few more"
        )


def measure(scenario: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks for one scenario and read what they measured."""
    started = time.perf_counter()
    [values] = on_ranks(2, run_rank, scenario, options)
    print(f"{scenario}: {time.perf_counter() - started:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    return values


def report(values: dict[str, Any], folder: Path) -> None:
    """Write the table and the pictures."""
    path = save(folder, NAME, values, text(values["scenarios"]))
    ending = path.name.removeprefix(NAME) + ".png"
    save_rates(values["scenarios"], path)
    for name, found in values["scenarios"].items():
        save_heat_map(name, found, folder / f"layers_{name}{ending}")
        save_timeline(name, found, folder / f"timeline_{name}{ending}")


def _interval(text: str) -> int:
    """A number of batches; checked here, since ranks would start first."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of batches, 1 or more")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs whose models change at once")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument(
        "--intervals", nargs="+", type=_interval, default=[], metavar="N",
        help="also runs that decide after every N-th batch",
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides as for make run")
    parser.add_argument("--out", type=Path, default=RESULTS / "scenarios")
    add_force(parser)
    options = parser.parse_args()
    try:
        check_length(options.only[0], options)
    except ValueError as problem:
        parser.error(str(problem))
    force(options)
    values: dict[str, Any] = {"environment": environment(), "scenarios": {}}
    for name in options.only:
        values["scenarios"][name] = measure(name, options)
        # After every one, since it may be interrupted, but not over what is kept: that has all scenarios.
        save(options.out, f"{NAME}.part", values, text(values["scenarios"]))
    report(values, options.out)
    for partial in options.out.glob(f"{NAME}.part.*"):
        partial.unlink()


if __name__ == "__main__":
    main()
