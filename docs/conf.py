"""Settings of the site that Sphinx makes of these pages: ``make docs``."""

import re
from pathlib import Path

project = "dynpipe_ds"
author = "the dynpipe_ds authors"
project_copyright = "the dynpipe_ds authors, Apache-2.0"
# Read, not imported: building the site needs neither torch nor DeepSpeed.
_package = (Path(__file__).parent.parent / "dynpipe_ds" / "__init__.py").read_text(encoding="utf-8")
release = version = re.findall(r'^__version__ = "(.+)"$', _package, re.MULTILINE)[0]

extensions = ["myst_parser", "sphinx_copybutton"]
copybutton_prompt_text = "$ "
copybutton_selector = "div:not(.highlight-text):not(.no-copybutton) > div.highlight > pre"  # not of what is printed
exclude_patterns = ["_build"]
myst_heading_anchors = 3
highlight_language = "text"  # of blocks that do not name theirs

html_theme = "furo"
html_title = f"dynpipe_ds {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]


def _link_files(_app, _page, source):
    """Pages outside this folder are no part of the site: offer them as files, as other files are."""
    source[0] = re.sub(r"\]\((\.\./[^)#\s]+\.md)(?:#[^)]*)?\)", r"](path:\1)", source[0])


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", _link_files)
