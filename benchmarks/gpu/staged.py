"""A communication back-end for several processes that share one CUDA device: gloo between copies in host memory.

NCCL refuses two ranks on one device, and gloo's ``send`` and ``recv`` take no CUDA tensors, with which DeepSpeed's
pipeline starts. Here every tensor is copied to pinned host memory, gloo carries it to the other process over the
loopback, and it is copied back. Neither DeepSpeed nor the library knows of it: to both it is a process group. On a CPU
the same code copies from host memory to host memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"


class _Waiting(dist.Work):
    """Something under way; what comes in is copied to where it belongs once it is here.

    Args:
        work: gloo's.
        finish: copies what has come.
    """

    def __init__(self, work: dist.Work, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is done.

        Args:
            timeout: ignored; gloo's own holds.
        """
        work, self._work = self._work, None
        if work is not None:  # gloo would wait for another message
            work.wait()
            self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether gloo is through; what came in is in its place only after :meth:`wait`."""
        return self._work is None or bool(self._work.is_completed())


def _nothing() -> None:
    pass


def _room(tensor: Tensor) -> Tensor:
    """Host memory for a tensor's elements, in one row; pinned where the tensor is on a device."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _out(tensor: Tensor) -> Tensor:
    """A tensor's elements in host memory; waits for what still computes them."""
    host = _room(tensor)
    host.view(tensor.shape).copy_(tensor.detach())
    return host


def _back(host: Tensor, tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(host.view(tensor.shape))


class StagedGroup(dist.ProcessGroup):
    """What DeepSpeed's pipeline and this library ask of a process group, by gloo on copies.

    Args:
        store: where its processes meet.
        rank: of this one.
        size: how many.
        timeout: of one message.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """What torch calls it."""
        return NAME

    # -- between two processes ----------------------------------------------------------------

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> dist.Work:
        """Begin to send one tensor."""
        hosts = [_out(tensor) for tensor in tensors]
        # The work keeps the copy alive until it has gone.
        return _Waiting(self._gloo.send(hosts, destination, tag), lambda: hosts.clear())

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        """Begin to receive one tensor."""
        hosts = [_room(tensor) for tensor in tensors]
        return self._into(self._gloo.recv(hosts, source, tag), hosts, tensors)

    # -- among all ---------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], *opts: Any) -> dist.Work:
        """Combine tensors in place."""
        hosts = [_out(tensor) for tensor in tensors]
        return self._into(self._gloo.allreduce(hosts, *opts), hosts, tensors)

    def reduce(self, tensors: list[Tensor], *opts: Any) -> dist.Work:
        """Combine tensors on one rank."""
        hosts = [_out(tensor) for tensor in tensors]
        return self._into(self._gloo.reduce(hosts, *opts), hosts, tensors)

    def broadcast(self, tensors: list[Tensor], *opts: Any) -> dist.Work:
        """Give one rank's tensors to all."""
        hosts = [_out(tensor) for tensor in tensors]
        return self._into(self._gloo.broadcast(hosts, *opts), hosts, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *opts: Any) -> dist.Work:
        """Give every rank's tensor to all."""
        rooms = [[_room(tensor) for tensor in row] for row in outputs]
        hosts = [_out(tensor) for tensor in inputs]
        work = self._gloo.allgather(rooms, hosts, *opts)
        return self._into(work, [host for row in rooms for host in row], [t for row in outputs for t in row])

    def all_gather_single(self, output: Tensor, given: Tensor, *opts: Any) -> dist.Work:
        """Give every rank's tensor to all, one after the other in one tensor."""
        return self.allgather([list(output.view(self.size(), *given.shape).unbind(0))], [given])

    _allgather_base = all_gather_single  # its name up to torch 2.12

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *opts: Any) -> dist.Work:
        """Give every rank's tensor to one."""
        rooms = [[_room(tensor) for tensor in row] for row in outputs]
        work = self._gloo.gather(rooms, [_out(tensor) for tensor in inputs], *opts)
        return self._into(work, [host for row in rooms for host in row], [t for row in outputs for t in row])

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], *opts: Any
    ) -> dist.Work:
        """Give every rank a part of every rank's tensor."""
        room = torch.empty(output.shape, dtype=output.dtype, pin_memory=output.is_cuda)
        host = _out(given).view(given.shape)
        work = self._gloo.alltoall_base(room, host, output_sizes, input_sizes, *opts)
        return self._into(work, [room.view(-1)], [output])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all."""
        return _Waiting(self._gloo.barrier(), _nothing)

    def _into(self, work: dist.Work, hosts: Sequence[Tensor], tensors: Sequence[Tensor]) -> dist.Work:
        def finish() -> None:
            for host, tensor in zip(hosts, tensors, strict=True):
                _back(host, tensor)

        return _Waiting(work, finish)


def start(backend: str, rank: int, size: int, port: int, *, timeout_s: float = 120.0) -> None:
    """Join the process group of so many processes of this machine, all of which use device 0.

    DeepSpeed's ``init_distributed`` takes it over. It would bind NCCL to a device, which is of no use here.

    Args:
        backend: ``"staged"``, ``"gloo"`` or ``"nccl"``.
        rank: of this process.
        size: how many there are.
        port: where they meet.
        timeout_s: of one message.
    """
    if backend == NAME and NAME.upper() not in vars(dist.Backend):
        dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    dist.init_process_group(
        backend, rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}", timeout=timedelta(seconds=timeout_s)
    )
