"""Events for DeepSpeed's monitor: TensorBoard, CSV, W&B or Comet, as the user configured.

``samples`` are those trained so far, DeepSpeed's x axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dynpipe_ds.telling import warn

if TYPE_CHECKING:
    from dynpipe_ds.events import RebalanceEvent
    from dynpipe_ds.measure.profile import PipelineProfile

_PREFIX = "Train/DynamicPipeline/"


class GuardedMonitor:
    """DeepSpeed's monitor, whose failures stop no rank: only the first one writes, and the others go on.

    Args:
        inner: DeepSpeed's ``MonitorMaster``; its attributes are this one's.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._has_warned = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write_events(self, events: Any) -> None:
        """Write events; what fails is told once."""
        try:
            self._inner.write_events(events)
        except Exception as error:  # noqa: BLE001 - a full disk, a server that is down: anything
            if not self._has_warned:
                warn(
                    f"the monitor could not write ({type(error).__name__}: {error}); training goes on, further "
                    "failures will not be reported"
                )
            self._has_warned = True


def _write(monitor: Any, values: dict[str, float], samples: int) -> None:
    if dist.get_rank() == 0 and monitor.enabled:
        monitor.write_events([(_PREFIX + name, value, samples) for name, value in values.items()])


def write_profile(monitor: Any, profile: PipelineProfile, samples: int, *, has_planned_order: bool) -> None:
    """Write the figures of one batch."""
    busy_s = {f"stage_{s}_busy_s": stage.busy_s for s, stage in enumerate(profile.stages)}
    figures = {"bubble_ratio": profile.bubble_ratio, "imbalance": profile.imbalance}
    values = {**figures, "planned_order": float(has_planned_order), **busy_s}
    _write(monitor, values, samples)


def write_rebalance(monitor: Any, event: RebalanceEvent, samples: int) -> None:
    """Write the figures of one change of partition."""
    values = {
        "rebalance_predicted_gain": event.predicted_gain,
        "rebalance_s": event.seconds,
        "rebalance_moved_bytes": float(event.bytes_moved),
        **{f"stage_{s}_first_layer": float(boundary) for s, boundary in enumerate(event.after[:-1])},
    }
    _write(monitor, values, samples)
