"""What a model thinks before it answers, as most reasoning models write it: `<think>…</think>` before the answer."""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
BEGUN = re.compile(rf"({OPEN}|{CLOSE})\s*$")  # by a prompt, or ended without a word


def with_thought(thought: str, answer: str) -> str:
    """As templates write it that take a thought by itself."""
    return f"{OPEN}\n{thought.strip()}\n{CLOSE}\n\n{answer}" if thought.strip() else answer


def parted(text: str) -> tuple[str, str]:
    """The thought and the answer of a text; a prompt may have begun the thought. One that never ends has no answer."""
    thought, ended, answer = text.rpartition(CLOSE)
    if ended:
        return thought.rpartition(OPEN)[2].strip(), answer.lstrip()
    return (text.partition(OPEN)[2].strip(), "") if text.lstrip().startswith(OPEN) else ("", text)
