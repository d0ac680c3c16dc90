"""The ``"survive"`` section inside ``"dynamic_pipeline"``; ``docs/configuration.md`` lists the keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from dynpipe_ds.sections import Section, key, parse_bytes


class SurviveConfig(Section):
    """What is done so that the loss of a worker costs little; every key has a default."""

    enabled: bool = key(
        False,
        "While batches compute, copy every worker's state into another worker's host memory. Go on from there when a "
        "worker is lost.",
        rule="true or false",
        example="true",
    )
    snapshot_every: Annotated[int, Field(ge=1)] | Literal["auto"] = key(
        "auto",
        "Batches between two such copies. \"auto\": the smallest number for which they cost less than 3% of the time.",
        rule='a whole number of batches >= 1 or "auto"',
        example="10",
    )
    max_bytes: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(parse_bytes)] = key(
        None,
        "Most host memory that a worker may use for copies: two of its own state and two of a neighbour's. Null: its "
        "share of what is free on the node at the start.",
        rule='null, a number of bytes >= 1 or a size such as "16GiB"',
        example='"16GiB"',
    )
    fewer_replicas: Literal["last", "first", "never"] = key(
        "last",
        "When to go on with fewer data-parallel replicas: \"last\": where there can't be as many; \"first\": rather "
        "than with fewer stages; \"never\". The data of lost replicas is read by engine.data_at.",
        rule='"last", "first" or "never"',
        example='"first"',
    )
    silent_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = key(
        30.0,
        "Seconds that workers wait for each other before they ask who is silent. One that does not answer for five "
        "more seconds is lost. One that has ended is noticed at once. Null: the process group's timeout.",
        rule="null or a finite number of seconds > 0",
        example="10",
    )
