"""List scheduling: a batch runs on paper, and whenever a stage is free it chooses what to do next.

Forwards, backwards and weight gradients of a stage each go from the first micro-batch to the last; only how they
alternate is chosen. Sends are over at once, as in the engine. The run is an execution, so the order that it wrote down
can't deadlock, and takes no longer than the run did; less only where a stage had waited for what then did not help.

Nor can it where a stage trains after all that was thought to be frozen, since layers skipped all that was measured or
were thawed: a frozen stage ends a micro-batch, at no cost, after the next stage has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from dynpipe_ds.schedule import Instruction, Op, Order
from dynpipe_ds.simulation import Workload
from dynpipe_ds.simulation.workload import by_micro_batch


@dataclass(frozen=True)
class Policy:
    """What a stage prefers when it could do several things.

    Args:
        forwards_until: stages before this one prefer a forward to a backward, all others the reverse.
        patience: work that nobody waits for begins only if nothing else is known to come within this share of its
            seconds.
    """

    forwards_until: int
    patience: float


@dataclass(frozen=True)
class Listing:
    """What a run wrote down.

    Args:
        seconds: of the batch; infinite when the run was given up.
        ran: for every stage its forwards, backwards and weight gradients in sequence, each kind in the order of
            micro-batches.
        whole: for every stage the micro-batches with a backward in one part.
    """

    seconds: float
    ran: tuple[Sequence[Op], ...]
    whole: tuple[frozenset[int], ...]

    @property
    def num_computations(self) -> int:
        """How many ran, of all stages."""
        return sum(map(len, self.ran))

    def order(self, num_micro_batches: int) -> Order:
        """The order as a value, with its messages: each leaves at once, and is received where it is needed.

        Args:
            num_micro_batches: M.
        """
        made = {op: [Instruction(op, m) for m in range(num_micro_batches)] for op in Op}
        last = len(self.ran) - 1
        streams = []
        for stage, ran in enumerate(self.ran):
            around = _messages(is_first=stage == 0, is_last=stage == last)
            weights = (m for m in range(num_micro_batches) if m not in self.whole[stage])
            counters = {
                Op.FORWARD: iter(range(num_micro_batches)), Op.BACKWARD: iter(range(num_micro_batches)),
                Op.BACKWARD_WEIGHT: weights,
            }  # fmt: skip
            numbered = ((op, next(counters[op])) for op in ran)
            streams.append(tuple(made[each][m] for op, m in numbered for each in around[op]))
        return Order(num_micro_batches, tuple(streams))


def list_order(workload: Workload, caps: Sequence[int], policy: Policy, *, limit_s: float = inf) -> Listing:
    """Run one batch.

    Args:
        workload: seconds and bytes.
        caps: S most bytes of activations, each at least what one micro-batch holds.
        policy: what stages prefer.
        limit_s: seconds beyond which the run is given up.

    Returns:
        What ran.
    """
    run = _Run(workload, caps, policy)
    seconds = run.to_the_end(limit_s)
    return Listing(
        seconds, tuple(stage.ran for stage in run.stages), tuple(frozenset(stage.whole) for stage in run.stages)
    )


def _messages(*, is_first: bool, is_last: bool) -> dict[Op, tuple[Op, ...]]:
    """Each computation with the messages around it."""
    receive, send = (Op.RECV_ACTIVATION,) * (not is_first), (Op.SEND_ACTIVATION,) * (not is_last)
    receive_back, send_back = (Op.RECV_GRADIENT,) * (not is_last), (Op.SEND_GRADIENT,) * (not is_first)
    return {
        Op.FORWARD: (*receive, Op.FORWARD, *send),
        Op.BACKWARD: (*receive_back, Op.BACKWARD, *send_back),
        Op.BACKWARD_WEIGHT: (Op.BACKWARD_WEIGHT,),
    }


class _Stage:
    """One stage: what it has to do, what has come to it, what it holds.

    Attributes:
        free_s: when what it does now is over.
        next_s: after it chose nothing: when something is known to come.
    """

    def __init__(self, workload: Workload, index: int, cap: int, policy: Policy, most_ahead: int) -> None:
        self.index = index
        self.forward_s, self.whole_s, self.input_s, self.weight_s = workload.stage_seconds(index)
        # Nobody waits for a stage that sends no gradient: its backward may be late as a whole, unless it takes no time.
        sends, has_backward = index > workload.frozen_boundaries, any(self.whole_s)
        self.is_prompt, self.splits = sends or not has_backward, sends and any(self.weight_s)
        self.activation_bytes, self.weight_bytes = workload.activation_bytes[index], workload.weight_bytes[index]
        self.cap, self.held = cap, 0
        if index < workload.frozen_boundaries:  # what it holds is counted in micro-batches, also where they are nothing
            self.cap = _most(cap, self.activation_bytes, most_ahead)
            self.activation_bytes = 1
        self.forward_first, self.patience = has_backward and index < policy.forwards_until, policy.patience
        self.activations: list[float] = []  # when they come, by micro-batch
        self.gradients: list[float] = []
        self.forwards = self.backwards = self.weights = 0  # begun
        self.free_s, self.next_s = 0.0, inf
        self.ran: list[Op] = []
        self.whole: set[int] = set()

    def choose(self, now_s: float) -> Op | None:
        """What to begin now; None: nothing yet."""
        gradient_s = self.gradients[self.backwards] if self.backwards < len(self.gradients) else inf
        activation_s = self.activations[self.forwards] if self.forwards < len(self.activations) else inf
        has_room = self.held + self.activation_bytes <= self.cap
        can_forward = activation_s <= now_s and has_room
        if gradient_s <= now_s and self.is_prompt and not (can_forward and self.forward_first):
            is_late = self.weights < self.backwards and not self._has_room_to_split()
            return Op.BACKWARD_WEIGHT if is_late else Op.BACKWARD
        if can_forward:
            return Op.FORWARD
        self.next_s = min(activation_s if has_room else inf, gradient_s if gradient_s > now_s else inf)
        later, seconds = self._unawaited(gradient_s <= now_s)
        is_blocked = activation_s <= now_s
        return later if is_blocked or self.next_s - now_s >= self.patience * seconds else None

    def _unawaited(self, has_gradient: bool) -> tuple[Op | None, float]:
        """Work that nobody waits for, and its seconds."""
        if self.weights < self.backwards:
            return Op.BACKWARD_WEIGHT, self.weight_s[self.weights]
        if has_gradient and not self.is_prompt:
            return Op.BACKWARD, self.whole_s[self.backwards]
        return None, 0.0

    def _has_room_to_split(self) -> bool:
        return self.splits and self.held - self.activation_bytes + self.weight_bytes <= self.cap

    def begin(self, op: Op, now_s: float) -> float:
        """Do it, and return when that is over."""
        self.ran.append(op)
        if op is Op.FORWARD:
            seconds = self.forward_s[self.forwards]
            self.forwards += 1
            self.held += self.activation_bytes
        elif op is Op.BACKWARD_WEIGHT:
            seconds = self.weight_s[self.weights]
            self.weights += 1
            self.held -= self.weight_bytes
        elif self._has_room_to_split():
            seconds = self.input_s[self.backwards]
            self.backwards += 1
            self.held += self.weight_bytes - self.activation_bytes
        else:
            seconds = self.whole_s[self.backwards]
            self.whole.add(self.backwards)
            self.backwards += 1
            self.weights = self.backwards
            self.held -= self.activation_bytes
        self.free_s = now_s + seconds
        return self.free_s


class _Run:
    """All stages, and the messages between them."""

    def __init__(self, workload: Workload, caps: Sequence[int], policy: Policy) -> None:
        count, self.frozen_boundaries = workload.num_micro_batches, workload.frozen_boundaries
        # Frozen stages need be no further ahead than the first one that trains has room for, and are to hold no more.
        first = self.frozen_boundaries
        most = first + _most(caps[first], workload.activation_bytes[first], count)
        self.stages = [_Stage(workload, s, cap, policy, most - s) for s, cap in enumerate(caps)]
        self.stages[0].activations = [0.0] * count
        self.activation_link_s = [by_micro_batch(row, count) for row in workload.activation_link_s]
        self.gradient_link_s = [by_micro_batch(row, count) for row in workload.gradient_link_s]
        self.events = [(0.0, 0)]  # when to look at which stage

    def to_the_end(self, limit_s: float) -> float:
        end_s, events, stages = 0.0, self.events, self.stages
        while events:
            now_s, index = heappop(events)
            stage = stages[index]
            if stage.free_s > now_s:
                continue
            op = stage.choose(now_s)
            if op is None:
                if stage.next_s < inf:
                    heappush(events, (stage.next_s, index))
                continue
            done_s = stage.begin(op, now_s)
            heappush(events, (done_s, index))
            if op is Op.FORWARD:
                self._pass_on(index, stage.forwards - 1, done_s)
            elif op is Op.BACKWARD:
                self._pass_back(index, stage.backwards - 1, done_s)
            if done_s > end_s:
                end_s = done_s
                if end_s > limit_s:
                    return inf
        return end_s

    def _pass_on(self, index: int, micro_batch: int, done_s: float) -> None:
        """What a forward brings about: the next stage's forward, or the backward of the last stage."""
        if index == len(self.stages) - 1:
            self.stages[index].gradients.append(done_s)
        else:
            receiver = self.stages[index + 1]
            self._send(receiver, receiver.activations, done_s, self.activation_link_s[index][micro_batch])

    def _pass_back(self, index: int, micro_batch: int, done_s: float) -> None:
        """What a backward brings about: the previous stage's, also where that is nothing and no gradient is sent."""
        if index:
            receiver, is_sent = self.stages[index - 1], index > self.frozen_boundaries
            link_s = self.gradient_link_s[index - 1][micro_batch] if is_sent else 0.0
            self._send(receiver, receiver.gradients, done_s, link_s)

    def _send(self, receiver: _Stage, messages: list[float], now_s: float, link_s: float) -> None:
        """A message is under way; a wire carries them one after the other."""
        arrive_s = (max(messages[-1], now_s) if messages else now_s) + link_s
        messages.append(arrive_s)
        if receiver.free_s <= arrive_s:
            heappush(self.events, (arrive_s, receiver.index))


def _most(cap: int, activation_bytes: int, otherwise: int) -> int:
    """Micro-batches for which there is room, but no more than otherwise."""
    return min(otherwise, cap // activation_bytes) if activation_bytes else otherwise
