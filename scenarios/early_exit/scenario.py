"""Early exit as a scenario: where exits stand, how sure a token must be to leave, what is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from deepspeed.pipe import LayerSpec
from torch import Tensor

from scenarios.early_exit.blocks import ExitBlock, ExitEmbedding, WholeExitBlock
from scenarios.early_exit.confidence import MEASURES, Decay, Measure, thresholds
from scenarios.early_exit.exits import ExitHead, exit_loss, read_audit
from scenarios.early_exit.rows import task_of
from scenarios.early_exit.state import ExitPlan
from scenarios.gpt import Block, Embedding, GPTConfig, Head
from scenarios.kernels import in_use
from scenarios.scenario import Engine, Report, Scenario, State, gather_by_layer

LossWeights = Literal["depth", "equal"]
LeftTokens = Literal["invisible", "visible"]
Calibration = Literal["share", "consistency", "never"]


@dataclass(kw_only=True)
class EarlyExit(Scenario):
    """Tokens leave at exits between the blocks once their prediction is confident.

    After CALM (Schuster et al., *Confident Adaptive Language Modeling*, NeurIPS 2022) and ADP-C (Liu et al.,
    *Anytime Dense Prediction with Confidence Adaptivity*, ICLR 2022). ``docs/early_exit.md`` lists what differs.

    Attributes:
        first_exit: number of blocks before the first exit.
        exit_interval: blocks from one exit to the next.
        confidence: ``"softmax"``, ``"state"``, ``"classifier"`` (CALM) or ``"probability"`` (ADP-C), see
            :func:`scenarios.early_exit.confidence.measure_confidence`.
        loss_weights: of the exits' cross entropies: ``"depth"``, the number of blocks before an exit over the
            sum of these numbers (CALM), or ``"equal"``, 1 each (ADP-C).
        left_tokens: what later blocks see of a token that left: ``"invisible"``, nothing, or ``"visible"``, keys
            and values of the state that it left with (CALM).
        threshold: confidence that lets a token leave, in [0, 1]; the first one where it is calibrated.
        decay: temperature of CALM's threshold that decays over positions; ``None`` for the same everywhere.
        first_batch: nobody leaves before this batch.
        calibrate: choose the threshold anew by what the auditors tell: for a ``"share"`` of the work, for
            ``"consistency"`` with the last layer's predictions, or ``"never"``.
        calibrate_every: batches between two calibrations, the first one right before ``first_batch``.
        target_share: blocks that a token shall run through, as a share of all; for ``"share"``.
        max_differing: largest share of tokens that may be predicted differently than by the last layer; for
            ``"consistency"``.
        error_probability: chance that a threshold is taken for consistent and is not; likewise.
        audit_every: one token in so many is an auditor: it runs through all blocks, whatever the exits say;
            0 for none.
    """

    first_exit: int = 3
    exit_interval: int = 3
    confidence: Measure = "softmax"
    loss_weights: LossWeights = "depth"
    left_tokens: LeftTokens = "invisible"
    threshold: float = 0.9
    decay: float | None = 4.0
    first_batch: int = 6
    calibrate: Calibration = "share"
    calibrate_every: int = 2
    target_share: float = 0.4
    max_differing: float = 0.2
    error_probability: float = 0.05
    audit_every: int = 16
    plan: ExitPlan = field(init=False)
    _left: list[int] = field(init=False, default_factory=list)
    _audited: list[int] = field(init=False, default_factory=list)
    _differing: float = field(init=False, default=math.nan)

    def __post_init__(self) -> None:
        """Refuse settings without a meaning, all problems at once."""
        problems = [*self._wrong_numbers(), *self._wrong_choices()]
        if self.confidence == "classifier" and not self.audit_every:
            problems.append("confidence='classifier' learns from auditors: audit_every=0 must be at least 1")
        if self.calibrate != "never" and not self.audit_every:
            problems.append(
                f"calibrate={self.calibrate!r} asks auditors: audit_every=0 must be at least 1 (or calibrate=never)"
            )
        if problems:
            raise ValueError("scenario: " + "; ".join(problems))

    def _wrong_numbers(self) -> list[str]:
        least = {"first_exit": 1, "exit_interval": 1, "first_batch": 0, "calibrate_every": 1, "audit_every": 0}
        problems = [
            f"{name}={getattr(self, name)} must be at least {bound}"
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]
        if not 0 <= self.threshold <= 1:
            problems.append(f"threshold={self.threshold} must be between 0 and 1")
        problems += [
            f"{name}={getattr(self, name)} must be above 0 and at most 1"
            for name in ("target_share", "max_differing", "error_probability")
            if not 0 < getattr(self, name) <= 1
        ]
        if self.decay is not None and self.decay < 0:
            problems.append(f"decay={self.decay} must be at least 0, or null for a threshold that does not decay")
        return problems

    def _wrong_choices(self) -> list[str]:
        choices: dict[str, tuple[str, ...]] = {
            "confidence": MEASURES,
            "loss_weights": get_args(LossWeights),
            "left_tokens": get_args(LeftTokens),
            "calibrate": get_args(Calibration),
        }
        return [
            f"{name}={getattr(self, name)!r} must be one of {', '.join(choice)}"
            for name, choice in choices.items()
            if getattr(self, name) not in choice
        ]

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        """Put blocks that skip tokens, some with an exit, in the place of plain ones."""
        if model.tied:
            raise ValueError(
                "model.tied=true does not go with early exit, whose last layer is a head of its own; set "
                "model.tied=false"
            )
        if model.depth > 1 and self.first_exit >= model.depth:
            raise ValueError(
                f"scenario.first_exit={self.first_exit} must be less than model.depth={model.depth}, behind whose "
                "last block stands the head anyway"
            )
        exits = range(self.first_exit, model.depth, self.exit_interval)
        self.plan = self._plan(model, exits)
        replaced, block = [], 0
        for spec in layers:
            if spec.typename is Embedding:
                replaced.append(LayerSpec(ExitEmbedding, model, self.plan))
            elif spec.typename is Block:
                block += 1
                number = exits.index(block) if block in exits else None
                compares = number is not None and self.confidence == "state"
                replaced.append(LayerSpec(WholeExitBlock if compares else ExitBlock, model, self.plan, number))
            elif spec.typename is Head:
                replaced.append(LayerSpec(ExitHead, model, self.plan))
            else:
                raise ValueError(
                    f"early exit needs plain layers, but another scenario has made a {spec.typename.__name__}; "
                    "train it alone"
                )
        return replaced

    def _plan(self, model: GPTConfig, exits: range) -> ExitPlan:
        blocks = (*exits, model.depth)
        total = sum(blocks)
        by_weight = {"depth": tuple(block / total for block in blocks), "equal": (1.0,) * len(blocks)}
        return ExitPlan(
            blocks=blocks,
            loss_weights=by_weight[self.loss_weights],
            measure=self.confidence,
            decay=Decay(self.decay, model.seq_len),
            visible=self.left_tokens == "visible",
            audit_every=self.audit_every,
        )

    def loss_fn(self) -> Callable[[Any, Tensor], Tensor]:
        """Return the loss of the exits and the head together."""
        return exit_loss

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Tell the exits on this stage the threshold."""
        threshold = self.threshold if batch >= self.first_batch else math.inf
        for layer in engine.local_layers().values():
            if isinstance(layer, ExitBlock) and layer.exit is not None:
                layer.exit.threshold = threshold

    def after_batch(self, engine: Engine, batch: int) -> None:
        """Collect who left, and calibrate where it is due."""
        head = _local_head(engine)
        exits = len(self.plan.blocks)
        self._left = self._collect(engine, head and head.take_left(), exits)
        if self.calibrate == "never" or not self.plan.num_exits:
            return
        width = 1 + 2 * len(thresholds())
        newest = self._collect(engine, head and head.take_audit(), width)
        self._audited = [sum(both) for both in zip(self._audited or [0] * width, newest, strict=True)]
        ahead = batch + 1 - self.first_batch
        if ahead >= 0 and ahead % self.calibrate_every == 0:
            self._choose(self._audited)
            self._audited = []
        elif ahead <= -self.calibrate_every:
            self._audited = []  # of a model too young to say anything about the one that is calibrated

    def _collect(self, engine: Engine, mine: list[int] | None, width: int) -> list[int]:
        """Give every rank the numbers of the last layer, summed over replicas."""
        last = engine.partition[-1] - 1
        values = {} if mine is None else {last: mine}
        return [int(value) for value in gather_by_layer(engine, values, width)[last].tolist()]

    def _choose(self, audited: list[int]) -> None:
        """Choose the threshold, from numbers that are the same on every rank."""
        audit = read_audit(audited)
        if self.calibrate == "share":
            chosen = audit.for_share(self.target_share, self.plan.blocks[-1])
        else:
            chosen = audit.for_consistency(self.max_differing, self.error_probability)
        self.threshold = float(thresholds()[chosen])
        self._differing = float(audit.differing[chosen])

    def active_by_block(self) -> list[int]:
        """Count the tokens that each block has computed in the last batch."""
        active, left = sum(self._left), dict(zip(self.plan.blocks[:-1], self._left, strict=False))
        counts = []
        for block in range(1, self.plan.blocks[-1] + 1):
            counts.append(active)
            active -= left.get(block, 0)
        return counts

    def report(self, engine: Engine) -> Report:
        """Report threshold, work, and how many tokens left behind each block and were computed in it."""
        active, tokens = self.active_by_block(), max(1, sum(self._left))
        left = dict(zip(self.plan.blocks[:-1], self._left, strict=False))
        report: Report = {
            "threshold": round(self.threshold, 4),
            "tokens computed": f"{100 * sum(active) / (len(active) * tokens):.0f}%",
            "kernel": in_use(task_of(visible=self.plan.visible), engine),
            "tokens left after block": [left.get(block + 1, 0) for block in range(len(active))],
            "tokens computed in block": active,
        }
        if not math.isnan(self._differing):
            report["would differ"] = f"{100 * self._differing:.0f}%"
        return report

    def state_dict(self) -> State:
        """Return the calibrated threshold, and what the auditors have told since."""
        return {"threshold": self.threshold, "differing": self._differing, "told": list(self._audited)}

    def load_state_dict(self, state: State) -> None:
        """Take them back; the exits learn of the threshold before the next batch."""
        self.threshold, self._differing, self._audited = state["threshold"], state["differing"], list(state["told"])


def _local_head(engine: Engine) -> ExitHead | None:
    """Return the head, on the stage that has it."""
    heads = [layer for layer in engine.local_layers().values() if isinstance(layer, ExitHead)]
    return heads[0] if heads else None
