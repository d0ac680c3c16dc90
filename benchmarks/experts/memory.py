"""Bytes of experts on a rank, sharded and replicated: counted in a training, over all tensors that are alive."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.experts.drawn import calibrated, routed
from benchmarks.experts.settings import Setting
from benchmarks.experts.waiting import Sizes, Waiting
from benchmarks.ranks import Send, on_ranks
from benchmarks.record import table
from scenarios.compare import build_contender
from scenarios.data import DataSettings
from scenarios.gpt import GPTConfig
from scenarios.moe.placing import Lanes, LayerModel, plan
from scenarios.settings import RunSettings, Settings, load_deepspeed_json, merge

OPTIMIZERS = {"AdamW": "fp32_adamw", "bf16 + ZeRO-1": "bf16_zero1"}
UNSHARED = {"AdamW": (4, 4, 8, 0, 16), "bf16 + ZeRO-1": (2, 4, 8, 4, 18)}
"""Bytes a number where one replica shares nothing out, by part: gradients are summed in fp32, AdamW has two moments."""
WEIGHTS = ("replicated", "sharded")
PARTS = ("weights", "gradients", "optimizer state", "fp32 weights", "all")
BATCHES = 3
DEPTH, HIDDEN, WIDTHS = 2, 32, (4, 8)
"""Of the model; an expert is so many times as wide, once and once again."""


@dataclass(frozen=True)
class Bytes:
    """What is alive on the fullest rank for each number of all experts, before the optimizer steps.

    Args:
        optimizer: a key of :data:`OPTIMIZERS`.
        weights: one of :data:`WEIGHTS`.
        num_ranks: R.
        parts: bytes a number, by part; ``"fp32 weights"`` are those of optimizers that have some of their own.
    """

    optimizer: str
    weights: str
    num_ranks: int
    parts: dict[str, float]


@dataclass(frozen=True)
class Transient:
    """What one layer holds during a batch, on the fullest rank, over the bytes of all its experts.

    Args:
        placement: a planner, and most copies of a rank if there is a bound.
        copies: weights of other ranks' experts.
        sums: of lanes' gradients, all held at the same time.
    """

    placement: str
    copies: float
    sums: float


def alive() -> list[Tensor]:
    """All tensors, with their gradients."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.layout == torch.strided]
    return found + [each.grad for each in found if each.is_leaf and each.grad is not None]


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of what tensors lie in, each counted once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def counted(folder: str, optimizer: str, weights: str, width: int, experts: int) -> dict[str, int]:
    """Train a little, and count before the last step; all blocks have experts."""
    model = GPTConfig(depth=DEPTH, hidden=HIDDEN, heads=2, mlp_ratio=width, seq_len=16, vocab_size=64)
    settings = Settings(
        model=model, scenario="moe",
        scenario_settings={"every": 1, "num_experts": experts, "expert_weights": weights, "capacity_factor": None},
        data=DataSettings(), partition_method="uniform", run=RunSettings(num_stages=1), seed=5, output_dir=Path(folder),
        deepspeed=merge(load_deepspeed_json(OPTIMIZERS[optimizer]), {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        }),
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=5000).astype(np.uint8)
    run = build_contender(settings, tokens, dynamic=False)
    found: dict[str, int] = {}

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = [each for layer in run.engine.local_layers().values() for each in layer.parameters()]
        state = [each for known in optimizer.state.values() for each in known.values() if isinstance(each, Tensor)]
        masters = [each for group in optimizer.param_groups for each in group["params"]]
        found["weights"], found["optimizer state"] = num_bytes(own), num_bytes(state)
        found["fp32 weights"] = num_bytes([*own, *masters]) - found["weights"]
        found["all"] = num_bytes(alive())

    hook = register_optimizer_step_pre_hook(count)
    list(run.train_window(range(BATCHES), timed=False))
    hook.remove()
    return found


def count_rank(send: Send, folder: str, optimizer: str, weights: str, width: int, experts: int) -> None:
    """Count on this rank; the first one tells of the fullest."""
    found = counted(folder, optimizer, weights, width, experts)
    fullest = torch.tensor(list(found.values()))
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    send(dict(zip(found, fullest.tolist(), strict=True)))


def lasting(num_ranks: int, optimizer: str, weights: str, experts: int) -> Bytes:
    """Count in two trainings, each in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:  # for journals
        few, many = (
            next(iter(list(on_ranks(num_ranks, count_rank, folder, optimizer, weights, width, experts))))
            for width in WIDTHS
        )
    numbers = DEPTH * experts * 2 * HIDDEN * HIDDEN * (WIDTHS[1] - WIDTHS[0])
    parts = {part: (many[part] - few[part]) / numbers for part in few}
    parts["gradients"] = parts["all"] - parts["weights"] - parts["optimizer state"] - parts["fp32 weights"]
    return Bytes(optimizer, weights, num_ranks, {part: parts[part] for part in PARTS})


def hold_rank(send: Send, sizes: Sizes, setting: Setting) -> None:
    """Count what a layer holds in a batch on this rank; the first one tells of the fullest."""
    alone = replace(sizes, blocks=1, micro_batches=1, row_s=0.0, rest_s=0.0)
    model, stage = LayerModel(calibrated(sizes, setting, 1)), Waiting(alone)
    [block], whole = stage.blocks, sizes.num_experts * sum(4 * out * ins for out, ins in sizes.shapes)
    tables = routed(setting, alone, 1)[0]
    loads = tables[0][0].tolist()
    share = sizes.num_experts // stage.num_ranks
    for name, most in (("static", None), ("pro_prophet", None), ("lanes", None), ("lanes", share), ("local", None)):
        lanes: Lanes = plan(name, loads, model, max_copies=most)
        block.held = 0
        stage.batch(tables, {0: lanes})
        copies = len(lanes.copies(stage.rank)) * whole // sizes.num_experts
        fullest = torch.tensor([copies, block.held], dtype=torch.float64)
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
        text = name if most is None else f"{name}, at most {most} copies"
        send(Transient(text, *(fullest / whole).tolist()))
    stage.close()


def measure(*, num_ranks: int = 4, quick: bool = False) -> Iterator[Bytes | Transient]:
    """Count all.

    Args:
        num_ranks: R, replicas of one stage.
        quick: one optimizer, few experts.

    Yields:
        What lasts, then what a layer holds during a batch.
    """
    experts = 2 * num_ranks if quick else 32
    cases = [(name, weights) for name in list(OPTIMIZERS)[: 1 if quick else None] for weights in WEIGHTS]
    for optimizer, weights in cases:
        yield lasting(num_ranks, optimizer, weights, experts)
    sizes = Sizes(num_experts=experts)
    setting = Setting("S", "HPWNV", num_ranks, experts, 1, sizes.rows)
    yield from on_ranks(num_ranks, hold_rank, sizes, setting)


def report(found: Sequence[Bytes | Transient]) -> tuple[dict[str, Any], str]:
    """Turn what was counted into values and text.

    Args:
        found: of :func:`measure`.
    """
    counts = [each for each in found if isinstance(each, Bytes)]
    held = [each for each in found if isinstance(each, Transient)]
    rows, lines = [], []
    for first, second in zip(counts[::2], counts[1::2], strict=True):
        for each in (first, second):
            rows.append([each.optimizer, each.weights, *(f"{each.parts[part]:.2f}" for part in PARTS)])
        unshared = dict(zip(PARTS, UNSHARED[first.optimizer], strict=True))
        for name, bases in (("sharded / replicated", first.parts), ("sharded / unshared", unshared)):
            cells = (f"{second.parts[part] / bases[part]:.3f}" if bases[part] > 1e-9 else "" for part in PARTS)
            rows.append([first.optimizer, f"*{name}*", *cells])
        goal, share = 1 / first.num_ranks, second.parts["all"] / unshared["all"]
        reached = "reached" if abs(share - goal) < 0.005 else "not reached"
        lines.append(
            f"{first.optimizer}: sharded experts take {share:.3f} of the {unshared['all']} bytes a number that a "
            f"replica takes that shares nothing (goal 1/R = {goal:.3f}: {reached}), and "
            f"{second.parts['all'] / first.parts['all']:.3f} of what replicated experts take."
        )
    lines += [
        "Bytes before the optimizer steps, of all tensors that are alive, for each number of all experts of a layer: "
        "the difference of two trainings whose experts are not equally wide, over the numbers in which they differ. "
        "*Gradients* are what is neither weights nor optimizer state.",
        "ZeRO-1 shares out replicated experts' optimizer state and fp32 weights already; sharding the experts does so "
        "with weights and gradients, too.",
        "*During a batch* is beside that, for one layer, over the bytes of the weights of all its experts. The sums of "
        "lanes are freed layer by layer while the batch's backward still runs.",
    ]
    ranks = counts[0].num_ranks
    text = "\n\n".join([
        "# Bytes of experts on a rank",
        f"{ranks} ranks, replicas of one stage, one micro-batch after the other; what the fullest rank has.",
        table(("optimizer", "experts", *PARTS), rows),
        "During a batch, fp32, 32-bit sums:",
        table(("placement", "copies", "sums of lanes"), [
            [each.placement, f"{each.copies:.2f}", f"{each.sums:.2f}"] for each in held
        ]),
        "\n".join(f"- {line}" for line in lines),
    ])  # fmt: skip
    return {"lasting": [asdict(each) for each in counts], "during_a_batch": [asdict(each) for each in held]}, text
