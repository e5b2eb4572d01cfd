"""The documentation site: `make docs`.

Sphinx reads the repository's own Markdown where it lies, so that a link means the same on GitHub and on the site.
Nothing is fetched, neither here nor by a reader's browser.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

project = "pf2lora"
author = "the pf2lora authors"
release = version = installed("pf2lora")
copyright = "the pf2lora authors, Apache-2.0"

root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "examples/*.md",
    "examples/*/*.md",
    "examples/*.ipynb",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
    "README.md",
]
exclude_patterns = ["**/runs/**", "build", ".venv"]
extensions = ["myst_nb", "sphinx.ext.autodoc"]
default_role = "code"  # docstrings write `x` for code

nb_execution_mode = "off"  # `make notebook` executes; the outputs are in the repository
myst_heading_anchors = 4  # as GitHub makes them; a link to one that is not there fails the build
suppress_warnings = ["misc.highlighting_failure"]  # code with an ellipsis in it is still code to a reader

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_use_legacy_class_based = False
nitpicky = False

html_theme = "pydata_sphinx_theme"
html_title = "pf2lora"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_extra_path = ["site/root"]  # index.html, which leads on to docs/index.html
html_copy_source = False
html_show_sourcelink = False
html_theme_options: dict[str, Any] = {
    "show_prev_next": False,
    "navbar_align": "left",
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": [],
}
pygments_style = "default"


def fill_commands(app: Any, docname: str, source: list[str]) -> None:
    """The commands' page is made from the commands."""
    if docname == "docs/commands":
        from pf2lora.cli.command_page import reference

        source[0] = source[0].replace("<!-- commands -->", reference())


def setup(app: Any) -> None:
    from pygments.lexers.data import JsonLexer

    app.connect("source-read", fill_commands)
    app.add_lexer("jsonc", JsonLexer)
