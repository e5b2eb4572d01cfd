"""Files from outside as values: the one place where foreign bytes are parsed.

Nothing here runs code that a file holds, and nothing here grows without bound: sizes and depths have limits, XML has no
entities, a JSON key stands once, a text is one that can be written again. What does not fit is one line: a `UserError`
with its place.
"""

from __future__ import annotations

import json
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.parsers import expat

from pf2lora.errors import UserError, check_path, reading

if TYPE_CHECKING:
    from torch import Tensor

MIB = 2**20
LARGEST = 2048 * MIB  # of a file of rows, a result, an archive's member
LARGEST_CONFIG = MIB // 4
DEEPEST = 64  # objects in objects; what we write and read has at most a dozen
LARGEST_INTEGER = 2**63 - 1

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""  # of a dotted key; nothing is tried twice
_DOTTED = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{64}}")


# --- bytes and text --------------------------------------------------------------------------------------


def read_bytes(path: Path, most: int = LARGEST, what: str = "file") -> bytes:
    """A file's bytes, which may be `most`."""
    check_path(path)
    with reading(path, what):
        if path.is_dir():
            raise IsADirectoryError
        if not path.exists():
            raise FileNotFoundError
        if not path.is_file() and not str(path).startswith("/dev/"):
            raise UserError(f"{path}: neither a {what} nor a folder (a pipe, or a device)")
        with path.open("rb") as file:
            data = file.read(most + 1)
    if len(data) > most:
        raise UserError(
            f"{path}: larger than {most // MIB or most / MIB:g} MiB, the most that a {what} may be"
        )
    return data


def read_text(path: Path, most: int = LARGEST, what: str = "file") -> str:
    """A file's text, which must be UTF-8 (a byte-order mark is fine)."""
    return decoded(read_bytes(path, most, what), path)


def decoded(data: bytes, path: Path) -> str:
    """The text of bytes that are UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8; save the file with that encoding") from None


def check_text(text: str, where: str) -> str:
    """The text, if it is whole: half of a surrogate pair is no character, and no file and no tokenizer takes it."""
    if not is_whole(text):
        raise UserError(
            f"{where}: a text holds half of a surrogate pair (\\ud800 to \\udfff), which is no character"
        )
    return text


def is_whole(text: str) -> bool:
    """Whether a text can be written as UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode("utf8")
    except UnicodeEncodeError:
        return False
    return True


# --- JSON ------------------------------------------------------------------------------------------------


class BadJSON(ValueError):
    """What is wrong with a JSON text, and `place`, where in it."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


def refuse(constant: str) -> Any:
    """For NaN and the infinities, which JSON does not have."""
    raise BadJSON(f"{constant} is no number")


def parse_json(text: str | bytes, constants: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text; `BadJSON` for all that is wrong with it. `constants` makes something of NaN, Infinity
    and -Infinity, which are numbers without it."""
    try:
        text = text.decode("utf8") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=constants)
        deep = text.count("[") + text.count("{") > DEEPEST
        if deep or _SURROGATE.search(text):
            _check_values(value)
    except BadJSON:
        raise
    except json.JSONDecodeError as error:
        raise BadJSON(error.msg, f", line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise BadJSON(f"nested more than {DEEPEST} deep") from None
    except UnicodeDecodeError:
        raise BadJSON("not UTF-8") from None
    except ValueError:  # Python's own limit
        raise BadJSON("a number of too many digits") from None
    except MemoryError:
        raise BadJSON("it needs more memory than there is") from None
    return value


def json_value(text: str, where: str, constants: Callable[[str], Any] | None = None) -> Any:
    """`parse_json` for a user's text, which `where` names."""
    try:
        return parse_json(text, constants)
    except BadJSON as error:
        raise UserError(f"{where}: broken JSON ({error})") from None


def read_json(path: Path, most: int = LARGEST, constants: Callable[[str], Any] | None = None) -> Any:
    """A whole JSON document."""
    try:
        return parse_json(read_text(path, most), constants)
    except BadJSON as error:
        raise UserError(f"{path}{error.place}: broken JSON ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise BadJSON(f"the key {twice[:40]!r} stands twice")
    return found


def _check_values(value: Any, largest: int | None = None) -> None:
    """Level by level, as what is too deep for the parser is too deep for a recursion."""
    level: Iterable[Any] = [value]
    for depth in range(DEEPEST + 1):
        inside: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if not is_whole(item):
                    raise BadJSON("half of a surrogate pair (\\ud800 to \\udfff), which is no character")
            elif depth == DEEPEST and isinstance(item, dict | list):
                raise BadJSON(f"nested more than {DEEPEST} deep")
            elif isinstance(item, dict):
                inside.extend(chain(item, item.values()))
            elif isinstance(item, list):
                inside.extend(item)
            elif largest and isinstance(item, int) and abs(item) > largest:
                raise BadJSON("a number beyond 2^63")
        level = inside


# --- TOML ------------------------------------------------------------------------------------------------


def read_toml(path: Path, what: str = "config file") -> dict[str, Any]:
    """The tables of a TOML file."""
    text = read_text(path, LARGEST_CONFIG, what)
    if _DOTTED.search(text):  # the parser's time is quadratic in them
        raise UserError(f"{path}: not valid TOML: a key of more than {DEEPEST} parts")
    try:
        found = tomllib.loads(text)
        _check_values(found, LARGEST_INTEGER)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: not valid TOML: nested more than {DEEPEST} deep") from None
    except ValueError as error:
        reason = str(error) if isinstance(error, BadJSON) else "a number of too many digits, or no such date"
        raise UserError(f"{path}: not valid TOML: {reason}") from None
    return found


# --- XML -------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """What our XML has no need for."""


def xml_root(data: bytes, where: str) -> ElementTree.Element:
    """The root of an XML document that declares no types and no entities: those can grow without bound, or reach for
    other files."""
    builder = ElementTree.TreeBuilder()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    depth = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > DEEPEST:
            raise _Refused(f"elements nested more than {DEEPEST} deep")
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    def declared(*_: Any) -> None:
        raise _Refused("a DOCTYPE; a document with declarations or entities is not read")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = declared
    parser.EntityDeclHandler = declared
    try:
        parser.Parse(data, True)
        return builder.close()
    except _Refused as refused:
        line, column = parser.CurrentLineNumber, parser.CurrentColumnNumber
        raise UserError(f"{where}, line {line}, column {column + 1}: {refused}") from None
    except expat.ExpatError as error:
        place = f"line {error.lineno}, column {error.offset + 1}"
        raise UserError(f"{where}, {place}: broken XML ({expat.ErrorString(error.code)})") from None
    except (ValueError, LookupError, AssertionError) as error:  # an encoding that there is not
        raise UserError(f"{where}: broken XML ({error})") from None


# --- tensors ---------------------------------------------------------------------------------------------


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file and the texts of its header. A file of any other kind is refused: no pickle."""
    from safetensors import safe_open

    check_path(path)
    with reading(path):
        if not path.exists():
            raise FileNotFoundError
        if not path.is_file():
            raise IsADirectoryError
        with path.open("rb"):
            pass  # the system's own reason where it may not be read
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except Exception as error:  # the bytes are foreign: whatever a parser raises, they are no tensors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: cannot be read as safetensors ({reason[:200]})") from None
