"""Faults that an engine could have, seeded into ours: ``-m tests.cli.mutants NAME FOLDER`` is a rank with one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from dynpipe_ds import DynamicPipelineModule
from dynpipe_ds.cli.numerics import rank
from dynpipe_ds.engine import EnabledEngine
from dynpipe_ds.host import instructions
from dynpipe_ds.host import pipeline as pipeline_module
from dynpipe_ds.host.gradient_norm import GradientNorm
from dynpipe_ds.host.halves import in_flight_of
from dynpipe_ds.host.hooks import Hooks
from dynpipe_ds.host.optimizers.flat import FlatOptimizer
from dynpipe_ds.host.optimizers.groups import ParameterGroups
from dynpipe_ds.host.optimizers.stage_optimizer import PlainOptimizer
from dynpipe_ds.migration import migrate
from dynpipe_ds.migration.freeze import Change
from dynpipe_ds.stage import Stage
from dynpipe_ds.training import Training


class Patches(ExitStack):
    """What a mutant changes; undone on leaving."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        self.enter_context(mock.patch.object(owner, name, value))

    def instruct(self, instruction: type, function: Callable[..., None]) -> None:
        kind = instructions._OURS[instruction][0]
        self.enter_context(mock.patch.dict(instructions._OURS, {instruction: (kind, function)}))


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        apply: seeds it.
        mode: in which it is found.
        told: what the problem's text says.
        breaks: whether it ends or stops the processes instead of computing something else.
    """

    apply: Callable[[Patches], None]
    mode: str
    told: str
    breaks: bool = False


MUTANTS: dict[str, Mutant] = {}


def mutant(mode: str, told: str, *, breaks: bool = False) -> Callable[[Callable[[Patches], None]], Any]:
    def add(function: Callable[[Patches], None]) -> Callable[[Patches], None]:
        MUTANTS[function.__name__] = Mutant(function, mode, told, breaks)
        return function

    return add


def _moved(engine: Any) -> bool:
    """Whether layers have moved in this run."""
    return getattr(engine, "_mutant_moved", False)


def _note_moves(patches: Patches, after: Callable[[Any], None] = lambda engine: None) -> None:
    original = Training.move_layers

    def migrate_and_note(self: Any, boundaries: Sequence[int]) -> None:
        original(self, boundaries)
        engine = self.stage.pipeline.engine
        engine._mutant_moved = True
        after(engine)

    patches.put(Training, "move_layers", migrate_and_note)


def _put_arrived(patches: Patches, change: Callable[[Any, Any], object]) -> None:
    """Let every layer that has arrived be changed, given the optimizer that has its state."""
    original = migrate.Migration.run  # before its end, what was changed would be overwritten by what is received

    def run(migration: Any, *args: Any, **kwargs: Any) -> Any:
        stage = migration._stage
        before = set(stage.local_layers())
        num_bytes = original(migration, *args, **kwargs)
        for layer, module in stage.local_layers().items():
            if layer not in before and module is not None:
                change(module, stage.optimizer)
        return num_bytes

    patches.put(migrate.Migration, "run", run)


def _put_states(patches: Patches, change: Callable[[int, Any], object]) -> None:
    """Let the optimizer state of parameters that have arrived be changed, given their index in the layer and views."""

    def all_of(layer: Any, optimizer: Any) -> None:
        for i, share in enumerate(optimizer.shares([p for p in layer.parameters() if p.requires_grad])):
            change(i, share.state)

    _put_arrived(patches, all_of)


def _put_received(patches: Patches, change: Callable[[Any, Any], Any], *, only_after_moves: bool = False) -> None:
    """Let every gradient that crosses a cut be changed, given the engine and the gradient."""

    def receive(engine: Any, buffer_id: int) -> None:
        instructions.receive_output_gradients(engine, buffer_id)
        kept = in_flight_of(engine).gradients
        if _moved(engine) or not only_after_moves:
            kept[buffer_id] = tuple(None if g is None else change(engine, g) for g in kept[buffer_id])

    _note_moves(patches)
    patches.instruct(schedule.RecvGrad, receive)


def _put_installed(patches: Patches, change: Callable[[Any], None], *, grown: bool) -> None:
    """Let the functions of the first stage be changed after it got other layers, or more of them."""
    original = DynamicPipelineModule.install

    def install(self: Any, boundaries: Sequence[int], layers: Any) -> None:
        before = set(self._layers)
        original(self, boundaries, layers)
        if before and self.stage_id == 0 and (len(layers) > len(before) if grown else set(layers) != before):
            change(self.forward_funcs)

    patches.put(DynamicPipelineModule, "install", install)


def _put_data(patches: Patches, change: Callable[[list[Any]], list[Any]]) -> None:
    """Let a rank get other micro-batches."""
    original = rank.islice
    patches.put(rank, "islice", lambda data, count: iter(change(list(original(data, count)))))


# -- clipping and its norm


@mutant("fp32", "optimizer state")
def dropped_clip(patches: Patches) -> None:
    patches.put(pipeline_module, "clip_gradients", lambda *_: None)


@mutant("fp32", "optimizer state")
def clip_on_one_stage_only(patches: Patches) -> None:
    original = pipeline_module.clip_gradients

    def clip(parameters: Any, norm: Any, bound: float) -> None:
        if torch.distributed.get_rank() == 0:
            original(parameters, norm, bound)

    patches.put(pipeline_module, "clip_gradients", clip)


@mutant("fp32", "gradient norm")
def norm_of_the_first_stage(patches: Patches) -> None:
    patches.put(GradientNorm, "_counts", lambda self, parameter, replica: self._grid.get_pipe_parallel_rank() == 0)


@mutant("ZeRO-1", "gradient norm")
def norm_of_the_own_stage(patches: Patches) -> None:
    def own(self: Any, squares: Any) -> Any:
        return torch.stack([square for _, square in squares]).sum().sqrt().float()

    patches.put(GradientNorm, "__call__", own)


@mutant("fp32", "gradient norm")
def tied_weights_counted_twice(patches: Patches) -> None:
    patches.put(GradientNorm, "_counts", lambda self, parameter, replica: True)


@mutant("ZeRO-1", "gradient norm")
def norm_stale_after_a_move(patches: Patches) -> None:
    """The norm knows the layers that were here at the start."""
    original = DynamicPipelineModule.layer_of_parameter

    def first(self: Any) -> Any:
        if not hasattr(self, "_mutant_layers"):
            self._mutant_layers = original(self)
        return self._mutant_layers

    patches.put(DynamicPipelineModule, "layer_of_parameter", first)


@mutant("fp32", "gradient norm")
def norm_squared_once_too_few(patches: Patches) -> None:
    original = GradientNorm.__call__
    patches.put(GradientNorm, "__call__", lambda self, *a, **k: original(self, *a, **k).sqrt())


# -- gradients


def _divided(engine: Any, gradient: Any) -> Any:
    return gradient / engine.gradient_accumulation_steps()


@mutant("checkpointing", "gradient")
def gradient_divided_twice(patches: Patches) -> None:
    """As DeepSpeed did before its fix: at every stage but the last."""
    _put_received(patches, _divided)


@mutant("fp32", "gradient")
def gradient_divided_twice_after_a_move(patches: Patches) -> None:
    _put_received(patches, _divided, only_after_moves=True)


@mutant("fp32", "gradient")
def loss_not_scaled(patches: Patches) -> None:
    """The gradients of all micro-batches are added, not averaged."""
    original = DeepSpeedEngine.backward

    def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, loss * self.gradient_accumulation_steps(), *args, **kwargs)

    patches.put(DeepSpeedEngine, "backward", backward)


@mutant("fp32", "loss")
def loss_of_the_last_micro_batch(patches: Patches) -> None:
    original = PipelineEngine._aggregate_total_loss

    def last(self: Any) -> Any:
        if self.is_last_stage():
            self.total_loss = self.loss.detach() * self.gradient_accumulation_steps()
        return original(self)

    patches.put(PipelineEngine, "_aggregate_total_loss", last)


@mutant("ZeRO-1", "gradient")
def micro_batch_without_backward(patches: Patches) -> None:
    """The first stage forgets every fourth."""

    def backward(engine: Any, buffer_id: int) -> None:
        engine._mutant_count = getattr(engine, "_mutant_count", 0) + 1
        if engine.is_first_stage() and engine._mutant_count % 4 == 0:
            kept = in_flight_of(engine).gradients
            kept[buffer_id] = tuple(None if g is None else torch.zeros_like(g) for g in kept[buffer_id])
        instructions.backward_pass(engine, buffer_id)

    patches.instruct(schedule.BackwardPass, backward)


@mutant("bf16", "gradient")
def gradient_lost_at_the_cut(patches: Patches) -> None:
    _put_received(patches, lambda engine, gradient: torch.zeros_like(gradient))


@mutant("fp32", "gradient")
def tied_gradients_not_added(patches: Patches) -> None:
    patches.instruct(schedule.ReduceTiedGrads, lambda engine: None)


@mutant("ZeRO-1", "gradient")
def tied_gradients_added_once_too_few(patches: Patches) -> None:
    """The first copy's are left out."""
    original = instructions._add_copies

    def without_first(engine: Any, weights: dict[int, Any], layers: list[int], owners: list[int]) -> None:
        for layer, weight in weights.items():
            gradient = engine.stage_optimizer.gradient(weight)
            if layer == layers[0] and gradient is not None:
                gradient.zero_()
        original(engine, weights, layers, owners)

    patches.put(instructions, "_add_copies", without_first)


@mutant("fp32", "gradient")
def tied_gradients_added_on_one_stage_only(patches: Patches) -> None:
    original = instructions._add_copies

    def only_first(engine: Any, weights: dict[int, Any], layers: list[int], owners: list[int]) -> None:
        kept = {layer: None if weight.grad is None else weight.grad.clone() for layer, weight in weights.items()}
        original(engine, weights, layers, owners)
        for layer, weight in weights.items():
            if layer != layers[0] and kept[layer] is not None:
                weight.grad.copy_(kept[layer])

    patches.put(instructions, "_add_copies", only_first)


# -- stale flags


@mutant("checkpointing", "loss")
def layers_dropped_by_a_stale_count(patches: Patches) -> None:
    """As DeepSpeed's forward does with a stale ``is_checkpointable_results``."""
    original = DynamicPipelineModule.forward

    def forward(self: Any, x: Any) -> Any:
        if not hasattr(self, "_mutant_count"):
            self._mutant_count = len(self.forward_funcs)
        functions, self.forward_funcs = self.forward_funcs, self.forward_funcs[: self._mutant_count]
        try:
            return original(self, x)
        finally:
            self.forward_funcs = functions

    patches.put(DynamicPipelineModule, "forward", forward)


@mutant("checkpointing", "", breaks=True)
def stale_first_output_send(patches: Patches) -> None:
    """What crosses the cut is told once and never again, though after a move it wants a gradient."""
    original = EnabledEngine.reset_activation_shape

    def once(self: Any) -> None:
        if not getattr(self, "_mutant_reset", False):
            self._mutant_reset = True
            original(self)

    patches.put(EnabledEngine, "reset_activation_shape", once)


@mutant("fp32", "weights")
def frozen_layer_thaws_by_moving(patches: Patches) -> None:
    _put_arrived(patches, lambda layer, _: layer.requires_grad_(True))


@mutant("fp32", "weights")
def trained_layer_freezes_by_moving(patches: Patches) -> None:
    _put_arrived(patches, lambda layer, _: layer.requires_grad_(False))


@mutant("ZeRO-1", "weights")
def freezing_not_noticed(patches: Patches) -> None:
    patches.put(Stage, "_unnoticed", lambda self: Change.NONE)


@mutant("fp32", "gradient")
def gradient_stays_away_after_a_move(patches: Patches) -> None:
    """A stale flag that cuts earlier stages off from training."""
    _put_received(patches, lambda engine, gradient: torch.zeros_like(gradient), only_after_moves=True)


@mutant("fp32", "weights")
def learning_rate_stale_after_a_move(patches: Patches) -> None:
    def reset(engine: Any) -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] = group["initial_lr"]

    _note_moves(patches, reset)


# -- layers and what belongs to them


@mutant("fp32", "loss")
def lost_layer(patches: Patches) -> None:
    """A stage that got layers leaves out its last one."""
    _put_installed(patches, lambda functions: functions.pop(), grown=True)


@mutant("fp32", "loss")
def layers_in_another_order(patches: Patches) -> None:
    def swap(functions: list[Any]) -> None:
        if len(functions) > 3:
            functions[1], functions[2] = functions[2], functions[1]

    _put_installed(patches, swap, grown=False)


@mutant("fp32", "loss")
def layer_arrives_as_first_built(patches: Patches) -> None:
    def fresh(layer: Any, _: Any) -> None:
        if type(layer).__name__ == "Block":
            index = (layer.bias.numel() - 16) // 2
            state = type(layer)(index, 0.0, True, False).state_dict()
            layer.load_state_dict(state, strict=False)

    _put_arrived(patches, fresh)


@mutant("fp32", "buffers")
def buffers_stay_behind(patches: Patches) -> None:
    def without(layer: Any, _: Any) -> None:
        for buffer in layer.buffers():
            buffer.zero_()

    _put_arrived(patches, without)


@mutant("fp32", "optimizer state")
def optimizer_state_stays_behind(patches: Patches) -> None:
    original = PlainOptimizer.fill
    patches.put(PlainOptimizer, "fill", lambda self, states: original(self, {}))


@mutant("ZeRO-1", "optimizer state")
def flat_optimizer_state_stays_behind(patches: Patches) -> None:
    def without_moments(_: int, state: Any) -> None:
        for key in {"exp_avg", "exp_avg_sq"} & set(state):
            state[key].zero_()

    _put_states(patches, without_moments)


@mutant("bf16", "optimizer state")
def optimizer_stale_after_a_move(patches: Patches) -> None:
    """The moments that a layer had when it left are used again when it comes back."""
    seen: set[int] = set()

    def stale(index: int, state: Any) -> None:
        if "exp_avg" in state:
            if index in seen:
                state["exp_avg"].fill_(0.01)
            seen.add(index)

    _put_states(patches, stale)


@mutant("fp32", "weights")
def weight_decay_group_lost(patches: Patches) -> None:
    """What arrives is put into the last group, which has no weight decay."""
    original = ParameterGroups.replace

    def into_last(self: Any, departed: Any, arrived: Any) -> None:
        original(self, departed, dict.fromkeys(arrived, len(self.placeholders) - 1))

    patches.put(ParameterGroups, "replace", into_last)


@mutant("ZeRO-1", "weights")
def no_weight_decay_on_one_stage(patches: Patches) -> None:
    original = FlatOptimizer.before_step

    def before(self: Any) -> None:
        if torch.distributed.get_rank() == 1:
            for group in self.groups.optimizer.param_groups:
                group["weight_decay"] = 0.0
        original(self)

    patches.put(FlatOptimizer, "before_step", before)


@mutant("fp32", "")
def arrived_layers_not_in_the_optimizer(patches: Patches) -> None:
    original = ParameterGroups.replace
    patches.put(ParameterGroups, "replace", lambda self, departed, arrived: original(self, departed, {}))


@mutant("fp32", "optimizer state")
def two_steps_on_one_stage(patches: Patches) -> None:
    original = PlainOptimizer.after_step

    def again(self: Any) -> None:
        original(self)
        if torch.distributed.get_rank() == 0:
            for p in chain.from_iterable(g["params"] for g in self.groups.optimizer.param_groups):
                if p in self.groups.optimizer.state:
                    self.groups.optimizer.state[p]["step"] += 1

    patches.put(PlainOptimizer, "after_step", again)


@mutant("fp32", "weights")
def no_step_on_one_stage(patches: Patches) -> None:
    original = Hooks._take_model_step

    def step(self: Any, lr_kwargs: Any) -> None:
        weights = [p.detach().clone() for p in self.module.parameters()]
        original(self, lr_kwargs)
        if torch.distributed.get_rank() == 1:
            for parameter, before in zip(self.module.parameters(), weights, strict=True):
                parameter.data.copy_(before)

    patches.put(Hooks, "_take_model_step", step)


# -- data, order and random numbers


@mutant("ZeRO-1", "buffers")
def micro_batches_swapped(patches: Patches) -> None:
    """Both stages agree, so losses and gradients are the same but for rounding."""
    _put_data(patches, lambda batch: [batch[1], batch[0], *batch[2:]])


@mutant("fp32", "loss")
def labels_of_another_micro_batch(patches: Patches) -> None:
    _put_data(patches, lambda batch: [*batch[1:], batch[0]] if torch.distributed.get_rank() == 1 else batch)


@mutant("checkpointing", "loss")
def dropout_seeded_by_the_place_on_the_stage(patches: Patches) -> None:
    original = DynamicPipelineModule._block

    def block(self: Any, start: int, stop: int) -> Any:
        first, self._local_start = self._local_start, 0
        try:
            return original(self, start, stop)
        finally:
            self._local_start = first

    patches.put(DynamicPipelineModule, "_block", block)


@mutant("checkpointing", "")
def checkpointing_cuts_off_frozen_inputs(patches: Patches) -> None:
    """Reentrant checkpointing of layers whose inputs want no gradient."""
    patches.put(DynamicPipelineModule, "_checkpoint_keeps_gradients", lambda self, inputs: True)


@mutant("fp32", "", breaks=True)
def a_rank_ends(patches: Patches) -> None:
    """One ends without a word after a move."""
    _note_moves(patches, lambda engine: sys.exit(0) if torch.distributed.get_rank() == 1 else None)


@mutant("fp32", "", breaks=True)
def a_rank_waits_for_ever(patches: Patches) -> None:
    import time

    _note_moves(patches, lambda engine: time.sleep(1e6) if torch.distributed.get_rank() == 1 else None)


def main(name: str, folder: str) -> None:
    patches = Patches()
    MUTANTS[name].apply(patches)
    rank.main(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
