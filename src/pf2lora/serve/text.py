"""A text that grows token by token: what may be shown of it, and where it stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for the first bytes of a character


class GrowingText:
    """Tokens in, pieces of text out: whole characters, nothing from a stop string on, and nothing that may still become
    one. `blank_before` says whether the blank that comes before a target in training is left out: it is no part of the
    text. Other blanks and lines before the first word are not shown, but a stop string may begin with them."""

    def __init__(
        self, decode: Callable[[list[int]], str], stops: Sequence[str] = (), *, blank_before: bool = False
    ) -> None:
        self.decode, self.stops = decode, tuple(stops)
        self.tokens: list[int] = []
        self.stopped = False
        self._shown, self._read = 0, 0  # tokens: decoded from, and already decoded
        self._held = ""
        self._first = self._trimming = blank_before

    def add(self, token: int) -> str:
        """What there is more to show after another token."""
        self.tokens.append(token)
        new = self._new()
        if not new or new.endswith(HALF):
            return ""
        # A piece is decoded behind the piece before it: some tokenizers write a token differently at a beginning.
        self._shown, self._read = self._read, len(self.tokens)
        return self._passed(new)

    def end(self) -> str:
        """What was held back, when no more tokens come."""
        rest = "" if self.stopped else self._passed(self._new())
        rest, self._held = rest + self._trimmed(self._held), ""
        return rest

    def _new(self) -> str:
        before = self.decode(self.tokens[self._shown : self._read])
        return self.decode(self.tokens[self._shown :])[len(before) :]

    def _passed(self, new: str) -> str:
        """What of the held text and the new may be shown."""
        if self._first and new:
            self._first, new = False, new.removeprefix(" ")
        text = self._held + new
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        keep = max((beginning(text, stop) for stop in self.stops), default=0)
        until = min(found) if found else len(text) - keep
        self.stopped, self._held = bool(found), "" if found else text[until:]
        return self._trimmed(text[:until])

    def _trimmed(self, text: str) -> str:
        if self._trimming:
            text = text.lstrip()
            self._trimming = not text
        return text


def beginning(text: str, stop: str) -> int:
    """How many characters at the text's end are a beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
