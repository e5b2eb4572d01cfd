"""Foreign text on its way to a terminal: nothing in it is markup, and nothing in it steers the terminal."""

from __future__ import annotations

from rich.markup import escape

from pf2lora.errors import one_line


def safe(text: object) -> str:
    """The text as it stands, for what rich prints: brackets stay brackets, control characters are written out, line
    breaks are kept."""
    return escape("\n".join(one_line(line) for line in str(text).split("\n")))
