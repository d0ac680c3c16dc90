"""The state of flat optimizers, and how a stage's optimizer is told which kind it is.

ZeRO-1 and bf16 keep each parameter group as one flat fp32 buffer, sharded over the data-parallel replicas. A stage
whose parameters change gets new buffers (``flat_buffers.py``). With replicas the shares shift: each rank sends what it
has to those that need it (``migration/shards.py``). Only :meth:`FlatOptimizer.export` puts whole states together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from typing_extensions import override

from dynpipe_ds.host.names import PARAMETER_MARKS
from dynpipe_ds.host.optimizers.flat_buffers import GroupBuffers, building
from dynpipe_ds.host.optimizers.groups import Entry, ParameterGroups, State
from dynpipe_ds.host.optimizers.resharding import among_replicas, arrive, description, leave, lies_at, place_text
from dynpipe_ds.host.optimizers.stage_optimizer import (
    NewBuffers,
    Parts,
    PlaceText,
    PlainOptimizer,
    Share,
    StageOptimizer,
)
from dynpipe_ds.host.optimizers.supported import check_flat
from dynpipe_ds.host.optimizers.whole import Source, fragments, full_states, is_moment


class FlatOptimizer(StageOptimizer):
    """One flat fp32 buffer a parameter group, sharded over replicas: ZeRO-1 and bf16.

    Args:
        engine: the pipeline engine that owns the optimizer.
        groups: the parameter groups all stages agreed on.
    """

    def __init__(self, engine: Any, groups: ParameterGroups) -> None:
        super().__init__(engine, groups)
        self._forget_change()

    def _forget_change(self) -> None:
        self._received: dict[nn.Parameter, Tensor] = {}  # memory of those that come
        self._new: Mapping[int, GroupBuffers] = {}
        self._taken: dict[int, GroupBuffers] = {}  # of these, what DeepSpeed took
        self._before = None

    @override
    def export(self, parameters: Sequence[nn.Parameter]) -> list[State]:
        states = dict(full_states({p: self._source(p) for p in parameters if self._is_flat(p)}))
        return [states.get(p, {}) for p in parameters]

    @override
    def shares(self, parameters: Sequence[nn.Parameter]) -> list[Share]:
        return [self._share(p) if self._is_flat(p) else Share({}) for p in parameters]

    def _share(self, parameter: nn.Parameter) -> Share:
        source = self._source(parameter)
        states, shares = fragments([parameter], {parameter: source})
        here = {key: share for _, key, share in shares if share is not None}
        start = int(source[0].lp_fragment_address.start) if here else 0
        return Share({**states[parameter], **here}, frozenset(here), start)

    @override
    def template(self) -> State:
        found = next((state for state in map(self._flat_state, self._flats()) if state), {})
        return {k: value.new_empty(0) if is_moment(value) else value for k, value in found.items()}

    def _source(self, parameter: nn.Parameter) -> Source:
        flat = self._flats()[self.groups.index[parameter]]
        return parameter._hp_mapping, parameter._dp_group, self._flat_state(flat)  # type: ignore[attr-defined]

    @property
    @override
    def shares_out(self) -> bool:
        return any(count > 1 for count in self.engine.optimizer.partition_count)

    @override
    def describe(self, parameters: Sequence[nn.Parameter]) -> list[State]:
        buffers, index = self._buffers(), self.groups.index
        return [description(buffers[index[p]], p) if self._has_share(p) else {} for p in parameters]

    @override
    def make_buffers(
        self, departed: Sequence[nn.Parameter], coming: Sequence[Entry], order: Iterable[nn.Parameter], *,
        is_here: bool = False,
    ) -> NewBuffers:
        old = self._buffers()
        arrived = {e.parameter: e.group for e in coming if e.group is not None}
        members = self.groups.members_after({*departed}, arrived, order)
        new = {i: old[i].after(group) for i, group in enumerate(members) if group}
        states = {e.parameter: e.state for e in coming}
        for i, buffers in new.items():
            for parameter in buffers.members:
                if parameter in old[i].layout.sizes:
                    continue
                if is_here or parameter not in states:
                    buffers.write(parameter, states.get(parameter, {}))
                else:
                    buffers.receive(parameter)
        return NewBuffers(old, new)

    @override
    def places(self, coming: Sequence[Entry], buffers: NewBuffers) -> list[PlaceText | None]:
        return [place_text(buffers, entry) for entry in coming]

    @override
    def parts(
        self, going: Mapping[int, Sequence[tuple[nn.Parameter, PlaceText | None]]],
        coming: Sequence[Entry], buffers: NewBuffers,
    ) -> Parts:
        found = Parts(defaultdict(list), defaultdict(list))
        among_replicas(buffers, found)
        old = buffers.old or self._buffers()
        for rank, pairs in going.items():
            leave([(self.groups.index[p], p, place) for p, place in pairs if self._has_share(p)], rank, old, found)
        arrive(coming, buffers, found)
        return found

    def _buffers(self) -> list[GroupBuffers]:
        wrapper, flats = self.engine.optimizer, self._flats()
        is_bf16 = self.engine.using_bf16_optimizer
        weights = wrapper.bf16_groups_flat if is_bf16 else wrapper.bit16_groups_flat
        gradients = wrapper.fp32_groups_gradients_flat if is_bf16 else [None] * len(flats)
        moments = [
            {k: v for k, v in self._flat_state(flat).items() if isinstance(v, Tensor) and v.shape == flat.shape}
            for flat in flats
        ]
        multiple, rank = wrapper.nccl_start_alignment_factor, dist.get_rank()
        return [
            GroupBuffers(
                members, weight, flat, its_moments, gradient, multiple, self._alignment(members),
                tuple(dist.get_process_group_ranks(group)), rank,
            )
            for members, group, weight, flat, its_moments, gradient in zip(
                self._members(), wrapper.real_dp_process_group, weights, flats, moments, gradients, strict=True
            )
        ]

    def _members(self) -> list[list[nn.Parameter]]:
        wrapper = self.engine.optimizer
        members: list[list[nn.Parameter]] = (
            wrapper.bf16_groups if self.engine.using_bf16_optimizer else wrapper.bit16_groups
        )
        return members

    def _alignment(self, members: Sequence[nn.Parameter]) -> int:
        """Elements to a multiple of which DeepSpeed rounds the offsets of a group's parameters up."""
        if not getattr(self.engine.optimizer, "parameter_alignment", False):
            return 1
        return 16 // math.gcd(16, members[0].element_size())

    @override
    def prepare(
        self, departed: Iterable[nn.Parameter], arrived: Mapping[nn.Parameter, int], buffers: NewBuffers | None = None
    ) -> None:
        wrapper, basic = self.engine.optimizer, self.groups.optimizer
        self._new = (buffers or NewBuffers()).new
        involved = [*self.groups.index, *arrived, *self.groups.placeholders]
        self._before = self.groups.snapshot(), basic.state, vars(wrapper), [_ParameterSnapshot(p) for p in involved]
        old_states = [dict(state) for state in basic.state.values()]
        for handle in wrapper._grad_acc_hooks:
            handle.remove()
        self._received = {p: p.data for p in arrived}
        for parameter in involved:
            _forget_wrapper(parameter)
        self.groups.replace(departed, arrived)
        for parameter in self.groups.index.keys() - arrived:
            if not parameter.requires_grad and parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.data.clone()  # a view would keep the old flat buffer alive
        self.groups.sort(self.engine.module.parameters())
        self.groups.install(trainable_only=True)
        basic.state = defaultdict(dict)
        # With optimizers on the host DeepSpeed keeps what it makes its gradients of.
        with building([] if getattr(wrapper, "cpu_offload", False) else self._new.values()):
            fresh = self._wrap(basic)
        # Sharing one dictionary keeps the identity that schedulers and users hold, while the hooks that
        # `fresh` registered on the parameters, bound to it, go on seeing the same state.
        for name in ("loss_scaler", "dynamic_loss_scale", "custom_loss_scaler", "external_loss_scale"):
            if name in vars(wrapper):
                setattr(fresh, name, vars(wrapper)[name])
        wrapper.__dict__ = fresh.__dict__
        wrapper.register_grad_acc_post_hook(self.engine._backward_post_hook)
        flats = self._flats()
        self._taken = {i: b for i, b in self._new.items() if b.master.data_ptr() == flats[i].data_ptr()}
        template = next((state for state in old_states if state), None)
        if template is not None:
            self.make_states([template] * len(flats))
        self._check_layout()

    def _check_layout(self) -> None:
        """Make sure that DeepSpeed's buffers lie as was planned, since what travels was cut accordingly."""
        for i, buffers in self._new.items():
            planned, members = buffers.layout.places, self._members()[i]
            same = list(map(id, members)) == list(map(id, planned)) and self._flats()[i].numel() == buffers.layout.share
            if not same or not all(lies_at(p, planned[p], buffers.rank) for p in members):
                raise RuntimeError(
                    f"DeepSpeed lays parameter group {i} out otherwise than planned ({len(members)} parameters in "
                    f"shares of {self._flats()[i].numel()}, planned were {len(planned)} in {buffers.layout.share})"
                )

    def make_states(self, templates: Sequence[State]) -> None:
        """Give every flat buffer an entry of optimizer state, which is then to be filled unless the buffer was given.

        Args:
            templates: of each buffer, an entry with the same names and kinds of values, such as a parameter's.
        """
        wrapper, basic = self.engine.optimizer, self.groups.optimizer
        for i, (flat, template) in enumerate(zip(self._flats(), templates, strict=True)):
            moments = self._taken[i].moments if i in self._taken else {}
            basic.state[flat] = {
                key: moments[key] if key in moments else _like(value, flat)
                for key, value in template.items() if key != "master"
            }
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()

    @override
    def commit(self) -> None:
        self._copy_what_came()
        for buffers in self._taken.values():
            buffers.clear_padding()  # until now it may have been a parameter's that leaves
        self._forget_change()

    def _copy_what_came(self) -> None:
        """Weights and state into memory that DeepSpeed made, where it did not take what was prepared."""
        for parameter, received in self._received.items():
            if parameter.numel() and parameter.data_ptr() != received.data_ptr():
                parameter.data.copy_(received)
        for i, buffers in self._new.items():
            if i not in self._taken:
                flat = self._flats()[i]
                for key, value in buffers.state.items():
                    target = flat.detach() if key == "master" else self._flat_state(flat)[key]
                    target[: buffers.share_used].copy_(value[: buffers.share_used])

    @override
    def rollback(self) -> None:
        if self._before is None:
            return
        groups, self.groups.optimizer.state, self.engine.optimizer.__dict__, parameters = self._before
        self.groups.put_back(groups)
        for parameter in parameters:
            parameter.restore()
        self._forget_change()

    @override
    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        if self.engine.using_bf16_optimizer:
            return getattr(parameter, "_hp_grad", None)
        accumulated = getattr(parameter, "grad_accum", None)
        return parameter.grad if accumulated is None else accumulated

    @override
    def put_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        wrapper, gradient = self.engine.optimizer, gradient.detach()
        if not self.engine.using_bf16_optimizer:
            copied = gradient.to(self.engine.get_data_types()[1], copy=True)
            setattr(parameter, "grad_accum" if wrapper.use_grad_accum_attribute else "grad", copied)
            return
        i = self.groups.index[parameter]
        j = next(j for j, member in enumerate(wrapper.bf16_groups[i]) if member is parameter)
        parameter._hp_grad = wrapper.fp32_groups_gradients[i][j]  # type: ignore[attr-defined]
        wrapper.fp32_groups_gradients[i][j].copy_(gradient.view(-1))
        wrapper.fp32_groups_has_gradients[i][j] = True

    @override
    def state_bytes(self, parameter: nn.Parameter) -> int:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None or not parameter.requires_grad:
            return 0
        flat_state = self._source(parameter)[-1]
        moments = [v for v in flat_state.values() if is_moment(v)]
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

    def _has_share(self, parameter: nn.Parameter) -> bool:
        """Whether it is trained, and was when the buffers were made."""
        return parameter.requires_grad and self._is_flat(parameter)

    def _flat_state(self, flat: Tensor) -> State:
        state: State = self.groups.optimizer.state.get(flat, {})
        return state


@dataclass(frozen=True)
class Pieces:
    """One flat tensor as the consecutive pieces it was stored in, so that a rank reads only its own share.

    Attributes:
        tensors: the pieces, of one dimension.
    """

    tensors: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """That of all pieces."""
        return self.tensors[0].dtype

    @property
    def num_elements(self) -> int:
        """Elements of all pieces."""
        return sum(piece.numel() for piece in self.tensors)

    def copy_to(self, target: Tensor, start: int) -> None:
        """Fill a flat tensor with as many elements as it has, from position ``start`` of the whole on."""
        position = 0
        for piece in self.tensors:
            low, high = max(start, position), min(start + target.numel(), position + piece.numel())
            if low < high:
                target[low - start : high - start].copy_(piece[low - position : high - position])
            position += piece.numel()


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
    for name in PARAMETER_MARKS & vars(parameter).keys():
        delattr(parameter, name)
    parameter.grad = None


def _like(value: Any, flat: Tensor) -> Any:
    """An entry of a flat parameter's state before it is filled."""
    if isinstance(value, Pieces) or is_moment(value):
        return torch.zeros_like(flat, dtype=value.dtype)
    return value.clone() if isinstance(value, Tensor) else value


def write_state(parameter: nn.Parameter, state: State) -> None:
    """Fill this rank's share of a parameter's master weights and moments.

    Args:
        parameter: of this stage.
        state: complete, as tensors or as :class:`Pieces`; what it lacks is left as it is.
    """
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return
    address = mapping.lp_fragment_address
    for key, target in {"master": mapping.hp_fragment, **(mapping.optim_fragment or {})}.items():
        value, target = state.get(key), target.detach()
        if isinstance(value, Pieces):
            value.copy_to(target.view(-1), address.start)
        elif value is not None:
            target.copy_(value.view(-1).narrow(0, address.start, address.numel))


def stage_optimizer(engine: Any, groups: ParameterGroups) -> StageOptimizer:
    """Pick the kind of :class:`StageOptimizer` for the optimizer that DeepSpeed built; collective over all ranks.

    Raises:
        ValueError: if the optimizer is of a kind whose state can't be moved, with the remedy.
    """
    if isinstance(engine.optimizer, BF16_Optimizer | DeepSpeedZeroOptimizer):
        check_flat(engine, groups)
        return FlatOptimizer(engine, groups)
    if engine.optimizer is engine.basic_optimizer:
        return PlainOptimizer(engine, groups)
    raise ValueError(
        f"dynamic_pipeline can't move the state of {type(engine.optimizer).__name__}; for fp16 add "
        '"zero_optimization": {"stage": 1}, for bf16 with bf16 accumulation set '
        '"data_types": {"grad_accum_dtype": "fp32"} or leave it out'
    )
