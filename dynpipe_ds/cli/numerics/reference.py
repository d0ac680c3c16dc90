"""The undivided model on one process: torch alone, without DeepSpeed and without any of our training code."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynpipe_ds.cli.numerics.cases import NUM_BATCHES, Mode
from dynpipe_ds.cli.numerics.model import (
    DROPOUT_SEED,
    NUM_LAYERS,
    NUM_MICRO_BATCHES,
    Block,
    Embedding,
    Head,
    as_head,
    loss_fn,
    make_optimizer,
    make_scheduler,
    micro_batches,
)
from dynpipe_ds.cli.numerics.record import LOSS, NORM, Quantity, Record, note, note_layer


class Undivided(nn.Module):
    """All layers in one module.

    Args:
        mode: how it is trained.
    """

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        first = Embedding(0, 0 in mode.frozen)
        blocks = [Block(i, mode.dropout, not mode.checkpointing, i in mode.frozen) for i in range(1, NUM_LAYERS - 1)]
        last = first if mode.tied else Head(NUM_LAYERS - 1)
        self.layers = nn.ModuleList([first, *blocks, last])
        self._mode = mode
        self._num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers; dropout is seeded for each from micro-batch and layer, as ``seed_layers`` has it.

        Args:
            x: tokens.

        Returns:
            Logits.
        """
        self._num_forwards += 1
        seed = DROPOUT_SEED * (self._num_forwards + 1)
        for i, layer in enumerate(self.layers):
            x = self._run(i, layer, seed + i, x)
        return x

    def _run(self, index: int, layer: nn.Module, seed: int, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            torch.manual_seed(seed)
            result: Tensor = as_head(layer, x) if isinstance(layer, Embedding) and index else layer(x)
            return result

        if self._mode.checkpointing and x.requires_grad:
            result: Tensor = checkpoint(run, x, use_reentrant=True)
            return result
        return run(x)


def train_undivided(mode: Mode) -> Record:
    """Train and evaluate the undivided model.

    Args:
        mode: how.

    Returns:
        What :mod:`~dynpipe_ds.cli.numerics.rank` records of the divided one, tied weights at both of their layers.
    """
    num_threads, seed = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(1)
    try:
        return _Training(mode).run()
    finally:
        torch.set_num_threads(num_threads)
        torch.random.set_rng_state(seed)


class _Training:
    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._model = Undivided(mode)
        if mode.bf16:
            self._model.bfloat16()
        self._weights = dict(self._model.named_parameters())
        # What the optimizer trains: the weights themselves, or fp32 copies of bf16 ones.
        self._masters = {
            name: nn.Parameter(weight.detach().float(), weight.requires_grad) if mode.bf16 else weight
            for name, weight in self._weights.items()
        }
        self._optimizer = make_optimizer(self._masters.values())
        self._scheduler = make_scheduler(self._optimizer)
        self._record: Record = {}

    def run(self) -> Record:
        data = micro_batches()
        for batch in range(NUM_BATCHES):
            if self._mode.freezes is not None and self._mode.freezes[0] == batch:
                self._freeze(self._mode.freezes[1])
            note(self._record, Quantity(batch, LOSS), self._gradients(list(islice(data, NUM_MICRO_BATCHES))))
            norm = self._step()
            if self._mode.clipping:
                note(self._record, Quantity(batch, NORM), norm)
            self._note_layers(batch)
        self._model.eval()
        with torch.no_grad():
            losses = [loss_fn(self._model(x), y) for x, y in islice(micro_batches(6), NUM_MICRO_BATCHES)]
        note(self._record, Quantity(NUM_BATCHES, LOSS), torch.stack(losses).mean())
        return self._record

    def _freeze(self, layer: int) -> None:
        for name, weight in self._weights.items():
            if name.startswith(f"layers.{layer}."):
                weight.requires_grad_(False)
                self._optimizer.state.pop(self._masters[name], None)

    def _gradients(self, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
        losses = []
        for tokens, labels in batch:
            loss = loss_fn(self._model(tokens), labels)
            torch.autograd.backward(loss / len(batch))
            losses.append(loss.detach())
            if self._mode.bf16:
                self._add_up()
        return torch.stack(losses).mean()

    def _add_up(self) -> None:
        """Add a micro-batch's bf16 gradients to those of the master weights."""
        for name, weight in self._weights.items():
            if weight.grad is not None:
                master = self._masters[name]
                master.grad = weight.grad.float() + (0.0 if master.grad is None else master.grad)
                weight.grad = None

    def _step(self) -> Tensor:
        trained = [master for master in self._masters.values() if master.grad is not None]
        norm = nn.utils.clip_grad_norm_(trained, self._mode.clipping or float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._scheduler.step()
        with torch.no_grad():
            for name, weight in self._weights.items():
                if weight.requires_grad and self._mode.bf16:
                    weight.copy_(self._masters[name])
        return norm

    def _note_layers(self, batch: int) -> None:
        for i, layer in enumerate(self._model.layers):
            prefix = "layers.0" if isinstance(layer, Embedding) else f"layers.{i}"
            states = {
                name: dict(self._optimizer.state.get(self._masters[f"{prefix}.{name}"], {}))
                for name, _ in layer.named_parameters()
            }
            note_layer(self._record, batch, i, layer, states)
