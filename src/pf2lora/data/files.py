"""Reading rows from files: jsonl, json, csv, tsv, parquet. Every record knows where it came from."""

from __future__ import annotations

import glob
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pf2lora.data import tables
from pf2lora.errors import UserError, check_path, listed, missing_extra, nearest, reading, shown
from pf2lora.parsing import LARGEST, BadJSON, json_value, parse_json


@dataclass(frozen=True)
class Record:
    """One row of a file: its values by column, and its place for error messages."""

    values: dict[str, Any]
    file: str
    place: str  # "line 7", or "row 7" in files that have no lines

    @property
    def where(self) -> str:
        return f"{self.file}, {self.place}"

    def is_missing(self, column: str) -> bool:
        """Whether nothing stands in the column: absent, null, not-a-number or only blanks."""
        value = self.values.get(column)
        if isinstance(value, float):
            return math.isnan(value)
        return value is None or (isinstance(value, str) and not value.strip())

    def text(self, column: str) -> str:
        """The column's text as it stands; an error if there is none."""
        if self.is_missing(column):
            raise UserError(f"{self.where}: empty text in column {column!r}")
        value = self.values[column]
        if not isinstance(value, str):
            raise UserError(f"{self.where}: column {column!r} holds {shown(value)}, not a text")
        return value

    def name(self, column: str) -> str:
        """The column's value as a name (of a label, a client, a topic): 1, 1.0 and "1" are the same."""
        if self.is_missing(column):
            raise UserError(f"{self.where}: nothing in column {column!r}")
        value = self.values[column]
        if not isinstance(value, str | int | float):
            raise UserError(f"{self.where}: column {column!r} holds {shown(value)}, not a name or a number")
        return as_name(value)


MOST_DIGITS = 1000  # of what is ordered as a number; Python itself refuses more than 4300


def as_name(value: str | int | float) -> str:
    """One spelling for values that different file formats spell differently: 1.0 is "1", True is "true"."""
    name = str(value).strip()
    if name in ("True", "False"):
        return name.lower()
    return re.sub(r"^(-?\d+)\.0+$", r"\1", name)


def natural_order(names: Iterable[str]) -> list[str]:
    """The distinct names in the order a person expects: client-2 before client-10."""

    def key(name: str) -> tuple[list[tuple[bool, int, str]], str]:
        parts = re.findall(r"\d+|\D+", name)
        numbers = [int(p) if p.isdecimal() and len(p) <= MOST_DIGITS else None for p in parts]
        return [(n is None, n or 0, p) for n, p in zip(numbers, parts)], name

    return sorted(set(names), key=key)


# --- finding files ---------------------------------------------------------------------------------------


def expand_paths(patterns: Sequence[str | Path]) -> list[Path]:
    """Files for paths, globs and folders, each file once: in the order given, a glob's in natural order."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        if str(pattern).startswith("memory:"):
            raise UserError(
                f"{pattern}: these rows were given in Python and are in no file: name files with --clients"
            )
        path = check_path(Path(pattern))
        with reading(path, "file or folder"):
            found.update(dict.fromkeys(map(Path, natural_order(_matches(path, str(pattern))))))
    return list(found)


def _matches(path: Path, pattern: str) -> list[str]:
    if path.is_dir():
        matches = [str(p) for p in path.iterdir() if kind_of(p) in READERS and not p.name.startswith(".")]
        if not matches:
            raise UserError(f"{path}: no data file in this folder (known kinds: {', '.join(READERS)})")
    elif path.exists() or not glob.has_magic(pattern):
        matches = [str(path)]
    else:
        matches = glob.glob(pattern, recursive=True)
        if not matches:
            raise UserError(f"no file matches {pattern!r}")
    return matches


# --- reading files ---------------------------------------------------------------------------------------


def kind_of(path: Path) -> str:
    """A file's kind by its suffix: .csv of north.csv and of north.csv.gz."""
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def name_of(path: Path) -> str:
    """A file's name without its suffixes, which is its client's."""
    return Path(path.stem).stem if path.suffix.lower() == ".gz" and kind_of(path) in READERS else path.stem


def read_records(path: str | Path) -> list[Record]:
    """All rows of a file, whose kind its suffix tells; .gz behind it means that it is packed."""
    path = check_path(Path(path))
    reader = READERS.get(kind_of(path))
    with reading(path):
        if not path.exists():
            raise UserError(f"{path}: no such file{'' if path.suffix else ' or folder'}")
        if reader is None:
            raise UserError(f"{path}: unknown kind of file {kind_of(path)!r} (known: {', '.join(READERS)})")
        if path.is_dir():
            raise IsADirectoryError
        records = list(reader(path))
    if not records:
        raise UserError(f"{path}: no rows in this file")
    return records


def read_tsv(path: Path, header: Sequence[str] | None = None, skip_short: bool = False) -> Iterator[Record]:
    """A published tsv file: lines cut at tabs, quotes are ordinary characters, as in GLUE's.

    `header` names the columns of a file that has no header line. `skip_short` passes over lines with too few
    fields, for the published files that are known to have some.
    """
    return _table(path, tables.cut_lines(tables.text_of(path), "\t", header, skip_short), header)


def _read_user_tsv(path: Path) -> Iterator[Record]:
    text = tables.text_of(path)
    return _table(path, tables.quoted_or_cut(text, str(path)))


def _read_csv(path: Path) -> Iterator[Record]:
    text = tables.text_of(path)
    return _table(path, tables.quoted(text, tables.delimiter_of(text), str(path)))


def _table(
    path: Path, rows: Iterable[tuple[int, list[str]]], header: Sequence[str] | None = None
) -> Iterator[Record]:
    for line, fields in rows:
        if header is None:
            header = _checked_header(fields, path)
        else:
            yield _record(header, fields, path, line)


def _read_jsonl(path: Path) -> Iterator[Record]:
    # Not splitlines(): JSON strings may hold U+2028 and other characters that it takes for line ends.
    for number, line in enumerate(tables.text_of(path).split("\n"), 1):
        if line.strip():
            yield _object(json_value(line, f"{path}, line {number}"), path, f"line {number}")


def json_document(path: Path) -> Any:
    """A JSON document; one object a line, as a .jsonl file has them, is a list of them."""
    text = tables.text_of(path)
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) > 1 and all(line[0] == "{" and line[-1] == "}" for _, line in lines):
        return [json_value(line, f"{path}, line {number}") for number, line in lines]
    try:
        return parse_json(text)
    except BadJSON as error:
        raise UserError(f"{path}{error.place}: broken JSON ({error})") from None


def _read_json_list(path: Path) -> Iterator[Record]:
    rows = json_document(path)
    if not isinstance(rows, list):
        raise UserError(f'{path}: not a JSON list of objects like [{{"text": …, "label": …}}, …]')
    for number, values in enumerate(rows, 1):
        yield _object(values, path, f"row {number}")


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("pyarrow", "parquet", f"reading {path}") from None
    number = size = 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_parquet(file.metadata, path)
            for batch in file.iter_batches(PARQUET_ROWS):
                size += batch.nbytes  # as it is when unpacked: a few bytes can stand for many rows
                if size > LARGEST:
                    raise UserError(
                        f"{path}: unpacked, larger than {LARGEST >> 20} MiB, the most that a file may be"
                    )
                for values in batch.to_pylist():
                    number += 1
                    yield Record(values, str(path), f"row {number}")
    except UserError:
        raise
    except Exception as error:  # the bytes are foreign: whatever a parser raises, they are no parquet
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: not a readable parquet file ({reason[:200]})") from None


def _check_parquet(about: Any, path: Path) -> None:
    """What a file says of itself must fit, before anything is unpacked."""
    size = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
    if about.num_columns > MOST_COLUMNS or size > LARGEST:
        raise UserError(
            f"{path}: {about.num_columns} columns of {size >> 20} MiB; at most {MOST_COLUMNS} and {LARGEST >> 20} MiB"
        )


def _object(values: Any, path: Path, place: str) -> Record:
    if not isinstance(values, dict):
        raise UserError(f'{path}, {place}: not an object like {{"text": …, "label": …}}')
    return Record(values, str(path), place)


def _checked_header(names: list[str], path: Path) -> list[str]:
    names = [name.strip() for name in names]
    if len(names) > MOST_COLUMNS:
        raise UserError(f"{path}, line 1: {len(names)} columns; a file may have {MOST_COLUMNS}")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"{path}, line 1: two columns named {shown(twice[0])}")
    return names


def _record(header: Sequence[str], fields: list[str], path: Path, line: int) -> Record:
    if len(fields) != len(header):
        raise UserError(f"{path}, line {line}: {len(fields)} fields where there are {len(header)} columns")
    return Record(dict(zip(header, fields)), str(path), f"line {line}")


MOST_COLUMNS = 10_000
PARQUET_ROWS = 256  # unpacked at a time

READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json_list,
    ".csv": _read_csv,
    ".tsv": _read_user_tsv,
    ".parquet": _read_parquet,
}


# --- choosing columns ------------------------------------------------------------------------------------


def columns_of(records: Iterable[Record]) -> list[str]:
    """Every column that occurs, in order of appearance."""
    return list(dict.fromkeys(name for record in records for name in record.values))


def require_column(name: str, columns: Sequence[str], file: str | Path, flag: str | None = None) -> str:
    """`name` if it is one of `columns`; else an error that lists those there are."""
    if name in columns:
        return name
    given = f" (named by {flag})" if flag else ""
    hint = nearest(name, columns)
    raise UserError(f"{file}: no column {shown(name)}{given}{hint} (columns: {listed(columns)})")


def choose_column(
    columns: Sequence[str], explicit: str | None, candidates: Sequence[str], file: str | Path, flag: str
) -> str:
    """The column that the user named, or else the first candidate that is there (upper or lower case)."""
    if explicit is not None:
        return require_column(explicit, columns, file, flag)
    found = find_column(columns, candidates)
    if found is None:
        there = f"columns: {listed(columns)}" if columns else "there is no other column"
        raise UserError(f"{file}: no column looks like the {flag[2:]}; name it with {flag} ({there})")
    return found


def find_column(columns: Sequence[str], candidates: Sequence[str]) -> str | None:
    """The first of `candidates` that is a column, in whatever case it is written."""
    by_folded: Mapping[str, str] = {name.casefold(): name for name in reversed(columns)}
    return next((by_folded[c] for c in candidates if c in by_folded), None)
