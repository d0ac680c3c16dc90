"""The scenario: which blocks are routed, and how much of the text they compute at which batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from deepspeed.pipe import LayerSpec

from scenarios.gpt import Block, GPTConfig
from scenarios.mod.block import Inference, RoutedBlock
from scenarios.scenario import Engine, Report, Scenario, gather_by_layer

BLOCKS = ("every_other", "later_half", "all")


@dataclass(frozen=True)
class CapacitySchedule:
    """From which batch on what share of the tokens a routed block computes; all before the first one.

    Attributes:
        batches: increasing batch indices.
        capacity: for each of them the share from that batch on, in [0, 1].
    """

    batches: Sequence[int]
    capacity: Sequence[float]

    def problems(self) -> list[str]:
        """Name what has no meaning."""
        problems = []
        if len(self.batches) != len(self.capacity):
            problems.append(
                f"scenario.batches has {len(self.batches)} entries and scenario.capacity {len(self.capacity)}: "
                "give one capacity for each batch"
            )
        if any(batch < 0 for batch in self.batches) or list(self.batches) != sorted(set(self.batches)):
            problems.append(f"scenario.batches={list(self.batches)} must be increasing, from 0")
        if not all(0 <= capacity <= 1 for capacity in self.capacity):
            problems.append(f"scenario.capacity={list(self.capacity)} must be shares in [0, 1], 0.125 for example")
        return problems

    def at(self, batch: int) -> float:
        """Return the capacity in a batch."""
        position = bisect_right(self.batches, batch)
        return float(self.capacity[position - 1]) if position else 1.0


@dataclass(kw_only=True)
class MixtureOfDepths(Scenario):
    """Route tokens around whole blocks (Raposo et al. 2024); the defaults are the paper's.

    Wraps whatever block is in the list, so it may follow a scenario that has replaced the blocks.

    Attributes:
        batches: batches from which the capacities hold; full capacity before the first.
        capacity: shares of each sequence's tokens that a routed block computes.
        blocks: which blocks are routed: ``"every_other"`` (the second, the fourth, …), ``"later_half"``,
            ``"all"``, or their indices, the first block being 0.
        inference: who chooses in evaluation, ``"predictor"`` (causal) or ``"top_k"`` (as in training).
        predictor_width: middle of the predictor's MLP.
        predictor_weight: factor of the predictor's gradient, which no other parameter sees.
    """

    batches: Sequence[int] = (0,)
    capacity: Sequence[float] = (0.125,)
    blocks: str | Sequence[int] = "every_other"
    inference: Inference = "predictor"
    predictor_width: int = 64
    predictor_weight: float = 0.1
    schedule: CapacitySchedule = field(init=False)

    extra_loss = True

    def __post_init__(self) -> None:
        """Check the settings."""
        self.schedule = CapacitySchedule(tuple(self.batches), tuple(self.capacity))
        problems = self.schedule.problems()
        if isinstance(self.blocks, str) and self.blocks not in BLOCKS:
            problems.append(f"scenario.blocks={self.blocks} must be one of {', '.join(BLOCKS)}, or a list of indices")
        if self.inference not in get_args(Inference):
            problems.append(f"scenario.inference={self.inference} must be one of {', '.join(get_args(Inference))}")
        if self.predictor_width < 1:
            problems.append(f"scenario.predictor_width={self.predictor_width} must be at least 1")
        if self.predictor_weight < 0:
            problems.append(f"scenario.predictor_weight={self.predictor_weight} must not be negative")
        if problems:
            raise ValueError("; ".join(problems))
        self._capacity = self.schedule.at(0)

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        """Wrap the chosen blocks."""
        blocks = [i for i, spec in enumerate(layers) if _is_block(spec)]
        routed = {blocks[i] for i in self._chosen(len(blocks))}
        return [self._routed(model, spec) if i in routed else spec for i, spec in enumerate(layers)]

    def _routed(self, model: GPTConfig, spec: LayerSpec) -> LayerSpec:
        return LayerSpec(
            RoutedBlock, model, spec, capacity=self._capacity, inference=self.inference,
            predictor_width=self.predictor_width, predictor_weight=self.predictor_weight,
        )  # fmt: skip

    def _chosen(self, depth: int) -> Sequence[int]:
        """List the indices of the blocks to route among ``depth`` of them."""
        if not isinstance(self.blocks, str):
            wrong = sorted(i for i in set(self.blocks) if not 0 <= i < depth)
            if wrong or len(set(self.blocks)) < len(self.blocks):
                raise ValueError(
                    f"scenario.blocks={list(self.blocks)} must be different indices of blocks from 0 to {depth - 1}"
                )
            return self.blocks
        named = {"every_other": range(1, depth, 2), "later_half": range(depth // 2, depth), "all": range(depth)}
        return named[self.blocks]

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Set the capacity of this batch."""
        self._capacity = self.schedule.at(batch)
        for layer in self._local(engine).values():
            layer.capacity = self._capacity
            layer.forget_counts()

    def report(self, engine: Engine) -> Report:
        """Report the capacity, the predictor's accuracy, and the share of tokens that each layer computed."""
        table = gather_by_layer(engine, {i: layer.counts() for i, layer in self._local(engine).items()}, width=4)
        judged, right = (int(table[:, column].sum()) for column in (2, 3))
        report: Report = {"capacity": f"{self._capacity:.1%}"}
        if judged:
            report["predictor accuracy"] = f"{right / judged:.0%} (always no: {1 - self._capacity:.0%})"
        report["share of tokens computed by layer"] = [
            computed / tokens if tokens else 1.0 for tokens, computed, *_ in table.tolist()
        ]
        report["predictor accuracy by layer"] = [
            right / judged if judged else None for *_, judged, right in table.tolist()
        ]
        return report

    @staticmethod
    def _local(engine: Engine) -> dict[int, RoutedBlock]:
        return {i: layer for i, layer in engine.local_layers().items() if isinstance(layer, RoutedBlock)}


def _is_block(spec: LayerSpec) -> bool:
    return isinstance(spec.typename, type) and issubclass(spec.typename, Block)
