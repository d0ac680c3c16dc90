"""``dynpipe profile``: what every layer of a model costs on this device, before any training."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dynpipe_ds.cli import reading, show
from dynpipe_ds.cli.command import OK, ProblemError, Result, UsageError, add_command, usage, users_code
from dynpipe_ds.host import accelerator
from dynpipe_ds.measure.layerwise import LayerError, TrainingMemory, measure_layers
from dynpipe_ds.measure.profile import PipelineProfile

_COLUMNS = {
    "layer": "layer", "name": "name", "forward ms": "forward_s", "backward ms": "backward_s",
    "parameters": "num_parameters", "state MiB": "state_bytes", "activations MiB": "activation_bytes",
}  # fmt: skip
_HINT = " (--traceback shows where)"



def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "profile", run)
    parser.add_argument("model", metavar="MODEL", help="package.module:function, found from the current folder")
    parser.option("--output", "FILE", "where to write", default="profile.json")
    parser.option("--config", "FILE", "DeepSpeed JSON: precision, optimizer, micro-batches")
    batch = "micro-batches of a batch (default: gradient_accumulation_steps of --config, else 1)"
    parser.option("--micro-batches", "M", batch, reading.whole(1))
    replicas = "data-parallel replicas, which share optimizer state under ZeRO-1"
    parser.option("--replicas", "N", replicas, reading.whole(1), default=1)
    state = "optimizer state for each parameter on a rank (default: by --config's optimizer, else 8, Adam's)"
    rule = "finite and >= 0, such as 8 for Adam in fp32"
    parser.option("--optimizer-bytes", "BYTES", state, reading.at_least_0(rule))
    parser.flag("--activation-checkpointing", "recompute every layer (interval 1) in its backward")
    parser.option("--repeats", "N", "measured passes", reading.whole(1), default=5)
    parser.option("--warmup", "N", "passes before them", reading.whole(0), default=2)
    parser.flag("--traceback", "if the model fails, show where")


def run(arguments: argparse.Namespace) -> Result:
    """Measure the layers of a model on this device.

    MODEL is package.module:function. The function takes no arguments and returns (layers, (inputs, labels)) or
    (layers, (inputs, labels), loss_fn): layers as PipelineModule takes them, one micro-batch, and the loss. Layers are
    built, run and dropped one after the other in one process, so the model may be larger than the device. The file
    that is written goes into 'dynpipe plan' and into DynamicPipelineModule(profile=..., partition_method="profile").

    Examples:
      dynpipe profile my_model:layers
      dynpipe profile my_model:layers --output profile.json --config ds_config.json --repeats 10
      dynpipe profile my_model:layers --micro-batches 8 --optimizer-bytes 4 --activation-checkpointing --json
    """
    config = reading.json_object(arguments.config)
    memory = _memory(config, arguments)
    num_micro_batches = arguments.micro_batches or config.get("gradient_accumulation_steps") or 1
    if type(num_micro_batches) is not int or num_micro_batches < 1:  # DeepSpeed also takes "auto"
        raise UsageError(
            f"{arguments.config}: gradient_accumulation_steps = {num_micro_batches!r}: must be a whole number >= 1; "
            "give the number by --micro-batches"
        )
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints is no part of the result
        layers, (inputs, labels), loss_fn = _load(arguments.model, show=arguments.traceback)
        try:
            profile = measure_layers(
                layers, inputs, labels, loss_fn=loss_fn, memory=memory, num_micro_batches=num_micro_batches,
                repeats=arguments.repeats, warmup=arguments.warmup, checkpointed=arguments.activation_checkpointing,
            )
        except LayerError as error:
            if arguments.traceback:
                raise
            raise ProblemError(f"{arguments.model}: {error}{_HINT}") from error
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    profile.save(arguments.output)
    values = _values(profile, arguments.output, memory)
    return OK, _text(values), values


def _memory(config: dict[str, Any], arguments: argparse.Namespace) -> TrainingMemory:
    given = arguments.optimizer_bytes
    without = config if given is None else {key: value for key, value in config.items() if key != "optimizer"}
    with usage(f"{arguments.config}: "):
        memory = TrainingMemory.from_config(without, num_replicas=arguments.replicas)
    return memory if given is None else replace(memory, optimizer_bytes=given)


def _load(name: str, *, show: bool) -> tuple[Any, ...]:
    """Import and call the user's function."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise UsageError(f"MODEL {name!r}: must be package.module:function, such as my_model:layers")
    with users_code(f"MODEL {name}: {module} can't be imported:", _HINT, show=show):
        remedy = "start where Python finds the module, or set PYTHONPATH"
        found = getattr(reading.module(module, where=f"MODEL {name}", remedy=remedy), function, None)
    if not callable(found):
        raise UsageError(f"MODEL {name}: {module} has no function {function!r}; name the one that returns the layers")
    with users_code(f"{name}() raised", _HINT, show=show):
        returned = found()
    return _checked(name, returned)


def _checked(name: str, returned: Any) -> tuple[Any, ...]:
    def check(is_right: bool, value: Any, what: str = "", more: str = "") -> None:
        if not is_right:
            rule = f"must return (layers, (inputs, labels)) or (layers, (inputs, labels), loss_fn){more}"
            raise UsageError(f"{name}() returned {_kind(value)}{what}: it {rule}")

    check(isinstance(returned, tuple) and len(returned) in (2, 3), returned)
    layers, batch, loss_fn = (*returned, None)[:3]
    has_layers = isinstance(layers, Sequence) and len(layers) > 0
    check(has_layers, layers, " as layers", ", with a list of at least one layer")
    check(isinstance(batch, tuple | list) and len(batch) == 2, batch, " as batch")
    check(loss_fn is None or callable(loss_fn), loss_fn, " as loss_fn")
    return layers, batch, loss_fn


def _kind(value: Any) -> str:
    length = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{length}"


def _values(profile: PipelineProfile, path: str, memory: TrainingMemory) -> dict[str, Any]:
    keys = list(_COLUMNS.values())[2:]
    layers = [
        {"layer": i, "name": layer.name, **{key: getattr(layer, key) for key in keys}}
        for i, layer in enumerate(profile.layers)
    ]
    return {
        "profile": path, "device": accelerator.kind(), "threads": torch.get_num_threads(),
        "dtype": str(memory.dtype).removeprefix("torch."), "num_micro_batches": profile.num_micro_batches,
        "layers": layers, "total": {key: sum(layer[key] for layer in layers) for key in keys},
    }  # fmt: skip


def _text(values: dict[str, Any]) -> str:
    rows = [*values["layers"], {"layer": "all", "name": "", **values["total"]}]
    threads = f", {values['threads']} threads" if values["device"] == "cpu" else ""
    return "\n".join([
        f"one micro-batch on {values['device']}{threads}, {values['dtype']}; state: parameters, gradients, optimizer",
        "", show.table(_COLUMNS, rows), "",
        f"written: {values['profile']} ({values['num_micro_batches']} micro-batches a batch)",
        f"next:    dynpipe plan {values['profile']} --stages 2",
    ])  # fmt: skip
