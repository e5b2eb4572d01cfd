"""Broken files made of good ones: changes of bytes, of lines, and of what a JSON text or a safetensors header says.

All randomness is the `Random` that is given: the same seed makes the same file again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

TOKENS = (
    *(
        b"",
        b"\0",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\r",
        b"\n\n",
        b"\t",
        b'"',
        b"'",
        b"\\",
        b",",
    ),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b"[" * 200,
        b'{"a":' * 200,
        b"null",
        b"true",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"-0",
    ),
    *(
        b"9" * 5000,
        b"0x" + b"f" * 3000,
        b"\\ud800",
        b"\\u0000",
        b"a." * 300,
        b"'''",
        b'"""',
        b"<",
        b"&a;",
        b"]]>",
    ),
    *(
        b"<!DOCTYPE a [<!ENTITY b 'c'>]>",
        b"<!--",
        b"<?xml version='1.0' encoding='utf-7'?>",
        b"../../etc/passwd",
    ),
    *(
        b"os:system",
        b"this:x",
        b"..:x",
        b"2020-13-45",
        b"inf",
        b"nan",
        b"A" * 20_000,
        "ﬁ\u202e\U0001f600".encode(),
    ),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, -1.5, 1e308, 1e-320),
    *("", " ", "a", "nan", "inf", "\0", "\ud800", "\u202e", "../../x", "/etc/passwd", "con", "x" * 70_000),
    *("os:system", "this:x", "<script>alert(1)</script>", "$\\frac{", "[bold]", "{0}", "%s"),
    *([], {}, [[]], [None], [1, "a"], {"": {}}, {"a": 1, "b": [1]}, {"text": 1, "answer_start": -1}),
)

Mutation = Callable[[bytes, Random], bytes]


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


# --- bytes -------------------------------------------------------------------------------------------------


def bytes_changed(data: bytes, random: Random) -> bytes:
    """One to four cuts, flips, insertions, copies."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at, other = random.randrange(len(changed) + 1), random.randrange(len(changed) + 1)
        first, last = min(at, other), max(at, other)
        match random.randrange(7):
            case 0:
                changed[at:at] = random.choice(TOKENS)
            case 1:
                changed[first : min(last, first + random.choice((1, 4, 64)))] = random.choice(TOKENS)
            case 2:
                del changed[first:last]
            case 3 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 4 if at < len(changed):
                changed[at] = random.randrange(256)
            case 5:
                changed[at:at] = changed[first : min(last, first + 4096)]
            case 6:
                changed[first : first + random.randrange(1, 9)] = random.randbytes(random.randrange(1, 9))
    return bytes(changed)


def lines_changed(data: bytes, random: Random) -> bytes:
    """A line more, less, twice, or one whose value is another."""
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    match random.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[random.randrange(len(lines))])
        case 2:
            lines.insert(at, random.choice(TOKENS))
        case 3:
            key, _, _ = lines[at].partition(b"=")
            lines[at] = key + b"= " + random.choice((*TOKENS, *map(toml, VALUES[:30])))
        case 4:
            cells = lines[at].split(b",")
            cells[random.randrange(len(cells))] = random.choice(TOKENS)
            lines[at] = b",".join(cells)
    return b"\n".join(lines)


def toml(value: Any) -> bytes:
    """A value about as TOML has it."""
    return json.dumps(value).encode()


# --- what a text says --------------------------------------------------------------------------------------


def value_changed(value: Any, random: Random) -> Any:
    """The same value with one place changed, added or taken away."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in items:
            places.append((node, key))
            walk(inner)

    walk(value)
    new = nested(random.choice((3, 100))) if random.random() < 0.05 else deepcopy(random.choice(VALUES))
    if not places:
        return new
    node, key = random.choice(places)
    match random.randrange(6):
        case 0 | 1 | 2:
            node[key] = new
        case 3:
            del node[key]
        case 4 if isinstance(node, dict):
            node[random.choice(("", "x", "\ud800", "name", "a" * 300, str(key) + " "))] = node.pop(key)
        case 5 if isinstance(node, list):
            node.extend(node[:5] * random.choice((1, 50)))
        case _:
            other, place = random.choice(places)
            node[key] = json.loads(json.dumps(other[place])) if other is not node else new
    return value


def json_changed(data: bytes, random: Random) -> bytes:
    """A JSON text that says something else."""
    value = json.loads(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        value = value_changed(value, random)
    return json.dumps(value).encode()


def jsonl_changed(data: bytes, random: Random) -> bytes:
    """Lines of JSON, one of which says something else."""
    lines = data.rstrip(b"\n").split(b"\n")
    at = random.randrange(len(lines))
    lines[at] = json_changed(lines[at], random)
    return b"\n".join(lines) + b"\n"


def tensors_changed(data: bytes, random: Random) -> bytes:
    """A safetensors file whose header says something else, or whose numbers are others."""
    length = int.from_bytes(data[:8], "little")
    if random.random() < 0.3:
        return data[: 8 + length] + bytes_changed(data[8 + length :], random)
    header = json.loads(data[8 : 8 + length])
    about = header.get("__metadata__", {})
    inner = [name for name, text in about.items() if text[:1] in "{["]
    if inner and random.random() < 0.6:
        name = random.choice(inner)
        about[name] = json_changed(about[name].encode(), random).decode()
    else:
        header = value_changed(header, random)
        if isinstance(header, dict) and random.random() < 0.3:
            for entry in header.values():
                if isinstance(entry, dict) and "dtype" in entry:
                    entry["dtype"] = random.choice(("F64", "I8", "BOOL", "F8_E5M2", "C64", "F4", "X"))
    text = json.dumps(header).encode()
    claimed = len(text) if random.random() < 0.9 else random.choice((0, 2**40, 2**63, len(text) + 1))
    return claimed.to_bytes(8, "little") + text + data[8 + length :]
