"""Keeping what a frozen prefix puts out, so that a batch that comes again skips it.

After Egeria's cache (Wang et al., EuroSys 2023) and AutoFreeze's (Liu et al. 2021), which key it by
sample. Here a key is a whole batch in a fixed order of data: the sums inside a matrix product may depend on a
sample's place in its micro-batch, and so would the last bits.

A batch that is cached at layer ``c`` passes the layers before ``c`` as it is (tokens, over stage boundaries
too); layer ``c`` puts out what it kept; layers behind it compute. What a layer keeps is an attribute of that
layer and moves with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from scenarios.gpt import Activation, Block, Embedding, GPTConfig, Head
from scenarios.scenario import Engine, gather_by_layer


class Role(Enum):
    """What a layer does in a batch."""

    COMPUTE = "compute"
    SKIP = "pass the input on"
    LOAD = "put out what was kept"
    STORE = "compute and keep"


@dataclass
class ActivationCache:
    """Outputs of one layer by batch, and what the layer does in the present batch.

    Attributes:
        batches: a batch's place in the period, to the output of each of its micro-batches.
        num_bytes: size of all outputs.
        role: what the layer does now.
        batch: place in the period of the present batch.
        position: micro-batches of it that the layer has seen.
        free_bytes: how much more may be kept.
    """

    batches: dict[int, list[Activation]] = field(default_factory=dict)
    num_bytes: int = 0
    role: Role = Role.COMPUTE
    batch: int = 0
    position: int = 0
    free_bytes: int = 0

    def begin(self, role: Role, batch: int, free_bytes: int = 0) -> None:
        """Take a role for the present batch."""
        self.role, self.batch, self.position, self.free_bytes = role, batch, 0, free_bytes

    def load(self, like: Activation) -> Activation:
        """Return what was kept of the next micro-batch, on the device of another activation."""
        kept = self.batches[self.batch]
        if self.position == len(kept):
            raise RuntimeError(
                f"a batch of {len(kept)} micro-batches was cached, but it has more now: a cache of the frozen "
                "prefix needs batches that are always the same"
            )
        self.position += 1
        device = _tensors(like)[0].device
        return _map(lambda tensor: tensor.to(device, non_blocking=True), kept[self.position - 1])

    def store(self, output: Activation) -> None:
        """Keep the output of the next micro-batch, or give the batch up if there is no room for it."""
        size = _size(output)
        if size > self.free_bytes:
            self.drop(self.batch)
            self.role = Role.COMPUTE
            return
        # On the CPU this is the tensor itself: nobody writes to an activation.
        self.batches.setdefault(self.batch, []).append(_map(lambda tensor: tensor.detach().cpu(), output))
        self.num_bytes += size
        self.free_bytes -= size

    def drop(self, batch: int) -> None:
        """Forget a batch, if it is there."""
        for output in self.batches.pop(batch, []):
            self.num_bytes -= _size(output)

    def clear(self) -> None:
        """Forget all batches."""
        self.batches.clear()
        self.num_bytes = 0

    def size_of(self, batch: int) -> int:
        """Return the bytes that a batch takes; 0 if it is not there."""
        return sum(map(_size, self.batches.get(batch, [])))


def _tensors(activation: Activation) -> tuple[Tensor, ...]:
    return (activation,) if isinstance(activation, Tensor) else activation


def _map(function: Callable[[Tensor], Tensor], activation: Activation) -> Activation:
    if isinstance(activation, Tensor):
        return function(activation)
    stream, extra_loss = activation
    return function(stream), function(extra_loss)


def _size(activation: Activation) -> int:
    return sum(tensor.nbytes for tensor in _tensors(activation))


def _forget(layer: nn.Module, _keys: object) -> None:
    """Drop what a layer has put out with other weights than those it was just given."""
    assert isinstance(layer, Cacheable)
    layer.activations.clear()


class Cacheable(nn.Module):
    """Mixed into a layer's class: the layer can be skipped, and keep what it puts out."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.activations = ActivationCache()
        self.register_load_state_dict_post_hook(_forget)

    def forward(self, activation: Activation) -> Activation:
        """Do what the role says; in :attr:`Role.SKIP` and :attr:`Role.LOAD` the input may be anything."""
        kept = self.activations
        if kept.role is Role.SKIP:
            return activation
        if kept.role is Role.LOAD:
            return kept.load(activation)
        output: Activation = super().forward(activation)
        if kept.role is Role.STORE:
            kept.store(output)
        return output


class CacheableEmbedding(Cacheable, Embedding):
    """An embedding that can be skipped."""


class CacheableBlock(Cacheable, Block):
    """A block that can be skipped."""


_CACHEABLE = {Embedding: CacheableEmbedding, Block: CacheableBlock}


def cacheable_layers(model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
    """Replace the layers of a plain GPT by ones that can be skipped.

    Args:
        model: the model's size and kind.
        layers: embedding, blocks and head as ``gpt_layers`` lists them.

    Raises:
        ValueError: if a layer need not answer twice alike: dropout, or another scenario's layers.
    """
    if model.dropout:
        raise ValueError(
            f"scenario.cache=true does not go with model.dropout={model.dropout}: a layer with dropout never "
            "answers twice alike; set model.dropout=0"
        )
    others = sorted({s.typename.__name__ for s in layers if s.typename not in (*_CACHEABLE, Head)})
    if others:
        raise ValueError(
            f"scenario.cache=true does not go with layers that change while they are frozen ({', '.join(others)}): "
            "set cache=false where freezing is combined with another scenario"
        )
    return [
        LayerSpec(_CACHEABLE.get(s.typename, s.typename), *s.module_args, **s.module_kwargs) for s in layers
    ]


class PrefixCache:
    """Decides, alike on every rank, what the frozen layers do in a batch.

    Args:
        budget_bytes: most that one replica of the model keeps, on all its stages together.

    Attributes:
        period: batches after which the same ones come again.
        num_skipped: leading layers that did not compute in the last batch.
    """

    def __init__(self, *, budget_bytes: int) -> None:
        self.period = 1
        self.num_skipped = 0
        self._budget_bytes = budget_bytes
        self._last = -1

    def begin(self, engine: Engine, batch: int, num_frozen: int) -> None:
        """Give the local layers their roles; collective when anything is frozen.

        The batch starts at the last frozen layer that has it on every replica. The last layer of the prefix
        keeps it, in place of the layer that had it, as far as the budget goes. Batches are not exchanged for
        others when it is used up: where they come in turns, the one that goes is needed before the new one.

        Args:
            engine: holds the local layers.
            batch: index of the batch, from 0.
            num_frozen: leading layers that are frozen.
        """
        self.num_skipped, self._last = 0, num_frozen - 1
        if not num_frozen:
            return
        place, layers = batch % self.period, _caches(engine)
        rows = {i: (place in kept.batches, kept.num_bytes, kept.size_of(place)) for i, kept in layers.items()}
        table = gather_by_layer(engine, rows, 3) / _ranks_a_stage(engine)
        has_it, num_bytes, size = table.T.tolist()
        first = max((i for i in range(num_frozen) if has_it[i] == 1), default=-1)
        free_bytes = self._budget_bytes - int(sum(num_bytes)) + int(size[first] if first >= 0 else 0)
        self.num_skipped = first + 1
        for index, kept in layers.items():
            if index < first:
                kept.begin(Role.SKIP, place)
            elif index == first:
                kept.begin(Role.LOAD, place)
            elif index == self._last:
                kept.drop(place)
                kept.begin(Role.STORE, place, free_bytes)

    def end(self, engine: Engine) -> None:
        """Let the local layers compute again (in an evaluation, say)."""
        for index, kept in _caches(engine).items():
            if kept.role is Role.LOAD and index < self._last:
                kept.drop(kept.batch)  # a later layer has it now
            kept.begin(Role.COMPUTE, kept.batch)

    def forget_behind(self, engine: Engine, num_frozen: int) -> None:
        """Forget what layers that train have put out.

        Args:
            engine: holds the local layers.
            num_frozen: leading layers that are frozen.
        """
        for index, kept in _caches(engine).items():
            if index >= num_frozen:
                kept.clear()


def _caches(engine: Engine) -> dict[int, ActivationCache]:
    """List the caches of the local layers by layer; after a move these are other ones."""
    local = engine.local_layers().items()
    return {index: layer.activations for index, layer in local if isinstance(layer, Cacheable)}


def _ranks_a_stage(engine: Engine) -> int:
    num_stages = len(engine.partition) - 1
    return dist.get_world_size() // num_stages if dist.is_initialized() else 1
