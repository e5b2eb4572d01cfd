"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A table; with `numbers`, all columns but the first are set to the right."""
    ruler = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in (head, ruler, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
