"""Optimizer state that leaves and enters with its parameters, for every optimizer DeepSpeed builds here.

Two kinds exist. A *plain* optimizer (torch, fused or CPU Adam) keeps one state entry a parameter: the
entry moves. A *flat* one (ZeRO-1, bf16) keeps each parameter group as one flat fp32 buffer, sharded over
the data-parallel replicas: a stage whose parameters change gets new buffers, and every parameter's master
weights and moments are copied over. The optimizer objects keep their identity, so that LR schedulers and
users go on holding the right ones.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from typing_extensions import override

from dynpipe_ds.migration.native_adam import count_fused_step, prime_native_adam
from dynpipe_ds.migration.packing import WRAPPER_ATTRIBUTES
from dynpipe_ds.migration.parameter_groups import ParameterGroups

State = dict[str, Any]


class StageOptimizer(ABC):
    """What the engine needs to know of the optimizer on one stage.

    Args:
        engine: the pipeline engine that owns the optimizer.
        groups: the parameter groups all stages agreed on.
    """

    def __init__(self, engine: Any, groups: ParameterGroups) -> None:
        self.engine = engine
        self.groups = groups
        self._before: Any = None  # what rollback() needs; None outside prepare() ... fill()

    @abstractmethod
    def export(self, parameter: nn.Parameter) -> State:
        """State of one parameter, complete, ready to travel; collective over its replicas.

        Args:
            parameter: a parameter of this stage.

        Returns:
            Named tensors in the parameter's shape and scalars; empty if it has none.
        """

    @abstractmethod
    def prepare(self, departed: Iterable[nn.Parameter], arrived: Mapping[nn.Parameter, int]) -> None:
        """Take in the stage's new set of parameters; may run out of memory, communicates nothing.

        Args:
            departed: parameters that leave.
            arrived: group index of each parameter that comes.
        """

    @abstractmethod
    def fill(self, states: Mapping[nn.Parameter, State]) -> None:
        """Write the state of all parameters into what ``prepare`` made; collective over replicas.

        Args:
            states: what ``export`` gave for the parameters that came.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Undo ``prepare``, complete or broken off, bit for bit; nothing to do if it had not begun."""

    @abstractmethod
    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient that the next step will use, before it is reduced over replicas.

        Args:
            parameter: a parameter of this stage.
        """

    @abstractmethod
    def state_bytes(self, parameter: nn.Parameter) -> int:
        """Bytes of optimizer state, master weights included, that this rank holds for a parameter.

        Args:
            parameter: a parameter of this stage.
        """

    def before_step(self) -> None:
        """Get ready for an optimizer step, which follows at once."""
        prime_native_adam(self.groups.optimizer)

    def after_step(self) -> None:
        """Take note of an optimizer step that was not skipped."""
        count_fused_step(self.groups.optimizer)


class PlainOptimizer(StageOptimizer):
    """One state entry a parameter: torch optimizers, DeepSpeed's fused and CPU Adam."""

    @override
    def export(self, parameter: nn.Parameter) -> State:
        return dict(self.groups.optimizer.state.get(parameter, {}))

    @override
    def prepare(self, departed: Iterable[nn.Parameter], arrived: Mapping[nn.Parameter, int]) -> None:
        optimizer, departed = self.groups.optimizer, list(departed)
        self._before = (
            dict(self.groups.index),
            [group["params"] for group in optimizer.param_groups],
            dict(optimizer.state),
        )
        self.groups.replace(departed, arrived)
        self.groups.sort(self.engine.module.parameters())
        self.groups.install(trainable_only=False)
        frozen = [p for p in self.groups.index if not p.requires_grad]
        for parameter in (*departed, *frozen):
            optimizer.state.pop(parameter, None)
            parameter.grad = None

    @override
    def fill(self, states: Mapping[nn.Parameter, State]) -> None:
        for parameter, state in states.items():
            if state:
                self.groups.optimizer.state[parameter] = state
        self._before = None

    @override
    def rollback(self) -> None:
        if self._before is None:
            return
        optimizer = self.groups.optimizer
        self.groups.index, members, state = self._before
        for group, parameters in zip(optimizer.param_groups, members, strict=True):
            group["params"] = parameters
        optimizer.state.clear()
        optimizer.state.update(state)
        self._before = None

    @override
    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad

    @override
    def state_bytes(self, parameter: nn.Parameter) -> int:
        state = self.groups.optimizer.state.get(parameter, {})
        return sum(v.nbytes for v in state.values() if isinstance(v, Tensor))


class FlatOptimizer(StageOptimizer):
    """One flat fp32 buffer a parameter group, sharded over replicas: ZeRO-1 and bf16."""

    @override
    def export(self, parameter: nn.Parameter) -> State:
        if not self._is_flat(parameter):
            return {}
        mapping, flat = parameter._hp_mapping, self._flat_of(parameter)  # type: ignore[attr-defined]
        return _full_state(parameter, mapping, parameter._dp_group, self._flat_state(flat))  # type: ignore[attr-defined]

    @override
    def prepare(self, departed: Iterable[nn.Parameter], arrived: Mapping[nn.Parameter, int]) -> None:
        wrapper, basic = self.engine.optimizer, self.groups.optimizer
        kept_flats = {p: self._flat_of(p) for p in self.groups.index if self._is_flat(p)}
        involved = [*self.groups.index, *arrived, *self.groups.placeholders]
        self._before = (
            dict(self.groups.index),
            [group["params"] for group in basic.param_groups],
            basic.state,
            vars(wrapper),
            [_ParameterSnapshot(p) for p in involved],
        )
        old_states = [dict(state) for state in basic.state.values()]
        for handle in wrapper._grad_acc_hooks:
            handle.remove()
        gone = set(departed)
        self._sources = {
            p: (p._hp_mapping, p._dp_group, self._flat_state(flat))  # type: ignore[attr-defined]
            for p, flat in kept_flats.items()
            if p.requires_grad and p not in gone
        }
        self._template = next((s for s in old_states if s), {})
        for parameter in involved:
            _forget_wrapper(parameter)
        self.groups.replace(gone, arrived)
        self.groups.sort(self.engine.module.parameters())
        self.groups.install(trainable_only=True)
        basic.state = defaultdict(dict)
        with _quiet_and_quick():
            fresh = self._wrap(basic)
        # Sharing one dictionary keeps the identity that schedulers and users hold, while the hooks that
        # `fresh` registered on the parameters, bound to it, go on seeing the same state.
        for name in ("loss_scaler", "dynamic_loss_scale", "custom_loss_scaler", "external_loss_scale"):
            if name in vars(wrapper):
                setattr(fresh, name, vars(wrapper)[name])
        wrapper.__dict__ = fresh.__dict__
        wrapper.register_grad_acc_post_hook(self.engine._backward_post_hook)

    @override
    def fill(self, states: Mapping[nn.Parameter, State]) -> None:
        wrapper, basic = self.engine.optimizer, self.groups.optimizer
        if self._template:
            for flat in self._flats():
                basic.state[flat] = {
                    key: torch.zeros_like(flat, dtype=value.dtype)
                    if isinstance(value, Tensor) and value.numel() > 1
                    else _copy(value)
                    for key, value in self._template.items()
                }
            wrapper._hp_optimizer_states_linked = False
            wrapper._lazy_init_hp_params_optimizer_state()
        for parameter in self.groups.index:
            if not self._is_flat(parameter):
                continue
            if parameter in self._sources:
                state = _full_state(parameter, *self._sources[parameter])
            else:
                state = states.get(parameter) or {}
            _write_state(parameter, state)
        self._sources, self._before = {}, None

    @override
    def rollback(self) -> None:
        if self._before is None:
            return
        basic, wrapper = self.groups.optimizer, self.engine.optimizer
        self.groups.index, members, basic.state, attributes, snapshots = self._before
        wrapper.__dict__ = attributes
        for group, parameters in zip(basic.param_groups, members, strict=True):
            group["params"] = parameters
        for snapshot in snapshots:
            snapshot.restore()
        self._before = None

    @override
    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        if self.engine.using_bf16_optimizer:
            return getattr(parameter, "_hp_grad", None)
        accumulated = getattr(parameter, "grad_accum", None)
        return parameter.grad if accumulated is None else accumulated

    @override
    def state_bytes(self, parameter: nn.Parameter) -> int:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None or not parameter.requires_grad:
            return 0
        flat_state = self._flat_state(self._flat_of(parameter))
        moments = [v for v in flat_state.values() if isinstance(v, Tensor) and v.numel() > 1]
        elements = int(mapping.hp_fragment_address.numel)
        return elements * int(mapping.hp_fragment.element_size() + sum(m.element_size() for m in moments))

    def _wrap(self, basic: torch.optim.Optimizer) -> Any:
        if self.engine.using_bf16_optimizer:
            return self.engine._configure_bf16_optimizer(basic)
        return self.engine._configure_zero_optimizer(basic)

    def _flats(self) -> list[Tensor]:
        return [group["params"][0] for group in self.groups.optimizer.param_groups]

    def _is_flat(self, parameter: nn.Parameter) -> bool:
        return parameter in self.groups.index and hasattr(parameter, "_hp_mapping") and parameter.numel() > 0

    def _flat_of(self, parameter: nn.Parameter) -> Tensor:
        return self._flats()[self.groups.index[parameter]]

    def _flat_state(self, flat: Tensor) -> State:
        state: State = self.groups.optimizer.state.get(flat, {})
        return state


class _ParameterSnapshot:
    """References to all that building a wrapper changes on a parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.data = parameter.data
        self.grad = parameter.grad
        self.attributes = dict(vars(parameter))
        hooks = parameter._post_accumulate_grad_hooks
        self.hooks = None if hooks is None else dict(hooks)

    def restore(self) -> None:
        self.parameter.data = self.data
        self.parameter.grad = self.grad
        vars(self.parameter).clear()
        vars(self.parameter).update(self.attributes)
        hooks = self.parameter._post_accumulate_grad_hooks
        if hooks is not None:
            hooks.clear()
            hooks.update(self.hooks or {})


def _forget_wrapper(parameter: nn.Parameter) -> None:
    for name in WRAPPER_ATTRIBUTES & vars(parameter).keys():
        delattr(parameter, name)
    parameter.grad = None
    if not parameter.requires_grad:
        parameter.data = parameter.data.clone()  # a view would keep the old flat buffer alive


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _full(parameter: nn.Parameter, mapping: Any, fragment: Tensor | None, group: Any) -> Tensor:
    """One flat fp32 tensor for the parameter, put together from its replicas' fragments."""
    if mapping is not None and mapping.lp_fragment_address.numel == parameter.numel():
        assert fragment is not None
        if dist.get_world_size(group) == 1:
            return fragment.detach()
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if mapping is not None and fragment is not None:
        address = mapping.lp_fragment_address
        whole.narrow(0, address.start, address.numel).copy_(fragment.detach())
    dist.all_reduce(whole, group=group)  # every element is in one fragment: adding zeros is exact
    return whole


def _fragment(flat: Tensor, mapping: Any) -> Tensor:
    address = mapping.hp_fragment_address
    return flat.narrow(0, address.start, address.numel)


def _full_state(parameter: nn.Parameter, mapping: Any, group: Any, flat_state: State) -> State:
    state: State = {"master": _full(parameter, mapping, mapping and mapping.hp_fragment, group)}
    for key, value in flat_state.items():
        if isinstance(value, Tensor) and value.numel() > 1:
            # Not mapping.optim_fragment: ZeRO links it after the first group's first step, when the
            # other groups have no state yet, and never again.
            state[key] = _full(parameter, mapping, mapping and _fragment(value, mapping), group)
        else:
            state[key] = value
    return state


def _write_state(parameter: nn.Parameter, state: State) -> None:
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return
    address = mapping.lp_fragment_address
    targets = {"master": mapping.hp_fragment, **(mapping.optim_fragment or {})}
    for key in targets.keys() & state.keys():
        fragment = state[key].view(-1).narrow(0, address.start, address.numel)
        targets[key].detach().copy_(fragment)


@contextlib.contextmanager
def _quiet_and_quick() -> Iterator[None]:
    """Build a DeepSpeed optimizer without its chatter and without its garbage collections.

    ``BF16_Optimizer`` reports memory with ``gc.collect()`` before, after and for every group; freezing
    what is alive keeps those collections from walking the whole process (0.8 s became 0.01 s).
    """
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    freezes = gc.get_freeze_count() == 0  # else the user did it, and unfreezing would undo that too
    if freezes:
        gc.freeze()
    logger.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if freezes:
            gc.unfreeze()


def stage_optimizer(engine: Any, groups: ParameterGroups) -> StageOptimizer:
    """Pick the kind of :class:`StageOptimizer` for the optimizer that DeepSpeed built.

    Args:
        engine: the engine; its ``optimizer`` decides.
        groups: the agreed parameter groups.

    Raises:
        ValueError: if the optimizer is of a kind whose state can't be moved, with the remedy.
    """
    if isinstance(engine.optimizer, BF16_Optimizer | DeepSpeedZeroOptimizer):
        return FlatOptimizer(engine, groups)
    if engine.optimizer is engine.basic_optimizer:
        return PlainOptimizer(engine, groups)
    raise ValueError(
        f"dynamic_pipeline can't move the state of {type(engine.optimizer).__name__}; for fp16 add "
        '"zero_optimization": {"stage": 1}, for bf16 with bf16 accumulation set '
        '"data_types": {"grad_accum_dtype": "fp32"} or leave it out'
    )
