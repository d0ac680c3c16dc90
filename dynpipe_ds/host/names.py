"""The one list of DeepSpeed's names that the library relies on, and the checks of it at start.

By owner, a class or a module of DeepSpeed:

* ``names`` it has: what is imported, called, or overridden for the user to call;
* ``attributes`` that its code sets, on its own objects or on parameters: they are there only after a constructor ran,
  so what is looked for is a statement that sets them;
* ``hooks``: what something of ours stands in for: methods, functions, instructions that its own code must call or
  name. What it no longer calls would be left out in silence.

Everything is read from the byte code of the classes as they are loaded, which needs neither an engine nor source. Of a
class into which a script has put functions of its own only the names are looked for.
"""

from __future__ import annotations

import dis
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

import deepspeed

from dynpipe_ds.functions import contents_of, nested_codes


@dataclass(frozen=True)
class Needed:
    """What we rely on of one class or module.

    Attributes:
        names: that it has.
        attributes: that its code sets.
        hooks: names of it that its own code must call.
        begins: where its code begins, from which that is followed; without, anywhere in it.
        optional: what some supported releases lack, and are right without.
    """

    names: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def _needed(names: str = "", *, attributes: str = "", hooks: str = "", begins: str = "", optional: str = "") -> Needed:
    return Needed(*(tuple(text.split()) for text in (names, attributes, hooks, begins, optional)))


ENGINE = "deepspeed:PipelineEngine"
MODULE = "deepspeed:PipelineModule"
ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"

NEEDED: dict[str, Needed] = {
    "deepspeed": _needed("DeepSpeedEngine init_distributed initialize load_ds_config"),
    ENGINE: _needed(
        # overridden, for the user to call
        "train_batch eval_batch save_checkpoint load_checkpoint set_dataloader set_dataiterator destroy get_lr compile "
        # called
        "_exec_load_micro_batch _exec_forward_pass _exec_backward_pass _exec_reduce_grads _exec_optimizer_step "
        "_configure_basic_optimizer _backward_post_hook reset_activation_shape "
        "_get_ckpt_name _get_zero_ckpt_name _save_checkpoint _save_zero_checkpoint _build_data_iter "
        # asked
        "bfloat16_enabled communication_data_type curriculum_learning_enabled fp16_enabled get_data_types "
        "get_global_grad_norm "
        "gradient_accumulation_steps gradient_clipping gradient_predivide_factor is_first_stage is_last_stage "
        "load_universal_checkpoint "
        "random_ltd_enabled train_batch_size use_node_local_storage zero_nvme_offload_optimizer zero_optimization "
        "zero_use_cpu_optimizer",
        attributes=(
            "_config _global_grad_norm _running_engine_backward basic_optimizer batch_timer checkpoint_engine "
            "client_lr_scheduler data_iterator device dp_world_size dynamic_shape global_rank global_samples "
            "global_steps grad_layer "
            "grid has_moe_layers is_data_parallel is_grad_partitioned is_pipe_parallel is_pipe_partitioned "
            "loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size loss lr_scheduler meta_buffer "
            "micro_batch_size micro_batches micro_steps monitor mp_world_size mpu next_stage num_stages optimizer "
            "param_names pipe_buffers prev_stage random_ltd_scheduler save_zero_checkpoint seq_dp_world_size "
            "skipped_steps stage_id timers tput_timer training_data training_dataloader using_bf16_optimizer world_size"
        ),
        hooks=(
            "_INSTRUCTION_MAP _exec_schedule _configure_optimizer _configure_zero_optimizer _configure_bf16_optimizer "
            "_reduce_non_expert_gradients clip_fp32_gradients _take_model_step _get_gradients_for_reduction "
            "_broadcast_model _configure_lr_scheduler _next_batch"
        ),
        begins="__init__ train_batch",
        optional=(
            "checkpoint_mp_rank _force_grad_boundary inside_no_sync_ctxt _running_engine_backward_count "
            "_running_engine_backward_lock"
        ),
    ),
    MODULE: _needed(
        "forward compile get_additional_losses ckpt_layer_path stage_owner _count_layer_params _is_checkpointable "
        "_precompute_checkpointable_values _recursive_getattr _set_bounds",
        attributes=(
            "_grid _layer_specs _local_start _local_stop _num_layers _topo activation_checkpoint_func "
            "activation_checkpoint_interval base_seed curr_layer ds_pipe_replicated forward_funcs fwd_map global_rank "
            "is_checkpointable_results is_checkpointable_results_interval loss_fn micro_offset num_stages parts "
            "seed_fn seed_layers stage_id tied_comms tied_modules tied_weight_attrs world_group world_size"
        ),
        hooks="_partition_layers _build _synchronize_tied_weights",
        begins="__init__",
    ),
    "deepspeed.pipe": _needed("PipelineModule"),
    "deepspeed.pipe:LayerSpec": _needed("build", attributes="typename module_args module_kwargs"),
    "deepspeed.pipe:TiedLayerSpec": _needed(attributes="key forward_fn tied_weight_attr"),
    ZERO: _needed(
        "get_param_id register_grad_acc_post_hook _lazy_init_hp_params_optimizer_state "
        "_restore_from_bit16_weights",
        attributes=(
            "_grad_acc_hooks _hp_optimizer_states_linked _zero_optimizer averaged_gradients bit16_groups "
            "bit16_groups_flat clip_grad cpu_data cpu_offload custom_loss_scaler dp_process_group dynamic_loss_scale "
            "external_loss_scale grad_accum grad_start_offset loss_scaler model_parallel_world_size "
            "nccl_start_alignment_factor norm_for_param_grads offload_gradient_dict optimizer overflow "
            "param_idx_in_group param_to_partition_ids params_in_partition partition_count real_dp_process_group "
            "use_grad_accum_attribute"
        ),
        hooks="scaled_global_norm allreduce_bucket gradient_reduction_w_predivide",
        begins="__init__ step",
        optional="_zero_padding gradient_accumulation_steps parameter_alignment round_robin_gradients",
    ),
    BF16: _needed(
        "clear_lp_grads update_hp_grads register_grad_acc_post_hook _lazy_init_hp_params_optimizer_state "
        "_restore_from_bit16_weights",
        attributes=(
            "_grad_acc_hooks _hp_grad _hp_optimizer_states_linked bf16_groups bf16_groups_flat clip_grad "
            "fp32_groups_gradients fp32_groups_gradients_flat fp32_groups_has_gradients nccl_start_alignment_factor "
            "non_expert_gradients optimizer partition_count real_dp_process_group"
        ),
        hooks="get_grads_for_norm",
        begins="step",
    ),
    "deepspeed.runtime.zero.stage_1_and_2": _needed(hooks="see_memory_usage empty_cache"),
    "deepspeed.runtime.bf16_optimizer": _needed(hooks="see_memory_usage"),
    "deepspeed.linear.optimized_linear:LoRAOptimizedLinear": _needed(attributes="ds_optim_param"),
    "deepspeed.utils.torch": _needed("required_torch_version"),
    "deepspeed.utils.mixed_precision_linkage": _needed(
        attributes=(
            "_dp_group _hp_mapping _index_in_param_group get_full_hp_grad get_full_hp_param set_full_hp_grad "
            "set_full_hp_param"
        ),
    ),
    "deepspeed.utils.tensor_fragment:tensor_fragment": _needed(
        attributes="hp_fragment hp_fragment_address lp_fragment_address optim_fragment"
    ),
    "deepspeed.utils.tensor_fragment:fragment_address": _needed(attributes="numel start"),
    "deepspeed.ops.adam:FusedAdam": _needed(attributes="_dummy_overflow_buf adam_w_mode multi_tensor_adam"),
    "deepspeed.ops.adam:DeepSpeedCPUAdam": _needed(attributes="ds_opt_adam opt_id"),
    "deepspeed.runtime.pipe.topology:PipelineParallelGrid": _needed(
        "get_data_parallel_group get_data_parallel_id get_data_parallel_rank get_data_parallel_world_size "
        "get_model_parallel_rank get_model_parallel_world_size get_slice_parallel_rank get_slice_parallel_world_size "
        "get_stage_id stage_to_global",
        attributes=(
            "data_parallel_size dp_proc_group ds_model_proc_group global_rank pipe_parallel_size pp_proc_group "
            "slice_proc_group world_size"
        ),
    ),
    "deepspeed.runtime.pipe.topology:ProcessTopology": _needed("get_axis_list get_axis_names get_dim get_rank"),
    "deepspeed.runtime.pipe.schedule": _needed(
        "BufferOpInstruction InferenceSchedule PipeSchedule TrainSchedule",
        hooks=(
            "LoadMicroBatch ForwardPass BackwardPass SendActivation RecvActivation SendGrad RecvGrad ReduceTiedGrads "
            "ReduceGrads OptimizerStep"
        ),
        begins="TrainSchedule",
    ),
    "deepspeed.runtime.pipe.schedule:PipeSchedule": _needed(
        "num_pipe_buffers", attributes="micro_batches stage_id stages", hooks="steps", begins="__iter__ __next__"
    ),
    "deepspeed.runtime.pipe.engine": _needed("PipelineEngine TRAIN_BATCH_TIMER"),
    "deepspeed.runtime.config:DeepSpeedConfig": _needed(
        attributes=(
            "_param_dict bfloat16_config gradient_accumulation_steps train_batch_size "
            "train_micro_batch_size_per_gpu"
        ),
    ),
    "deepspeed.runtime.utils": _needed("is_model_parallel_parameter partition_balanced"),
    "deepspeed.runtime.fp16.loss_scaler": _needed("DynamicLossScaler LossScaler"),
    "deepspeed.runtime.zero.config": _needed("ZeroStageEnum"),
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine": _needed("CheckpointCommitInfo"),
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine": _needed(
        "commit create is_decoupled makedirs preserves_storage_sharing save"
    ),
    "deepspeed.runtime.activation_checkpointing.checkpointing": _needed(
        "checkpoint get_cuda_rng_tracker non_reentrant_checkpoint"
    ),
    "deepspeed.runtime.activation_checkpointing.checkpointing:CudaRNGStatesTracker": _needed("get_states set_states"),
    "deepspeed.runtime.dataloader:DeepSpeedDataLoader": _needed(attributes="data_sampler"),
    "deepspeed.utils.timer:SynchronizedWallClockTimer.Timer": _needed(attributes="started_"),
    "deepspeed.comm": _needed("all_reduce destroy_process_group reduce"),
    "deepspeed.utils.groups": _needed("_WORLD_GROUP _clone_world_group _get_sequence_data_parallel_world_size mpu"),
    "deepspeed.accelerator": _needed("get_accelerator"),
    "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator": _needed(
        "Event Stream available_memory communication_backend_name current_device_name current_stream device_count "
        "device_name get_rng_state is_synchronized_device manual_seed_all max_memory_allocated set_rng_state stream "
        "synchronize total_memory"
    ),
}

PARAMETER_MARKS = frozenset({
    "_hp_mapping", "_hp_grad", "_dp_group", "_index_in_param_group", "_zero_optimizer", "cpu_data",
    "get_full_hp_param", "get_full_hp_grad", "set_full_hp_param", "set_full_hp_grad",
    "load_hp_checkpoint_state", "grad_accum", "param_idx_in_group",
})
"""What DeepSpeed's optimizers put on a parameter: it points into flat buffers, process groups and the optimizer
itself, and the next owner's optimizer makes its own."""


def version() -> str:
    """The installed release of DeepSpeed."""
    return str(deepspeed.__version__)


# -- the checks -------------------------------------------------------------------------------


def missing_names() -> list[str]:
    """What the installed DeepSpeed lacks of :data:`NEEDED`, such as ``deepspeed:PipelineEngine._exec_schedule``."""
    missing = []
    for owner, needed in NEEDED.items():
        found = _find(owner)
        if found is None:
            missing.append(owner)
            continue
        lacking = [name for name in (*needed.names, *needed.hooks) if not hasattr(found, name)]
        wanted = {name for name in needed.attributes if not hasattr(found, name)}
        if wanted and not _is_patched(found):
            lacking += sorted(wanted - _assigned_in(found, wanted))
        missing += [f"{owner}.{name}" for name in lacking]
    return missing


def hooks_never_called() -> list[str]:
    """Hooks that the installed DeepSpeed has, but to which no way leads from where its own code begins."""
    silent = []
    for owner, needed in NEEDED.items():
        found = _find(owner) if needed.hooks else None
        if found is not None and not _is_patched(found):
            called = _called(found, needed.begins)
            silent += [f"{owner}.{name}" for name in needed.hooks if hasattr(found, name) and name not in called]
    return silent


def _is_patched(owner: Any) -> bool:
    """Whether a script has put functions of its own in place of DeepSpeed's, which call these in ways not seen here."""
    functions = [value for name, value in _members(owner) if isinstance(value, FunctionType) and name != "__repr__"]
    return not all(any(map(_is_known, _all_of(function))) for function in functions)


def _is_known(function: FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).partition(".")[0] in ("deepspeed", "dynpipe_ds")


def _find(owner: str) -> Any:
    module_name, _, class_name = owner.partition(":")
    try:
        module = importlib.import_module(module_name)
        return attrgetter(class_name)(module) if class_name else module
    except (ImportError, AttributeError):
        return None


def _called(owner: Any, begins: Iterable[str]) -> set[str]:
    """Names that code of an owner mentions, if it runs once the methods it begins with run; all, for a module."""
    codes: dict[str, set[str]] = {}
    for name, value in _members(owner):
        if name not in codes or "super" in codes[name]:  # else it replaces what a base has of this name
            codes.setdefault(name, set()).update(*(code.co_names for code in _codes(value)))
    running: set[str] = set()
    called: set[str] = set()
    new = set(begins) or set(codes)
    while new:
        running |= new
        called |= {name for known in new & codes.keys() for name in codes[known]}
        new = called - running
    return called


def _assigned_in(owner: Any, wanted: set[str]) -> set[str]:
    """Of some names, those that code of an owner assigns as an attribute of anything."""
    codes = (code for _, value in _members(owner) for code in _codes(value))
    return {name for code in codes if not wanted.isdisjoint(code.co_names) for name in _assigned(code)} & wanted


def _members(owner: Any) -> list[tuple[str, Any]]:
    """What DeepSpeed defines in a module, or in a class and in each of its bases."""
    if isinstance(owner, ModuleType):
        return [(name, value) for name, value in vars(owner).items() if _module_of(value) == owner.__name__]
    classes = [cls for cls in owner.__mro__ if _module_of(cls).partition(".")[0] not in _NOT_DEEPSPEEDS]
    return [member for cls in classes for member in vars(cls).items()]


_NOT_DEEPSPEEDS = ("torch", "builtins", "abc")


def _module_of(value: Any) -> str:
    return str(getattr(value, "__module__", ""))


def _codes(value: Any) -> Iterator[CodeType]:
    """The code of all functions of a value, and of those inside them."""
    return (code for function in _all_of(value) for code in nested_codes(function.__code__))


def _all_of(value: Any) -> Iterator[FunctionType]:
    """A function and what it decorates; those of a property, a class, a dict such as _INSTRUCTION_MAP."""
    parts: Iterable[Any] = ()
    if isinstance(value, FunctionType):
        yield value
        held = (part for cell in value.__closure__ or () for part in contents_of(cell))
        parts = [part for part in held if isinstance(part, FunctionType)]
    elif isinstance(value, staticmethod | classmethod):
        parts = [value.__func__]
    elif isinstance(value, property):
        parts = [value.fget, value.fset]
    elif isinstance(value, type):
        parts = [part for part in vars(value).values() if not isinstance(part, type | dict)]
    elif isinstance(value, dict):
        parts = [part for part in value.values() if isinstance(part, FunctionType)]
    for part in parts:
        yield from _all_of(part)


def _assigned(code: CodeType) -> Iterator[str]:
    """Names of the attributes that a function assigns; ``dis`` says it, too, but takes a hundred times as long."""
    operations, arguments = code.co_code[::2], code.co_code[1::2]
    at = operations.find(_STORE)
    while at >= 0:
        number, before, shift = arguments[at], at - 1, 8
        while before >= 0 and operations[before] == _EXTENDED:
            number |= arguments[before] << shift
            before, shift = before - 1, shift + 8
        yield code.co_names[number]
        at = operations.find(_STORE, at + 1)


_STORE, _EXTENDED = dis.opmap["STORE_ATTR"], dis.opmap["EXTENDED_ARG"]
