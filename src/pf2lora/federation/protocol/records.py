"""What the server keeps of its rounds: a line of a file for each, beside checkpoints that do not grow with them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from pf2lora.errors import UserError
from pf2lora.federation.protocol.checkpoints import writing
from pf2lora.federation.protocol.stopping import middle_loss
from pf2lora.parsing import BadJSON, parse_json

RECORDS = "records.jsonl"


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


class Records:
    """The records of a run, in the file `records.jsonl` of its folder on the server. Memory has what the next round
    needs of them.

    A round's line is on the disk before its checkpoint, which says how many rounds are done: a line beyond these is of
    a round that a crash undid, and is written over.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / RECORDS
        self.count = self.end = 0  # rounds, and the bytes that they take
        self.last: RoundRecord | None = None
        self.undone: dict[str, int] = {}  # of each site the round that it is to take back, its last; 0: none
        self.losses: list[float] = []  # the middle of the sites' validation losses, for each evaluation

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[RoundRecord]:
        """All of them, from the disk."""
        if self.count:
            with self.file.open("rb") as lines:
                for _ in range(self.count):
                    yield record_of(lines.readline())

    def read(self, done: int) -> None:
        """Those of the first `done` rounds; a UserError if the file has not got them."""
        found = 0
        try:
            with self.file.open("rb") as lines:
                for line in lines:
                    if found == done:
                        break
                    self.note(record_of(line), len(line))
                    found += 1
        except FileNotFoundError:
            pass
        if found < done:
            raise UserError(f"{self.file} has {found} rounds, and the checkpoint is of round {done}")

    def append(self, record: RoundRecord) -> None:
        """One round more, after those that are known."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with (
            writing(self.file.parent),
            open(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file,
        ):
            file.truncate(self.end)
            file.seek(self.end)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.note(record, len(line))

    def note(self, record: RoundRecord, size: int) -> None:
        """What is needed of a record later."""
        self.count, self.end, self.last = self.count + 1, self.end + size, record
        for site in (*record["answered"], *record["refused"]):
            self.undone[site] = record["round"] if site in record["take_back"] else 0
        loss = middle_loss(record["scores"])
        self.losses += [] if loss is None else [loss]


def record_of(line: bytes) -> RoundRecord:
    """The record in a line; a UserError if it holds none."""
    try:
        found = parse_json(line)
    except BadJSON:
        found = None
    if not isinstance(found, dict) or not RoundRecord.__required_keys__ <= found.keys():
        raise UserError(f"{RECORDS} has a line that is no round's record")
    return found  # type: ignore[return-value]
