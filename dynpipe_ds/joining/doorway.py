"""All ranks' doors: newcomers wait at the first rank's, the others' send them there.

So there is a door as long as a rank lives, and newcomers know of all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import dynpipe_ds
from dynpipe_ds.host.entering import description
from dynpipe_ds.host.names import version
from dynpipe_ds.joining.address import DOOR_FILE, Address, find_token, write_door_file
from dynpipe_ds.joining.door import Door
from dynpipe_ds.joining.papers import describe, describe_layers, versions
from dynpipe_ds.planning.pace import AS_MACHINE_CODE, pace
from dynpipe_ds.ranks.agreement import from_first, gather, together
from dynpipe_ds.telling import log

if TYPE_CHECKING:
    from dynpipe_ds.run import Run


def papers(run: Run) -> dict[str, Any]:
    """What this process has, for comparison: the same on every rank of a job, whatever layers it holds.

    Args:
        run: as it was built.
    """
    stage = run.stage
    made = description(stage.pipeline)
    section = dict(made["config"].get("dynamic_pipeline", {}))
    section.pop("elastic", None)  # where a door is differs by machine
    return {
        "versions": versions(deepspeed=version(), dynpipe_ds=dynpipe_ds.__version__),
        "model": describe_layers(stage.module.layer_names(), stage.module.layer_specs()),
        "config": describe({**made.pop("config"), "dynamic_pipeline": section}),
        **made,
    }


class Doorway:
    """This rank's door among those of all ranks.

    Args:
        run: whose newcomers they are.

    Attributes:
        door: this rank's; ``None`` before it is open.
        addresses: of all ranks' doors, by rank.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._papers = papers(run)
        self._token = ""
        self._has_led = False
        self.door: Door | None = None
        self.addresses: list[Address] = []

    @property
    def token(self) -> str:
        """The word that newcomers must know."""
        return self._token

    def settle(self) -> None:
        """Open what is not open yet, and tell newcomers how the job is now; collective over all ranks.

        Raises:
            ValueError: on every rank, if a door can't be opened.
        """
        config, leads = self._run.config.elastic, dist.get_rank() == 0
        door_files = [file for file in (config.door_file, os.environ.get(DOOR_FILE)) if file]  # spares know the latter
        self._token = from_first(lambda: self._token or find_token())

        def open_door() -> Door:
            door = self.door or Door(self._papers, self._token, config.port if leads else 0)
            for file in door_files if leads and not self._has_led else ():
                write_door_file(Path(file), door.address, self._token)
            return door

        self.door = together(open_door, self._run.stage.device, lambda text: ValueError(
            f"elastic.enabled = true, elastic.port = {config.port}: no door can be opened ({text}); give another port, "
            "or 0 for a free one"
        ))
        self.addresses = addresses = gather(self.door.address)
        if not leads:
            self.door.send_to(addresses[0])
        else:
            self.door.lead(self._told([list(address) for address in addresses]))
            if not self._has_led:
                self._has_led = True
                log.info(
                    "dynamic_pipeline: workers may join: dynpipe join %s -- script.py ...",
                    door_files[0] if door_files else "{}:{}".format(*self.door.address),
                )

    def _told(self, doors: list[list[Any]]) -> dict[str, Any]:
        module, pipeline = self._run.stage.module, self._run.stage.pipeline
        return {
            "doors": doors, "num_stages": module.num_stages, "num_sources": pipeline.reading.num_sources,
            "owned": [[layer, list(names)] for layer, names in module.owned.items()],
            "twinned": pipeline.twinned, "versions": self._papers["versions"],
            "plans_compiled": pace() is AS_MACHINE_CODE,
        }

    def close(self) -> None:
        """This rank has no door any more; who waits there hears that the job is over."""
        if self.door is not None:
            self.door.close()
            self.door = None

