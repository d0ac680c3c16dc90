"""Write down the public names: docs/api.md and docs/api for readers, tests/public_api.json for the test that compares.

python docs/api.py            rewrite all
python docs/api.py --check    say whether they are up to date (exit code 1 if not)

Public is what a package of dynpipe_ds lists in ``__all__``, and of its classes every member of our own without an
underscore. Who changes one on purpose runs this and says so in CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import re
import sys
import types
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import dynpipe_ds
from dynpipe_ds.engine import EnabledEngine

FOLDER = Path(__file__).resolve().parent
INDEX, RECORD = FOLDER / "api.md", FOLDER.parent / "tests" / "public_api.json"
PAGES = FOLDER / "api"

TOPICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "training": ("Training: the module, the engine, events, errors", ("",)),
    "partitions": ("Partitions and partitioners", ("partition", "decide")),
    "profiles": ("Profiles and clocks", ("measure",)),
    "orders": ("Orders: planned and run", ("planning", "schedule")),
    "simulation": ("The simulator", ("simulation",)),
    "moves_and_workers": ("Moves, checkpoints, workers", ("migration", "checkpoint", "ranks", "release")),
    "watching": ("Journals, pictures, pages", ("journal", "reporting")),
    "huggingface": ("Models of Hugging Face", ("hf",)),
}
"""Of each page: its title, and the packages on it, of which the first one is the package itself."""

_WRITTEN = "<!-- Written by `python docs/api.py` from the docstrings. -->"
_HEAD = f"""\
# Public names

{_WRITTEN}

What the packages export in `__all__`. Only these names are kept from one version to the next (a test compares their
signatures with a recorded list); everything else may change. Types are shipped (`py.typed`). `DynamicPipelineModule`
and `DynamicPipelineEngine` have in addition all that DeepSpeed's `PipelineModule` and `PipelineEngine` have.
"""

PROPERTY = property | cached_property

# Without an underscore because other modules of the package call them; no promise to anybody else.
_OURS = frozenset({
    "add_part", "clip_fp32_gradients", "couplings", "dynamic_config", "install", "layer_of_parameter", "local_indices",
    "make_dynamic", "num_bytes", "pieces", "sources", "stage_optimizer", "tied_layers", "tied_weights",
})  # fmt: skip

_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)
_LITERAL = re.compile(r" ?::\n\n((?:    .*\n?|\n)+)")
_ENTRY = re.compile(r"^    (\*{0,2}\w[\w., ]*): ?", re.MULTILINE)


# -- what there is ---------------------------------------------------------------------------


def packages() -> Iterator[types.ModuleType]:
    """The package and its sub-packages that say what is public."""
    names = [dynpipe_ds.__name__]
    names += [found.name for found in pkgutil.iter_modules(dynpipe_ds.__path__, "dynpipe_ds.") if found.ispkg]
    for name in names:
        package = importlib.import_module(name)
        if hasattr(package, "__all__"):
            yield package


def names() -> Iterator[tuple[str, Any]]:
    """Every public name with what it stands for: ``package.name`` and ``package.Class.member``."""
    for package in packages():
        for name in package.__all__:
            yield f"{package.__name__}.{name}", getattr(package, name)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class that are not DeepSpeed's or Python's, by name.

    Of the engine those that it has with the section enabled.
    """
    found: dict[str, Any] = {}
    for base in (EnabledEngine if cls is dynpipe_ds.DynamicPipelineEngine else cls).__mro__:
        if base.__module__.split(".")[0] == dynpipe_ds.__name__:
            for name, value in vars(base).items():
                wanted = isinstance(value, types.FunctionType | classmethod | staticmethod | PROPERTY)
                if wanted and not name.startswith("_") and name not in _OURS:
                    found.setdefault(name, value)
    yield from sorted(found.items())


def function_of(value: Any) -> Any:
    """The function inside a method of any kind or a property."""
    if isinstance(value, PROPERTY):
        return value.func if isinstance(value, cached_property) else value.fget
    return getattr(value, "__func__", value)


class AsWritten(str):
    """An annotation that a signature shows without quotes."""

    __repr__ = str.__str__


def annotation(given: Any) -> AsWritten:
    """Show an annotation as it was written, whether Python keeps it as text or as an object."""
    if isinstance(given, str):
        return AsWritten(given)
    return AsWritten(getattr(given, "__forward_arg__", None) or inspect.formatannotation(given))


def signature(function: Any) -> str:
    """Show arguments with types and defaults, and what is returned; nothing for what has no signature."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    empty = inspect.Parameter.empty
    arguments = [
        argument if argument.annotation is empty else argument.replace(annotation=annotation(argument.annotation))
        for argument in found.parameters.values()
    ]
    returned = empty if inspect.isclass(function) else found.return_annotation
    return str(found.replace(
        parameters=arguments, return_annotation=returned if returned is empty else annotation(returned)
    ))  # fmt: skip


def describe(value: Any) -> str:
    """One line that changes when what users rely on does."""
    if inspect.isclass(value) and issubclass(value, Enum):
        return f"enum {', '.join(f'{member.name} = {member.value!r}' for member in value)}"
    if inspect.isclass(value):
        foreign = next(base for base in value.__mro__[1:] if base.__module__.split(".")[0] != dynpipe_ds.__name__)
        base = "" if foreign is object else f"({foreign.__name__})"
        return f"class{base} {signature(value).removesuffix(' -> None')}".strip()
    if isinstance(value, PROPERTY):
        return f"property -> {annotation(inspect.signature(function_of(value)).return_annotation)}"
    if isinstance(value, classmethod | staticmethod):
        return f"{type(value).__name__} {signature(value.__func__)}"
    if inspect.isfunction(value):
        return f"function {signature(value)}"
    return str(value)  # a type under another name


def record() -> dict[str, str]:
    """Every public name and what describes it, sorted by name."""
    found = {}
    for name, value in names():
        found[name] = describe(value)
        if inspect.isclass(value):
            found |= {f"{name}.{member}": describe(inner) for member, inner in members(value)}
    return dict(sorted(found.items()))


# -- the pages -------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """What every page says, by its path."""
    seen: dict[int, str] = {}
    by_name = {package.__name__: package for package in packages()}
    texts = {
        name: section(package, seen) for name, package in by_name.items()
    }  # in this order, so that what has several names stands under the shortest
    topics = {topic: [full_name(part) for part in parts] for topic, (_, parts) in TOPICS.items()}
    lacking = texts.keys() - {name for names in topics.values() for name in names}
    assert not lacking, f"docs/api.py: no topic of TOPICS has {', '.join(sorted(lacking))}"
    found = {INDEX: index(by_name)}
    for topic, names in topics.items():
        parts = [f"# {TOPICS[topic][0]}", _WRITTEN, "[All public names](../api.md)"]
        found[PAGES / f"{topic}.md"] = joined([*parts, *(part for name in names for part in texts[name])])
    return found


def full_name(part: str) -> str:
    """A package's name in full; the empty one is the package itself."""
    return f"dynpipe_ds.{part}".rstrip(".")


def index(by_name: dict[str, types.ModuleType]) -> str:
    """The page that names all: topics, and every name with a link."""
    rows = []
    for topic, (title, parts) in TOPICS.items():
        rows.append(f"## [{title}](api/{topic}.md)")
        for name in map(full_name, parts):
            links = ", ".join(f"[`{each}`](api/{topic}.md#{anchor(each)})" for each in by_name[name].__all__)
            rows.append(f"`{name}`: {links}")
    tree = "\n".join(["```{toctree}", ":hidden:", "", *(f"api/{topic}" for topic in TOPICS), "```"])
    return joined([_HEAD, *rows, tree])


def anchor(name: str) -> str:
    """What a link to the heading of a name says."""
    return re.sub(r"[^\w\- ]", "", name.lower())


def joined(parts: list[str]) -> str:
    """Parts of a page, with a blank line between them."""
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def section(package: types.ModuleType, seen: dict[int, str]) -> list[str]:
    """What a page says of a package; of a name that it shares with an earlier one, where that stands.

    Args:
        package: of it.
        seen: full names by what they stand for; those of this package are added.
    """
    parts = [f"## `{package.__name__}`", prose((package.__doc__ or "").split("\n\n")[0])]
    for name in package.__all__:
        value = getattr(package, name)
        first = seen.setdefault(id(value), f"{package.__name__}.{name}")
        if first == f"{package.__name__}.{name}":
            parts += entry(name, value)
        else:
            parts += [f"### `{name}`", f"The same as `{first}`."]
    return parts


def entry(name: str, value: Any) -> list[str]:
    """Heading, signature and docstring of a name, and of its members if it is a class."""
    if not callable(value) or not getattr(value, "__doc__", None) or isinstance(value, types.GenericAlias):
        return [f"### `{name}`", f"```py\n{name} = {value}\n```"]
    if inspect.isclass(value) and issubclass(value, Enum):
        return [f"### `{name}`", f"`{describe(value)}`", explain(value.__doc__)]
    word = "class " if inspect.isclass(value) else ""
    parts = [f"### `{name}`", code(f"{word}{name}", signature(value)), explain(value.__doc__)]
    for member, inner in members(value) if inspect.isclass(value) else ():
        shown = signature(function_of(inner))
        if isinstance(inner, PROPERTY):
            shown = f": {shown.partition(' -> ')[2]}"
        parts += [f"#### `{name}.{member}`", code(member, re.sub(r"^\((?:self|cls)(?:, )?", "(", shown))]
        parts.append(explain(function_of(inner).__doc__))
    return parts


def code(name: str, text: str) -> str:
    """A signature as a block; a long one with an argument a line."""
    text = text.removesuffix(" -> None")
    if len(name + text) > 110:
        depth, arguments, returned = 0, [""], ""
        for i, sign in enumerate(text):
            depth += (sign in "([") - (sign in ")]")
            if depth == 0:
                returned = text[i + 1 :]
                break
            if sign == "," and depth == 1:
                arguments.append("")
            else:
                arguments[-1] += sign
        lines = [f"    {argument.lstrip('( ')}," for argument in arguments]
        text = "\n".join(["(", *lines, f"){returned}"])
    return f"```py\n{name}{text}\n```"


def explain(docstring: str | None) -> str:
    """Turn a docstring into Markdown: paragraphs, and lists for arguments, results and errors."""
    first, *rest = _SECTION.split(inspect.cleandoc(docstring or ""))
    parts = [prose(first)]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        body, _, after = body.strip("\n").partition("\n\n")
        entries = _ENTRY.split(body)
        if title in ("Returns", "Yields"):
            parts.append(f"*{title}:* {one_line(body)}")
        else:
            items = zip(entries[1::2], entries[2::2], strict=True)
            parts.append(f"*{title}:*\n\n" + "\n".join(f"- `{name}`: {one_line(text)}" for name, text in items))
        parts.append(prose(after))
    return "\n\n".join(part for part in parts if part)


def prose(text: str) -> str:
    """Paragraphs, with code as Markdown writes it."""

    def block(found: re.Match[str]) -> str:
        return f"\n\n```py\n{inspect.cleandoc(found[1])}\n```\n\n"

    return inline(_LITERAL.sub(block, text).strip())


def one_line(text: str) -> str:
    """A paragraph without its line breaks."""
    return inline(" ".join(text.split()))


def inline(text: str) -> str:
    """Roles and double back quotes of docstrings as Markdown's code."""
    text = re.sub(r":\w+:`~?([^`<]+?)(?:\s*<[^`]*>)?`", r"`\1`", text)
    return text.replace("``", "`") if "```" not in text else re.sub(r"(?<!`)``(?!`)", "`", text)


def main(arguments: list[str] | None = None) -> int:
    """Rewrite or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a file is out of date")
    check = parser.parse_args(arguments).check
    wanted = {**pages(), RECORD: json.dumps(record(), indent=1) + "\n"}
    if not check:
        PAGES.mkdir(exist_ok=True)
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.name} is out of date: run 'python docs/api.py'", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
            print(f"written: {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
