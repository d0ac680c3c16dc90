"""Forward and backward of a block of every scenario against the dense block, on the kernels that the device gets."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu.job import Job
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.timing import Spread, allocated_bytes, forget_peak, in_turns, peak_bytes
from benchmarks.record import table

# Compiling makes sparse attention the longest, so it is the last one.
SCENARIOS = ("pruning", "freezing", "early_exit", "moe", "mod", "sparse_attention")
DTYPES = ("bfloat16", "float16")
_LARGE_BYTES = 40 * 10**9
_WARM_UP, _ROUNDS = 3, 20
_RESERVE_S = 3.0


def measure(job: Job) -> dict[str, Any]:
    """Device seconds of every case of one scenario and of its dense block, in both types."""
    from benchmarks.layers.case import Shape

    device = torch.device(job.device)
    if job.small:
        shape = Shape(hidden=32, heads=2, seq_len=16, batch=2)
    elif job.device == "cuda" and torch.cuda.get_device_properties(device).total_memory >= _LARGE_BYTES:
        shape = Shape(hidden=2048, heads=32, seq_len=2048, batch=4)
    else:
        shape = Shape(hidden=1024, heads=16, seq_len=1024, batch=4)
    cases = importlib.import_module(f"benchmarks.layers.{job.options['scenario']}").cases
    found: dict[str, Any] = {"shape": asdict(shape), "kernels": {}, "rows": []}
    for dtype in DTYPES:
        with _default(device, getattr(torch, dtype)):
            found["kernels"][dtype] = _kernels(job.options["scenario"], device, getattr(torch, dtype), shape)
            try:
                for case in cases(shape):
                    if job.left_s < _RESERVE_S:
                        raise TimeoutError("no time was left for what is missing here")
                    found["rows"].append({"dtype": dtype, "amount": case.amount, **_of(case, device, job)})
                    job.keep(found)
            except Exception as error:  # noqa: BLE001 - the other type may work
                found["rows"].append({"dtype": dtype, "amount": "", "error": f"{type(error).__name__}: {error}"})
    return found


@contextmanager
def _default(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Let layers and inputs be made on the device, in the type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _kernels(scenario: str, device: torch.device, dtype: torch.dtype, shape: Any) -> dict[str, str]:
    """The kernels that the project's table gives a scenario here."""
    from scenarios.kernels import choose

    tasks: dict[str, tuple[tuple[Any, tuple[int, ...]], ...]] = {
        "pruning": (("pruned elements", ()), ("pruned blocks", ())),
        "early_exit": (("attention among tokens that stayed", ()), ("attention to all tokens", ())),
        "moe": (("experts", (shape.hidden, 4 * shape.hidden)), ("sum of rows", ())),
        "sparse_attention": (("attention within hash buckets", (shape.hidden // shape.heads,)),),
    }
    return {task: choose(task, device, dtype, *sizes).name for task, sizes in tasks.get(scenario, ())}


def _of(case: Any, device: torch.device, job: Job) -> dict[str, Any]:
    """Seconds and peak memory of a case and its dense block, or why there are none."""
    from benchmarks.layers.case import forward_backward_s

    def layer() -> None:
        forward_backward_s(case.layer, case.activation)

    def dense() -> None:
        forward_backward_s(case.dense, case.dense_activation)

    try:
        peaks = [_peak(run, device) for run in (layer, dense)]
        share_s = max(0.5, min(4.0, (job.left_s - _RESERVE_S) / 8))
        seconds = in_turns(
            (layer, dense), device, rounds=job.at_most(_ROUNDS), warm_up=job.at_most(_WARM_UP),
            until_s=time.time() + share_s,
        )
    except Exception as error:  # noqa: BLE001 - the other cases may work
        return {"error": f"{type(error).__name__}: {error}"}
    return {"layer_s": seconds[0], "dense_s": seconds[1], "layer_peak_bytes": peaks[0], "dense_peak_bytes": peaks[1]}


def _peak(run: Any, device: torch.device) -> int:
    forget_peak(device)
    before = allocated_bytes(device)
    run()
    return peak_bytes(device) - before


def text(parts: dict[str, Outcome]) -> str:
    """The tables of the report, one for each scenario."""
    found = [f"### {name}\n\n{_table(outcome)}" for name, outcome in parts.items() if outcome.values]
    return "Device time of one forward and backward; medians (quartiles); quotients of turns.\n\n" + "\n\n".join(found)


def _table(outcome: Outcome) -> str:
    values, rows = outcome.values, []
    shape = values["shape"]
    for row in values["rows"]:
        if "error" in row:
            rows.append([row["dtype"], row["amount"], f"failed: {' '.join(row['error'].split())[:300]}", "", "", ""])
            continue
        quotients = [layer / dense for layer, dense in zip(row["layer_s"], row["dense_s"], strict=True)]
        rows.append([
            row["dtype"], row["amount"], Spread.of(row["layer_s"]).text(1e3), Spread.of(row["dense_s"]).text(1e3),
            Spread.of(quotients).text(form=".2f"),
            f"{row['layer_peak_bytes'] / 1e6:.0f} / {row['dense_peak_bytes'] / 1e6:.0f}",
        ])
    kernels = "; ".join(
        f"{dtype}: " + ", ".join(f"{task}: {name}" for task, name in chosen.items())
        for dtype, chosen in values["kernels"].items() if chosen
    )
    size = f"hidden {shape['hidden']}, {shape['heads']} heads, {shape['batch']} x {shape['seq_len']} tokens"
    head = ("type", "layer", "layer, ms", "dense, ms", "layer / dense", "most memory beside weights, MB: layer / dense")
    return f"{size}{f'. Kernels: {kernels}' if kernels else ''}.\n\n{table(head, rows)}"
