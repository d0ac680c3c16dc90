"""A linear layer that shrinks: dense, then the non-zeros alone, or small dense blocks.

The weight's number of dimensions says which form it has, so that tensors alone (a checkpoint, a reference
copy) define what the layer computes:

* 2, ``[out, in]``: dense, with zeros stored where ``mask`` says so;
* 1, ``[non-zeros]``: compressed sparse rows, the places in ``rows``, ``columns`` and their transposes;
* 3, ``[groups, rows, kept]``: groups of rows that share the columns they keep, in ``block_columns``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dynpipe_ds import ParameterReplacement
from scenarios.kernels import Task, choose
from scenarios.pruning.products import BlockProduct, CSRProduct, MaskedProduct, Pattern, Work, mask_of, pattern_of

Structure = Literal["unstructured", "block"]

_BUFFERS = ("mask", "rows", "columns", "rows_t", "columns_t", "order_t", "block_columns")

TASKS: Mapping[Structure, Task] = {"unstructured": "pruned elements", "block": "pruned blocks"}


@dataclass(frozen=True)
class Form:
    """How weights are pruned, and when they change their form.

    Attributes:
        structure: single elements, or one column of ``block_rows`` rows at a time.
        crossover: sparsity from which a weight is stored without its zeros; ``None`` for the default.
        block_rows: rows that share their columns; the largest divisor of the weight's rows up to this is taken.
    """

    structure: Structure = "unstructured"
    crossover: float | None = None
    block_rows: int = 128

    def rows_of(self, out_features: int) -> int:
        """Rows of a block in a weight with so many rows."""
        return next(rows for rows in range(min(self.block_rows, out_features), 0, -1) if out_features % rows == 0)

    def is_small(self, sparsity: float, weight: Tensor) -> bool:
        """Say whether a weight of this sparsity is stored without its zeros."""
        if self.crossover is not None:
            return sparsity >= self.crossover
        return sparsity >= choose(TASKS[self.structure], weight.device, weight.dtype).pays_from


@dataclass(frozen=True)
class Shrinking:
    """A change of a layer's weight that is worked out but not made yet.

    Attributes:
        replacement: for ``engine.replace_parameters``.
        buffers: set after that has succeeded.
    """

    replacement: ParameterReplacement
    buffers: dict[str, Tensor]

    def finish(self) -> None:
        """Set the buffers that belong to the new weight."""
        linear = self.replacement.owner
        for name in _BUFFERS:
            setattr(linear, name, self.buffers.get(name, _empty(name, linear.weight.device)))


class PrunableLinear(nn.Module):
    """``x @ weight.T + bias`` as ``nn.Linear``, with a weight that can be pruned while it trains.

    Args:
        linear: taken over as it is; its weight and bias become this module's.
        form: how it is pruned.
        feature_major: return memory that is ``[out, tokens]`` (see ``products``): for a layer whose output meets
            only elementwise functions before the next product.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    mask: Tensor
    rows: Tensor
    columns: Tensor
    rows_t: Tensor
    columns_t: Tensor
    order_t: Tensor
    block_columns: Tensor

    def __init__(self, linear: nn.Linear, form: Form, *, feature_major: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.form, self.feature_major, self.work = form, feature_major, Work()
        self.weight, self.bias = linear.weight, linear.bias
        for name in _BUFFERS:
            self.register_buffer(name, _empty(name, linear.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, in]`` to ``[…, out]``."""
        work = self.work if self.training else Work()  # evaluation is not counted
        if self.weight.dim() == 2:
            return MaskedProduct.apply(x, self.weight, self.bias, self.mask, work)
        if self.weight.dim() == 1:
            y = CSRProduct.apply(x, self.weight, self.bias, work, *self._pattern())
        else:
            y = BlockProduct.apply(x, self.weight, self.bias, self.block_columns, work)
        return y if self.feature_major else y.contiguous()

    @property
    def is_small(self) -> bool:
        """Whether the zeros are not stored."""
        return self.weight.dim() != 2

    @property
    def numel(self) -> int:
        """Elements of the weight, zeros included."""
        return self.in_features * self.out_features

    def num_kept(self) -> int:
        """Count the elements that are not pruned."""
        return int(self.mask.sum()) if self.mask.numel() else self.weight.numel()

    def kept(self) -> Tensor:
        """Return the mask ``[out, in]`` of elements that are not pruned, a copy."""
        if self.weight.dim() == 1:
            return mask_of(self._pattern())
        if self.weight.dim() == 3:
            shape = (self.block_columns.shape[0], self.in_features)
            groups = torch.zeros(shape, dtype=torch.bool, device=self.weight.device)
            groups.scatter_(1, self.block_columns, True)
            return groups.repeat_interleave(self.weight.shape[1], dim=0)
        return self.mask.clone() if self.mask.numel() else torch.ones_like(self.weight, dtype=torch.bool)

    @torch.no_grad()
    def dense_weight(self) -> Tensor:
        """Return the weight as ``[out, in]`` with zeros, a copy."""
        if self.weight.dim() == 2:
            return self.weight.detach().clone()
        dense = self.weight.new_zeros(self.out_features, self.in_features)
        if self.weight.dim() == 1:
            dense[self.kept()] = self.weight
        else:
            groups = dense.view(self.weight.shape[0], self.weight.shape[1], -1)
            groups.scatter_(2, self.block_columns[:, None].expand_as(self.weight), self.weight)
        return dense

    @torch.no_grad()
    def scores(self) -> Tensor:
        """Return the magnitude of each unit that is not pruned, float32, by position.

        A unit is an element, or for ``structure: block`` the elements of one column in one group of rows; its
        magnitude is the root of the sum of their squares.
        """
        weight = self.weight.detach().float()
        if self.form.structure == "unstructured":
            if self.mask.numel():
                weight = weight[self.mask]
            return weight.abs().flatten()
        if weight.dim() == 2:
            weight = self._grouped(weight)
            return torch.linalg.vector_norm(weight, dim=1).gather(1, self._kept_units()).flatten()
        return torch.linalg.vector_norm(weight, dim=1).flatten()

    def num_units(self) -> int:
        """Count the units, pruned ones included."""
        rows = 1 if self.form.structure == "unstructured" else self.form.rows_of(self.out_features)
        return self.numel // rows

    @torch.no_grad()
    def shrink(self, keep: Tensor) -> Shrinking | None:
        """Work out what pruning changes; nothing is changed yet.

        Args:
            keep: ``[units]``, which of those in :meth:`scores` stay.

        Returns:
            The change, or ``None`` where all stay.
        """
        if bool(keep.all()):
            return None
        return self._shrink_elements(keep) if self.form.structure == "unstructured" else self._shrink_blocks(keep)

    def _shrink_elements(self, keep: Tensor) -> Shrinking:
        kept = self.kept()
        kept[kept.clone()] = keep
        if self.weight.dim() == 1:
            return self._shrinking(lambda t: t[keep], pattern_of(kept)._asdict())
        if self.form.is_small(1.0 - int(keep.sum()) / self.numel, self.weight):
            return self._shrinking(lambda t: t[kept], pattern_of(kept)._asdict())
        return self._shrinking(lambda t: t.masked_fill(~kept, 0.0), {"mask": kept})

    def _shrink_blocks(self, keep: Tensor) -> Shrinking | None:
        """Give every group of rows as many columns, those with the largest magnitude, so that products batch."""
        units = self._kept_units()
        num_columns = round(int(keep.sum()) / units.shape[0])
        if num_columns == units.shape[1]:
            return None
        order = self.scores().view(units.shape).sort(dim=1, descending=True, stable=True).indices
        chosen = order[:, :num_columns].sort(dim=1).values
        columns = units.gather(1, chosen)
        if self.weight.dim() == 3:
            return self._shrinking(lambda t: _take(t, chosen), {"block_columns": columns})
        if self.form.is_small(1.0 - num_columns / self.in_features, self.weight):
            return self._shrinking(lambda t: _take(self._grouped(t), columns), {"block_columns": columns})
        mask = torch.zeros(units.shape[0], self.in_features, dtype=torch.bool, device=units.device)
        mask = mask.scatter_(1, columns, True).repeat_interleave(self.out_features // units.shape[0], dim=0)
        return self._shrinking(lambda t: t.masked_fill(~mask, 0.0), {"mask": mask})

    def _shrinking(self, carry: Callable[[Tensor], Tensor], buffers: dict[str, Tensor]) -> Shrinking:
        new = carry(self.weight.detach()).clone()
        parameter = nn.Parameter(new, requires_grad=self.weight.requires_grad)
        return Shrinking(ParameterReplacement(self, "weight", parameter, carry), buffers)

    def _kept_units(self) -> Tensor:
        """Columns ``[groups, kept]`` that each group of rows keeps, ascending."""
        if self.weight.dim() == 3:
            return self.block_columns
        kept = self._grouped(self.kept())[:, 0]
        return kept.nonzero()[:, 1].view(kept.shape[0], -1)

    def _grouped(self, t: Tensor) -> Tensor:
        rows = self.form.rows_of(self.out_features)
        return t.view(self.out_features // rows, rows, self.in_features)

    def _pattern(self) -> Pattern:
        return Pattern(self.rows, self.columns, self.rows_t, self.columns_t, self.order_t)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take on the shapes that weight and buffers had when they were saved.

        The weight becomes another parameter then, so that whoever knows the old one (the optimizer) can tell.
        """
        for name in ("weight", *_BUFFERS):
            saved, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(saved, Tensor) and saved.shape != own.shape:
                empty = own.detach().new_empty(saved.shape)
                is_parameter = isinstance(own, nn.Parameter)
                setattr(self, name, nn.Parameter(empty, own.requires_grad) if is_parameter else empty)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, weight={tuple(self.weight.shape)}"


def _take(groups: Tensor, columns: Tensor) -> Tensor:
    """Take ``columns [groups, kept]`` out of ``[groups, rows, columns]``."""
    return groups.gather(2, columns[:, None].expand(-1, groups.shape[1], -1))


def _empty(name: str, device: torch.device) -> Tensor:
    dtypes = {"mask": torch.bool, "block_columns": torch.int64}
    return torch.empty(0, dtype=dtypes.get(name, torch.int32), device=device)
