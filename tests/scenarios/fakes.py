"""A stand-in for the engine: all layers on one rank, no distributed training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scenarios.gpt import GPTConfig, loss_fn
from scenarios.scenario import Scenario, build_layers

TINY = GPTConfig(depth=4, hidden=16, heads=2, seq_len=12, vocab_size=32)


class FakeEngine:
    """Holds layers, trains them with SGD, and tells a learning rate that the test chooses."""

    def __init__(self, scenario: Scenario, model: GPTConfig = TINY, *, lr: float = 0.1) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cpu")
        self.layers = [spec.build() for spec in build_layers(scenario, model)]
        self.partition = (0, len(self.layers))
        self.model = model
        self.lr = lr

    def local_layers(self) -> dict[int, nn.Module]:
        """Return every layer."""
        return dict(enumerate(self.layers))

    def get_lr(self) -> list[float]:
        """Return the rate that the test chose."""
        return [self.lr]

    def gradient_accumulation_steps(self) -> int:
        """Return 1: the whole batch goes through at once."""
        return 1

    def train_batch(self, batch: int) -> Tensor:
        """Take one SGD step on random tokens that depend on the batch index only."""
        generator = torch.Generator().manual_seed(batch)
        shape = (2, self.model.seq_len + 1)
        tokens = torch.randint(self.model.vocab_size, shape, generator=generator)
        x: Tensor = tokens[:, :-1]
        for layer in self.layers:
            x = layer(x)
        loss = loss_fn(x, tokens[:, 1:])
        loss.backward()
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter -= self.lr * parameter.grad
                    parameter.grad = None
        return loss.detach()

    def parameters(self) -> list[nn.Parameter]:
        """Return every parameter of every layer."""
        return [p for layer in self.layers for p in layer.parameters()]

    def frozen(self) -> list[bool]:
        """Say of each layer whether all its parameters are frozen."""
        return [not any(p.requires_grad for p in layer.parameters()) for layer in self.layers]


def run(engine: FakeEngine, scenario: Scenario, batches: range) -> list[float]:
    """Train some batches with a scenario around each, and return the losses."""
    losses = []
    for batch in batches:
        scenario.before_batch(engine, batch)
        losses.append(float(engine.train_batch(batch)))
        scenario.after_batch(engine, batch)
    return losses
