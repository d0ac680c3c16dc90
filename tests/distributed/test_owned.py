"""Parameters that one replica owns: trained by it alone, counted once in the norm, the same bits whatever the cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule, ParameterReplacement, Replica
from dynpipe_ds.host.passing import BatchRefused
from dynpipe_ds.owning import owner_of
from tests.distributed import models, owned
from tests.distributed.clients import compile_first
from tests.distributed.configs import ADAMW, BF16, BF16_FP32_SUMS, CLIP, FP16, SGD, UNCLIPPED, WARMUP, ZERO
from tests.distributed.models import HIDDEN, Run, data, digest, loss_fn, make_engine, train
from tests.distributed.owned import Known, Own, Shared, Unowned, Whole
from tests.distributed.ranks import run_ranks
from tests.distributed.splitting import AT_THE_END, compare_with_1f1b
from tests.distributed.ways import assert_same_bits, at_cuts, train_ways
from tests.matrix import mostly

MODES: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "sgd": SGD,
    "zero1": {**ADAMW, **ZERO},
    "zero1_where_they_are": {**ADAMW, "zero_optimization": {"stage": 1, "contiguous_gradients": False}},
    "zero1_in_one_piece": {**ADAMW, "zero_optimization": {"stage": 1, "reduce_scatter": False}},
    "fp16_zero1": {**ADAMW, **ZERO, **FP16},
    "bf16": {**ADAMW, **BF16},
    "bf16_zero1": {**ADAMW, **BF16, **ZERO},
    "bf16_zero1_fp32_sums": {**ADAMW, **BF16_FP32_SUMS},
}
OWNED = {1: Shared, 3: Shared, 4: Own}
AS_THEY_ARE = {"communication_data_type": "fp32"}  # gradients travel without rounding, as layers here send them


@pytest.mark.parametrize(
    ("mode", "replicas"),
    mostly(
        [(mode, replicas) for mode in MODES for replicas in (1, 2, 3)],
        [("zero1", 3), ("bf16_zero1_fp32_sums", 2)],
    ),
)
def test_every_cut_gives_the_same_bits(mode: str, replicas: int) -> None:
    run = Run(2, num_batches=4, config={**MODES[mode], **CLIP}, special=OWNED)
    ways = train_ways(*at_cuts(run), replicas=replicas)
    assert_same_bits(*ways)
    for block in range(run.num_blocks):
        layer = f"layer {block + 1}"
        assert len({replica[layer] for replica in ways[0].layers}) == (replicas if block in OWNED else 1), layer


@pytest.mark.parametrize("replicas", mostly([1, 2, 3], [2]))
def test_with_deepspeeds_cpu_adam(replicas: int) -> None:
    compile_first("cpu_adam")
    run = Run(2, num_batches=4, config=CLIP, client="cpu_adam", special=OWNED)
    assert_same_bits(*train_ways(*at_cuts(run), replicas=replicas))


@pytest.mark.parametrize(
    ("mode", "replicas"),
    mostly(
        [(mode, r) for mode in ("adamw", "sgd", "zero1", "bf16_zero1_fp32_sums") for r in (1, 2, 4)],
        [("adamw", 2), ("zero1", 2)],
    ),
)
def test_rows_of_all_replicas_train_as_one_parameter(mode: str, replicas: int) -> None:
    run = Run(2, num_batches=4, config={**MODES[mode], **UNCLIPPED, **AS_THEY_ARE}, special={1: Whole, 3: Whole})
    ways = train_ways(run, replace(run, special={1: Shared, 3: Shared}), replicas=replicas)
    assert ways[0].losses == ways[1].losses


# -- one replica ------------------------------------------------------------------------------


WITHOUT_OPTIMIZER: dict[str, dict[str, Any]] = {"plain": {}, "zero1": ZERO, "bf16": BF16_FP32_SUMS}


@pytest.mark.parametrize(
    ("mode", "client"),
    mostly(
        [*((mode, None) for mode in MODES), *((m, c) for m in WITHOUT_OPTIMIZER for c in
          ("scheduled", "scheduled_by_callable"))],
        [("zero1", None), ("bf16", "scheduled_by_callable")],
    ),
)  # fmt: skip
def test_the_only_replica_trains_what_it_owns_as_any_other_parameter(mode: str, client: str | None) -> None:
    config = {**MODES[mode], **WARMUP} if client is None else WITHOUT_OPTIMIZER[mode]
    run = Run(2, num_batches=5, client=client, config={**config, **CLIP}, special={1: Own, 4: Own})
    plain, owns, moves = train_ways(
        replace(run, special={1: Unowned, 4: Unowned}), run, replace(run, moves={1: (0, 1, 8), 3: (0, 7, 8)})
    )
    assert owns.rates == plain.rates, "schedulers see the user's groups alone"
    assert_same_bits(plain, owns, moves)


def rates_of_both(_rank: int) -> list[list[float]]:
    """The learning rates in the optimizer after each batch, one set by hand, and what the engine then tells."""
    run = Run(2, num_batches=1, client="scheduled", config=ZERO, special={1: Own, 4: Own})
    engine = make_engine(run)
    found = []
    for _ in range(3):
        train(engine, run)
        found.append([group["lr"] for group in engine.basic_optimizer.param_groups])
    engine.basic_optimizer.param_groups[0]["lr"] = 0.123
    engine.lr_scheduler = None
    train(engine, run)
    return [*found, [group["lr"] for group in engine.basic_optimizer.param_groups], engine.get_lr()]


def test_what_a_replica_owns_follows_its_group() -> None:
    for found in run_ranks(rates_of_both, 4):
        *_, last, by_hand, told = found
        assert len(last) == 3, "of two groups one has such parameters"
        assert by_hand[0] == by_hand[2] == 0.123
        assert told == by_hand[:2], "users know nothing of further groups"


# -- values and norm by hand ------------------------------------------------------------------


def train_known(_rank: int, run: Run) -> list[Any]:
    """Rows before and after, the gradients of the whole model in the last batch, and the norm."""
    engine = make_engine(run)
    layer = next(module for module in engine.local_layers().values() if isinstance(module, Known))
    rows = [layer.rows.detach().clone()]
    steps = []

    def look(optimizer: Any, *_: Any) -> None:
        own = sum(float(p.grad.double().square().sum()) for p in module_parameters(engine) if owner_of(p))
        rest = sum(float(p.grad.double().square().sum()) for p in module_parameters(engine) if not owner_of(p))
        steps.append((own, rest))

    handle = engine.basic_optimizer.register_step_pre_hook(look)
    train(engine, run)
    handle.remove()
    rows.append(layer.rows.detach().clone())
    return [engine.grid.get_stage_id(), engine.grid.get_data_parallel_id(), rows, steps, engine.get_global_grad_norm()]


def module_parameters(engine: Any) -> list[nn.Parameter]:
    return [p for p in engine.module.parameters() if p.grad is not None]


@pytest.mark.parametrize("replicas", [2, 3])
def test_values_and_norm_by_hand(replicas: int) -> None:
    """Plain SGD with given gradients; the norm of all gradients as they are when the step begins, unclipped."""
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.25}}, "gradient_clipping": 1e9}
    run = Run(2, num_batches=3, config=config, special={1: Known, 4: Known})
    found = run_ranks(train_known, 2 * replicas, run)
    total = 0.0
    for _, replica, (before, after), steps, _ in found:
        expected = owned.whole(5)[Replica(replica, replicas).rows(owned.ROWS).start :][: len(before)]
        assert torch.equal(before, expected), "nothing was made equal at the start"
        pattern = torch.tensor([1.0, 0.5, 0.25, -1.0]).repeat(before.numel() // 4).view(before.shape)
        for _ in range(run.num_batches):
            expected = expected - 0.25 * ((replica + 1) * pattern)
        assert torch.equal(after, expected), "no mean has touched it"
        own, rest = steps[-1]
        assert own == (replica + 1) ** 2 * float(pattern.double().square().sum())
        total += own + (rest if replica == 0 else 0.0)
    norms = {norm if isinstance(norm, float) else float(norm) for *_, norm in found}
    assert len(norms) == 1 and norms.pop() == pytest.approx(total**0.5, rel=1e-6)


def sizes(_rank: int, run: Run) -> list[Any]:
    """What a profile says of the layer that is owned, and what this rank holds of the rows' state."""
    engine = make_engine(run)
    train(engine, run)
    rows = [layer.rows for layer in engine.local_layers().values() if hasattr(layer, "rows")]
    return [engine.profile.layers[2], [engine.dynamic.stage.state_bytes(parameter) for parameter in rows]]


@pytest.mark.parametrize("mode", mostly(["adamw", "zero1", "bf16_zero1_fp32_sums"], ["zero1"]))
def test_reports_of_memory_count_one_replicas_rows(mode: str) -> None:
    run = Run(2, num_batches=2, config=MODES[mode], special={1: Own})
    elements, rest, is_flat = owned.ROWS // 2 * HIDDEN, 2 * HIDDEN, mode != "adamw"
    for profile, held in run_ranks(sizes, 4, run)[:2]:
        assert profile.num_parameters == elements + rest
        assert profile.parameter_bytes == (elements + rest) * (2 if "bf16" in mode else 4)
        assert profile.gradient_bytes == (elements + rest) * 4
        assert held == [elements * 12 if is_flat else elements * 8 + 4], "all of it, whatever the replicas share out"


# -- orders -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "special", "way"),
    mostly(
        [(mode, special, way) for mode in ("adamw", "zero1", "bf16") for special in ("own", "shared")
         for way in (0, AT_THE_END, "planned")],
        [("adamw", "own", "planned"), ("zero1", "shared", AT_THE_END)],
    ),
)  # fmt: skip
def test_gradients_are_finished_after_the_last_half_of_a_backward(mode: str, special: str, way: Any) -> None:
    layers = {"own": {1: Own, 4: Own}, "shared": {1: Shared, 4: Shared}}[special]
    run = Run(2, num_batches=4, config={**MODES[mode], **CLIP}, special=layers, moves={2: (0, 2, 8)})
    compare_with_1f1b(run, [way], 2)


# -- what else happens to parameters ----------------------------------------------------------


def freeze_and_go_on(_rank: int, run: Run) -> tuple[list[float], dict[str, str]]:
    engine = make_engine(run)

    def on_batch(engine: Any, batch: int) -> None:
        for layer in engine.local_layers().values():
            if hasattr(layer, "rows"):
                layer.rows.requires_grad_(batch not in (1, 2))
            if batch == 3:
                layer.requires_grad_(True)

    return train(engine, run, on_batch), digest(engine)


@pytest.mark.parametrize("mode", mostly(MODES, ["zero1"]))
def test_it_can_be_frozen_and_unfrozen(mode: str) -> None:
    run = Run(2, num_batches=5, config={**MODES[mode], **CLIP}, special=OWNED)
    still = run_ranks(freeze_and_go_on, 4, run)
    moved = run_ranks(freeze_and_go_on, 4, replace(run, moves={1: (0, 2, 8), 3: (0, 5, 8), 4: (0, 4, 8)}))
    assert [losses for losses, _ in still] == [losses for losses, _ in moved]
    assert [layers for _, layers in still] == [layers for _, layers in moved]


def replace_and_go_on(_rank: int, run: Run) -> list[Any]:
    """The same training with and without parameters that take the place of equal ones."""
    results = []
    for turns in (False, True):
        engine = make_engine(run)

        def on_batch(engine: Any, batch: int, turns: bool = turns) -> None:
            if turns and batch in (1, 2):
                engine.replace_parameters([
                    ParameterReplacement(
                        layer, "rows", nn.Parameter(layer.rows.detach().clone()), torch.clone
                    )
                    for layer in engine.local_layers().values() if isinstance(layer, Own)
                ])

        results.append((train(engine, run, on_batch), digest(engine)))
        assert all(owner_of(layer.rows) for layer in engine.local_layers().values() if hasattr(layer, "rows"))
    return results


@pytest.mark.parametrize("mode", mostly(["adamw", "zero1", "bf16"], ["zero1"]))
def test_what_takes_its_place_is_owned_as_well(mode: str) -> None:
    run = Run(2, num_batches=3, config={**MODES[mode], **UNCLIPPED}, special={1: Own, 4: Shared}, moves={2: (0, 1, 8)})
    for as_it_was, replaced in run_ranks(replace_and_go_on, 4, run):
        assert as_it_was == replaced


class Refusing(Shared):
    """Raises in one batch, on one replica."""

    raises = False

    def finish_gradients(self) -> dict[nn.Parameter, Tensor]:
        found = super().finish_gradients()
        if Refusing.raises:
            raise ArithmeticError("no gradients today")
        return found


class Misplaced(Own):
    def finish_gradients(self) -> dict[nn.Parameter, Tensor]:
        return {self.norm.weight: torch.zeros(HIDDEN)}


class Misshapen(Own):
    def finish_gradients(self) -> dict[nn.Parameter, Tensor]:
        return {self.rows: torch.zeros(HIDDEN)}


def refuse_once(rank: int, run: Run) -> list[Any]:
    engine = make_engine(run)
    batches, found = data(engine.grid.get_data_parallel_id(), run.micro_batches), []
    for batch in range(4):
        Refusing.raises = batch == 1 and rank == 0
        try:
            found.append(float(engine.train_batch(batches)))
        except BatchRefused as error:
            found.append(str(error))
    return found


def skip_one(_rank: int, run: Run) -> list[Any]:
    """The losses before and after the batch that is refused elsewhere."""
    engine = make_engine(run)
    batches, found = data(engine.grid.get_data_parallel_id(), run.micro_batches), []
    for batch in range(4):
        if batch == 1:
            for _ in range(run.micro_batches):
                next(batches)
        else:
            found.append(float(engine.train_batch(batches)))
    return found


@pytest.mark.parametrize("mode", mostly(MODES, ["bf16_zero1_fp32_sums"]))
def test_a_batch_whose_gradients_are_not_finished_is_dropped_by_all(mode: str) -> None:
    run = Run(2, config={**MODES[mode], **CLIP}, special={1: Refusing, 4: Shared})
    dropped, skipped = run_ranks(refuse_once, 4, run), run_ranks(skip_one, 4, run)
    assert all("rank 0: ArithmeticError: no gradients today" in found[1] for found in dropped)
    assert [[found[0], *found[2:]] for found in dropped] == skipped, "nothing of it is left"


@pytest.mark.parametrize(
    ("layer", "text"),
    [(Misplaced, "layer 2.finish_gradients gave a gradient of a parameter of shape [16] that no replica owns; mark it"),
     (Misshapen, "layer 2.finish_gradients gave a gradient of shape [16] in torch.float32 (torch.strided), where the")],
)  # fmt: skip
def test_gradients_that_can_not_be_used_are_refused(layer: type, text: str) -> None:
    for found in run_ranks(refuse_once, 4, Run(2, config=ADAMW, special={1: layer})):
        for message in found:
            assert isinstance(message, str) and text in message


# -- refused at the start ---------------------------------------------------------------------


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def build(layers: list[Any], **config: Any) -> str:
    import deepspeed

    def start() -> None:
        module = DynamicPipelineModule(layers, loss_fn=loss_fn, num_stages=2, partition_method="uniform")
        deepspeed.initialize(model=module, config={**models.base_config(Run(2), 2), **config})

    return message_of(start)


def live() -> Own:
    layer = Own()  # not by a LayerSpec: nobody can tell which replica it is for
    assert owner_of(layer.rows) == Replica()
    return layer


class OnFirst(Own):
    """Only the first replica owns its rows."""

    def __init__(self) -> None:
        super().__init__()
        if dist.get_rank() % 2:
            del self.rows.owned_by_replica


def refused(_rank: int, case: str) -> str:
    first, last = LayerSpec(models.Embed), LayerSpec(models.Head)
    if case == "tied":
        tied = TiedLayerSpec("rows", Own, tied_weight_attr="rows")
        return build([first, tied, tied, last])
    if case == "live":
        return build([first, LayerSpec(models.Block), live(), last])
    if case == "differs":
        return build([first, LayerSpec(OnFirst), LayerSpec(models.Block), last])
    if case == "plain engine":
        return build([first, LayerSpec(Own), LayerSpec(models.Block), last], dynamic_pipeline={"enabled": False})
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    return build(
        [first, LayerSpec(Own), LayerSpec(models.Block), last], zero_optimization=offload,
        zero_force_ds_cpu_optimizer=False,
    )


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("tied", "rows of layer 1 (Own) is owned by a replica and belongs to a tied layer (key 'rows')"),
        ("live", "rows of layer 2 (Own) is marked as Replica(index=0, count=1)'s and this is Replica(index="),
        ("differs", "differ in the parameters that replicas own: rank 0 has rows [6, 16] of layer 1 where rank 1"),
        ("plain engine", "rows of layer 1 is owned by a replica, and DeepSpeed's own engine gives all replicas equal"),
        ("offload", "ZeRO-1 with offload_optimizer"),
    ],
)
def test_what_can_not_be_owned_is_refused_at_start(case: str, text: str) -> None:
    messages = run_ranks(refused, 4, case)
    assert all(text in message for message in messages), messages
    assert len(set(messages)) == 1

