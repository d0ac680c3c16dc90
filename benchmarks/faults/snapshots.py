"""What snapshots in a neighbour's memory cost: the same model without them and with them, window by window in turns.

python -m benchmarks.faults.snapshots [--minutes 12 --rounds 10 --models 8x128x64 6x512x32 --ranks 2 --quick]

*auto*: the smallest interval that costs less than 3% by the library's own accounting; *every 5*: one every five
batches, which costs enough to be seen in few windows; *none, again*: a second engine without them, which tells how far
two engines differ by themselves. A window has as many batches as *auto* leaves between two snapshots, so that each one
holds a snapshot; fewer if there is no time for six rounds of them, and the interval of confidence is then wider. CPU
time is that of all ranks, threads included: on a busy machine it alone says something.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import Send, now_s, on_ranks
from benchmarks.record import RESULTS, add_force, environment, force, save, table
from scenarios.compare import silence
from scenarios.report.interval import LEAST_PAIRS, Estimate, ratio_of_totals

NAME = "snapshots"
GOAL = 0.03
EVERY = 5
WITHOUT, AGAIN, AUTO, OFTEN = "none", "none, again", "auto", f"every {EVERY}"
SURVIVE: dict[str, dict[str, Any]] = {
    WITHOUT: {}, AGAIN: {}, AUTO: {"enabled": True}, OFTEN: {"enabled": True, "snapshot_every": EVERY},
}
ADAMW, BF16 = "AdamW", "bf16, ZeRO-1"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    ADAMW: {}, BF16: {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
}
_LEAST_ROUNDS = 6
"""Each kind of engine is then once in each place of a round."""
_LEAST_WINDOW_S = 3.0
"""Shorter windows scatter more than a snapshot costs."""


def build(kind: str, model: str, optimizer: str) -> Any:
    """A GPT on as many stages as there are ranks; all start from the same weights."""
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule
    from scenarios.gpt import GPTConfig, gpt_layers, loss_fn

    depth, hidden, length = (int(number) for number in model.split("x"))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True, **OPTIMIZERS[optimizer],
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never", "survive": SURVIVE[kind]},
    }
    torch.manual_seed(1)
    layers = gpt_layers(GPTConfig(depth=depth, hidden=hidden, seq_len=length))
    with silence():
        module = DynamicPipelineModule(
            layers, num_stages=dist.get_world_size(), loss_fn=loss_fn, partition_method="uniform"
        )
        engine: Any = deepspeed.initialize(model=module, config=config)[0]
    return engine


def greatest(*numbers: float) -> list[float]:
    """Of every number the largest one of all ranks; collective."""
    box = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    found: list[float] = box.tolist()
    return found


def smallest_interval(share: float, goal: float = GOAL) -> int:
    """The smallest number of batches between two snapshots that costs less than the goal.

    Args:
        share: of the time that one every :data:`EVERY` batches costs.
        goal: share of the time.
    """
    return max(1, math.floor(EVERY * share / goal) + 1)


def window_length(interval: int, batch_s: float, left_s: float) -> int:
    """Batches in a window, a multiple of :data:`EVERY`.

    Args:
        interval: that *auto* is expected to choose, in batches.
        batch_s: seconds of a batch.
        left_s: seconds for all rounds, of which there should be six.
    """
    wanted = max(interval, math.ceil(_LEAST_WINDOW_S / batch_s))
    affordable = int(left_s / (_LEAST_ROUNDS * len(SURVIVE) * batch_s))
    return EVERY * max(1, min(math.ceil(wanted / EVERY), affordable // EVERY))


def without_snapshots_s(batches: Sequence[tuple[float, bool]]) -> float:
    """What a window would have taken without snapshots, by its batches that had none.

    Args:
        batches: seconds of each, and whether a snapshot was on its way.

    Returns:
        Seconds; not a number if all had one.
    """
    quiet_s = [seconds for seconds, is_under_way in batches if not is_under_way]
    if not quiet_s:
        return math.nan
    return math.fsum(quiet_s) + (len(batches) - len(quiet_s)) * statistics.median(quiet_s)


class Engines:
    """One engine of each kind, and what its windows took.

    Args:
        model: blocks x hidden x length.
        optimizer: a name in :data:`OPTIMIZERS`.

    Attributes:
        wall_s: seconds of every window, by kind.
        around_s: what every window would have taken if batches with a snapshot on its way had been as those without.
        cpu_s: processor seconds of all ranks in it, by kind.
        losses: of all batches, by kind.
    """

    def __init__(self, model: str, optimizer: str) -> None:
        length = int(model.split("x")[2])
        self._engines = {kind: build(kind, model, optimizer) for kind in SURVIVE}
        tokens = torch.randint(256, (2, length + 1), generator=torch.Generator().manual_seed(2))
        self._data = itertools.repeat((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        self.losses: dict[str, list[float]] = {kind: [] for kind in SURVIVE}
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.wall_s: dict[str, list[float]] = {kind: [] for kind in SURVIVE}
        self.around_s: dict[str, list[float]] = {kind: [] for kind in SURVIVE}
        self.cpu_s: dict[str, list[float]] = {kind: [] for kind in SURVIVE}
        self._before_s = [engine.overhead.snapshots_s for engine in self._engines.values()]

    def run(self, kind: str, num_batches: int) -> None:
        """Train one window; collective.

        Args:
            kind: of the engine.
            num_batches: in it.
        """
        engine, batches = self._engines[kind], []
        last_s, start_cpu_s = now_s(), time.process_time()
        for _ in range(num_batches):
            self.losses[kind].append(float(engine.train_batch(self._data)))
            start_s, last_s = last_s, now_s()
            batches.append((last_s - start_s, engine.dynamic.snapshots.is_under_way))
        used_s = torch.tensor(time.process_time() - start_cpu_s, dtype=torch.float64)
        self.wall_s[kind].append(math.fsum(seconds for seconds, _ in batches))
        self.around_s[kind].append(without_snapshots_s(batches))
        dist.all_reduce(used_s)
        self.cpu_s[kind].append(float(used_s))

    def spent_s(self) -> dict[str, float]:
        """Seconds by own accounting since counting began, of the rank that counts most; collective."""
        now = [engine.overhead.snapshots_s for engine in self._engines.values()]
        spent = greatest(*(a - b for a, b in zip(now, self._before_s, strict=True)))
        return dict(zip(self._engines, spent, strict=True))

    def state_bytes(self) -> int:
        """Weights and optimizer state of the largest stage, once a batch was profiled; profiles no more."""
        profile = self._engines[WITHOUT].last_batch_profile
        layers = profile.moved_bytes()
        for engine in self._engines.values():
            engine.profiling = False
        return max(sum(layers[a:b]) for a, b in itertools.pairwise(profile.boundaries))


def measure(model: str, optimizer: str, most_rounds: int, left_s: float) -> dict[str, Any]:
    """Seconds and CPU seconds of every engine's windows, its own accounting, and whether all have the same losses.

    Args:
        model: blocks x hidden x length.
        optimizer: a name in :data:`OPTIMIZERS`.
        most_rounds: windows of each kind.
        left_s: seconds for all of it; rounds are begun until they are over, but at least six.
    """
    until_s = now_s() + left_s
    engines = Engines(model, optimizer)
    kinds = list(SURVIVE)
    for kind in kinds:
        engines.run(kind, EVERY)
    state_bytes = engines.state_bytes()
    engines.forget()
    for kind in kinds:
        engines.run(kind, EVERY)
    without_s, left_s = greatest(*engines.wall_s[WITHOUT], until_s - now_s())
    window = window_length(smallest_interval(engines.spent_s()[OFTEN] / without_s), without_s / EVERY, left_s)
    engines.forget()
    for number in range(most_rounds):
        if number >= _LEAST_ROUNDS and greatest(now_s())[0] > until_s:
            break
        shift = number // 2 % len(kinds)
        order = kinds[shift:] + kinds[:shift]
        for kind in order if number % 2 == 0 else reversed(order):
            engines.run(kind, window)
    return {
        "model": model, "optimizer": optimizer, "state_bytes": state_bytes, "window": window,
        "wall_s": engines.wall_s, "around_s": engines.around_s, "cpu_s": engines.cpu_s, "spent_s": engines.spent_s(),
        "same_losses": all(losses == engines.losses[WITHOUT] for losses in engines.losses.values()),
    }


def more(row: Mapping[str, Any], kind: str, seconds: str) -> Estimate:
    """What windows with snapshots take more than those without, with its interval.

    Args:
        row: of :func:`measure`.
        kind: of snapshots.
        seconds: ``"wall_s"`` or ``"cpu_s"``.
    """
    return ratio_of_totals(row[seconds][kind], row[seconds][WITHOUT]).change


def around(row: Mapping[str, Any], kind: str) -> Estimate:
    """What windows took more than they would have taken if all their batches had been as those without a snapshot.

    Args:
        row: of :func:`measure`.
        kind: of snapshots.
    """
    pairs = [pair for pair in zip(row["wall_s"][kind], row["around_s"][kind], strict=True) if not math.isnan(pair[1])]
    return ratio_of_totals(*zip(*pairs, strict=True)).change if pairs else Estimate(math.nan)


def costs(row: Mapping[str, Any]) -> list[list[str]]:
    """The rows of the first table: what each kind costs."""
    found = []
    for kind in SURVIVE:
        count = len(row["wall_s"][kind]) * row["window"]
        batch_ms = 1e3 * statistics.median(row["wall_s"][kind]) / row["window"]
        compared = ["", "", ""]
        if kind != WITHOUT:
            compared = [more(row, kind, seconds).text("+.1%", "") for seconds in ("wall_s", "cpu_s")]
            compared += [around(row, kind).text("+.1%", "") if SURVIVE[kind] else ""]
        spent_s = row["spent_s"][kind]
        found.append([
            row["model"], row["optimizer"], f"{row['state_bytes'] / 1e6:.0f}", kind, f"{batch_ms:.1f}", *compared,
            f"{spent_s / sum(row['wall_s'][kind]):.2%}", f"{1e3 * spent_s / count:.2f}",
            "yes" if row["same_losses"] else "NO",
        ])
    return found


def intervals(row: Mapping[str, Any]) -> list[str]:
    """A row of the second table: what one snapshot costs, and how often the goal allows one."""
    without_s, paired = sum(row["wall_s"][WITHOUT]), around(row, OFTEN)
    assert paired.low is not None and paired.high is not None, "there are enough pairs"
    pairs, spent = len(row["wall_s"][WITHOUT]), row["spent_s"][OFTEN] / without_s
    snapshot_ms = 1e3 * EVERY * without_s / (pairs * row["window"])
    return [
        row["model"], row["optimizer"], f"{pairs} of {row['window']}", f"{snapshot_ms * spent:.1f}",
        Estimate(*(snapshot_ms * share for share in (paired.value, paired.low, paired.high))).text(".1f", ""),
        str(smallest_interval(spent)),
        f"{smallest_interval(paired.value)} ({smallest_interval(paired.low)} to {smallest_interval(paired.high)})",
    ]


def report(values: Mapping[str, Any], folder: Path) -> None:
    """Write the tables."""
    costs_head = (
        "model", "optimizer", "state of a stage, MB", "snapshots", "batch, ms", "wall time over *none* (95% interval)",
        "CPU time of all ranks", "batches with one on its way, over those around them",
        f"own accounting (goal {GOAL:.0%})", "own accounting, ms a batch", "same losses",
    )
    intervals_head = (
        "model", "optimizer", "windows of batches", "one snapshot by own accounting, ms",
        "by the batches around it, ms (95% interval)", f"smallest interval below {GOAL:.0%} by own accounting, batches",
        "by the batches around",
    )
    rows = values["rows"]
    first = table(costs_head, [line for row in rows for line in costs(row)])
    save(folder, NAME, values, f"{first}\n\n{table(intervals_head, [intervals(row) for row in rows])}")


def run_rank(send: Send, cases: list[tuple[str, str]], most_rounds: int, minutes: float) -> None:
    """Measure on this rank: each case has an equal part of the time that is left."""
    until_s = now_s() + 60 * minutes
    rows = []
    for number, (model, optimizer) in enumerate(cases):
        left_s = (until_s - now_s()) / (len(cases) - number)
        rows.append(measure(model, optimizer, most_rounds, left_s))
    send({"rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=12.0, help="after which no round is begun, of all together")
    parser.add_argument("--rounds", type=int, default=10, help="at most")
    parser.add_argument(
        "--models", nargs="+", default=["8x128x64", "6x512x32"],
        help="blocks x hidden x length; the last one is trained with bf16 and ZeRO-1, too",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="the small model alone, in two minutes")
    parser.add_argument("--out", type=Path, default=RESULTS / "faults")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    if options.rounds < LEAST_PAIRS:
        parser.error(f"--rounds {options.rounds}: give at least {LEAST_PAIRS}, without which there is no interval")
    if options.quick:
        options.minutes, options.models = 2.0, ["8x128x64"]
    cases = [(model, ADAMW) for model in options.models] + [(options.models[-1], BF16)]
    found = environment()
    [values] = on_ranks(options.ranks, run_rank, cases, options.rounds, options.minutes)
    report({"environment": found} | values, options.out)


if __name__ == "__main__":
    main()
