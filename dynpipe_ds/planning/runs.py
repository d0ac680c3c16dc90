"""The inner loops of planning, on tables of numbers: a batch that runs on paper, forwards in time and backwards.

Python runs these functions on lists, Numba compiles them for arrays (:mod:`~dynpipe_ds.simulation.compiled`), and both
give the same to the bit. So they call nothing, and all tables are given to them. Which stage is next is looked up
among all, since there are few: in a heap, that took three quarters of the time of machine code.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from dynpipe_ds.schedule import Op
from dynpipe_ds.simulation.compiled import Loop

SAME = 1e-9
"""Seconds that differ by a smaller share are the same: sums round."""

# Tables, a row for each stage: lists, or two-dimensional arrays.
Floats = list[list[float]]
Ints = list[list[int]]
Flags = list[list[bool]]

_FORWARD, _BACKWARD, _WEIGHT = int(Op.FORWARD), int(Op.BACKWARD), int(Op.BACKWARD_WEIGHT)


class Work(NamedTuple):
    """What all stages of a batch have to do and may hold.

    Attributes:
        num_micro_batches: M.
        frozen_boundaries: over how many boundaries, from the first on, no gradients go.
        forward_s: forwards, ``(S, M)``.
        whole_s: backwards in one part.
        input_s: backwards without what is left for later.
        weight_s: what is left for later.
        activation_link_s: messages over every boundary, ``(S - 1, M)``.
        gradient_link_s: the same of gradients.
        work_s: of each stage, all forwards and whole backwards.
        activation_bytes: that a micro-batch holds from forward until backward.
        weight_bytes: that it holds between the parts of a backward.
        caps: most bytes of activations.
        has_backward: whether a stage has anything to do in a backward.
        is_prompt: whether somebody waits for its backward.
        splits: whether it may split backwards.
    """

    num_micro_batches: int
    frozen_boundaries: int
    forward_s: Floats
    whole_s: Floats
    input_s: Floats
    weight_s: Floats
    activation_link_s: Floats
    gradient_link_s: Floats
    work_s: list[float]
    activation_bytes: list[int]
    weight_bytes: list[int]
    caps: list[int]
    has_backward: list[bool]
    is_prompt: list[bool]
    splits: list[bool]


class Ran(NamedTuple):
    """What stages ran.

    Attributes:
        ops: of each stage in sequence, ``(S, 3 M)``, of which the first so many count.
        num_ops: how many.
        whole: whether the backward of a micro-batch was in one part, ``(S, M)``.
        stages: of all computations, in the sequence in which they began, ``(3 M S)``.
    """

    ops: Ints
    num_ops: list[int]
    whole: Flags
    stages: list[int]


class Places(NamedTuple):
    """Of each stage and micro-batch, the place in the stage's sequence, ``(S, M + 1)``.

    Attributes:
        forwards: of its forward.
        backwards: of its backward.
        weights: of its weight gradient.
    """

    forwards: Ints
    backwards: Ints
    weights: Ints


class Wires(NamedTuple):
    """When messages come, by stage and micro-batch, ``(S, M + 1)``; infinite until it is known.

    Attributes:
        activations: from the stage before, or in a run backwards in time from the one after.
        gradients: the reverse.
    """

    activations: Floats
    gradients: Floats


@Loop
def run_forwards(
    work: Work, is_guided: bool, places: Places, patience: float, prefers_forwards: bool, depth: float, limit_s: float,
    ran: Ran, wires: Wires,
) -> tuple[float, int]:
    """Run a batch; what ran, and when messages came, is written into the tables.

    Given up when it takes longer than a limit. That is seen early on: no stage may be idle for longer than what the
    limit leaves beside its work.

    Args:
        work: of all stages.
        is_guided: whether stages go by places; else by what follows.
        places: in which sequence they would rather compute.
        patience: as of a policy or a guide.
        prefers_forwards: of a policy.
        depth: of a policy.
        limit_s: seconds of the batch at most.
        ran: to be written.
        wires: to be written.

    Returns:
        Seconds of the batch, infinite if it was given up; and how many computations ran.
    """
    forward_s, whole_s, input_s, weight_s = work.forward_s, work.whole_s, work.input_s, work.weight_s
    activation_link_s, gradient_link_s = work.activation_link_s, work.gradient_link_s
    activation_bytes, weight_bytes, caps = work.activation_bytes, work.weight_bytes, work.caps
    is_prompt, splits, has_backward = work.is_prompt, work.splits, work.has_backward
    forward_at, backward_at, weight_at = places.forwards, places.backwards, places.weights
    activations, gradients = wires.activations, wires.gradients
    ops, num_ops, whole, stages = ran.ops, ran.num_ops, ran.whole, ran.stages
    num_stages, count, frozen, num_ran = len(caps), work.num_micro_batches, work.frozen_boundaries, 0
    last, nowhere = num_stages - 1, 3 * count
    activation_wires_s, gradient_wires_s = [0.0] * num_stages, [0.0] * num_stages  # when the newest message comes
    forwards, backwards, weights = [0] * num_stages, [0] * num_stages, [0] * num_stages  # begun
    held, free_s, end_s = [0] * num_stages, [0.0] * num_stages, 0.0
    may_idle_s = [limit_s * (1 + SAME) - seconds for seconds in work.work_s]
    most_ahead = [depth * (num_stages - stage) for stage in range(num_stages)]
    for m in range(count):
        activations[0][m] = 0.0
    wakes_s = [inf] * num_stages  # when to look at each stage
    wakes_s[0] = 0.0
    while True:
        now_s, s = inf, 0
        for i, wake_s in enumerate(wakes_s):
            if wake_s < now_s:
                now_s, s = wake_s, i
        if now_s == inf:
            return end_s, num_ran
        f, b, w = forwards[s], backwards[s], weights[s]
        activation_s, gradient_s = activations[s][f], gradients[s][b]
        room = caps[s] - held[s]
        has_room = room >= activation_bytes[s] and f - b < most_ahead[s]
        can_split = splits[s] and room >= weight_bytes[s] - activation_bytes[s]
        op, seconds, next_s, waits = _FORWARD, 0.0, inf, False
        if is_guided:
            at = next_at = nowhere
            if w < b:
                at, op, seconds = weight_at[s][w], _WEIGHT, weight_s[s][w]
            if can_split or w == b:
                here = backward_at[s][b]
                if gradient_s > now_s:
                    next_s, next_at = gradient_s, here
                elif here < at:
                    at, op, seconds = here, _BACKWARD, input_s[s][b] if can_split else whole_s[s][b]
            if has_room:
                here = forward_at[s][f]
                if activation_s > now_s:
                    if activation_s < next_s:
                        next_s, next_at = activation_s, here
                elif here < at:
                    at, op, seconds = here, _FORWARD, forward_s[s][f]
            waits = at == nowhere or (next_at < at and next_s - now_s < patience * seconds)
        elif (
            gradient_s <= now_s and is_prompt[s]
            and not (prefers_forwards and has_backward[s] and activation_s <= now_s and has_room)
        ):
            op = _WEIGHT if w < b and not can_split else _BACKWARD
        elif activation_s > now_s or not has_room:  # work that nobody waits for, if nothing is known to come soon
            if has_room:
                next_s = activation_s
            if now_s < gradient_s < next_s:
                next_s = gradient_s
            if w < b:
                op, seconds = _WEIGHT, weight_s[s][w]
            elif gradient_s <= now_s and not is_prompt[s]:
                op, seconds = _BACKWARD, whole_s[s][b]
            else:
                waits = True
            waits = waits or (activation_s > now_s and next_s - now_s < patience * seconds)
        if waits:
            wakes_s[s] = activation_s if activation_s > now_s else inf
            if now_s < gradient_s < wakes_s[s]:
                wakes_s[s] = gradient_s
            continue
        ops[s][num_ops[s]] = op
        num_ops[s] += 1
        stages[num_ran] = s
        num_ran += 1
        if now_s > free_s[s]:
            may_idle_s[s] -= now_s - free_s[s]
            if may_idle_s[s] < 0:
                return inf, num_ran
        if op == _FORWARD:
            done_s = now_s + forward_s[s][f]
            forwards[s] = f + 1
            held[s] += activation_bytes[s]
            if s == last:
                gradients[s][f] = done_s
            else:
                to = s + 1
                wire_s = activation_wires_s[to]
                arrive_s = (done_s if wire_s < done_s else wire_s) + activation_link_s[s][f]
                activation_wires_s[to] = activations[to][f] = arrive_s
                if free_s[to] <= arrive_s < wakes_s[to]:
                    wakes_s[to] = arrive_s
        elif op == _WEIGHT:
            done_s = now_s + weight_s[s][w]
            weights[s] = w + 1
            held[s] -= weight_bytes[s]
        else:
            backwards[s] = b + 1
            held[s] -= activation_bytes[s]
            if can_split:
                done_s = now_s + input_s[s][b]
                held[s] += weight_bytes[s]
            else:
                done_s = now_s + whole_s[s][b]
                whole[s][b] = True
                weights[s] = b + 1
            if s:  # the previous stage's backward, also where that is nothing and no gradient is sent
                to = s - 1
                wire_s = gradient_wires_s[to]
                link_s = gradient_link_s[to][b] if s > frozen else 0.0
                arrive_s = (done_s if wire_s < done_s else wire_s) + link_s
                gradient_wires_s[to] = gradients[to][b] = arrive_s
                if free_s[to] <= arrive_s < wakes_s[to]:
                    wakes_s[to] = arrive_s
        free_s[s] = done_s
        if done_s > end_s:
            end_s = done_s
            if end_s > limit_s:
                return inf, num_ran
        wakes_s[s] = done_s


@Loop
def run_backwards(work: Work, places: Places, patience: float, ran: Ran, wires: Wires) -> None:
    """Run a batch from its end to its beginning, every computation as late as it can be.

    Args:
        work: of all stages.
        places: in which sequence they would rather compute, seen from the end.
        patience: as of a guide.
        ran: to be written, but for its ``stages``; no backward is in one part that could be in two.
        wires: to be written. Seconds are those until the end of the batch: when what comes after in time is over, and
            the message has room.
    """
    forward_s, whole_s, input_s, weight_s = work.forward_s, work.whole_s, work.input_s, work.weight_s
    activation_link_s, gradient_link_s = work.activation_link_s, work.gradient_link_s
    activation_bytes, caps = work.activation_bytes, work.caps
    frozen, count = work.frozen_boundaries, work.num_micro_batches
    forward_at, backward_at, weight_at = places.forwards, places.backwards, places.weights
    activations, gradients = wires.activations, wires.gradients
    ops, num_ops = ran.ops, ran.num_ops
    num_stages = len(caps)
    last = num_stages - 1
    splits = [work.splits[s] and work.weight_bytes[s] <= caps[s] for s in range(num_stages)]
    held_between = [work.weight_bytes[s] if splits[s] else 0 for s in range(num_stages)]
    # Weight gradients leave room for the backward before them, or a stage that is full of them would wait for ever.
    needed = [max(held_between[s], activation_bytes[s]) for s in range(num_stages)]
    room = [caps[s] for s in range(num_stages)]
    activation_wires_s, gradient_wires_s = [0.0] * num_stages, [0.0] * num_stages
    forwards, backwards = [count - 1] * num_stages, [count - 1] * num_stages  # the next one
    weights = [count - 1 if splits[s] else -1 for s in range(num_stages)]
    free_s = [0.0] * num_stages
    for m in range(count):
        gradients[0][m] = 0.0
    wakes_s = [0.0] * num_stages
    while True:
        now_s, s = inf, 0
        for i, wake_s in enumerate(wakes_s):
            if wake_s < now_s:
                now_s, s = wake_s, i
        if now_s == inf:
            break
        f, b, w = forwards[s], backwards[s], weights[s]
        at, next_at, next_s, op, seconds = -1, -1, inf, _FORWARD, 0.0
        if w >= 0 and room[s] >= needed[s]:
            at, op, seconds = weight_at[s][w], _WEIGHT, weight_s[s][w]
        if b >= 0 and (not splits[s] or w < b) and room[s] >= activation_bytes[s] - held_between[s]:
            there_s, here = gradients[s][b], backward_at[s][b]
            if there_s > now_s:
                next_s, next_at = there_s, here
            elif here > at:
                at, op, seconds = here, _BACKWARD, input_s[s][b] if splits[s] else whole_s[s][b]
        if f > b:
            there_s, here = activations[s][f] if s < last else now_s, forward_at[s][f]
            if there_s > now_s:
                if there_s < next_s:
                    next_s, next_at = there_s, here
            elif here > at:
                at, op, seconds = here, _FORWARD, forward_s[s][f]
        if at < 0 or (next_at > at and next_s - now_s < patience * seconds):
            wakes_s[s] = next_s
            continue
        ops[s][num_ops[s]] = op
        num_ops[s] += 1
        done_s = now_s + seconds
        free_s[s] = done_s
        if op == _FORWARD:
            forwards[s] = f - 1
            room[s] += activation_bytes[s]
            if s:
                to = s - 1
                arrive_s = max(activation_wires_s[to], done_s) + activation_link_s[to][f]
                activation_wires_s[to] = activations[to][f] = arrive_s
                if free_s[to] <= arrive_s < wakes_s[to]:
                    wakes_s[to] = arrive_s
        elif op == _WEIGHT:
            weights[s] = w - 1
            room[s] -= held_between[s]
        else:
            backwards[s] = b - 1
            room[s] -= activation_bytes[s] - held_between[s]
            if s < last:
                to = s + 1
                link_s = gradient_link_s[s][b] if to > frozen else 0.0
                arrive_s = max(gradient_wires_s[to], done_s) + link_s
                gradient_wires_s[to] = gradients[to][b] = arrive_s
                if free_s[to] <= arrive_s < wakes_s[to]:
                    wakes_s[to] = arrive_s
        wakes_s[s] = done_s
    for s in range(num_stages):
        for i in range(num_ops[s] // 2):
            first, newest = ops[s][i], ops[s][num_ops[s] - 1 - i]
            ops[s][i], ops[s][num_ops[s] - 1 - i] = newest, first


@Loop
def find_places(ran: Ran, count: int, places: Places) -> None:
    """In which place each computation is.

    Args:
        ran: what ran.
        count: M.
        places: to be written; one that did not run is behind all others, and the weight gradient of a backward in one
            part is where that is.
    """
    ops, num_ops, whole = ran.ops, ran.num_ops, ran.whole
    forward_at, backward_at, weight_at = places.forwards, places.backwards, places.weights
    for s in range(len(num_ops)):
        f = b = w = 0
        for place in range(num_ops[s]):
            if ops[s][place] == _FORWARD:
                forward_at[s][f] = place
                f += 1
            elif ops[s][place] == _WEIGHT:
                weight_at[s][w] = place
                w += 1
            else:
                if whole[s][b]:
                    weight_at[s][w] = place
                    w += 1
                backward_at[s][b] = place
                b += 1
        for m in range(f, count + 1):
            forward_at[s][m] = num_ops[s]
        for m in range(b, count + 1):
            backward_at[s][m] = num_ops[s]
        for m in range(w, count + 1):
            weight_at[s][m] = num_ops[s]


@Loop
def time_again(work: Work, ran: Ran, num_ran: int, wires: Wires) -> float:
    """How long what ran takes with other seconds.

    Args:
        work: with these; caps and bytes don't count.
        ran: what ran, to its end.
        num_ran: computations of all stages.
        wires: to be written.

    Returns:
        Seconds of the batch.
    """
    forward_s, whole_s, input_s, weight_s = work.forward_s, work.whole_s, work.input_s, work.weight_s
    activation_link_s, gradient_link_s = work.activation_link_s, work.gradient_link_s
    activations, gradients, frozen = wires.activations, wires.gradients, work.frozen_boundaries
    ops, whole, stages = ran.ops, ran.whole, ran.stages
    num_stages = len(forward_s)
    last = num_stages - 1
    activation_wires_s, gradient_wires_s, free_s = [0.0] * num_stages, [0.0] * num_stages, [0.0] * num_stages
    forwards, backwards, weights, done = [0] * num_stages, [0] * num_stages, [0] * num_stages, [0] * num_stages
    for m in range(work.num_micro_batches):
        activations[0][m] = gradients[last][m] = 0.0
    for i in range(num_ran):
        s = stages[i]
        op, now_s = ops[s][done[s]], free_s[s]
        done[s] += 1
        if op == _FORWARD:
            m = forwards[s]
            forwards[s] = m + 1
            if activations[s][m] > now_s:
                now_s = activations[s][m]
            now_s += forward_s[s][m]
            if s < last:
                wire_s = activation_wires_s[s] if activation_wires_s[s] > now_s else now_s
                activation_wires_s[s] = activations[s + 1][m] = wire_s + activation_link_s[s][m]
        elif op == _BACKWARD:
            m = backwards[s]
            backwards[s] = m + 1
            if s >= frozen and gradients[s][m] > now_s:
                now_s = gradients[s][m]
            if whole[s][m]:
                now_s += whole_s[s][m]
                weights[s] = m + 1
            else:
                now_s += input_s[s][m]
            if s > frozen:
                wire_s = gradient_wires_s[s] if gradient_wires_s[s] > now_s else now_s
                gradient_wires_s[s] = gradients[s - 1][m] = wire_s + gradient_link_s[s - 1][m]
        else:
            m = weights[s]
            weights[s] = m + 1
            now_s += weight_s[s][m]
        free_s[s] = now_s
    return max(free_s)
