"""What is trained how, and where the model is cut: plain values that the processes and the reference share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dynpipe_ds.cli.numerics.model import MICRO_BATCH_SIZE, NUM_LAYERS, NUM_MICRO_BATCHES, Block, Embedding, Head
from dynpipe_ds.cli.show import brackets

NUM_BATCHES = 4
NUM_STAGES = 2

Boundaries = tuple[int, ...]


@dataclass(frozen=True)
class Mode:
    """One way to train.

    Attributes:
        name: for people.
        tolerance: by which a quantity may differ from the undivided model's, as a share of its size: both round, and
            they add in another order.
        config: what the DeepSpeed JSON has besides batch sizes.
        clipping: largest norm of the gradients; 0: none.
        bf16: whether the model computes in bf16 (with fp32 master weights).
        tied: whether embedding and head share weights.
        frozen: layers that are not trained.
        freezes: batch before which a layer is frozen, and the layer.
        dropout: share that blocks drop.
        checkpointing: whether activations are computed again in the backward.
    """

    name: str
    tolerance: float
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    clipping: float = 0.0
    bf16: bool = False
    tied: bool = True
    frozen: tuple[int, ...] = (3,)
    freezes: tuple[int, int] | None = (2, 5)
    dropout: float = 0.0
    checkpointing: bool = False

    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed JSON."""
        return {
            "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
            "gradient_accumulation_steps": NUM_MICRO_BATCHES,
            "gradient_clipping": self.clipping,
            "steps_per_print": 10**9,
            "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"},
            **self.config,
        }

    def layers(self) -> list[tuple[Any, ...]]:
        """The class of every layer and what it is built with; tied, the first one is the last one, too."""
        blocks = [
            (Block, i, self.dropout, not self.checkpointing, i in self.frozen) for i in range(1, NUM_LAYERS - 1)
        ]
        first = (Embedding, 0, 0 in self.frozen)
        return [first, *blocks, first if self.tied else (Head, NUM_LAYERS - 1)]


@dataclass(frozen=True)
class Course:
    """Where the model is cut while it trains.

    Attributes:
        first: boundaries at the start.
        moves: boundaries from a batch on.
    """

    first: Boundaries
    moves: tuple[tuple[int, Boundaries], ...] = ()

    def __str__(self) -> str:
        return " then ".join(map(brackets, (self.first, *(b for _, b in self.moves))))

    def at(self, batch: int) -> str:
        """The cut in force in a batch, counted from 0, and how it came about."""
        *earlier, present = [brackets(b) for b in (self.first, *(b for start, b in self.moves if start <= batch))]
        return f"cut {present} (moved from {earlier[-1]})" if earlier else f"cut {present}"


_ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
_BF16 = {**_ZERO, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}

MODES = (
    Mode("fp32", 1e-4, clipping=4.0),  # reached by the second batch: gradients of the first show which layers are wrong
    Mode("ZeRO-1", 1e-4, config=_ZERO, clipping=0.5),
    Mode("bf16", 1e-1, config=_BF16, clipping=0.5, bf16=True),
    Mode("checkpointing", 1e-4, tied=False, frozen=(0, 1, 2), freezes=None, dropout=0.2, checkpointing=True),
)
"""Between them: clipping that clips and none, ties, frozen layers and layers that freeze, dropout, checkpointing."""

COURSES = (
    Course((0, 1, NUM_LAYERS)),
    Course((0, 4, NUM_LAYERS)),
    Course((0, 7, NUM_LAYERS)),
    Course((0, 2, NUM_LAYERS), ((1, (0, 6, NUM_LAYERS)), (3, (0, 2, NUM_LAYERS)))),
)
"""Cuts that stay, and one that moves: back and forth, over the frozen layers."""
