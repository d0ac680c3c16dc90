"""DeepSpeed's own partitioner."""

from __future__ import annotations

from collections.abc import Sequence

from dynpipe_ds.host.quiet import keep_deepspeed_quiet

keep_deepspeed_quiet()  # a plan that is compared with its cut imports it here

from deepspeed.runtime import utils  # noqa: E402


def partition_balanced(weights: Sequence[float], num_stages: int) -> list[int]:
    """Cut as ``partition_method="parameters"`` of DeepSpeed does, for any weights.

    Returns:
        ``S + 1`` boundaries; stages may be empty.
    """
    return [int(cut) for cut in utils.partition_balanced(weights, num_stages)]  # built-in ints: it leaves numpy's
