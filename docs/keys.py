"""Write the tables of the JSON section's keys into the pages that show them, and the schema for editors.

python docs/keys.py            rewrite what stands between the markers, and dynpipe.schema.json
python docs/keys.py --check    say whether all are up to date (exit code 1 if not)

Keys, defaults, rules and meanings are those of the config model: ``dynpipe_ds/config.py``,
``dynpipe_ds/repacking/config.py``, ``dynpipe_ds/snapshots/config.py``, ``dynpipe_ds/joining/config.py`` and
``dynpipe_ds/release/options.py``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.joining.config import ElasticConfig
from dynpipe_ds.release.options import CallbackOptions, KubernetesOptions, SlurmOptions
from dynpipe_ds.repacking.config import RepackConfig
from dynpipe_ds.schema import json_schema
from dynpipe_ds.sections import Section
from dynpipe_ds.snapshots.config import SurviveConfig

FOLDER = Path(__file__).resolve().parent

# Name between the markers: the model, and what is written before its keys.
SECTIONS: dict[str, tuple[type[Section], str]] = {
    "dynamic_pipeline": (DynamicPipelineConfig, ""),
    "repack": (RepackConfig, "repack."),
    "survive": (SurviveConfig, "survive."),
    "elastic": (ElasticConfig, "elastic."),
    "slurm": (SlurmOptions, ""),
    "kubernetes": (KubernetesOptions, ""),
    "callback": (CallbackOptions, ""),
}

PAGES = {
    "configuration.md": ("dynamic_pipeline", "repack", "survive", "elastic"),
    "repacking.md": ("slurm", "kubernetes", "callback"),
}

SCHEMA = FOLDER / "dynpipe.schema.json"

# An error spells it out; in a table it is short.
_WHOLE = re.compile(r"a whole number(?: of \w+)?")

# Texts in quotes, {words}, names with an underscore or a call's brackets.
_CODE = re.compile(r'"[^"]+"|\{\w+\}|[\w.]*\w_\w[\w.]*\w(?:\(\w*\))?|[\w.]+\w\(\w*\)')


def table(name: str) -> str:
    """The table of one section.

    Args:
        name: a key of :data:`SECTIONS`.

    Returns:
        Markdown.
    """
    model, prefix = SECTIONS[name]
    rows = [("key", "default", "a value must be", "meaning"), *_rows(model, prefix)]
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([lines[0], "|---|---|---|---|", *lines[1:]])


def _rows(model: type[Section], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in model.model_fields.items():
        if name == "backend":
            continue
        extra: Any = field.json_schema_extra
        inner = isinstance(field.default, Section) and name in SECTIONS
        default = "must be given" if field.is_required() else f"[below](#{name})" if inner else _default(field.default)
        rule = _WHOLE.sub("integer", extra["rule"])
        yield f"`{prefix}{name}`", default, _code(rule), _code(field.description or "")


def _default(value: Any) -> str:
    return f"`{json.dumps(value.model_dump() if isinstance(value, Section) else value)}`"


def _code(text: str) -> str:
    return _CODE.sub(r"`\g<0>`", text)


def insert(page: str, name: str) -> str:
    """Put one section's table between its markers.

    Args:
        page: a whole page.
        name: a key of :data:`SECTIONS`.

    Raises:
        ValueError: if the markers are missing or in the wrong order.
    """
    begin, end = f"<!-- keys of {name}: begin -->", f"<!-- keys of {name}: end -->"
    at, until = page.find(begin), page.find(end)
    if not 0 <= at < until:
        raise ValueError(f"the page needs {begin} and, after it, {end}: the table goes between them")
    return f"{page[:at + len(begin)]}\n{table(name)}\n{page[until:]}"


def rewritten(page: str) -> tuple[str, str]:
    """A page as it is, and as it should be.

    Args:
        page: its file name in ``docs/``.
    """
    before = after = (FOLDER / page).read_text(encoding="utf-8")
    for name in PAGES[page]:
        after = insert(after, name)
    return before, after


def files() -> Iterator[tuple[Path, str, str]]:
    """Every file that is written, as it is and as it should be."""
    for page in PAGES:
        yield FOLDER / page, *rewritten(page)
    before = SCHEMA.read_text(encoding="utf-8") if SCHEMA.exists() else ""
    yield SCHEMA, before, json.dumps(json_schema(), indent=1) + "\n"


def main() -> None:
    """Rewrite the files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page is out of date")
    check = parser.parse_args().check
    for file, before, after in files():
        if before == after:
            continue
        if check:
            sys.exit(f"docs/{file.name} is out of date: python docs/keys.py")
        file.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
