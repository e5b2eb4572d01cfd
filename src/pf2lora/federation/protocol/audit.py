"""A participant's audit log: what it let out, refused and decided. Lines are added and never changed, and each holds
the hash of the one before it: who changes, removes or adds one in the middle breaks the chain.

The end of a chain proves itself only to those who noted its hash before: `verify` says it, for that.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pf2lora.atomic import writing
from pf2lora.errors import UserError
from pf2lora.parsing import BadJSON, parse_json

FILE = "audit.jsonl"
FIRST = "0" * 64  # before the first line
CUT = "cut"  # the event after a line that a crash cut off
BLOCK = 4096  # bytes that are read at once from the end


@dataclass(frozen=True)
class Verified:
    """An unbroken log: its lines, the hash of the last one, and how many a crash has cut off."""

    lines: int
    last: str
    cut: int


def record(kit: Path, event: str, **fields: Any) -> None:
    """One more line in the log of a kit: what happened, and when. On the disk before this returns."""
    with writing(kit / FILE):
        handle = os.open(kit / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # the lead's job and a person's command may write at once
            tail = last_line(handle)
            if tail and not tail.endswith(b"\n"):
                os.write(handle, b"\n")
                tail = add(handle, tail, {"event": CUT})
            add(handle, tail, {"event": event, **fields})
            os.fsync(handle)
        finally:
            os.close(handle)


def add(handle: int, before: bytes, fields: dict[str, Any]) -> bytes:
    """Write a line after `before`; the line."""
    said = {"time": round(time.time(), 3), **fields, "before": digest(before) if before else FIRST}
    line = json.dumps(said, ensure_ascii=True, allow_nan=False).encode() + b"\n"
    os.write(handle, line)
    return line


def digest(line: bytes) -> str:
    """The hash of a line, without its end."""
    return hashlib.sha256(line.removesuffix(b"\n")).hexdigest()


def last_line(handle: int) -> bytes:
    """The last line of an open file, with its end if it has one."""
    end = os.lseek(handle, 0, os.SEEK_END)
    found = b""
    while end and b"\n" not in found[:-1]:
        start = max(0, end - BLOCK)
        found = os.pread(handle, end - start, start) + found
        end = start
    return found[found[:-1].rfind(b"\n") + 1 :]


def lines_of(file: Path) -> Iterator[bytes]:
    """The lines of a log, without their ends."""
    try:
        with file.open("rb") as opened:
            for line in opened:
                yield line.removesuffix(b"\n")
    except OSError as error:
        raise UserError(f"{file}: there is no audit log that can be read ({error.strerror})") from None


def verify(kit: Path, noted: str | None = None) -> Verified:
    """The log of a kit, if its chain is unbroken; else a UserError that names the first line that does not fit. `noted`
    is the hash of a line that was once the last one: it must still be there."""
    file, before, count, cut = kit / FILE, FIRST, 0, 0
    seen = noted is None
    unreadable = False  # the line before: a crash may have cut it off, as the next one then says
    for count, line in enumerate(lines_of(file), 1):
        try:
            fields = parse_json(line)
        except BadJSON:
            fields = None
        if fields is None:
            if unreadable:
                raise broken(file, count - 1)
            unreadable = True
        elif not isinstance(fields, dict) or fields.get("before") != before:
            raise broken(file, count)
        elif unreadable != (fields.get("event") == CUT):
            raise broken(file, count - 1 if unreadable else count)
        else:
            cut, unreadable = cut + unreadable, False
        before = digest(line)
        seen = seen or before == noted
    if not seen:
        raise UserError(f"{file}: no line has the hash {noted}: lines that were there are gone")
    return Verified(count, before, cut + unreadable)


def broken(file: Path, number: int) -> UserError:
    """For a chain that does not hold."""
    return UserError(f"{file}: line {number} does not follow from the one before it: the log was changed")
