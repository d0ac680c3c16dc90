"""``dynpipe schema``: the JSON schema of the ``"dynamic_pipeline"`` section."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dynpipe_ds.cli.command import OK, Result, add_command
from dynpipe_ds.schema import json_schema


def add_parser(commands: Any) -> None:
    """Add the command."""
    add_command(commands, "schema", run)


def run(_arguments: argparse.Namespace) -> Result:
    """Print the JSON schema of the "dynamic_pipeline" section, for editors.

    With it, an editor completes the section's keys in a DeepSpeed JSON, explains them and marks wrong values.
    DeepSpeed's own keys are left alone.

    Examples:
      dynpipe schema > dynpipe.schema.json
      dynpipe schema --json
    """
    values = json_schema()
    return OK, json.dumps(values, indent=1), values
