"""How dynpipe_ds gets its engine out of ``deepspeed.initialize``, and from which DeepSpeed.

``deepspeed.initialize`` picks ``PipelineEngine`` by name and offers no registry. Instead of replacing
that name (which would break ``isinstance(engine, deepspeed.PipelineEngine)``), :func:`install` teaches
the class itself to construct a subclass when its model is a ``DynamicPipelineModule``. Every other
model gets exactly the engine it got before.
"""

from __future__ import annotations

import importlib
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import deepspeed
from deepspeed.runtime.pipe.engine import PipelineEngine

from dynpipe_ds._versions import DEEPSPEED_RANGE, LEAST_DEEPSPEED, TESTED_SERIES, is_older

# What we call or override, by owner: a missing name is reported at import, not in the middle of training.
_NEEDED: dict[str, tuple[str, ...]] = {
    "deepspeed:PipelineEngine": (
        "_INSTRUCTION_MAP",
        "_exec_schedule",
        "_exec_load_micro_batch",
        "_exec_backward_pass",
        "_exec_reduce_tied_grads",
        "reset_activation_shape",
        "train_batch",
        "eval_batch",
        "_configure_optimizer",
        "_configure_basic_optimizer",
        "_configure_zero_optimizer",
        "_configure_bf16_optimizer",
        "_reduce_non_expert_gradients",
        "clip_fp32_gradients",
        "_take_model_step",
    ),
    "deepspeed:PipelineModule": (
        "_partition_layers",
        "_set_bounds",
        "_count_layer_params",
        "_precompute_checkpointable_values",
        "_synchronize_tied_weights",
        "forward",
    ),
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": (
        "get_grads_for_norm",
        "_lazy_init_hp_params_optimizer_state",
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": (
        "scaled_global_norm",
        "allreduce_bucket",
        "gradient_reduction_w_predivide",
        "_lazy_init_hp_params_optimizer_state",
    ),
}


class DeepSpeedVersionError(RuntimeError):
    """The installed DeepSpeed trains wrongly, or lacks something that dynpipe_ds builds on."""


def why_unsupported() -> str:
    """The rule that the installed DeepSpeed breaks, to be read after its version; empty if it breaks none."""
    if is_older(str(deepspeed.__version__), LEAST_DEEPSPEED):
        return (
            f"is older than {LEAST_DEEPSPEED}, the first release whose pipeline gradients are right (before, every "
            "stage but the last divides them by the accumulation steps once more)"
        )
    missing = _missing_names()
    return f"has no {', '.join(missing)}, which dynpipe_ds needs" if missing else ""


def _missing_names() -> list[str]:
    missing = []
    for owner, names in _NEEDED.items():
        module_name, class_name = owner.split(":")
        try:
            cls = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError):
            missing.append(owner)
            continue
        missing += [f"{owner}.{name}" for name in names if not hasattr(cls, name)]
    return missing


def check_version() -> None:
    """Check that DeepSpeed is right and has what dynpipe_ds needs; warn when its series was not tested.

    Raises:
        DeepSpeedVersionError: if its gradients are wrong, or a needed class or method is gone, naming the remedy.
    """
    version = str(deepspeed.__version__)
    rule = why_unsupported()
    if rule:
        raise DeepSpeedVersionError(
            f"DeepSpeed {version} {rule}. Install a supported release: pip install '{DEEPSPEED_RANGE}'"
        )
    if not version.startswith(f"{TESTED_SERIES}."):
        warnings.warn(
            f"dynpipe_ds was tested with DeepSpeed {TESTED_SERIES}.x; {version} has every name it "
            "needs, but its behaviour was not checked; 'dynpipe doctor --numerics' does that",
            stacklevel=2,
        )


def install(module_class: type, choose: Callable[[type, Any], type]) -> None:
    """Make ``PipelineEngine(model=m, ...)`` an engine of another class whenever ``m`` is a ``module_class``.

    Args:
        module_class: the pipeline module class that asks for it.
        choose: maps the class that was called, and DeepSpeed's configuration (``None`` if none was given), to the
            class of the engine, which derives from it.
    """

    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get("model"), module_class):
            return object.__new__(cls)
        return object.__new__(choose(cls, kwargs.get("config_class")))

    PipelineEngine.__new__ = construct


def init_distributed(backend: str | None = None) -> None:
    """``deepspeed.init_distributed`` without DeepSpeed's own all-reduce for inference, which training never calls.

    On CPUs DeepSpeed compiles it first, for up to a minute, and leaves 66 MB of shared memory for each rank in
    ``/dev/shm`` behind, under another name for every port.

    Args:
        backend: of the process group; ``None`` for the accelerator's.
    """
    operations: Any = importlib.import_module("deepspeed.ops")
    known = vars(operations).get("__compatible_ops__")
    operations.__compatible_ops__ = defaultdict(bool)  # none; up to 0.19.2 DeepSpeed asks for one that must be there
    try:
        deepspeed.init_distributed(backend, verbose=False)
    finally:
        del operations.__compatible_ops__  # DeepSpeed looks again when somebody asks
        if known is not None:
            operations.__compatible_ops__ = known
