"""What the server keeps of a round."""

from __future__ import annotations

from typing import Any, TypedDict


class RoundRecord(TypedDict):
    """As JSON. Names are the sites'."""

    round: int
    seconds: float
    answered: list[str]  # whose updates were merged
    missing: list[str]  # who was asked and did not answer in time
    refused: dict[str, str]  # who was left out, and why
    take_back: list[str]  # of these, whose update was refused here: the site undoes its round
    stopped: list[str]  # who said that it cannot go on
    bytes: dict[str, int]  # the size of each answer
    scores: dict[str, dict[str, Any]]  # the fields of each answer that was not refused
