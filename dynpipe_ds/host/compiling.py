"""DeepSpeed's ways to compile layers, where layers move."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from dynpipe_ds.migration.compiled import CALL, compile_in_place, recipe_of, why_bits_differ
from dynpipe_ds.migration.packing import PackingError, pack
from dynpipe_ds.telling import warn

_ON_EVERY_STAGE = (
    "its code is made for the parameters, gradients and process groups of one rank, so that layers could not leave it"
)


def check_sections(engine: Any) -> None:
    """Refuse what DeepSpeed's configuration asks for and layers that move can't have.

    Args:
        engine: DeepSpeed's.

    Raises:
        ValueError: naming the keys.
    """
    if engine.is_pipe_partitioned or engine.is_grad_partitioned:
        raise ValueError(
            "dynamic_pipeline sends whole activations; with tensor parallelism set "
            '"pipeline": {"pipe_partitioned": false, "grad_partitioned": false}'
        )
    section = engine._config._param_dict.get("compile") or {}
    if section.get("deepcompile"):
        raise ValueError(
            f'"compile": {{"deepcompile": true}} can\'t be used with dynamic_pipeline: {_ON_EVERY_STAGE}; leave '
            "it out, and call engine.compile()"
        )


def check_arguments(
    engine: Any, function: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Check what ``engine.compile`` is given; the same on every rank, since all are given the same.

    Args:
        engine: DeepSpeed's.
        function: its ``compile``.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        ValueError: if it can't be.
    """
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given.get("compiled_autograd_enabled"):
        raise ValueError(
            "compiled_autograd_enabled=True compiles the backward of the last stage alone, so that gradients would "
            "depend on the cut; leave it out"
        )
    probe = nn.Identity()
    compile_in_place(probe, {**given["compile_kwargs"], "backend": given["backend"]})
    try:
        pack(probe, "what engine.compile() compiles", is_trial=True)
    except PackingError as error:
        raise ValueError(str(error)) from error
    reason = why_bits_differ(recipe_of(vars(probe)[CALL]))
    if reason is not None and dist.get_rank() == 0:
        warn(f"losses of this run may differ from those of another one: layers are compiled with {reason}")
