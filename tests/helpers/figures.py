"""Prometheus' text format read back, and whether a text holds anything of the small federation's rows."""

from __future__ import annotations

import re

from small_federation import LABELS, WORDS

LINE = re.compile(r'pf2lora_[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? -?[0-9.e+-]+')


def figures(text: str) -> dict[str, float]:
    """A figure by its name and labels; every line is one of the text format."""
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    assert text.endswith("\n") and all(LINE.fullmatch(line) for line in lines), text
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def private_words(text: str) -> set[str]:
    """Words of rows, and labels, that are in a text."""
    return {word for word in (*WORDS, *LABELS) if re.search(rf"\b{word}\b", text)}
