"""An example as tokens, and which of them are the model's to write."""

from __future__ import annotations

from typing import NamedTuple


class Tokens(NamedTuple):
    """An example: its tokens, and for each of them whether it is the model's to write (1) or given (0)."""

    ids: list[int]
    target: list[int]

    def cut(self, length: int) -> Tokens:
        return Tokens(self.ids[:length], self.target[:length])
