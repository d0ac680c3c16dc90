"""The undivided model on one process: torch alone, without DeepSpeed and without any of our training code."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynpipe_ds.cli.numerics.model import (
    DROPOUT_SEED,
    NUM_BATCHES,
    NUM_MICRO_BATCHES,
    Embedding,
    Mode,
    loss_fn,
    make_optimizer,
    make_scheduler,
    micro_batches,
)
from dynpipe_ds.cli.numerics.record import LOSS, NORM, Quantity, Record, note, note_layer


class Undivided(nn.Module):
    """All layers in one module."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        layers = [layer_class(*arguments) for layer_class, *arguments in mode.layers()]
        self.layers = nn.ModuleList([*layers[:-1], layers[0 if mode.tied else -1]])
        self._checkpointing = mode.checkpointing
        self._num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        """From tokens to logits, dropout seeded for each layer from micro-batch and layer, as by ``seed_layers``."""
        self._num_forwards += 1
        seed = DROPOUT_SEED * (self._num_forwards + 1)
        for i in range(len(self.layers)):
            again = self._checkpointing and x.requires_grad
            x = checkpoint(self._run, i, seed + i, x, use_reentrant=True) if again else self._run(i, seed + i, x)
        return x

    def _run(self, index: int, seed: int, x: Tensor) -> Tensor:
        torch.manual_seed(seed)
        layer = self.layers[index]
        result: Tensor = layer.logits(x) if isinstance(layer, Embedding) and index else layer(x)
        return result


def train_undivided(mode: Mode) -> Record:
    """Train and evaluate the undivided model: what the two ranks measure, tied weights at both of their layers."""
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
        # What the optimizer trains: fp32 copies, also of weights that are fp32 themselves.
        weights = self._model.parameters()
        self._masters = {w: nn.Parameter(w.detach().float().clone(), w.requires_grad) for w in weights}
        self._optimizer = make_optimizer(self._masters.values())
        self._scheduler = make_scheduler(self._optimizer)

    def run(self) -> Record:
        record: Record = {}
        data = micro_batches()
        for batch in range(NUM_BATCHES):
            if self._mode.freezes is not None and self._mode.freezes[0] == batch:
                self._freeze(self._model.layers[self._mode.freezes[1]])
            note(record, Quantity(batch, LOSS), self._gradients(list(islice(data, NUM_MICRO_BATCHES))))
            norm = self._step()
            if self._mode.clipping:
                note(record, Quantity(batch, NORM), norm)
            for i, layer in enumerate(self._model.layers):
                weights = layer.named_parameters()
                states = {name: dict(self._optimizer.state.get(self._masters[w], {})) for name, w in weights}
                note_layer(record, batch, i, layer, states)
        self._model.eval()
        with torch.no_grad():
            losses = [loss_fn(self._model(x), y) for x, y in islice(micro_batches(6), NUM_MICRO_BATCHES)]
        note(record, Quantity(NUM_BATCHES, LOSS), torch.stack(losses).mean())
        return record

    def _freeze(self, layer: nn.Module) -> None:
        for weight in layer.parameters():
            weight.requires_grad_(False)
            self._optimizer.state.pop(self._masters[weight], None)

    def _gradients(self, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
        losses = []
        for tokens, labels in batch:
            loss = loss_fn(self._model(tokens), labels)
            torch.autograd.backward(loss / len(batch))
            losses.append(loss.detach())
            for weight, master in self._masters.items():
                if weight.grad is not None:
                    master.grad = weight.grad.float() + (0.0 if master.grad is None else master.grad)
                    weight.grad = None
        return torch.stack(losses).mean()

    def _step(self) -> Tensor:
        trained = [master for master in self._masters.values() if master.grad is not None]
        norm = nn.utils.clip_grad_norm_(trained, self._mode.clipping or float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._scheduler.step()
        with torch.no_grad():
            for weight, master in self._masters.items():
                if weight.requires_grad:
                    weight.copy_(master)
        return norm
