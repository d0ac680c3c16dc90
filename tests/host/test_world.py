"""Worlds that come to nothing leave nothing behind for the next one."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dynpipe_ds.host.world import World
from tests.distributed.ranks import run_ranks


def try_twice(_rank: int) -> tuple[str, str, int]:
    """Call a world off, and make the next one of the same members; what each rank heard."""
    first = World.among([0, 1])
    dist.barrier()
    if dist.get_rank() == 0:
        first.say("go", "called off")
    heard = first.hear("trying", "go")
    second = World.among([0, 1])
    with pytest.raises(RuntimeError, match="nobody said 'trying' in 0.1 s"):
        second.hear("trying", "go", patience_s=0.1)
    second.regroup()
    third = World.among([0, 1])
    return heard, str(dist.get_world_size()), third.generation - first.generation


def test_the_next_try_hears_nothing_of_the_last() -> None:
    assert run_ranks(try_twice, 2) == [("called off", "2", 2)] * 2
