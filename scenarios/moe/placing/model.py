"""The performance model: seconds of a MoE layer under a placement (Pro-Prophet, section IV-B, equations 1 to 8).

Where it differs from the paper: all-to-all, Trans and Agg take as long as the *fullest* link, in either direction. The
paper's equations 4 and 5 spread what is transferred evenly over all devices, which no placement does. Weights and
gradients go along chains, every rank forwarding what it gets; sent by the home alone, each copy would cost the home's
link an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scenarios.moe.placing.constants import Constants, Link
from scenarios.moe.placing.lanes import Lanes
from scenarios.moe.placing.traffic import (
    Floats,
    Ints,
    Rows,
    Transfers,
    as_loads,
    count_agg,
    count_rows,
    count_trans,
    held,
)


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Predicted seconds of a MoE layer in one batch, by part.

    Args:
        all_to_all_s: all four exchanges of rows (equation 1).
        forward_s: experts' forward on the busiest rank (equation 2).
        backward_s: experts' backward on the busiest rank (equation 3).
        trans_s: weights to their copies (equation 4).
        agg_s: gradients back to their homes (equation 5).
        hidden_trans_s: how much of Trans can run beside forwards (equation 8).
        hidden_agg_s: how much of Agg can run beside backwards (equation 8).
        fixed_s: what any placement takes.
    """

    all_to_all_s: float
    forward_s: float
    backward_s: float
    trans_s: float
    agg_s: float
    hidden_trans_s: float
    hidden_agg_s: float
    fixed_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Experts' forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def blocking_s(self) -> float:
        """The whole layer, with nothing hidden (equation 6)."""
        return self.all_to_all_s + self.compute_s + self.trans_s + self.agg_s + self.fixed_s

    @property
    def overlapped_s(self) -> float:
        """The whole layer, with Trans and Agg beside computation (equation 8)."""
        return self.blocking_s - self.hidden_s

    @property
    def hidden_s(self) -> float:
        """Seconds of Trans and Agg that nobody waits for."""
        return self.hidden_trans_s + self.hidden_agg_s


@dataclass(frozen=True)
class LayerModel:
    """What planners minimise: predicted seconds of one layer.

    Args:
        constants: of the machine and the layer.
        overlapped: whether Trans and Agg run beside computation (equation 8) or block (equation 6).
    """

    constants: Constants
    overlapped: bool = True

    def predict(self, lanes: Lanes, loads: Any) -> LayerSeconds:
        """Predict a batch.

        Args:
            lanes: the placement.
            loads: rows of each source for each expert in the whole batch, ``[R, E]``.

        Returns:
            Seconds of every part.

        Raises:
            ValueError: when the placement is for other sizes, or the loads are none.
        """
        table = as_loads(loads)
        lanes.check(*table.shape)
        return self.parts(np.array(lanes.owner, dtype=np.int64), table)

    def seconds(self, lanes: Lanes, loads: Any) -> float:
        """Predict the whole layer, with what is hidden left out if :attr:`overlapped`.

        Args:
            lanes: the placement.
            loads: rows of each source for each expert in the whole batch, ``[R, E]``.

        Returns:
            Seconds of the layer.

        Raises:
            ValueError: when the placement is for other sizes, or the loads are none.
        """
        return self.whole(self.predict(lanes, loads))

    def whole(self, parts: LayerSeconds) -> float:
        """Choose equation 6 or 8.

        Args:
            parts: of :meth:`predict`.

        Returns:
            Seconds of the layer.
        """
        return parts.overlapped_s if self.overlapped else parts.blocking_s

    def parts(self, owner: Ints, loads: Floats) -> LayerSeconds:
        """The same as :meth:`predict` for tables that were checked already.

        Args:
            owner: rank of every lane, ``[R, E]``.
            loads: rows of every lane, ``[R, E]``.

        Returns:
            Seconds of every part.
        """
        constants = self.constants
        rows = count_rows(owner, loads)
        forward_s, backward_s = self.compute_s(rows)
        trans_s = self.transfer_s(count_trans(held(owner)), constants.expert_bytes, constants.trans_link)
        summed = count_agg(owner, loads, constants.agg)
        agg_s = constants.sum_s + self.transfer_s(summed, constants.agg_bytes, constants.sums_link)
        return LayerSeconds(
            all_to_all_s=self.all_to_all_s(rows.fullest_link),
            forward_s=forward_s,
            backward_s=backward_s,
            trans_s=trans_s,
            agg_s=agg_s,
            # Section V-C, equation 8: computation of experts and of the rest of the block hides what it can.
            hidden_trans_s=min(trans_s, forward_s + constants.rest_forward_s),
            hidden_agg_s=min(agg_s, backward_s + constants.rest_backward_s),
            fixed_s=constants.fixed_s,
        )

    def all_to_all_s(self, rows: float) -> float:
        """Four exchanges: there and back, forward and backward (equation 1, four times as in equation 6).

        Args:
            rows: on the fullest link. Answers go the other way, so a link is as full as its fuller direction in all.

        Returns:
            Seconds of all four.
        """
        constants = self.constants
        messages_s = constants.num_micro_batches * constants.message_s if rows else 0.0  # or there are no exchanges
        return 4 * (rows * constants.row_bytes * constants.byte_s + messages_s)

    def compute_s(self, rows: Rows) -> tuple[float, float]:
        """Forward (equation 2) and backward (equation 3) on the busiest rank, experts one after the other.

        Args:
            rows: what ranks compute.

        Returns:
            Seconds of the forward and of the backward.
        """
        constants = self.constants
        share, lane_s = constants.forward_share, constants.lane_s * constants.num_micro_batches
        forward = rows.computed * constants.forward_row_s + rows.lanes * (lane_s * share)
        backward = rows.computed * constants.backward_s + rows.lanes * (lane_s * (1 - share))
        return float(forward.max()), float(backward.max())

    def transfer_s(self, transfers: Transfers, num_bytes: float, link: Link) -> float:
        """Trans (equation 4) or Agg (equation 5): the fullest link, and what the longest chain takes to fill.

        Args:
            transfers: who receives and sends how many.
            num_bytes: of one expert's weights or gradients.
            link: what they take.

        Returns:
            Seconds.
        """
        if not transfers.depth:
            return 0.0
        limit = self.constants.piece_bytes
        piece = num_bytes if limit is None else min(limit, num_bytes)
        one_s = link.message_s + num_bytes * link.byte_s
        fill_s = link.message_s + piece * link.byte_s
        return link.start_s + transfers.fullest_link * one_s + (transfers.depth - 1) * fill_s
