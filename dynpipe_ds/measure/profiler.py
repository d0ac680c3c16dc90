"""From a batch that is run to the profile of it that all ranks share, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from dynpipe_ds.events import Overhead
from dynpipe_ds.measure.clock import Clock
from dynpipe_ds.measure.compiling import compiled_so_far
from dynpipe_ds.measure.gather import BalancingSeconds, LayerSizes, gather_profile, layer_sizes
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.measure.recorder import ActivationMeter, BatchRecorder
from dynpipe_ds.messages.obstacles import agree_on_obstacles
from dynpipe_ds.telling import warn

# Sizes change rarely, and measuring them costs a Python call per saved tensor and parameter.
_SIZES_EVERY = 10

_FELL_BACK = (
    "torch has compiled some code for as many cases as it may (recompile_limit), and runs other cases of it without "
    "compiling: how layers of this rank round then depends on which others are here; raise "
    "torch._dynamo.config.recompile_limit above the number of cases in the whole model (widths, shapes, training and "
    "evaluation, frozen or not), on every rank"
)

T = TypeVar("T")


class MeasuredStage(Protocol):
    """What is measured."""

    module: Any

    @property
    def device(self) -> torch.device:
        """Where the communication back-end works."""

    @property
    def stage_id(self) -> int:
        """Its number."""

    @property
    def partition(self) -> tuple[int, ...]:
        """The present boundaries."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What gradients are summed in."""

    def local_layers(self) -> dict[int, nn.Module]:
        """Live modules by layer index."""

    def state_bytes(self, parameter: nn.Parameter) -> int:
        """Bytes of optimizer state."""


class Measured(NamedTuple):
    """What a batch came to, the same on every rank.

    Attributes:
        profile: of the batch.
        seconds: what balancing took since the profile before.
        obstacles: what layers return that can't be sent to another stage.
    """

    profile: PipelineProfile
    seconds: BalancingSeconds
    obstacles: Mapping[int, str]


class Profiler:
    """Measures batches on this rank and puts all ranks' measurements together.

    Args:
        stage: what is measured.
        overhead: gets the seconds that profiling takes.
        clock: which all seconds are read from.

    Attributes:
        recorder: of the newest measured batch.
        obstacles: what layers return that can't be sent to another stage, as all ranks know it.
    """

    def __init__(self, stage: MeasuredStage, overhead: Overhead, clock: Clock) -> None:
        self._stage = stage
        self._clock = clock
        self._overhead = overhead
        self.recorder = BatchRecorder(clock)
        self.obstacles: dict[int, str] = {}
        self._measure_sizes = True
        self._meter: ActivationMeter | None = None
        self._since = BalancingSeconds()
        self._compile_s = 0.0
        self._is_told = False

    def run(self, run: Callable[[], T], batch: int, last: PipelineProfile | None, *, is_profiled: bool) -> T:
        """Run a batch, with the recorder on if it is profiled, and with a meter of activations when that is due.

        Args:
            run: runs it.
            batch: its number.
            last: the newest profile; ``None`` before the first one.
            is_profiled: whether it is.
        """
        before = compiled_so_far()
        try:
            return self._record(run, batch, last) if is_profiled else run()
        finally:
            after = compiled_so_far()
            self._compile_s = after.seconds - before.seconds
            self._overhead.compiling_s += self._compile_s
            if after.falls_back and not self._is_told:
                self._is_told = True
                warn(_FELL_BACK)

    def _record(self, run: Callable[[], T], batch: int, last: PipelineProfile | None) -> T:
        module = self._stage.module
        is_due = self._measure_sizes or last is None or last.batch // _SIZES_EVERY != batch // _SIZES_EVERY
        self._meter = ActivationMeter(module, self._clock) if is_due else None
        self._measure_sizes = False if is_due else self._measure_sizes
        module.recorder = self.recorder
        self.recorder.start(self._meter)
        try:
            return run()
        finally:
            module.recorder = None

    def finish(self, batch: int, last: PipelineProfile | None) -> Measured:
        """Agree on the profile of the batch that was run; collective over all ranks.

        Args:
            batch: its number.
            last: the newest profile before it.

        Raises:
            ValueError: on every rank, if some rank measured nonsense.
        """
        stage = self._stage
        self._clock.settle()  # what is left of the batch is no cost of profiling
        with self._clock.work("profile") as adding_up:
            sizes, activation_bytes = self._measured_sizes() if last is None or self._meter else _known(last)
            times = self.recorder.stop()
        own_s = self.recorder.recording_s + adding_up.seconds
        gathering_s = self._clock.now_s()
        profile, seconds, obstructing = gather_profile(
            times, sizes, activation_bytes, batch=batch, boundaries=stage.partition,
            names=stage.module.layer_names(), stage=stage.stage_id, device=stage.device,
            spent=self._since._replace(own_s=self._since.own_s + own_s, compile_s=self._compile_s),
            obstacles=self.recorder.obstacles,
        )
        self.obstacles = agree_on_obstacles(obstructing, self.recorder.obstacles, self.obstacles)
        self._since = BalancingSeconds(gather_s=self._clock.now_s() - gathering_s)
        self._overhead.profiling_s += own_s + seconds.gather_s
        return Measured(profile, seconds, self.obstacles)

    def _measured_sizes(self) -> tuple[dict[int, LayerSizes], dict[int, int]]:
        stage = self._stage
        layers = stage.local_layers().items()
        sizes = {i: layer_sizes(layer, stage.state_bytes, stage.gradient_dtype) for i, layer in layers}
        return sizes, {} if self._meter is None else self._meter.num_bytes

    # -- what it costs ------------------------------------------------------------------------

    def count_noting(self, seconds: float) -> None:
        """Note what it took to take in a profile.

        Args:
            seconds: this rank's.
        """
        self._overhead.profiling_s += seconds
        self.count_deciding(seconds)

    def count_deciding(self, seconds: float) -> None:
        """Note what it took to decide to stay: the more, the fewer batches are profiled.

        Args:
            seconds: this rank's.
        """
        self._since = self._since._replace(own_s=self._since.own_s + seconds)

    def count_move(self, seconds: float) -> None:
        """Note what a move took, planning included: all ranks learn it by the next profile.

        Args:
            seconds: this rank's.
        """
        self._since = self._since._replace(move_s=seconds)

    def sizes_changed(self) -> None:
        """Measure what layers occupy anew in the next profiled batch."""
        self._measure_sizes = True

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the next profile reports of the time before, and whether it measures sizes anew; plain values."""
        return {"spent": tuple(map(float, self._since)), "measure_sizes": self._measure_sizes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; empty where it comes from other stages.
        """
        self._since = BalancingSeconds(*state.get("spent", ()))
        self._measure_sizes = state.get("measure_sizes", True)


def _known(profile: PipelineProfile) -> tuple[dict[int, LayerSizes], dict[int, int]]:
    layers = dict(enumerate(profile.layers))
    return {i: _sizes(layer) for i, layer in layers.items()}, {i: layer.activation_bytes for i, layer in layers.items()}


def _sizes(layer: LayerProfile) -> LayerSizes:
    return LayerSizes(layer.num_parameters, layer.parameter_bytes, layer.gradient_bytes, layer.optimizer_state_bytes)
