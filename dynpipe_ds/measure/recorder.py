"""Measuring layers while they train: stamps in a batch, added up after it.

A stage is one stream of work, so a batch is a list of marks: from this mark on, the stage is in this
layer's forward, in that layer's backward, or waiting. A layer's backward begins when the gradient of its
output is ready, which a tensor hook sees; recomputation under activation checkpointing falls into the
backward. Marks are the clock's stamps: CUDA events (read after the batch, no synchronisation inside) or the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynpipe_ds.measure.clock import Clock, current_clock
from dynpipe_ds.messages.values import obstacle, tensors_in
from dynpipe_ds.schedule import Order

FORWARD, BACKWARD, LOAD, TRANSFER, REDUCE, STEP, WEIGHT = range(7)
_COMPUTING = (FORWARD, BACKWARD, WEIGHT)

_WAITED = 0.1  # of a computation: who was idle for so long before it waited for its message


class Stretch(NamedTuple):
    """When a computation ran, counted from the start of the batch on this rank.

    Attributes:
        came_s: until the stage had what it computes with, or sees to something else.
        ended_s: its end.
        waited: whether the stage was idle until then, so that this is when its message came.
    """

    came_s: float
    ended_s: float
    waited: bool


@dataclass(frozen=True)
class BatchTimes:
    """What one rank measured in one batch.

    Attributes:
        forward_s: forward seconds by layer, all micro-batches together.
        backward_s: the same for the backward, recomputation and what is computed apart for weights included.
        num_micro_batches: M.
        fill_s: idle before the first forward.
        waiting_s: time in transfers between the first and the last computation.
        compute_end_s: end of the last computation, counted from the start of the batch.
        step_s: seconds in the optimizer step.
        batch_s: the whole batch.
        halves: by layer, of the micro-batches whose backward was split, what both halves took, and the second one of
            it; none where all ran whole.
        num_split: how many micro-batches these are.
        first_forward: when it could begin, and ended.
        first_backward: the same.
    """

    forward_s: dict[int, float]
    backward_s: dict[int, float]
    num_micro_batches: int
    fill_s: float
    waiting_s: float
    compute_end_s: float
    step_s: float
    batch_s: float
    halves: dict[int, tuple[float, float]] = field(default_factory=dict)
    num_split: int = 0
    first_forward: Stretch | None = None
    first_backward: Stretch | None = None


class BatchRecorder:
    """Collects the marks of one batch on one rank.

    Args:
        clock: whose stamps they are; ``None``: the one in use.

    Attributes:
        marks: kind, layer and seconds of each, in order, of the newest batch; none until it was stopped.
        obstacles: what layers returned that can't be sent to another stage, by layer.
        mark_s: seconds that a mark takes besides those that are timed in the batch, such as calling a hook, as measured
            when this was made.
        order: what the batch runs, once it has begun; ``None`` for a schedule of the user's own.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.marks: list[tuple[int, int, float]] = []
        self.obstacles: dict[int, str] = {}
        self.order: Order | None = None
        self._split: tuple[int, ...] = ()  # micro-batches whose backward has two halves, as they come
        self._types: dict[int, type] = {}
        self._clock = clock or current_clock()
        self._labels: list[tuple[int, int]] = []
        self._begun: list[int] = []  # which marks begin an instruction
        self._stamps: list[Any] = []
        self._made_s: list[float] = []  # when the host made each mark
        self._spent_s: list[float] = []  # what the host did for each mark
        self._marking_s = 0.0
        self._phase = FORWARD
        self._num_forwards = 0
        self._meter: ActivationMeter | None = None
        self.mark_s = _mark_s(self)

    @property
    def recording_s(self) -> float:
        """Seconds that the marks of the newest batch have taken, and what counted its activations."""
        return self._marking_s + (self._meter.seconds if self._meter is not None else 0.0)

    def start(self, meter: ActivationMeter | None = None) -> None:
        """Begin a batch.

        Args:
            meter: counts activation bytes in the first micro-batch when given.
        """
        self._labels, self._stamps, self._begun, self._num_forwards = [], [], [], 0
        self._made_s, self._spent_s, self._marking_s = [], [], 0.0
        self.marks, self.order, self._split = [], None, ()
        self._meter = meter
        self._mark(TRANSFER)

    def follow(self, order: Order | None, stage: int) -> None:
        """Note what the batch runs.

        Args:
            order: of all stages; ``None`` for a schedule of the user's own.
            stage: this one.
        """
        self.order, self._split = order, () if order is None else tuple(sorted(order.split(stage)))

    def instruction(self, kind: int, layer: int = -1) -> None:
        """Note that the stage turns to another pipeline instruction.

        Args:
            kind: ``FORWARD``, ``BACKWARD``, ``WEIGHT``, ``LOAD``, ``TRANSFER``, ``REDUCE`` or ``STEP``.
            layer: for computation, the layer it begins with.
        """
        if kind == FORWARD:
            self._num_forwards += 1
        if kind in _COMPUTING:
            self._phase = kind
        self._begun.append(len(self._labels))
        self._mark(kind, layer)

    def mark_layer(self, kind: int, layer: int, settle: Callable[[], object] = lambda: None) -> None:
        """Note that an instruction turns to another layer, if it does.

        Args:
            kind: of the instruction.
            layer: which one.
            settle: does before what is left to do for the layer that was the last one.
        """
        if self._labels[-1] != (kind, layer):
            settle()
            self._mark(kind, layer)

    def run(self, layer: int, function: Callable[[Any], Any], x: Any) -> Any:
        """Run one layer, marking when it begins and, by a hook, when its backward begins.

        Args:
            layer: global layer index.
            function: the layer.
            x: its input.

        Returns:
            Its output, untouched.
        """
        now_s, number = self._clock.now_s, len(self._spent_s)
        self._mark(self._phase, layer)
        marked_s = now_s()
        inputs = {id(t): t for t in tensors_in(x)}  # before the layer changes a list or dict of them
        metering = self._metering(layer)
        began_s = now_s()
        with metering:
            y = function(x)
        ended_s = now_s()
        self._see(layer, y)
        if torch.is_grad_enabled():
            for tensor in tensors_in(y):
                if tensor.grad_fn is not None and id(tensor) not in inputs:
                    tensor.register_hook(partial(self._gradient_ready, layer))  # type: ignore[no-untyped-call]
        self._spent_s[number] += began_s - marked_s + now_s() - ended_s
        return y

    @contextmanager
    def checkpoint(self, layer: int, inputs: Sequence[Any]) -> Iterator[None]:
        """Run a block of layers that keeps only its inputs; none of them is metered inside.

        Args:
            layer: first layer of the block.
            inputs: what the block keeps.
        """
        meter, self._meter = self._meter, None
        if meter is not None and self._num_forwards == 1:
            meter.count(layer, inputs)
        try:
            # Metering inside would take non-reentrant checkpointing's own hooks out of effect.
            yield
        finally:
            self._meter = meter

    def stop(self) -> BatchTimes:
        """End the batch and add up its marks."""
        self._mark(TRANSFER)
        durations_s = self._clock.durations_s(self._stamps)
        self._marking_s = len(self._stamps) * self.mark_s + _lost_s(self._made_s, self._spent_s, durations_s)
        self._stamps = []  # events take time to be let go, which counts now and not in the next batch
        self.marks = [(*label, seconds) for label, seconds in zip(self._labels, durations_s, strict=False)]
        times = _summarise(self.marks, self._micro_batches(), self._num_forwards, frozenset(self._split))
        first_forward, first_backward = (self._first(kind) for kind in (FORWARD, BACKWARD))
        return replace(times, first_forward=first_forward, first_backward=first_backward)

    def _first(self, kind: int) -> Stretch | None:
        """The first instruction of a kind."""
        begun = (i for i in self._begun if self.marks[i][0] == kind) if self._begun else iter(())
        if (first := next(begun, None)) is None:
            return None
        end = next((i for i in self._begun if i > first), len(self.marks))
        came = first  # mark at which the message had come: samples are loaded after it
        while came and self.marks[came - 1][0] == LOAD:
            came -= 1
        idle = came
        while idle and self.marks[idle - 1][0] == TRANSFER:
            idle -= 1
        spans = (idle, came), (first, end), (0, came), (0, end)
        idle_s, lasted_s, came_s, ended_s = (sum(seconds for _, _, seconds in self.marks[a:b]) for a, b in spans)
        return Stretch(came_s, ended_s, waited=idle_s > _WAITED * lasted_s)

    def by_micro_batch(self) -> dict[int, tuple[list[float], list[float]]]:
        """Seconds of every layer in each micro-batch of the last batch that was stopped: forward and backward."""
        found: dict[int, tuple[list[float], list[float]]] = {}
        for (kind, layer, seconds), micro_batch in zip(self.marks, self._micro_batches(), strict=True):
            if kind in _COMPUTING:
                forward, backward = found.setdefault(layer, ([0.0] * self._num_forwards, [0.0] * self._num_forwards))
                (forward if kind == FORWARD else backward)[micro_batch] += seconds
        return found

    def _micro_batches(self) -> list[int]:
        """Of each mark of a computation its micro-batch: each kind of instruction goes from the first one to the last.

        Only those whose backward is split have a ``WEIGHT``.
        """
        found, now, begun = [], dict.fromkeys(_COMPUTING, -1), set(self._begun)
        for i, (kind, _, _) in enumerate(self.marks):
            if kind in now and i in begun:
                now[kind] += 1
            number = now.get(kind, -1)
            found.append(self._split[number] if kind == WEIGHT and self._split else number)
        return found

    def by_instruction(self) -> list[list[tuple[int, float]]]:
        """Kinds and seconds of the newest batch: of what was before any instruction, then of each instruction."""
        ends = [0, *self._begun, len(self.marks)]
        return [[(kind, seconds) for kind, _, seconds in self.marks[a:b]] for a, b in pairwise(ends)]

    def _see(self, layer: int, value: Any) -> None:
        """Note a value that can't be sent, looked at in the first micro-batch and when it is of another type."""
        if self._phase == FORWARD and (self._num_forwards == 1 or type(value) is not self._types.get(layer)):
            self._types[layer] = type(value)
            if (what := obstacle(value)) is not None:
                self.obstacles[layer] = what

    def _mark(self, kind: int, layer: int = -1) -> None:
        made_s = self._clock.now_s()
        self._made_s.append(made_s)
        self._labels.append((kind, layer))
        self._stamps.append(self._clock.stamp())
        self._spent_s.append(self._clock.now_s() - made_s)

    def _gradient_ready(self, layer: int, _gradient: Tensor) -> None:
        self._mark(WEIGHT if self._phase == WEIGHT else BACKWARD, layer)  # a whole backward may run as W

    def _metering(self, layer: int) -> AbstractContextManager[Any]:
        if self._meter is None or self._num_forwards != 1 or self._phase != FORWARD:
            return nullcontext()
        return self._meter.hooks(layer)


def _lost_s(made_s: Sequence[float], spent_s: Sequence[float], durations_s: Sequence[float]) -> float:
    """Seconds of the host's work on marks for which the computation waited.

    A device that still has work queued when a mark is made does not wait. How far it is behind the host is what its own
    clock says of the mark, less the host's, counted from the mark at which that is least. A CPU is never behind.

    Args:
        made_s: when the host made each mark.
        spent_s: what it did for it.
        durations_s: from each mark to the next one, in the computation.
    """
    late_s = [there_s - here_s for there_s, here_s in zip(accumulate(durations_s, initial=0.0), made_s, strict=True)]
    least_s = min(late_s)
    return sum(max(0.0, seconds - (late - least_s)) for seconds, late in zip(spent_s, late_s, strict=True))


def _mark_s(recorder: BatchRecorder, num_layers: int = 32, repeats: int = 3) -> float:
    """Seconds by which recording lengthens a layer that does next to nothing, besides those that are timed in a batch.

    A half for each of the layer's two marks.
    """
    @torch.inference_mode(False)
    @torch.enable_grad()
    def seconds(run: Callable[[int, Callable[[Any], Any], Any], Any]) -> float:
        first = x = torch.ones(1, requires_grad=True)
        recorder._spent_s = []
        started_s = recorder._clock.now_s()
        for layer in range(num_layers):
            x = run(layer, torch.neg, x)
        torch.autograd.grad(x, first)
        return recorder._clock.now_s() - started_s - sum(recorder._spent_s)

    seconds(recorder.run)
    with_s = min(seconds(recorder.run) for _ in range(repeats))
    without_s = min(seconds(lambda _, function, x: function(x)) for _ in range(repeats))
    recorder._labels, recorder._stamps, recorder._made_s, recorder._spent_s = [], [], [], []
    recorder._types, recorder.obstacles = {}, {}  # a tensor in host memory could not be sent from a device
    return max(0.0, with_s - without_s) / (2 * num_layers)


def _summarise(
    marks: list[tuple[int, int, float]], micro_batches: list[int], num_forwards: int, split: frozenset[int]
) -> BatchTimes:
    totals: dict[int, dict[int, float]] = {kind: {} for kind in _COMPUTING}
    of_split: dict[int, dict[int, float]] = {kind: {} for kind in _COMPUTING}
    computing = [i for i, (kind, _, _) in enumerate(marks) if kind in totals]
    first, last = (computing[0], computing[-1]) if computing else (0, -1)
    fill_s = waiting_s = step_s = now_s = compute_end_s = 0.0
    for i, (kind, layer, seconds) in enumerate(marks):
        now_s += seconds
        if kind in totals:
            for found in (totals, of_split) if micro_batches[i] in split else (totals,):
                found[kind][layer] = found[kind].get(layer, 0.0) + seconds
            compute_end_s = now_s
        elif kind == TRANSFER and i < first:
            fill_s += seconds
        elif kind == TRANSFER and i < last:
            waiting_s += seconds
        elif kind == STEP:
            step_s += seconds
    first_s, second_s = of_split[BACKWARD], of_split[WEIGHT]
    return BatchTimes(
        forward_s=totals[FORWARD],
        backward_s={
            layer: totals[BACKWARD].get(layer, 0.0) + totals[WEIGHT].get(layer, 0.0)
            for layer in totals[BACKWARD] | totals[WEIGHT]
        },
        num_micro_batches=num_forwards,
        fill_s=fill_s,
        waiting_s=waiting_s,
        compute_end_s=compute_end_s,
        step_s=step_s,
        batch_s=now_s,
        # Where a stage has no inputs that want a gradient, W is the whole backward.
        halves={i: (first_s[i] + second_s.get(i, 0.0), second_s.get(i, 0.0)) for i in first_s},
        num_split=len(split),
    )


class ActivationMeter:
    """Counts the bytes that autograd keeps for the backward of each layer, weights left out.

    Args:
        module: the stage, whose parameters do not count.
        clock: says what counting takes; ``None``: the one in use.

    Attributes:
        num_bytes: by layer.
        seconds: what counting has taken.
    """

    def __init__(self, module: nn.Module, clock: Clock | None = None) -> None:
        self._clock = clock or current_clock()
        self.num_bytes: dict[int, int] = {}
        self.seconds = 0.0
        self._seen = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def count(self, layer: int, tensors: Sequence[Any]) -> None:
        """Count tensors that are kept, each storage once.

        Args:
            layer: whose forward keeps them.
            tensors: tensors, or anything that holds some.
        """
        started_s = self._clock.now_s()
        for tensor in tensors_in(tuple(tensors)):
            storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
            if storage is None or storage.data_ptr() not in self._seen:
                size = tensor.nbytes if storage is None else storage.nbytes()
                self.num_bytes[layer] = self.num_bytes.get(layer, 0) + size
                if storage is not None:
                    self._seen.add(storage.data_ptr())
        self.seconds += self._clock.now_s() - started_s

    def hooks(self, layer: int) -> AbstractContextManager[Any]:
        """Count what autograd keeps inside.

        Args:
            layer: whose forward runs inside.
        """
        def pack(tensor: Tensor) -> Tensor:
            self.count(layer, [tensor])
            # Handing back the output itself would tie it to its own graph in a reference cycle.
            return tensor if tensor.is_leaf else tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


_unpack.gives_what_was_saved = True  # type: ignore[attr-defined]  # a backward may be split although these hooks hold it
