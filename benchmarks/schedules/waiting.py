"""1F1B as it was before: DeepSpeed's own order, in which a send is over when its message has been received."""

from __future__ import annotations

from collections.abc import Iterator

from dynpipe_ds.schedule import Instruction, Op
from dynpipe_ds.simulation import Workload

_AWAY = {
    Op.SEND_ACTIVATION: (Op.RECV_ACTIVATION, 1), Op.RECV_ACTIVATION: (Op.SEND_ACTIVATION, -1),
    Op.SEND_GRADIENT: (Op.RECV_GRADIENT, -1), Op.RECV_GRADIENT: (Op.SEND_GRADIENT, 1),
}  # fmt: skip


def with_waiting(workload: Workload) -> tuple[float, float]:
    """Seconds of a batch whose messages are waited for on both sides, and its bubble ratio.

    Args:
        workload: seconds of stages and links; backwards are whole.
    """
    count, num_stages = workload.num_micro_batches, workload.num_stages
    streams = [list(_deepspeeds(count, num_stages, stage)) for stage in range(num_stages)]
    at, now_s, busy_s = [0] * num_stages, [0.0] * num_stages, [0.0] * num_stages
    seconds = [workload.stage_seconds(stage) for stage in range(num_stages)]
    links = {Op.SEND_ACTIVATION: workload.activation_link_s, Op.SEND_GRADIENT: workload.gradient_link_s}

    def step(stage: int) -> bool:
        """Run a stage's next instruction, and with a message its neighbour's; false if that is not there yet."""
        if at[stage] == len(streams[stage]):
            return False
        op, m = streams[stage][at[stage]]
        if op not in _AWAY:
            took_s = (seconds[stage].forward_s if op is Op.FORWARD else seconds[stage].backward_s)[m]
            now_s[stage] += took_s
            busy_s[stage] += took_s
            at[stage] += 1
            return True
        its, way = _AWAY[op]
        other = stage + way
        boundary = min(stage, other)
        if op in (Op.SEND_GRADIENT, Op.RECV_GRADIENT) and boundary < workload.frozen_boundaries:
            at[stage] += 1
            return True
        if at[other] == len(streams[other]) or streams[other][at[other]] != (its, m):
            return False
        table = links[op if op in links else its][boundary]
        now_s[stage] = now_s[other] = max(now_s[stage], now_s[other]) + float(table[m % len(table)])
        at[stage] += 1
        at[other] += 1
        return True

    while any([step(stage) for stage in range(num_stages)]):
        pass
    assert at == [len(stream) for stream in streams], "DeepSpeed's order can't block"
    return max(now_s), 1.0 - sum(busy_s) / (num_stages * max(now_s))


def _deepspeeds(count: int, num_stages: int, stage: int) -> Iterator[Instruction]:
    """DeepSpeed's order: a stage exchanges with the neighbour that computed in the step before, before it computes."""
    previous = -1
    for t in range(2 * (count + num_stages - 1)):
        is_forward = (t - stage) % 2 == 0
        current = (t - stage) // 2 if is_forward else (t + stage + 1) // 2 - num_stages
        has_previous, has_current = (0 <= m < count for m in (previous, current))
        if is_forward and stage > 0:
            if has_previous:
                yield Instruction(Op.SEND_GRADIENT, previous)
            if has_current:
                yield Instruction(Op.RECV_ACTIVATION, current)
        if not is_forward and stage < num_stages - 1:
            if has_current:
                yield Instruction(Op.RECV_GRADIENT, current)
            if has_previous:
                yield Instruction(Op.SEND_ACTIVATION, previous)
        if has_current:
            yield Instruction(Op.FORWARD if is_forward else Op.BACKWARD, current)
        previous = current
