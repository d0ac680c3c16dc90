"""The ``"repack"`` section inside ``"dynamic_pipeline"``; ``docs/configuration.md`` lists the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from dynpipe_ds.release.options import (
    CallbackOptions,
    ExitOptions,
    KubernetesOptions,
    OwnOptions,
    ReleaseOptions,
    SlurmOptions,
    StayOptions,
    options_type,
)
from dynpipe_ds.sections import Section, key

AnyOptions = ExitOptions | StayOptions | SlurmOptions | KubernetesOptions | CallbackOptions | OwnOptions


class RepackConfig(Section):
    """When to train on fewer or more stages, and who gets the freed workers; every key has a default."""

    enabled: bool = key(
        False,
        "Change the number of stages by itself. False: only when engine.repack(num_stages) is called.",
        rule="true or false",
        example="true",
    )
    method: Literal["fewest_stages", "first_fit"] = key(
        "fewest_stages",
        "\"fewest_stages\": as few stages as keep memory and throughput. \"first_fit\": DynMo's Algorithm 2, by memory "
        "alone; needs memory_cap_bytes.",
        rule='"fewest_stages" or "first_fit"',
        example='"fewest_stages"',
    )
    target_stages: Annotated[int, Field(ge=1)] | None = key(
        None,
        "How many stages to reach. Null: as few as the tolerance allows (with \"first_fit\": as memory allows).",
        rule="null or a whole number of stages >= 1",
        example="2",
    )
    tolerance: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = key(
        0.05,
        "Share of the predicted throughput that fewer stages may cost. The whole is what the most workers that the run "
        "ever had would reach. Not together with target_stages.",
        rule="a number from 0 up to, but not including, 1",
        example="0.05 (5%)",
    )
    min_gain: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = key(
        None,
        "Least share by which waiting workers must raise the predicted throughput to be taken in. Null: 1.1 / (1 - "
        "tolerance) - 1.",
        rule="null or a number > 0, above tolerance / (1 - tolerance)",
        example="0.15 (15%)",
    )
    horizon_batches: Annotated[int, Field(ge=1)] = key(
        100,
        "How many batches more stages are expected to serve. They must save more seconds in them than the pause takes.",
        rule="a whole number of batches >= 1",
        example="1000",
    )
    min_stages: Annotated[int, Field(ge=1)] = key(
        1,
        "Never shrink by itself to fewer.",
        rule="a whole number of stages >= 1",
        example="2",
    )
    max_stages: Annotated[int, Field(ge=1)] | None = key(
        None,
        "Never grow by itself to more. Null: no limit.",
        rule="null or a whole number of stages >= 1",
        example="8",
    )
    earliest_batch: Annotated[int, Field(ge=0)] = key(
        0,
        "First batch, counted from 0, after which another number of stages may be decided.",
        rule="a whole number >= 0",
        example="1000",
    )
    adapt_micro_batches: bool = key(
        False,
        "With the number of stages, also choose the number of micro-batches that is predicted to be fastest. The batch "
        "keeps its samples. Losses then differ by rounding. Not with \"first_fit\".",
        rule="true or false",
        example="true",
    )
    leave_on: Literal["SIGUSR1", "SIGUSR2", "SIGTERM"] | None = key(
        None,
        "Signal by which a scheduler announces that it takes workers away. They leave after the batch, and the others "
        "go on. The signal then ends no process. Null: none.",
        rule='null, "SIGUSR1", "SIGUSR2" or "SIGTERM"',
        example='"SIGTERM"',
    )
    release: AnyOptions = key(
        ExitOptions(),
        "Who gets the freed workers: a back-end, with its options.",
        rule='an object with "backend" ("exit", "stay", "slurm", "kubernetes", "callback" or "package.module:Class") '
        "and its options",
        example='{"backend": "slurm"}',
    )

    @property
    def least_gain(self) -> float:
        """``min_gain``, or what stands for null."""
        return 1.1 / (1.0 - self.tolerance) - 1.0 if self.min_gain is None else self.min_gain

    @classmethod
    def nested(cls) -> Mapping[str, Callable[[Mapping[Any, Any]], type[ReleaseOptions]]]:
        """``release`` is a section of its own; its back-end tells which."""
        return {"release": options_type}

    def contradictions(self) -> Iterable[str]:
        """Yield what can't both be meant, one line each with values, rule and remedy."""
        target = self.target_stages
        if self.is_given("tolerance") and target is not None:
            yield (
                f"repack.target_stages = {target}, repack.tolerance = {self.tolerance}: a target is reached whatever "
                f"it costs; remove one of them"
            )
        if self.is_given("tolerance") and self.method == "first_fit":
            yield (
                f"repack.method = 'first_fit', repack.tolerance = {self.tolerance}: first fit looks at memory "
                f"alone; remove repack.tolerance, or use the method 'fewest_stages'"
            )
        if self.adapt_micro_batches and self.method == "first_fit":
            yield (
                "repack.method = 'first_fit', repack.adapt_micro_batches = True: first fit predicts no seconds; use "
                "the method 'fewest_stages' or remove repack.adapt_micro_batches"
            )
        if target is not None and target < self.min_stages:
            yield (
                f"repack.target_stages = {target}, repack.min_stages = {self.min_stages}: the target can't be below "
                f"the fewest stages; lower repack.min_stages or raise repack.target_stages"
            )
        if self.max_stages is not None and self.max_stages < max(self.min_stages, target or 1):
            yield (
                f"repack.max_stages = {self.max_stages}, repack.min_stages = {self.min_stages}, repack.target_stages = "
                f"{target}: the most stages can't be below these; raise repack.max_stages"
            )
        if self.min_gain is not None and (1 + self.min_gain) * (1 - self.tolerance) <= 1:
            yield (
                f"repack.min_gain = {self.min_gain}, repack.tolerance = {self.tolerance}: stages would be added and "
                f"given up again for the same load; raise repack.min_gain above tolerance / (1 - tolerance) = "
                f"{self.tolerance / (1 - self.tolerance):.3g}"
            )
