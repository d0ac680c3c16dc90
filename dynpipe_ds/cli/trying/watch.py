"""What is recorded of a script's engine: losses, seconds, moves, weights; and its end after enough batches."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dynpipe_ds import DynamicPipelineEngine
from dynpipe_ds.cli.trying.moves import RandomMoves
from dynpipe_ds.cli.trying.record import Record
from dynpipe_ds.cli.trying.settings import DENSE_CUTS, MOVING, NO_DROPOUT, NO_FLAGS, Settings
from dynpipe_ds.cli.trying.weights import bits, digests, layers_of
from dynpipe_ds.host.differences import dropout_rates, find_dropout
from dynpipe_ds.host.optimizers.native_adam import is_compiled_for_cpu
from dynpipe_ds.host.specs import tied_key
from dynpipe_ds.messages.values import tensors_in


class Watch:
    """What a run does with one pipeline engine of the script, DeepSpeed's or ours."""

    def __init__(self, engine: Any, settings: Settings, record: Record) -> None:
        self._engine, self._settings, self._record = engine, settings, record
        self._num_batches, self._has_ended = 0, False
        facts = _facts(engine)
        is_moving = settings.way == MOVING and facts["ours"]
        self._moves = RandomMoves(engine, settings.seed, record.say) if is_moving else None
        record.say("engine", **facts)
        self._said: set[str] = set()
        engine.module.register_forward_hook(self._at_cut)
        if NO_DROPOUT in settings.changes:
            _stop_dropout(engine)
        if NO_FLAGS in settings.changes:
            engine.module.forward = partial(self._without_flags, engine.module.forward)
        watched = {"train_batch": self._train, "eval_batch": self._evaluate, "save_checkpoint": self._save}
        for name, run in watched.items():
            # On the object: a class of the script's own keeps its methods, and what they call stays unwatched.
            setattr(engine, name, partial(run, getattr(engine, name)))
        # At the end of the process: atexit's functions are not called in one that multiprocessing has forked.
        Finalize(None, self._end, exitpriority=0)

    def _train(self, train_batch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        with self._record.errors():
            loss = train_batch(*args, **kwargs)
            found = bits(loss)  # waits for the device
            self._num_batches += 1
            self._record.say(
                "batch", loss=found, seconds=time.perf_counter() - started,
                boundaries=[int(b) for b in self._engine.module.parts],
            )  # fmt: skip
            if self._num_batches >= self._settings.batches:
                self._stop()
            if self._moves is not None and self._num_batches % self._settings.move_every == 0:
                self._moves.move(self._num_batches)
        return loss

    def _at_cut(self, module: Any, _: Any, output: Any) -> None:
        """What leaves the stage, and the gradients that come back."""
        if self._engine.is_last_stage():
            return
        trained = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if torch.is_grad_enabled() and module.training:
            self._say_once("crossing", outputs=len(trained))
            for tensor in trained:
                tensor.register_hook(self._at_gradient)  # type: ignore[no-untyped-call]
        elif trained and not torch.is_grad_enabled():
            self._say_once("flagged")

    def _at_gradient(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient as it is, or contiguous, as DeepSpeed has it, where the run wants that."""
        if gradient is None or gradient.is_contiguous():  # none where a checkpoint only hands a tensor through
            return None
        self._say_once("strided")
        return gradient.contiguous() if DENSE_CUTS in self._settings.changes else None

    def _say_once(self, event: str, **values: Any) -> None:
        if event not in self._said:
            self._said.add(event)
            self._record.say(event, **values)

    def _without_flags(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        """Give layers what was received under ``no_grad`` as DeepSpeed does."""
        if not torch.is_grad_enabled() and not self._engine.is_first_stage():
            for tensor in tensors_in(inputs):
                tensor.requires_grad_(False)
        return forward(*inputs)

    def _evaluate(self, eval_batch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._record.errors():
            result = eval_batch(*args, **kwargs)
        self._record.say("evaluation", loss=bits(result))
        return result

    def _save(self, _: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Instead of saving: a try must neither replace the user's checkpoints, nor be what the next way loads."""
        self._record.say("not_saved")
        return True

    def _stop(self) -> NoReturn:
        """End the process, in the same batch on every rank, whatever the script would do on an exception."""
        self._end()
        # A rank that left early would break the others' connections. No barrier: NCCL's must guess the device.
        dist.all_reduce(torch.zeros(1, device=self._engine.device))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _end(self) -> None:
        """Record what is left at the end, here or where the script ends by itself."""
        if self._has_ended or self._record.written is not None:
            return
        self._has_ended = True
        held: dict[str, Any] = {}
        try:
            held = digests(self._engine)
        except Exception as error:  # noqa: BLE001 - an odd tensor is no reason to lose the losses
            held = {"unread": f"{type(error).__name__}: {error}"}
        overhead = getattr(self._engine, "overhead", None)
        self._record.say("end", **held, **({} if overhead is None else {"profiling_s": overhead.profiling_s}))


def _facts(engine: Any) -> dict[str, Any]:
    """What may be a reason for other bits, and what the table says."""
    module, layers = engine.module, layers_of(engine.module)
    tied = [key for i in layers if (key := tied_key(module._layer_specs[i])) is not None]
    return {
        "rank": engine.global_rank, "world": dist.get_world_size(), "stages": engine.num_stages,
        "replica": f"{engine.grid.get_data_parallel_rank()}.{engine.grid.get_slice_parallel_rank()}",
        "replicas": engine.grid.get_data_parallel_world_size(),
        "layers": module._num_layers, "boundaries": [int(b) for b in module.parts],
        "compiled_adam": is_compiled_for_cpu(engine.basic_optimizer),
        "clipping": float(engine.gradient_clipping() or 0.0), "plain": engine.optimizer is engine.basic_optimizer,
        "seed_layers": bool(module.seed_layers), "dropout": find_dropout(layers),
        "checkpointing": int(module.activation_checkpoint_interval or 0),
        "tied_on_one_stage": len(tied) > len(set(tied)),
        "engine": type(engine).__name__, "module": type(module).__name__,
        "ours": isinstance(engine, DynamicPipelineEngine) and engine.dynamic_config.enabled,
    }  # fmt: skip


def _stop_dropout(engine: Any) -> None:
    for layer in layers_of(engine.module).values():
        for module in layer.modules():
            for name in dropout_rates(module):
                setattr(module, name, 0.0)
