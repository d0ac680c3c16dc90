"""The ``"elastic"`` section inside ``"dynamic_pipeline"``; ``docs/configuration.md`` lists the keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dynpipe_ds.sections import Section, key


class ElasticConfig(Section):
    """Whether workers may join while the job trains, and where they knock; every key has a default."""

    enabled: bool = key(
        False,
        "Let workers wait to join. False: nobody can join.",
        rule="true or false",
        example="true",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = key(
        0,
        "Port at which the first rank lets workers ask to join. 0: a free one, which the log and door_file tell.",
        rule="a whole number from 0 to 65535",
        example="29600",
    )
    door_file: str | None = key(
        None,
        "File into which the first rank writes address and token, readable by its owner only. Who can read it may "
        "join, by \"dynpipe join FILE\". Null: none; the token is then the one in DYNPIPE_TOKEN.",
        rule="null or a path",
        example='"run/door.json"',
    )
