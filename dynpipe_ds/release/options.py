"""The ``"release"`` section inside ``"repack"``: one type a back-end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from dynpipe_ds.sections import Section, key

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1)]
_Reference = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
_BACKEND_RULE = '"exit", "stay", "slurm", "kubernetes", "callback" or "package.module:Class"'


def _backend(name: Any = ..., example: str = "slurm") -> Any:
    return key(name, "Name of the back-end.", rule=_BACKEND_RULE, example=f'"{example}"')


def _timeout(seconds: float, meaning: str) -> Any:
    return key(seconds, meaning, rule="a number of seconds > 0", example=f"{seconds:g}")


class ReleaseOptions(Section):
    """What all back-ends share: their name."""

    backend: _Text = _backend()

    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments of the back-end's class."""
        return {name: value for name, value in self if name != "backend"}


class ExitOptions(ReleaseOptions):
    """Workers leave with exit code 0."""

    backend: Literal["exit"] = _backend("exit", "exit")


class StayOptions(ReleaseOptions):
    """Workers wait at the job's door again."""

    backend: Literal["stay"] = _backend("stay", "stay")


class SlurmOptions(ReleaseOptions):
    """``scontrol update JobId=... NodeList=...``."""

    backend: Literal["slurm"] = _backend("slurm")
    job_id: _Text | None = key(None, "The job. Null: SLURM_JOB_ID.", rule="null or a job id as text", example='"1234"')
    scontrol: _Text = key(
        "scontrol", "The command that talks to Slurm, or its path.", rule="a command",
        example='"/opt/slurm/bin/scontrol"',
    )
    timeout_s: _Seconds = _timeout(30.0, "Longest that one command may take, and that the change may take to show.")


class KubernetesOptions(ReleaseOptions):
    """Scale a StatefulSet down, or shrink an Indexed Job."""

    backend: Literal["kubernetes"] = _backend("kubernetes", "kubernetes")
    mode: Literal["statefulset", "indexed-job"] = key(
        ..., "What kind of object made the workers' pods.", rule='"statefulset" or "indexed-job"',
        example='"indexed-job"',
    )
    name: _Text = key(..., "Name of that object.", rule="the object's name", example='"train"')
    namespace: _Text | None = key(
        None, "Its namespace. Null: the pod's own.", rule="null or a namespace", example='"research"'
    )
    timeout_s: _Seconds = _timeout(30.0, "Longest that one request may take, and that the pods may take to go.")


class CallbackOptions(ReleaseOptions):
    """Any command or Python function."""

    backend: Literal["callback"] = _backend("callback", "callback")
    command: Annotated[list[_Text], Field(min_length=1)] | None = key(
        None,
        "Command and arguments, run without a shell; {ranks}, {nodes} and {num_ranks} are filled in. It fails with an "
        "exit code other than 0.",
        rule='null or a list of texts with the command first',
        example='["/opt/site/give_back", "{nodes}"]',
    )
    function: _Reference | None = key(
        None,
        "Function, called with (ranks, nodes); it fails by raising. Exactly one of command and function.",
        rule='null or "package.module:function"',
        example='"site_tools.scheduler:give_back"',
    )
    timeout_s: _Seconds = _timeout(60.0, "Longest that the command may take.")
    whole_nodes: bool = key(False, "Free whole nodes only.", rule="true or false", example="true")
    lowest_stay: bool = key(
        False, "The ranks that stay must be the lowest.", rule="true or false", example="true"
    )

    def contradictions(self) -> Iterable[str]:
        """Exactly one of command and function."""
        if (self.command is None) == (self.function is None):
            yield (
                f"repack.release.command = {self.command}, repack.release.function = {self.function!r}: exactly one "
                f"says what to call; set one of them"
            )


class OwnOptions(ReleaseOptions):
    """A site's own back-end; every other key is an argument of its class."""

    model_config = ConfigDict(extra="allow")

    backend: _Reference = key(..., "The class.", rule=_BACKEND_RULE, example='"site_tools.scheduler:GiveBack"')


_TYPES: dict[str, type[ReleaseOptions]] = {
    "exit": ExitOptions, "stay": StayOptions, "slurm": SlurmOptions, "kubernetes": KubernetesOptions,
    "callback": CallbackOptions,
}


def options_type(section: Mapping[Any, Any]) -> type[ReleaseOptions]:
    """Type of the options of the back-end that a section names."""
    return _TYPES.get(str(section.get("backend")), OwnOptions)
