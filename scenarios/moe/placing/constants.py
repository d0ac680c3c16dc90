"""What the performance model has to know of the machine and of the layer, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Agg = Literal["chain", "lanes", "sums"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What it takes to pass weights or sums on.

    Args:
        byte_s: seconds of a byte.
        message_s: of a message, whatever its bytes are.
        start_s: of all together, if anything travels at all.

    Raises:
        ValueError: for a number that is negative or not finite.
    """

    byte_s: float
    message_s: float = 0.0
    start_s: float = 0.0

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        wrong = [f"{name}={value}" for name, value in values.items() if not 0 <= value < math.inf]
        if wrong:
            raise ValueError(
                f"a link of a MoE layer: {', '.join(wrong)} must be 0 or more, and finite; measure them again"
            )


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Seconds and bytes of one MoE layer on one group of ranks.

    The paper's symbols (Pro-Prophet, Table II): ``forward_row_s`` is 1 / t, ``byte_s`` is 1 / B, ``row_bytes`` the
    size of an input, ``expert_bytes`` and ``gradient_bytes`` the sizes of an expert's parameters and gradients.

    Args:
        forward_row_s: seconds of one row in the forward of one expert.
        row_bytes: of a row that travels, in either direction.
        byte_s: seconds that a byte takes on a rank's link in an exchange of rows.
        expert_bytes: of an expert's weights (Trans).
        backward_row_s: seconds of one row in the backward; ``None``: twice the forward's (equation 3).
        lane_s: seconds of a lane with rows in one micro-batch, forward and backward, whatever its rows are.
        message_s: seconds of an exchange, whatever its bytes are.
        trans: what weights take on a link (Trans); ``None``: as ``byte_s`` and ``message_s``.
        agg_link: what sums of gradients take (Agg), being added up included; ``None``: as ``byte_s`` and ``message_s``.
        sum_s: seconds of adding up at home, whatever travels.
        fixed_s: seconds of a layer besides all this, whatever the placement: its begin, telling counts, its end.
        gradient_bytes: of a lane's gradient sum (Agg); ``None``: as many as the weights have.
        piece_bytes: what is forwarded at a time along a chain; ``None``: a whole expert.
        rest_forward_s: forward of what is not experts in the block, which hides Trans (the paper's FNEC).
        rest_backward_s: its backward, which hides Agg (BNEC).
        num_micro_batches: M of a batch, for ``lane_s`` and ``message_s``; rows are those of the whole batch.
        agg: how gradients come home. ``"chain"``: one running sum visits the lanes in the order of their sources,
            which gives the same bits whatever the placement; ``"lanes"``: every lane's sum goes home by itself;
            ``"sums"``: every holder adds its lanes and forwards along the holders, the papers' way (other bits).

    Raises:
        ValueError: for a number that is negative or not finite, no micro-batch, or an unknown ``agg``.
    """

    forward_row_s: float
    row_bytes: float
    byte_s: float
    expert_bytes: float
    backward_row_s: float | None = None
    lane_s: float = 0.0
    message_s: float = 0.0
    trans: Link | None = None
    agg_link: Link | None = None
    sum_s: float = 0.0
    fixed_s: float = 0.0
    gradient_bytes: float | None = None
    piece_bytes: float | None = None
    rest_forward_s: float = 0.0
    rest_backward_s: float = 0.0
    num_micro_batches: int = 1
    agg: Agg = "chain"

    def __post_init__(self) -> None:
        problems = []
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if field.name == "agg":
                if value not in get_args(Agg):
                    problems.append(f"agg={value!r} must be one of {', '.join(get_args(Agg))}")
            elif field.name == "num_micro_batches":
                if value < 1:
                    problems.append(f"num_micro_batches={value} must be at least 1")
            elif not isinstance(value, Link | None) and not 0 <= value < math.inf:
                problems.append(f"{field.name}={value} must be 0 or more, and finite")
        if problems:
            raise ValueError("constants of a MoE layer: " + "; ".join(problems) + "; measure them again")

    @property
    def backward_s(self) -> float:
        """Seconds of one row in the backward: as measured, or twice the forward's (equation 3)."""
        return 2 * self.forward_row_s if self.backward_row_s is None else self.backward_row_s

    @property
    def agg_bytes(self) -> float:
        """Bytes of a lane's gradient sum."""
        return self.expert_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def trans_link(self) -> Link:
        """Of weights."""
        return self.trans or Link(byte_s=self.byte_s, message_s=self.message_s)

    @property
    def sums_link(self) -> Link:
        """Of sums of gradients."""
        return self.agg_link or Link(byte_s=self.byte_s, message_s=self.message_s)

    @property
    def forward_share(self) -> float:
        """Share of an expert's seconds that its forward takes."""
        both = self.forward_row_s + self.backward_s
        return self.forward_row_s / both if both else 1 / 3
