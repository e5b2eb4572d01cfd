"""A row as the model sees it: token by token, what it is to find in colour, or between marks where there is none."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from pf2lora.errors import one_line

if TYPE_CHECKING:
    from pf2lora.tasks.base import Shown

BETWEEN, LINE_END = "·", "⏎"
BEFORE, BEHIND = "«", "»"  # around what is marked, where there is no colour


def print_example(shown: Shown, console: Console) -> None:
    """The tokens in running text, a dot between them, and the line about them."""
    coloured = console.is_terminal and not console.no_color
    text = Text()
    for marked, part in groupby(zip(shown.tokens, shown.marked), key=lambda pair: pair[1]):
        tokens = BETWEEN.join(visible(token) for token, _ in part)
        if marked and not coloured:
            tokens = f"{BEFORE}{tokens}{BEHIND}"
        text.append(BETWEEN if text else "").append(tokens, "bold green" if marked else "")
    console.print(text, soft_wrap=True)
    if shown.about:
        console.print(Text(one_line(shown.about), "dim"), soft_wrap=True)


def visible(token: str) -> str:
    """A token without anything that steers a terminal; line ends are shown, and break the line."""
    return f"{LINE_END}\n".join(one_line(line) for line in token.split("\n"))
