"""The ``"dynamic_pipeline"`` section of the DeepSpeed JSON as one typed value.

:func:`parse_config` reads the section and reports *every* problem in one message, so that a
user corrects a file once. :func:`check_against_model` adds the rules that need the number of
layers and stages. ``docs/configuration.md`` lists the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import override

from dynpipe_ds.joining.config import ElasticConfig
from dynpipe_ds.partition.registry import known_capabilities
from dynpipe_ds.repacking.config import RepackConfig
from dynpipe_ds.sections import AlsoText, Section, key, parse_bytes, read_section, show
from dynpipe_ds.snapshots.config import SurviveConfig

SECTION = "dynamic_pipeline"
"""Key of the section in the DeepSpeed JSON."""


def _each_parse_bytes(value: object) -> object:
    if isinstance(value, list):
        return [parse_bytes(item) for item in value]
    return parse_bytes(value)


_NonNegativeInt = Annotated[int, Field(ge=0)]
_PositiveInt = Annotated[int, Field(ge=1)]
_Bytes = Annotated[int, Field(ge=1), AlsoText()]
Hold = _PositiveInt | Literal["forever"]
"""For how many batches a partition that the user chose is not changed by itself."""
_Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_PartitionerName = Annotated[str, Field(pattern=r"^[^\s:]+$")]


class DynamicPipelineConfig(Section):
    """When and how the pipeline is cut again; every key has a default."""

    enabled: bool = key(
        False,
        "Profile, decide and move layers at run time. False: DeepSpeed's behaviour.",
        rule="true or false",
        example="true",
    )
    partitioner: _PartitionerName | None = key(
        None,
        "Partitioner at run time: uniform, balanced, optimal, diffusion, simulated, or a name given to "
        "register_partitioner. Null: the one in the module's partition_method, else optimal.",
        rule="null or a name without spaces or ':' (the cost has a key of its own, 'cost')",
        example='"optimal"',
    )
    cost: Literal["time", "parameters"] | None = key(
        None,
        "What the partitioner balances: measured seconds, or numbers of parameters. Null: the one in the module's "
        "partition_method, else time.",
        rule='null, "time" or "parameters"',
        example='"time"',
    )
    rebalance_every: _PositiveInt | Literal["auto", "never"] = key(
        "auto",
        "When to consider a new partition. A number: after every so many batches. \"auto\": when it pays. \"never\": "
        "only when engine.rebalance() or engine.repartition() is called.",
        rule='a whole number of batches >= 1, "auto" or "never"',
        example='"auto"',
    )
    profile_batches: _PositiveInt = key(
        3,
        "How many of the newest profiled batches a decision combines. No layer moves before.",
        rule="a whole number of batches >= 1",
        example="3",
    )
    profile_every: _PositiveInt | Literal["auto"] = key(
        "auto",
        "Which batches are profiled while layer times are steady. A number: every so many. \"auto\": at least one in "
        "10, and within 0.5% of the time. After a change, every batch is.",
        rule='a whole number of batches >= 1 or "auto"',
        example="1",
    )
    smoothing: Literal["median", "mean", "ema"] = key(
        "median",
        "How layer times are combined over these batches. \"ema\": an exponential moving average, in which the newest "
        "batch weighs one half.",
        rule='"median", "mean" or "ema"',
        example='"median"',
    )
    min_gain: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = key(
        0.003,
        "Least predicted gain that justifies a move, as a share of the slowest stage's cost. If the slowest stage "
        "stays as slow: as a share of the batch.",
        rule="a number from 0 up to, but not including, 1",
        example="0.01 (1%)",
    )
    horizon_batches: _PositiveInt = key(
        20,
        "For \"auto\" only: how many batches a new partition is expected to serve. It must save more seconds in them "
        "than the move costs.",
        rule="a whole number of batches >= 1",
        example="20",
    )
    hold_batches: Hold = key(
        20,
        "For how many batches a partition that engine.repartition() chose is kept. \"forever\": until the next call of "
        "repartition(), rebalance() or repack().",
        rule='a whole number of batches >= 1 or "forever"',
        example="20",
    )
    schedule: Literal["auto", "1f1b", "planned"] = key(
        "auto",
        "Order of a stage's forwards and backwards. \"1f1b\": DeepSpeed's. \"planned\": planned from measured seconds. "
        "\"auto\": planned, if that is measured to be faster. All have the same bits.",
        rule='"auto", "1f1b" or "planned"',
        example='"auto"',
    )
    activation_budget: Annotated[float, Field(gt=0, allow_inf_nan=False)] = key(
        1.0,
        "Activations that a worker may hold under a planned order, as a multiple of the fullest worker's under 1F1B on "
        "the first partition. More makes batches faster.",
        rule="a finite number > 0, so large that one micro-batch finds room",
        example="1.5",
    )
    memory_cap_bytes: Annotated[
        _Bytes | Annotated[list[_Bytes], Field(min_length=1)] | None,
        BeforeValidator(_each_parse_bytes),
    ] = key(
        None,
        "Most that a stage may hold: parameters, gradients, optimizer state and activations. One size for all stages, "
        "or a list with one for each. Null: no cap.",
        rule='null, a number of bytes >= 1, a size such as "16GiB", or a list of these',
        example='"16GiB"',
    )
    pinned_cuts: list[_PositiveInt] = key(
        [],
        "Forbidden cuts. 3 keeps layers 2 and 3 on the same stage, for example because layer 3 reads a value that "
        "layer 2 stores.",
        rule="a list of layer indices >= 1",
        example="[3] (layers 2 and 3 stay together)",
    )
    stage_speeds: Annotated[list[_Speed], Field(min_length=1)] | None = key(
        None,
        "How fast you think each stage's worker is: 1.0 normal, 0.5 half as fast. Measurements correct it. Null: all "
        "alike.",
        rule="null or a list of finite numbers > 0, one for each stage",
        example="[1.0, 0.5]",
    )
    allow_empty_stages: bool = key(
        False,
        "Let a stage have no layers.",
        rule="true or false",
        example="false",
    )
    first_batch: _NonNegativeInt = key(
        0,
        "First batch, counted from 0, after which a new partition may be decided. Earlier batches are profiled too.",
        rule="a whole number >= 0",
        example="0",
    )
    last_batch: _NonNegativeInt | None = key(
        None,
        "Last batch, counted from 0, after which a new partition may be decided. Null: no end.",
        rule="null or a whole number >= 0",
        example="1000",
    )
    transfer_buffer_bytes: Annotated[int, Field(ge=2**20), AlsoText(), BeforeValidator(parse_bytes)] = key(
        64 * 2**20,
        "Largest message in which weights and optimizer state travel. More makes big moves faster and takes more "
        "memory.",
        rule='a number of bytes >= 1048576 (1 MiB) or a size such as "64MiB"',
        example='"64MiB"',
    )
    cross_memory: bool = key(
        True,
        "Let ranks of one machine read weights and optimizer state that lie in host memory from each other's memory, "
        "where Linux allows it. Large layers then move in about half the time.",
        rule="true or false",
        example="false",
    )

    journal: Annotated[str, Field(min_length=1)] | None = key(
        None,
        "Folder in which the first rank keeps a journal of the run, journal.jsonl, for dynpipe watch and dynpipe "
        "report. Null: none.",
        rule="null or the path of a folder, which is made where it is missing",
        example='"runs/first"',
    )
    repack: RepackConfig = key(
        RepackConfig(),
        "Change the number of stages: give workers back when the model has shrunk, take in workers that wait.",
        rule="an object with the keys of repack",
        example='{"enabled": true, "tolerance": 0.05}',
    )
    survive: SurviveConfig = key(
        SurviveConfig(),
        "Keep copies of every worker's state in other workers' host memory.",
        rule="an object with the keys of survive",
        example='{"enabled": true}',
    )
    elastic: ElasticConfig = key(
        ElasticConfig(),
        "Let workers join while the job trains.",
        rule="an object with the keys of elastic",
        example='{"enabled": true, "door_file": "run/door.json"}',
    )

    @classmethod
    def nested(cls) -> Mapping[str, Callable[[Mapping[Any, Any]], type[Section]]]:
        """``repack``, ``survive`` and ``elastic`` are sections of their own."""
        return {
            "repack": lambda _: RepackConfig, "survive": lambda _: SurviveConfig, "elastic": lambda _: ElasticConfig,
        }

    @override
    def contradictions(self) -> Iterable[str]:
        first, last = self.first_batch, self.last_batch
        if last is not None and last < first:
            yield (
                f"first_batch = {first}, last_batch = {last}: the last batch can't come before the "
                f"first; raise last_batch or lower first_batch"
            )
        when = self.rebalance_every
        if when != "auto" and self.is_given("horizon_batches"):
            yield (
                f"horizon_batches = {self.horizon_batches}, rebalance_every = {when!r}: the horizon "
                f"is used by 'auto' only; set rebalance_every to 'auto' or remove horizon_batches"
            )
        for name in ("first_batch", "last_batch"):
            if when == "never" and self.is_given(name):
                yield (
                    f"{name} = {getattr(self, name)}, rebalance_every = 'never': there is no dynamic "
                    f"phase to bound; set rebalance_every or remove {name}"
                )
        if when != "never" and last is not None and last + 1 < self.profile_batches:
            yield (
                f"last_batch = {last}, profile_batches = {self.profile_batches}: no decision could "
                f"ever be made, the dynamic phase ends before enough batches are profiled; raise "
                f"last_batch to {self.profile_batches - 1} or more, or lower profile_batches"
            )
        if self.partitioner is not None:
            yield from _cap_blindness(self, self.partitioner, f"partitioner = {self.partitioner!r}")
        if self.repack.enabled and self.repack.method == "first_fit" and self.memory_cap_bytes is None:
            yield (
                "repack.method = 'first_fit', memory_cap_bytes = None: first fit packs by memory alone; set "
                "memory_cap_bytes, or use the method 'fewest_stages'"
            )
        if self.schedule == "1f1b" and self.is_given("activation_budget"):
            yield (
                f"activation_budget = {self.activation_budget}, schedule = '1f1b': the budget is used by planned "
                "orders only; set schedule to 'auto' or 'planned', or remove activation_budget"
            )
        speeds, caps = self.stage_speeds, self.memory_cap_bytes
        if speeds is not None and isinstance(caps, list) and len(speeds) != len(caps):
            yield (
                f"stage_speeds = {speeds}, memory_cap_bytes = {caps}: {len(speeds)} and {len(caps)} "
                f"stages; both lists need one entry for each stage"
            )


def parse_config(ds_config: Mapping[str, Any]) -> DynamicPipelineConfig:
    """Read the section out of a DeepSpeed configuration.

    Returns:
        The typed section; the defaults (disabled) when the section is missing.

    Raises:
        ValueError: for unknown keys, wrong types, values out of range and contradictions; one
            message lists all of them, each with value, rule and remedy.
    """
    if SECTION not in ds_config:
        _refuse_misspelt_section(ds_config)
        return DynamicPipelineConfig()
    section = ds_config[SECTION]
    if not isinstance(section, Mapping):
        raise ValueError(
            f"{SECTION} = {show(section)}: must be an object with keys and values; "
            f'write {{"{SECTION}": {{"enabled": true}}}}, or leave the section out'
        )
    config, problems = read_section(DynamicPipelineConfig, section)
    _raise_all([line for lines in problems.values() for line in lines])
    assert config is not None
    return config


def check_against_model(
    config: DynamicPipelineConfig,
    *,
    num_layers: int,
    num_stages: int,
    num_micro_batches: int | None = None,
    partitioner: str | None = None,
) -> None:
    """Check the rules that need the model; a disabled section passes.

    Args:
        config: the parsed section.
        num_layers: L, the length of the module's layer list.
        num_stages: S, the number of pipeline stages.
        num_micro_batches: M, of a batch; ``None``: not known.
        partitioner: the partitioner in use when ``config.partitioner`` is ``None`` and the
            module's ``partition_method`` names one.

    Raises:
        ValueError: one message with every problem, each with value, rule and remedy.
    """
    if not config.enabled:
        return
    problems = list(_wrong_lengths(config, num_stages))
    outside = [cut for cut in config.pinned_cuts if cut >= num_layers]
    if outside:
        problems.append(
            f"pinned_cuts = {config.pinned_cuts}: with {num_layers} layers a cut lies between 1 "
            f"and {num_layers - 1}; remove {', '.join(map(str, outside))}"
        )
    held = num_stages if num_micro_batches is None else min(num_stages, num_micro_batches)  # by the first under 1F1B
    if config.activation_budget * held < 1:
        problems.append(
            f"activation_budget = {config.activation_budget}: under 1F1B a worker holds at most {held} micro-batches; "
            f"that one finds room needs {1 / held:.3g} or more; raise the budget, or remove it (1.0)"
        )
    num_cuts = num_layers - 1 - len(set(config.pinned_cuts) - set(outside))
    if not config.allow_empty_stages and num_cuts < num_stages - 1:
        problems.append(
            f"{num_layers} layers with {num_cuts} allowed cuts can't fill {num_stages} stages: "
            f"{num_stages - 1} cuts are needed; use fewer stages, pin fewer cuts or set "
            f"allow_empty_stages to true"
        )
    if config.partitioner is None and partitioner is not None:
        problems.extend(_cap_blindness(config, partitioner, f"partition_method = {partitioner!r}"))
    _raise_all(problems)


def checked_hold(hold: Any) -> Hold:
    """Check for how long a call says that its partition holds.

    Raises:
        ValueError: if it is neither a number of batches nor ``"forever"``.
    """
    if hold == "forever" or (type(hold) is int and hold >= 1):
        found: Hold = hold
        return found
    raise ValueError(f'hold = {hold!r}: must be a whole number of batches >= 1 or "forever"; for example 20')


def _cap_blindness(config: DynamicPipelineConfig, partitioner: str, shown: str) -> Iterable[str]:
    can = known_capabilities(partitioner)
    if can is None:  # one that is registered later
        return
    for name, honours in (("memory_cap_bytes", can.memory_caps), ("stage_speeds", can.speeds)):
        if not honours and getattr(config, name) is not None:
            yield (
                f"{name} = {getattr(config, name)}, {shown}: this partitioner can't honour it; use "
                f"'optimal' or 'diffusion', or remove {name}"
            )


def _wrong_lengths(config: DynamicPipelineConfig, num_stages: int) -> Iterable[str]:
    for name in ("memory_cap_bytes", "stage_speeds"):
        value = getattr(config, name)
        if isinstance(value, list) and len(value) != num_stages:
            yield (
                f"{name} = {value}: {len(value)} entries, but there are {num_stages} stages; give "
                f"one entry for each stage"
            )


def _refuse_misspelt_section(ds_config: Mapping[str, Any]) -> None:
    """A misspelt section name would silently switch everything off."""
    near = get_close_matches(SECTION, [str(key) for key in ds_config], n=1, cutoff=0.85)
    if near:
        raise ValueError(
            f"{near[0]!r} is not a section of the configuration; did you mean {SECTION!r}?"
        )


def _raise_all(problems: Sequence[str]) -> None:
    if problems:
        title = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ValueError(f'{title} in section "{SECTION}":{lines}')
