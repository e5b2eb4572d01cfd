"""Rows of fields from text, however a table program wrote them: which delimiter, quoted or not, packed or not."""

from __future__ import annotations

import csv
import io
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pf2lora.errors import UserError
from pf2lora.parsing import LARGEST, MIB, decoded, read_bytes

DELIMITERS = (",", ";", "\t", "|")
LOOKED_AT = 20  # rows by which a delimiter is found

Rows = Iterator[tuple[int, list[str]]]
"""Each row with the number of its first line; the header comes first."""


def text_of(path: Path) -> str:
    """A file's text, unpacked if its name ends in .gz."""
    data = read_bytes(path)
    return decoded(unpacked(data, path) if path.suffix.lower() == ".gz" else data, path)


def unpacked(data: bytes, path: Path) -> bytes:
    """What gzip packed, if it is not too much: a few bytes can stand for many."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        found = unpacker.decompress(data, LARGEST + 1)
    except zlib.error as error:
        raise UserError(f"{path}: not a gzip file ({error})") from None
    if len(found) > LARGEST:
        raise UserError(f"{path}: unpacked, larger than {LARGEST // MIB} MiB, the most that a file may be")
    if not unpacker.eof:
        raise UserError(f"{path}: the gzip file ends before its end")
    return found


def quoted(text: str, delimiter: str, where: str) -> Rows:
    """Fields as csv has them; one in quotes may hold delimiters, quotes (twice) and line ends."""
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is shorter than some documents
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{where}, line {line}: broken csv ({error})") from None


def cut_lines(text: str, delimiter: str, header: Sequence[str] | None, skip_short: bool = False) -> Rows:
    """Lines cut at every delimiter; quotes are ordinary characters."""
    width = len(header or ())
    for number, line in enumerate(text.split("\n"), 1):
        fields = line.removesuffix("\r").split(delimiter)
        width = width or len(fields)
        if fields != [""] and not (skip_short and len(fields) < width):
            yield number, fields


def delimiter_of(text: str) -> str:
    """What a csv file is cut by: Excel writes `;` where the comma is the decimal point, some write tabs. The one that
    cuts the first rows into the most columns, all alike; a comma where none does."""
    best, most = ",", 1
    for delimiter in DELIMITERS:
        try:
            first = [fields for _, fields in zip(range(LOOKED_AT), _fields(text, delimiter))]
        except UserError:
            continue
        widths = {len(fields) for fields in first}
        if len(widths) == 1 and max(widths) > most:
            best, most = delimiter, max(widths)
    return best


def _fields(text: str, delimiter: str) -> Iterator[list[str]]:
    return (fields for _, fields in quoted(text, delimiter, ""))


def quoted_or_cut(text: str, where: str) -> Rows:
    """A user's tsv file: pandas puts a field in quotes that holds a tab, a quote or a line end, and GLUE's files know
    no quotes. It is quoted if reading it so finds such a field, and rows of one width."""
    if '"' not in text:
        return cut_lines(text, "\t", None)
    try:
        rows = list(quoted(text, "\t", where))
    except UserError:
        return cut_lines(text, "\t", None)
    alike = len({len(fields) for _, fields in rows}) == 1
    needed = any(mark in field for _, fields in rows for field in fields for mark in '\t\n"')
    return iter(rows) if alike and needed else cut_lines(text, "\t", None)
