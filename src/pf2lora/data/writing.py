"""Writing rows to files of the kinds that are read: jsonl, json, csv, tsv, parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pf2lora.atomic import check_writable, write_bytes
from pf2lora.errors import UserError, check_path, missing_extra, reading

Rows = Sequence[dict[str, Any]]


def check_record_file(path: Path, force: bool) -> None:
    """Said before anything is computed: the kind is known, and no file is lost."""
    if path.suffix.lower() not in WRITERS:
        raise UserError(f"{path}: unknown kind of file {path.suffix!r} (known: {', '.join(WRITERS)})")
    with reading(check_path(path)):
        if path.exists() and not force:
            raise UserError(f"{path} exists; choose another --out, or --force to replace it")
        if not path.absolute().parent.is_dir():
            raise UserError(f"{path}: there is no folder {str(path.parent)!r}")
    check_writable(path)
    if path.suffix.lower() == ".parquet":
        _arrow(path)


def write_records(path: Path, rows: Rows) -> None:
    """The rows as the file's suffix says, whole or not at all."""
    data = WRITERS[path.suffix.lower()](rows, path)
    write_bytes(path, data)


def _jsonl(rows: Rows, path: Path) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows).encode()


def _json(rows: Rows, path: Path) -> bytes:
    return (json.dumps(rows, ensure_ascii=False, indent=1, default=str) + "\n").encode()


def _table(delimiter: str) -> Callable[[Rows, Path], bytes]:
    def write(rows: Rows, path: Path) -> bytes:
        file = io.StringIO(newline="")
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(file, columns, delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
        return file.getvalue().encode()

    return write


def _cell(value: Any) -> Any:
    """Lists and objects as JSON, which the reader takes apart again."""
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else value


def _parquet(rows: Rows, path: Path) -> bytes:
    arrow, parquet = _arrow(path)
    file = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def _arrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("pyarrow", "parquet", f"writing {path}") from None
    return pyarrow, parquet


WRITERS: dict[str, Callable[[Rows, Path], bytes]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _table(","),
    ".tsv": _table("\t"),
    ".parquet": _parquet,
}
