"""What the processes of one run are told: a file next to the ``sitecustomize.py`` that they start with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dynpipe_ds.config import SECTION

DEEPSPEED, STILL, MOVING = "DeepSpeed's class", "dynpipe_ds", "dynpipe_ds, moving"
WAYS = (DEEPSPEED, STILL, MOVING)
"""In the order in which they are run."""

NO_CLIPPING, DENSE_CUTS = '"gradient_clipping": 0', "contiguous gradients at the cuts"
NO_FLAGS = "flags dropped at the cuts under no_grad"
PLAIN_ADAM = '"torch_adam": true'
SEED_LAYERS, NO_DROPOUT = "seed_layers=True", "dropout off"
"""What a run may change beside the class, to find out whether it is the reason of a difference."""

_FILE = "settings.json"


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        way: one of :data:`WAYS`.
        batches: after which the script is stopped.
        move_every: batches between two moves.
        seed: of the random boundaries.
        changes: such as :data:`NO_CLIPPING`.
    """

    way: str
    batches: int
    move_every: int
    seed: int
    changes: tuple[str, ...] = ()

    @property
    def dynamic(self) -> bool:
        """Whether the script gets our classes."""
        return self.way != DEEPSPEED

    @property
    def named(self) -> str:
        """For people: the way, and what was changed."""
        return f"{self.way} with {' and '.join(self.changes)}" if self.changes else self.way

    def save(self, folder: Path) -> None:
        """Write the file into the run's folder."""
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Settings:
        """Read the file in the run's folder."""
        values = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return cls(**{**values, "changes": tuple(values["changes"])})

    def config(self, given: dict[str, object]) -> dict[str, object]:
        """The script's DeepSpeed configuration, which is not changed itself, as this run wants it."""
        config = dict(given)
        section = config.pop(SECTION, None)
        kept = {k: v for k, v in section.items() if k not in _DECIDING} if isinstance(section, dict) else {}
        if self.dynamic or section is not None:
            config[SECTION] = {**kept, "enabled": self.dynamic, "rebalance_every": "never"}
        if NO_CLIPPING in self.changes:
            config["gradient_clipping"] = 0.0
        optimizer = config.get("optimizer")
        if PLAIN_ADAM in self.changes and isinstance(optimizer, dict):
            config["optimizer"] = {**optimizer, "params": {**optimizer.get("params", {}), "torch_adam": True}}
        return config


# Keys about moves by themselves and about fewer workers: a try makes its own moves, on all workers.
_DECIDING = ("rebalance_every", "horizon_batches", "first_batch", "last_batch", "repack")
