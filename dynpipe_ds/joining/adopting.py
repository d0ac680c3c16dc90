"""What a newcomer takes over before it is a rank: all that the present ranks hold besides layers.

It is what a checkpoint keeps besides layers, by the same functions, and some that a checkpoint finds anew. It travels
as tensors and plain values and is read as such: nothing in it can run code.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dynpipe_ds.checkpoint.extras import common_state, rank_state, restore
from dynpipe_ds.checkpoint.plain import plain
from dynpipe_ds.host.entering import shared_state, take_shared_state
from dynpipe_ds.host.optimizer_files import known_classes

if TYPE_CHECKING:
    from dynpipe_ds.run import Run


def for_newcomers(run: Run, per_stage: Mapping[str, Any], client_state: Mapping[str, Any]) -> str:
    """What is the same on every rank, as a text; for a pipeline of another length.

    Args:
        run: of the first rank.
        per_stage: keys of the section that are given for each stage, as they will be.
        client_state: the user's own values.

    Raises:
        CheckpointError: naming what in it is neither a plain value nor a tensor.
    """
    return packed({
        "common": common_state(run), "engine": shared_state(run.stage.pipeline),
        "pinned": list(run.balancer.pinned), "obstacles": dict(run.profiler.obstacles),
        "per_stage": dict(per_stage), "shared": run.stage.module.surroundings.shared_paths,
        "client": dict(client_state), "landmarks": run.landmarks.plain(), "acts": run.repeating.state(),
    })


def of_this_rank(run: Run) -> str:
    """What a newcomer takes over that has this rank's place in another stage, as a text: streams and counters."""
    return packed({**rank_state(run), "attributes": {}})


def adopt(run: Run, common: str, of_rank: str) -> dict[str, Any]:
    """Take over both texts; nothing is communicated.

    Args:
        run: of a newcomer, with the number of stages that it has alone.
        common: what :func:`for_newcomers` gave.
        of_rank: what :func:`of_this_rank` gave.

    Returns:
        The user's own values.
    """
    state, own = unpacked(common), unpacked(of_rank)
    run.config = run.config.model_copy(update=state["per_stage"])
    run.balancer.serve(run.config)
    run.balancer.forbid(state["pinned"])
    run.profiler.obstacles = dict(state["obstacles"])
    run.stage.module.surroundings.shared_paths = list(state["shared"])
    take_shared_state(run.stage.pipeline, state["engine"])
    restore(run, state["common"], own, same_stages=False)
    run.landmarks.adopt(state["landmarks"])
    run.repeating.inherit(state["acts"])
    client: dict[str, Any] = state["client"]
    return client


def packed(content: Any) -> str:
    """Tensors and plain values as a text.

    Raises:
        CheckpointError: if something in it is neither.
    """
    stream = io.BytesIO()
    torch.save(plain(content, "what a newcomer takes over"), stream)
    return base64.b64encode(stream.getvalue()).decode()


def unpacked(text: str) -> Any:
    """What :func:`packed` was given."""
    with torch.serialization.safe_globals(known_classes()):
        return torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)
