"""Tables that a script writes into a page of docs/, between two comments that name it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def marks(made_by: str) -> tuple[str, str]:
    """The comments before and after what the script makes."""
    begin, end = (f"<!-- made by {made_by}: {which} -->" for which in ("begin", "end"))
    return begin, end


def filled(page: str, made_by: str, text: str) -> str:
    """The page with the text in its place."""
    begin, end = marks(made_by)
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
