"""What layers refer to but do not own: it stays where it is, and a moved layer finds the receiver's own."""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule, MigrationError
from dynpipe_ds.migration.packing import PackingError
from tests.distributed.configs import BF16, BY_HAND, EVEN, UNCLIPPED
from tests.distributed.models import HIDDEN, Embed, Head, Run, base_config, data, digest, loss_fn
from tests.distributed.ranks import run_ranks

LOCK = threading.Lock()
BATCHES = 6
CUTS = {1: (0, 2, 3, 8), 2: (0, 5, 7, 8), 3: (0, 1, 6, 8), 4: (0, 3, 6, 8)}


class Settings:
    """As an argument namespace: the script changes it while it trains."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.calls = 0
        self.rank = dist.get_rank()
        self.group = dist.new_group(range(dist.get_world_size()))


class Table(nn.Module):
    """Shared by all members, and not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.full((HIDDEN,), 0.01), requires_grad=False)
        self.register_buffer("rotation", torch.linspace(0, 1, HIDDEN))


class Member(nn.Module):
    """A layer as large code bases write them."""

    def __init__(self, settings: Settings, model: nn.Module, table: Table, counts: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.linear.bias.stride = 1  # type: ignore[method-assign, assignment]
        self.settings, self._model, self.table, self.lock = settings, [model], table, LOCK
        self.log = logging.getLogger("member")
        self.counts = counts
        self.act = lambda x: torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.settings.calls += 1
        with self.lock:
            shift = self.table.offset.to(x.dtype) * self.table.rotation.to(x.dtype)
            return x + self.settings.scale * self.act(x) + shift


def local_member() -> type[Member]:
    class Local(Member):
        """Has a name only in the layer list."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.group = self.settings.group

    return Local


class Script:
    """What a user's start script holds."""

    def __init__(self, base: type, config: dict[str, Any] | None = None, counts: bool = False) -> None:
        torch.manual_seed(5)
        self.settings, self.table = Settings(), Table()
        self.model = nn.ModuleList([nn.Linear(4, 4, device="meta"), nn.Linear(4, 4)])
        kinds = [Member, local_member()] * 3
        member = [LayerSpec(kind, self.settings, self.model, self.table, counts=counts) for kind in kinds]
        self.engine = initialize(base, [LayerSpec(Embed), *member, LayerSpec(Head)], config)

    def train(self, moves: dict[int, tuple[int, ...]]) -> list[float]:
        batches, losses = data(0, 4), []
        for batch in range(BATCHES):
            self.settings.scale = 1.0 + 0.1 * batch
            if batch in moves:
                self.engine.repartition(moves[batch])
            losses.append(float(self.engine.train_batch(batches)))
        return losses

    def check_identities(self) -> None:
        for index, layer in self.engine.local_layers().items():
            if isinstance(layer, Member):
                assert layer.settings is self.settings and layer._model[0] is self.model
                assert layer.table is self.table and layer.lock is LOCK and layer.log is logging.getLogger("member")
                assert getattr(layer, "group", self.settings.group) is self.settings.group
                assert isinstance(layer, self.engine.module._layer_specs[index].typename)
                assert layer.act.__closure__[0].cell_contents is layer and layer.linear.bias.stride == 1


def initialize(
    base: type, layers: list[Any], config: dict[str, Any] | None = None, first: tuple[int, ...] = EVEN[3]
) -> Any:
    module = base(
        layers, num_stages=len(first) - 1, loss_fn=loss_fn, seed_layers=True,
        partition_method=list(first) if base is DynamicPipelineModule else "uniform",
    )
    settings = base_config(Run(num_stages=len(first) - 1, config=config or {}), 1)
    if base is PipelineModule:
        settings.pop("dynamic_pipeline")
    engine, *_ = deepspeed.initialize(model=module, config=settings)
    return engine


def three_ways(_rank: int, config: dict[str, Any]) -> list[tuple[list[float], dict[str, str]]]:
    found = []
    for base, moves in ((PipelineModule, {}), (DynamicPipelineModule, {}), (DynamicPipelineModule, CUTS)):
        script = Script(base, config)
        losses = script.train(moves)
        if base is DynamicPipelineModule:
            script.check_identities()
        found.append((losses, digest(script.engine) if base is DynamicPipelineModule else {}))
    return found


BF16_ZERO1 = {**UNCLIPPED, **BF16, "zero_optimization": {"stage": 1}}
FP32_OR_BF16 = [UNCLIPPED, pytest.param(BF16_ZERO1, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("config", FP32_OR_BF16, ids=["fp32", "bf16"])
def test_moved_layers_find_the_receivers_own(config: dict[str, Any]) -> None:
    for deepspeeds, static, moving in run_ranks(three_ways, 3, config):
        assert static == moving
        assert deepspeeds[0] == static[0]


# -- what is told -----------------------------------------------------------------------------


def count_calls(_rank: int) -> list[str]:
    script = Script(DynamicPipelineModule, counts=True)
    batches = data(0, 4)
    script.engine.train_batch(batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script.engine.repartition((0, 2, 6, 8))
    return [str(w.message) for w in caught if "settings" in str(w.message) or "calls" in str(w.message)]


def test_a_value_that_training_changed_on_one_rank_is_named() -> None:
    texts = run_ranks(count_calls, 3)
    assert texts[0] == texts[2] == []
    (text,) = texts[1]
    assert "layer 2 (Local): specs[1].module_args[0].calls, which the layer refers to, is 12 here and 8 on" in text


class Biased(nn.Module):
    """As GPT-NeoX's layers with ``rpe``: a module of the arguments is part of every one."""

    def __init__(self, rpe: nn.Module) -> None:
        super().__init__()
        self.rpe, self.linear = rpe, nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rpe(self.linear(x))


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = {"at": [x for x in (1, 2)], "next": (x for x in (1, 2))}

    def forward(self, x: Tensor) -> Tensor:
        return x


EMBEDDED = nn.Linear(HIDDEN, HIDDEN)


def refusals(_rank: int) -> dict[str, str]:
    rpe, found = nn.Linear(HIDDEN, HIDDEN), {}
    global EMBEDDED
    EMBEDDED = nn.Linear(HIDDEN, HIDDEN)

    class OfModule(Biased):
        def __init__(self) -> None:
            super().__init__(EMBEDDED)

    kinds = {
        "rpe": [LayerSpec(Biased, rpe=rpe) for _ in range(6)],
        "global": [LayerSpec(OfModule) for _ in range(6)],
        "generator": [LayerSpec(Biased, nn.Identity()) for _ in range(5)] + [LayerSpec(Stateful)],
        "live": [Nameless() for _ in range(6)],
    }
    for kind, layers in kinds.items():
        with pytest.raises((ValueError, PackingError)) as caught:
            initialize(DynamicPipelineModule, [LayerSpec(Embed), *layers, LayerSpec(Head)])
        found[kind] = str(caught.value)
    return found


class Nameless(nn.Linear):
    def __init__(self) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.act = lambda x: x + self.bias


def test_what_cannot_be_right_or_cannot_move_is_refused_at_start() -> None:
    texts = run_ranks(refusals, 3)
    assert texts[0] == texts[1] == texts[2]
    found = texts[0]
    assert found["rpe"].startswith(
        "layers 1 (Biased) and 2 (Biased) both hold specs[1].module_kwargs['rpe'].bias, which is trained"
    )
    assert "(OfModule) both hold tests.distributed.test_surroundings.EMBEDDED" in found["global"]
    assert "rank 2: PackingError: layer 6 (Stateful) can't be carried" in found["generator"]
    assert "position['next'] holds a builtins.generator" in found["generator"]
    assert "rank 0: PackingError: layer 1 (Nameless) can't be carried" in found["live"]
    assert "act holds the function Nameless.__init__.<locals>.<lambda>, which has no name" in found["live"]


# -- live layers ------------------------------------------------------------------------------


class Live(nn.Module):
    def __init__(self, settings: Any, table: nn.Module) -> None:
        super().__init__()
        self.settings, self.table, self.linear = settings, table, nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.settings.scale * self.linear(x) + self.table.offset


def live_class() -> type[Live]:
    class Local(Live):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.act = lambda x: torch.tanh(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(super().forward(x))

    return Local


def train_live(_rank: int) -> list[list[float]]:
    runs = []
    for moves in ({}, CUTS):
        torch.manual_seed(5)
        settings, table = Settings(), Table()
        layers = [Embed(), *(live_class()(settings, table) for _ in range(6)), Head()]
        engine, losses, batches = initialize(DynamicPipelineModule, layers), [], data(0, 4)
        for batch in range(BATCHES):
            settings.scale = 1.0 + 0.1 * batch
            if batch in moves:
                engine.repartition(moves[batch])
            losses.append(float(engine.train_batch(batches)))
        members = [layer for layer in engine.local_layers().values() if isinstance(layer, Live)]
        assert all(layer.settings is settings and layer.table is table for layer in members)
        runs.append(losses)
    return runs


def test_what_live_layers_share_is_the_receivers_own() -> None:
    for static, moving in run_ranks(train_live, 3):
        assert static == moving


# -- parts of the script's model ---------------------------------------------------------------


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.adapter = nn.Linear(HIDDEN, HIDDEN), nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.linear(x) + getattr(self.adapter, "factor", 1.0) * self.adapter(x)


class Wrapped(nn.Module):
    """As in qlora-pipe: a part of the model is the layer's own, and the script reaches it through the model."""

    def __init__(self, model: nn.ModuleList, index: int) -> None:
        super().__init__()
        self.part, self._model = model[index], [model]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.part(x))


def train_parts(_rank: int) -> list[list[float]]:
    runs = []
    for moves in ({}, CUTS):
        torch.manual_seed(5)
        model = nn.ModuleList(Part() for _ in range(6))
        specs = [LayerSpec(Embed), *(LayerSpec(Wrapped, model, i) for i in range(6)), LayerSpec(Head)]
        engine, losses, batches = initialize(DynamicPipelineModule, specs), [], data(0, 4)
        for batch in range(BATCHES):
            for part in model:
                part.factor, part.adapter.factor = 1.0 + 0.1 * batch, float(batch % 2)
            if batch in moves:
                if batch == 2:
                    fail_once(engine, moves[batch])
                engine.repartition(moves[batch])
            losses.append(float(engine.train_batch(batches)))
        layers = engine.local_layers()
        assert all(layer.part is model[index - 1] for index, layer in layers.items() if isinstance(layer, Wrapped))
        runs.append(losses)
    return runs


class Both(nn.Module):
    """Embedding and head out of one model, as in llama-pipeline-parallel."""

    def __init__(self, model: nn.ModuleDict) -> None:
        super().__init__()
        self.embed = model["embed"]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)


def as_logits(module: Both, x: Tensor) -> Tensor:
    return x @ module.embed.weight.t()


def train_tied_parts(_rank: int) -> list[list[float]]:
    runs = []
    for moves in ({}, {1: (0, 6, 6), 2: (0, 0, 6), 3: (0, 2, 6), 4: (0, 6, 6), 5: (0, 4, 6)}):
        torch.manual_seed(5)
        model = nn.ModuleDict({"embed": Embed(), "blocks": nn.ModuleList(Part() for _ in range(4))})
        tied = partial(TiedLayerSpec, "ends", Both, model, tied_weight_attr="embed.weight")
        specs = [tied(), *(LayerSpec(Wrapped, model["blocks"], i) for i in range(4)), tied(forward_fn=as_logits)]
        engine = initialize(DynamicPipelineModule, specs, {"dynamic_pipeline": EMPTY}, (0, 3, 6))
        losses, batches = [], data(0, 4)
        for batch in range(BATCHES):
            if batch in moves:
                engine.repartition(moves[batch])
            losses.append(float(engine.train_batch(batches)))
            layers = engine.local_layers()
            if {0, 5} <= layers.keys():
                assert layers[0].embed is not layers[5].embed
                assert torch.equal(layers[0].embed.weight, layers[5].embed.weight)
        runs.append(losses)
    return runs


EMPTY = {**BY_HAND, "allow_empty_stages": True}


def test_tied_parts_of_one_model_keep_weights_of_their_own() -> None:
    """On an empty stage both ends find the same part of the model; only one of them can be it."""
    for static, moving in run_ranks(train_tied_parts, 2):
        assert static == moving


def fail_once(engine: Any, cut: tuple[int, ...]) -> None:
    """A move that is undone after the layers were put together."""
    broken = patch.object(engine.module, "install", side_effect=[MemoryError("no room"), None])
    with pytest.raises(MigrationError), broken if engine.stage_id == 1 else nullcontext():
        engine.repartition(cut)


def test_what_the_script_does_to_its_model_reaches_layers_that_have_moved() -> None:
    for static, moving in run_ranks(train_parts, 3):
        assert static == moving


# -- hooks ------------------------------------------------------------------------------------


def halve(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output / 2


def triple(gradient: Tensor) -> Tensor:
    return gradient * 3


def train_with_hooks(moves: dict[int, tuple[int, ...]]) -> tuple[list[float], list[int]]:
    """Hooks of layer 2, registered on the first rank, and removed there after batch 3, wherever the layer is."""
    script = Script(DynamicPipelineModule)
    handles, batches, losses, numbers = [], data(0, 4), [], []
    if 2 in script.engine.local_layers():
        layer: Any = script.engine.local_layers()[2]
        handles = [layer.linear.register_forward_hook(halve), layer.linear.weight.register_hook(triple)]
    for batch in range(BATCHES):
        if batch in moves:
            script.engine.repartition(moves[batch])
        if batch == 4:
            for handle in handles:
                handle.remove()
        losses.append(float(script.engine.train_batch(batches)))
        for index, layer in script.engine.local_layers().items():
            if index == 2:
                numbers.append(len(layer.linear._forward_hooks) + len(layer.linear.weight._backward_hooks or ()))
    return losses, numbers


def static_and_moving(_rank: int, moves: dict[int, tuple[int, ...]]) -> Any:
    return train_with_hooks({}), train_with_hooks(moves)


def test_a_handle_removes_its_hook_from_a_layer_that_has_moved() -> None:
    moves = {1: (0, 2, 6, 8), 2: (0, 1, 2, 8)}
    static, moving = zip(*run_ranks(static_and_moving, 3, moves), strict=True)
    assert [losses for losses, _ in static] == [losses for losses, _ in moving]
    assert [numbers for _, numbers in static] == [[2, 2, 2, 2, 0, 0], [], []]
    assert [numbers for _, numbers in moving] == [[2], [2], [2, 2, 0, 0]]


# -- errors -----------------------------------------------------------------------------------


def fail_while_packing(rank: int) -> str:
    script = Script(DynamicPipelineModule)
    batches = data(0, 4)
    script.engine.train_batch(batches)
    if rank == 0:
        script.engine.local_layers()[2].linear.guard = (x for x in ())
    with pytest.raises(MigrationError) as caught:
        script.engine.repartition((0, 2, 6, 8))
    if rank == 0:
        del script.engine.local_layers()[2].linear.guard
    script.engine.repartition((0, 2, 6, 8))
    script.engine.train_batch(batches)
    return str(caught.value)


def test_only_the_rank_that_failed_to_pack_says_why() -> None:
    texts = run_ranks(fail_while_packing, 3)
    assert texts[0] == texts[1] == texts[2]
    assert "rank 0: PackingError: layer 2 (Local) can't be carried to another process: linear.guard holds" in texts[0]
    assert "rank 1" not in texts[0] and "rank 2" not in texts[0]


# -- what is shared without a name ------------------------------------------------------------


@lru_cache
def cached() -> dict[str, list[int]]:
    return {"seen": [0]}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind = np.dtype("float32")
        self.memory = cached()

    def forward(self, x: Tensor) -> Tensor:
        return x


def warned_at_start(_rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        initialize(DynamicPipelineModule, [LayerSpec(Embed), *(LayerSpec(Holder) for _ in range(6)), LayerSpec(Head)])
    return [str(w.message) for w in caught if "hold the same" in str(w.message)]


def test_what_layers_share_without_a_name_is_named() -> None:
    texts = run_ranks(warned_at_start, 3)
    assert "layer 1 (Holder) at memory and layer 2 (Holder) at memory hold the same dict" in texts[0][0]
    assert [len(found) for found in texts] == [1, 2, 0]
