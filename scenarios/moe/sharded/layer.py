"""What a layer is whose experts the replicas share out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynpipe_ds import Replica, own_by_replica
from scenarios.moe.sharded.batch import Experts, LayerState
from scenarios.moe.sharded.exchange import Span, from_lanes, to_lanes
from scenarios.moe.sharded.products import mlp, multiply
from scenarios.moe.sharded.sharing import Sharing, sharing_in_force


@dataclass(frozen=True)
class LaneProducts:
    """The arithmetic of this rank's lanes in one micro-batch.

    Attributes:
        own: this rank's own weights by name.
        sharing: has the copies of others.
        state: of the layer.
        spans: rows of the lanes.
    """

    own: dict[str, nn.Parameter]
    sharing: Sharing
    state: LayerState | None
    spans: Sequence[Span]

    def multiply(self, rows: Tensor, name: str) -> Tensor:
        """Multiply each lane's rows, ``[N, in]``, with its expert's matrix of a name: ``[N, out]``."""
        return multiply(rows, self.own[name], self.sharing.weights(self.state, name), self.spans)

    def apart(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Compute rows lane by lane, so that their bits don't depend on the other lanes of this rank.

        Args:
            function: row by row, of autograd's own operations, without weights.
            *tensors: its arguments, of all lanes, ``[N, …]`` each.
        """
        if not self.spans:
            return function(*tensors)
        done = [function(*(tensor[start:stop] for tensor in tensors)) for *_, start, stop in self.spans]
        return torch.cat(done)

    def mlp(self, rows: Tensor, up: str, down: str) -> Tensor:
        """Multiply each lane's rows with two matrices of its expert, by their names, with GELU between."""
        ups, downs = (self.sharing.weights(self.state, name) for name in (up, down))
        return mlp(rows, self.own[up], self.own[down], ups, downs, self.spans)


def keep_own_rows(module: nn.Module, names: Sequence[str], replica: Replica) -> None:
    """Keep of stacks of all experts those of one replica, in storage of their own.

    Args:
        module: has the stacks as parameters, ``[E, …]``, drawn as one replica alone would draw them.
        names: of the parameters.
        replica: whose are kept.

    Raises:
        ValueError: if the experts don't divide evenly.
    """
    for name in names:
        whole: nn.Parameter = getattr(module, name)
        num_experts = len(whole)
        if num_experts % replica.count:
            raise ValueError(cant_divide(num_experts, replica.count))
        rows = replica.rows(num_experts)
        own = nn.Parameter(whole.detach()[rows.start : rows.stop].clone())
        setattr(module, name, own)
        own_by_replica(own, replica)


def cant_divide(num_experts: int, num_replicas: int) -> str:
    """Say that experts can't be shared out."""
    return (
        f"num_experts={num_experts} on {num_replicas} data-parallel replicas: with expert_weights=sharded each must "
        "hold as many experts; choose a multiple of the number of replicas, or expert_weights=replicated"
    )


class SharedExperts(nn.Module):
    """A module with experts that replicas may share out; it overrides :meth:`expert_weights` and :meth:`run_lanes`.

    All methods but these two are collective over the replicas of its stage, by the :class:`Sharing` in force.
    """

    def expert_weights(self) -> dict[str, nn.Parameter]:
        """This replica's own weights of experts, ``[E/R, …]`` by name; empty if it has all of them."""
        return {}

    def run_lanes(self, rows: Tensor, lanes: LaneProducts) -> Tensor:
        """Compute rows ``[N, hidden]`` of lanes."""
        raise NotImplementedError

    def run_shared(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Let rows be computed wherever their lanes are.

        Args:
            rows: of this rank, sorted by expert, ``[N, hidden]``.
            counts: of each expert, ``[E]``.

        Returns:
            ``[N, hidden]``, in the same order.

        Raises:
            RuntimeError: where no group is known that shares the experts.
        """
        sharing = sharing_in_force()
        if sharing is None:
            raise RuntimeError(
                "this replica holds a share of the experts and does not know who holds the others: train with a "
                "scenario (its before_batch says so), or call scenarios.moe.sharded.share_experts before"
            )
        own = self.expert_weights()
        exchange, state = sharing.forward(Experts(self, own), counts, is_training=self.training)
        lanes = LaneProducts(own, sharing, state, exchange.spans)
        return from_lanes(self.run_lanes(to_lanes(rows, exchange), lanes), exchange)

    # -- what the library calls -----------------------------------------------------------------

    def finish_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Bring the gradients of all lanes home when a batch is over."""
        own, sharing = self.expert_weights(), sharing_in_force()
        if not own or sharing is None:
            return {}
        return {own[name]: gradient for name, gradient in sharing.finish(self).items()}

    def give_up_batch(self) -> None:
        """Let the other replicas know that this rank computes no more of a batch; waits for nobody."""
        sharing = sharing_in_force()
        if self.expert_weights() and sharing is not None:
            sharing.give_up()

    def drop_gradients(self) -> None:
        """Forget a batch that all ranks drop."""
        sharing = sharing_in_force()
        if self.expert_weights() and sharing is not None:
            sharing.drop()
