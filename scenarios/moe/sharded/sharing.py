"""What the replicas of a stage do together for their layers with experts: tell counts, swap rows, pass on what travels.

Layers hold none of this, since they travel between processes. A process has one :class:`Sharing` in force
(:func:`share_experts`), which knows for each layer of a batch who computes what, which copies are here, and whose sums
wait. Between batches there is nothing of it.

The order of a batch, on all replicas of a stage:

1. ``begin`` plans nothing and computes nothing: it takes the lanes of each layer and posts *Trans*, the copies' weights
   on their way from home to holder, layer by layer.
2. A layer's first forward waits for its copies. Every forward tells counts and swaps rows.
3. When a layer has all gradients of its weights, *Agg* is posted, the sums of lanes on their way home; later layers
   first, whatever comes when.
4. ``finish`` waits for a layer's sums. Copies and sums are forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynpipe_ds import CountedForwards
from scenarios.moe.placing import Lanes
from scenarios.moe.sharded.batch import Experts, LayerBatch, LayerState, Planner, Reroute, Summed, Travelled
from scenarios.moe.sharded.chains import Load, Visit, pieces_of, run_chains, summing_chain
from scenarios.moe.sharded.exchange import LaneExchange, plan_lanes
from scenarios.moe.sharded.meetings import Meetings, PartnerGaveUpError
from scenarios.moe.sharded.products import LaneSums, LaneTimes, LaneWeights
from scenarios.moe.sharded.relay import Job, Relay

LIMIT_S = 1800.0
"""Longest wait for what travels, as DeepSpeed's default for collectives."""

COUNTS = 0
SUMMING = 16
"""Topics of meetings: counts of a forward; the sums of a layer, by index from there on."""


class Sharing:
    """Sharing of experts within one group of ranks; all methods are collective over it unless they say otherwise.

    Args:
        rows: the ranks that share the experts; rows travel by it.
        meetings: of the same ranks, for numbers on the host.
        relay: of the same ranks, for weights and sums.
        num_experts: of each layer.
        device: of the layers.
        sum_dtype: what gradients are summed in; ``None``: that of the weights.
        reroute: may choose other lanes within existing copies, by the counts of a batch's first micro-batch.
        limit_s: longest wait for what travels.
    """

    def __init__(
        self, rows: dist.ProcessGroup, meetings: dist.ProcessGroup, relay: dist.ProcessGroup, *, num_experts: int,
        device: torch.device, sum_dtype: torch.dtype | None = None, reroute: Reroute | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.group, self._relay_group = rows, relay
        self.num_ranks, self.rank = dist.get_world_size(rows), dist.get_rank(rows)
        self.num_experts, self.device, self.sum_dtype = num_experts, device, sum_dtype
        self.meetings = Meetings(meetings, num_experts)
        self._relay, self._relay_meetings = Relay(), Meetings(relay, 0, _where(relay, device))
        self._planning = Relay()
        self._planner: Planner | None = None
        self._due: frozenset[int] = frozenset()
        self._reroute, self._limit_s = reroute, limit_s
        self._static = Lanes.static(self.num_ranks, num_experts)
        self._states: dict[nn.Module, LayerState] = {}
        self._unposted: list[LayerState] = []  # whose sums are not on their way yet, earlier layers first
        self._micro_batches: int | None = None
        self._jobs: list[Job[int]] = []
        self._done: dict[int, LayerBatch] = {}

    @property
    def experts(self) -> range:
        """This rank's own experts."""
        share = self.num_experts // self.num_ranks
        return range(self.rank * share, (self.rank + 1) * share)

    # -- a batch ------------------------------------------------------------------------------

    def begin(
        self, layers: Mapping[int, Experts], lanes: Mapping[int, Lanes], micro_batches: int | None = None,
        due: Collection[int] = (), planner: Planner | None = None,
    ) -> None:
        """Begin a batch: who computes what, and copies are on their way.

        Args:
            layers: with experts, by index; the same indices on all ranks.
            lanes: of these; static for one that is not there.
            micro_batches: backwards that each layer will run; ``None``: not known.
            due: layers that are to be planned.
            planner: makes the placement of the next batch, on a thread.
        """
        if self.meetings.is_closed:  # a batch was given up where nobody drops it for all ranks
            self.drop()
        self._wait_for_copies()
        self._states, self._unposted, self._done = {}, [], {}
        self._micro_batches, self._due, self._planner = micro_batches, frozenset(due), planner
        for index, experts in sorted(layers.items()):
            chosen = lanes.get(index, self._static)
            chosen.check(self.num_ranks, self.num_experts)
            self._post_copies(self._add(index, experts, chosen))

    def forward(self, experts: Experts, counts: Tensor, *, is_training: bool) -> tuple[LaneExchange, LayerState | None]:
        """Tell counts, and plan how the rows of a micro-batch travel.

        Args:
            experts: of a layer.
            counts: rows for each expert, ``[E]``.
            is_training: whether this belongs to a batch that is trained.

        Returns:
            The exchange, and the layer's state; ``None`` outside batches, where all is computed at home.
        """
        table = self.meetings.meet(COUNTS, counts.tolist())
        state, lanes = self._states.get(experts.module) if is_training else None, self._static
        if state is None and is_training and torch.is_grad_enabled():  # no batch was begun: all is computed at home
            state = self._add(len(self._states), experts, self._static)
        if state is not None:
            lanes = state.lanes = state.lanes or self._lanes_of_batch(state, table)
            if state.counted.once():
                pairs = zip(state.rows, table, strict=True)
                state.rows = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
                state.num_forwards += 1
                if state.num_forwards == self._micro_batches:
                    self._post_plan(state)
            if state.trans is not None and lanes.copies(self.rank):
                state.trans.wait(self._limit_s)
        times = LaneTimes() if state is None else state.times

        def swapped(seconds: float) -> None:
            times.exchange_s += seconds

        return plan_lanes(table, lanes, self.rank, self.group, self.meetings, counts.device, swapped), state

    def weights(self, state: LayerState | None, name: str) -> LaneWeights:
        """What the lanes of this rank are multiplied with; of this rank alone.

        Args:
            state: from :meth:`forward`.
            name: of a weight.
        """
        if state is None:
            return LaneWeights(self.experts.start, {}, None)
        copies, sums = state.copies[name], state.sums[name]
        return LaneWeights(self.experts.start, copies, sums, self._post_complete_sums, state.times)

    def finish(self, module: nn.Module) -> dict[str, Tensor]:
        """Wait for a layer's sums, and forget what it had for this batch.

        Args:
            module: of the layer.

        Returns:
            Gradients by name, means over the replicas; none where nothing was trained.
        """
        state = self._states.get(module)
        if state is None:
            return {}
        while self._unposted:
            self._post_sums(self._unposted.pop())
        assert state.agg is not None
        found = state.agg.wait(self._limit_s)
        trans_bytes = 0 if state.trans is None else state.trans.wait(self._limit_s)
        del self._states[module]
        if state.plan is None:
            self._post_plan(state)
        if found is None:
            raise PartnerGaveUpError("a rank that shares the experts has given the batch up")
        gradients, agg_bytes, seconds = found
        hidden_s = max(0.0, seconds - state.agg.waited_s)
        state.times.agg_s = seconds
        if state.trans is not None:
            state.times.trans_s = state.trans.seconds
            seconds, hidden_s = seconds + state.trans.seconds, hidden_s + state.trans.hidden_s
        times = state.times if self.device.type == "cpu" else None
        travelled = Travelled(trans_bytes, agg_bytes, seconds, hidden_s)
        self._done[state.index] = LayerBatch(
            state.lanes or state.planned, state.rows, len(state.planned.copies(self.rank)), travelled, state.plan, times
        )
        return gradients

    def take_done(self) -> dict[int, LayerBatch]:
        """What the batch was for each layer that is finished, by index; of this rank alone, and only once."""
        done, self._done = self._done, {}
        return done

    @property
    def sum_bytes(self) -> int:
        """Bytes of all sums that are held now; of this rank alone."""
        return sum(sums.num_bytes for state in self._states.values() for sums in state.sums.values())

    # -- a batch that is given up -------------------------------------------------------------

    def give_up(self) -> None:
        """Let the others know that this rank computes no more of the batch; of this rank alone, and waits for none."""
        if not self.meetings.is_closed:
            self.meetings.give_up()
            self._relay.post(self._relay_meetings.give_up)

    def drop(self) -> None:
        """Forget the sums of a batch that all ranks drop; lanes and copies stay for another try."""
        self.meetings.reopen()
        self._relay.post(self._relay_meetings.reopen).wait(self._limit_s)
        self._unposted = list(self._states.values())
        for state in self._unposted:
            state.agg, state.lanes, state.rows, state.plan = None, None, self._no_rows(), None
            state.num_forwards, state.times, state.counted = 0, LaneTimes(), CountedForwards()
            for sums in state.sums.values():
                sums.clear()

    def close(self) -> None:
        """End the thread; of this rank alone."""
        self._wait_for_copies()
        self._relay.close()
        self._planning.close()

    # -- what travels -------------------------------------------------------------------------

    def _post_copies(self, state: LayerState) -> None:
        lanes, own = state.planned, {name: weight.detach() for name, weight in sorted(state.experts.own.items())}
        copied = [expert for expert in range(self.num_experts) if len(lanes.holders(expert)) > 1]
        if not copied:
            return
        for expert in lanes.copies(self.rank):
            for name, weight in own.items():
                state.copies[name][expert] = torch.empty_like(weight[0])
        chains, loads = [lanes.holders(expert) for expert in copied], []
        for expert, chain in zip(copied, chains, strict=True):
            found: dict[int, Load] = {}
            if self.rank in chain:
                first, is_home = self.experts.start, chain[0] == self.rank
                tensors = [w[expert - first] if is_home else state.copies[n][expert] for n, w in own.items()]
                found[chain.index(self.rank)] = Load(tensors)
            loads.append(found)
        num_pieces = len(pieces_of([weight[0] for weight in own.values()]))
        state.trans = self._relay.post(lambda: run_chains(chains, loads, num_pieces, self._relay_group))
        self._jobs.append(state.trans)

    def _post_plan(self, state: LayerState) -> None:
        """Plan on one of the ranks, others other layers; what is planned may be changed by nobody meanwhile."""
        planner, rows = self._planner, state.rows
        if planner is not None and state.index in self._due and state.index % self.num_ranks == self.rank:
            state.plan = self._planning.post(lambda: planner(state.index, rows))

    def _post_complete_sums(self) -> None:
        """Post the sums of layers that have all gradients, later layers first."""
        while self._unposted and self._micro_batches is not None:
            sums = self._unposted[-1].sums.values()
            if any(each.num_added < self._micro_batches for each in sums):
                return
            self._post_sums(self._unposted.pop())

    def _post_sums(self, state: LayerState) -> None:
        own = {name: weight for name, weight in sorted(state.experts.own.items()) if weight.requires_grad}
        state.agg = self._relay.post(lambda: self._sum_up(state, own))

    def _sum_up(self, state: LayerState, own: Mapping[str, nn.Parameter]) -> Summed | None:
        """Bring all sums of a layer home, on the thread; nothing if the batch is given up somewhere."""
        try:
            self._relay_meetings.meet(SUMMING + state.index)
        except PartnerGaveUpError:
            return None
        began = perf_counter()  # what others come later for is no time of these sums
        lanes, first = state.lanes or state.planned, self.experts.start
        dtype = self.sum_dtype
        found = {n: torch.zeros_like(weight, dtype=dtype, requires_grad=False) for n, weight in own.items()}
        chains = [
            summing_chain(lanes, expert, [row[expert] > 0 for row in state.rows]) for expert in range(self.num_experts)
        ]
        loads = [self._loads(state, chain, expert, found) for expert, chain in enumerate(chains)]
        num_pieces = len(pieces_of([tensor[0] for tensor in found.values()]))
        ranks = [[visit.rank for visit in chain] for chain in chains]
        num_bytes = run_chains(ranks, loads, num_pieces, self._relay_group)
        for expert in self.experts:
            if (last := loads[expert].get(len(chains[expert]) - 1)) is not None:
                for tensor, sum_of_lanes in zip(found.values(), last.tensors, strict=True):
                    torch.div(sum_of_lanes, self.num_ranks, out=tensor[expert - first])
        return Summed(found, num_bytes, perf_counter() - began)

    def _loads(
        self, state: LayerState, chain: Sequence[Visit], expert: int, found: Mapping[str, Tensor]
    ) -> dict[int, Load]:
        """What this rank has where the sum of an expert's lanes passes it."""
        loads = {}
        for place, visit in enumerate(chain):
            if visit.rank != self.rank:
                continue
            if visit.sources:
                lanes = [
                    [_sum_of(state.sums[n], (source, expert), like[0]) for n, like in found.items()]
                    for source in visit.sources
                ]
                loads[place] = Load(lanes[0], lanes[1:], has_own=True)
            else:
                loads[place] = Load([tensor[expert - self.experts.start] for tensor in found.values()])
        return loads

    # -- further ------------------------------------------------------------------------------

    def _add(self, index: int, experts: Experts, lanes: Lanes) -> LayerState:
        sums = {name: LaneSums(self.sum_dtype) for name in experts.own}
        state = LayerState(index, experts, lanes, self._no_rows(), {name: {} for name in experts.own}, sums)
        self._states[experts.module] = state
        self._unposted.append(state)
        return state

    def _lanes_of_batch(self, state: LayerState, table: list[list[int]]) -> Lanes:
        return state.planned if self._reroute is None else self._reroute(state.planned, table)

    def _wait_for_copies(self) -> None:
        """Wait for what is still under way of an earlier batch."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.wait(self._limit_s)

    def _no_rows(self) -> list[list[int]]:
        return [[0] * self.num_experts for _ in range(self.num_ranks)]


def _sum_of(sums: LaneSums, lane: tuple[int, int], like: Tensor) -> Tensor:
    """A lane's sum; zeros where its rows had no part in the loss."""
    found = sums.take(lane)
    return torch.zeros_like(like) if found is None else found


def _where(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where collectives of a group work."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device


_sharing: Sharing | None = None


def share_experts(sharing: Sharing | None) -> None:
    """Choose how this process shares experts from now on.

    Args:
        sharing: of the group of its stage; ``None``: not at all.
    """
    global _sharing
    _sharing = sharing


def sharing_in_force() -> Sharing | None:
    """How this process shares experts, if it does."""
    return _sharing
