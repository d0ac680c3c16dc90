"""Small stages whose backward is split; each is built the same way twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
Value = Any


class Mlp(nn.Module):
    def __init__(self, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias), nn.Linear(4 * WIDTH, WIDTH, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class Product(torch.autograd.Function):
    """A product of the user's own; counts how often its backward runs."""

    num_backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        Product.num_backwards += 1
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class InParts(torch.autograd.Function):
    """A product that computes no gradient it is not asked for; its weight is kept in another precision."""

    leaves_gradients_alone = True
    backward_can_be_split = True
    asked: ClassVar[list[tuple[bool, ...]]] = []

    @staticmethod
    def forward(ctx: Any, times: int, x: Tensor, bias: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.times = times
        y = times * (x @ weight.float())
        return (y if bias is None else y + bias), x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_sum: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        _, wants_x, wants_bias, wants_weight = ctx.needs_input_grad
        InParts.asked.append((wants_x, wants_bias, wants_weight))
        scaled = gradient * ctx.times
        return (
            None, scaled @ weight.float().t() + of_sum if wants_x else None,
            gradient.flatten(0, -2).sum(0) if wants_bias else None,
            x.flatten(0, -2).t() @ scaled.flatten(0, -2) if wants_weight else None,
        )  # fmt: skip


class Parted(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.randn(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(InParts.apply(2, x, self.bias, self.weight)[0])


class InPlace(torch.autograd.Function):
    """Changes its gradient, which others may share."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 3.0

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.mul_(3.0)


class Refusing(torch.autograd.Function):
    """Does not let itself be asked for some gradients only."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[attr-defined]
            raise RuntimeError("call backward() instead")
        return gradient * 2.0


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Product.apply(self.linear(x), self.weight))


class Sharing(nn.Module):
    """Uses its parameters again and again, directly and by ways of their own."""

    def __init__(self, uses: int, *, mixed: bool = False) -> None:
        super().__init__()
        self.linear, self.uses, self.mixed = nn.Linear(WIDTH, WIDTH), uses, mixed

    def forward(self, x: Tensor) -> Tensor:
        for use in range(self.uses):
            x = torch.tanh(self.linear(x))
            if self.mixed:
                x = x @ self.linear.weight if use % 2 else x @ (self.linear.weight * 0.5).t()
        return x


class Before(nn.Module):
    """Uses a parameter itself once, before two ways to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.tanh(self.linear(torch.tanh(x @ self.linear.weight)))))


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.last, self.reentrant = Mlp(dropout=0.2), nn.Linear(WIDTH, WIDTH), reentrant
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self._run, x, use_reentrant=self.reentrant))

    def _run(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return self.inner(x)


def _stage(*layers: nn.Module) -> Callable[[Value], Value]:
    return nn.Sequential(*layers)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Tied(nn.Module):
    """An embedding added on the way, whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x + F.embedding(torch.tensor([0, 1, 1, 4]), self.table)) @ self.table.t()


class Several(nn.Module):
    """Several outputs, of which one passes by, one gets no gradient and one needs no input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(2, 2)
        self.free = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        return y, self.second(y), y.sum() * 2, self.free.exp(), x[0], self.second(x).sum()


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH)), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).clone()
        y[..., : WIDTH // 2] = self.gain[: WIDTH // 2] * x[..., WIDTH // 2 :]
        y[..., 0].mul_(self.gain[0])
        bias = torch.cat([self.bias.weight.view(-1)[:4], self.gain[4:].detach()])
        y = F.linear(y.relu_().view(-1, WIDTH), self.linear.weight, bias).view_as(y)
        return y.add_(x).transpose(0, 1) * self.gain


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.bmm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.wide(x.transpose(1, 2))).transpose(1, 2)
        return torch.baddbmm(x, y, self.bmm) + torch.einsum("btd,bde->bte", y, self.bmm)


class Hooked(nn.Module):
    """Hooks of all kinds, which say what they saw; some change the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: list[str] = []
        self.first.register_full_backward_hook(lambda *_: self.seen.append("module"))
        for name, parameter in self.named_parameters():
            parameter.register_hook(self._see(f"tensor {name}"))
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.seen.append(f"added {name}"))

    def _see(self, what: str) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            self.seen.append(what)
            return gradient * 1.5

        return hook

    def forward(self, x: Tensor) -> Tensor:
        flat = self.first(x.view(-1, WIDTH))  # the product itself is what has the hook
        flat.register_hook(self._see("flat"))
        y = self.norm(flat)
        y.register_hook(self._see("normed"))
        return self.second(y).view_as(x)


class Changing(nn.Module):
    """What comes after the product, going back, changes the gradient that the product got."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return InPlace.apply(x) + self.linear(x)


BLOCKS: dict[str, Callable[[], Callable[[Value], Value]]] = {
    "mlp": lambda: _stage(Mlp(), Mlp(bias=False), Mlp()),
    "attention": lambda: _stage(Attention(), Mlp(), Attention()),
    "dropout": lambda: _stage(Mlp(dropout=0.3), Mlp(dropout=0.3)),
    "function": lambda: _stage(Own(), Mlp(), Own()),
    "function in parts": lambda: _stage(Parted(), Mlp(), Parted(bias=False)),
    "in place on a gradient": lambda: _stage(Changing(), Changing()),
    "two uses": lambda: _stage(Sharing(2)),
    "five uses": lambda: _stage(Mlp(), Sharing(5)),
    "one use before two": lambda: _stage(Before(), Mlp()),
    "mixed uses": lambda: _stage(Sharing(5, mixed=True), Mlp()),
    "frozen middle": lambda: _stage(Mlp(), Frozen(), Mlp()),
    "frozen end": lambda: _stage(Mlp(), Frozen()),
    "tied": lambda: _stage(Mlp(), Tied()),
    "several outputs": lambda: _stage(Mlp(), Several()),
    "views": lambda: _stage(Mlp(), Views()),
    "convolution": lambda: _stage(Convolved(), Mlp()),
    "hooks": lambda: _stage(Mlp(), Hooked(), Hooked()),
    "checkpoint": lambda: _stage(Mlp(), Recomputed(), Mlp()),
}
