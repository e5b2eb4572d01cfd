"""Clients from a user's own files: formats, columns, splits, and what is said about bad input."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from loading import load_clients, read_rows

from pf2lora.data.files import as_name, expand_paths, json_document, natural_order, read_records
from pf2lora.errors import UserError
from pf2lora.tasks.classification.rows import TextRow, label_names

ROWS = [{"text": f'text {i}, "quoted"', "label": i % 2} for i in range(10)]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """The rows in the format that the suffix names."""
    if path.suffix == ".jsonl":
        write_jsonl(path, rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".tsv":
        lines = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(list(rows)), path)
    return path


# --- formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", ROWS)
    assert read_rows(path) == [TextRow(f'text {i}, "quoted"', str(i % 2)) for i in range(10)]


def test_csv_field_over_lines_keeps_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbftext,label\r\n"one\r\ntwo",x\r\n\r\n"",y\r\n')
    records = read_records(path)
    assert records[0].values == {"text": "one\r\ntwo", "label": "x"}
    assert [record.place for record in records] == ["line 2", "line 5"]


def test_csv_field_longer_than_the_csv_modules_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "x" * 200_000 + ",y\n")
    assert len(read_records(path)[0].values["text"]) == 200_000


def test_jsonl_keeps_unicode_line_separators_inside_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\u2028two", "label": 1}\n', encoding="utf-8")
    assert read_records(path)[0].values["text"] == "one\u2028two"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl, line 2: broken JSON"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "a.jsonl, line 2: not an object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', "a.jsonl, line 2: not UTF-8"),
        ("a.jsonl", b"\n\n", "a.jsonl: no rows"),
        ("a.json", b'[{"text": "x"},\n {"text" "y"}]', "a.json, line 2, column"),
        ("a.json", b'{"text": "x"}', "a.json: not a JSON list"),
        ("a.json", b'[{"text": "x"}, 3]', "a.json, row 2: not an object"),
        ("a.csv", b"text,label\na,1\nb\n", "a.csv, line 3: 1 fields where there are 2 columns"),
        ("a.csv", b'text,label\na,1\n"b,1\nc,1\n', "a.csv, line 3: broken csv"),
        ("a.csv", b"text,text\na,1\n", "a.csv, line 1: two columns named 'text'"),
        ("a.csv", b"text,label\n", "a.csv: no rows"),
        ("a.tsv", b"text\tlabel\na\t1\tx\n", "a.tsv, line 2: 3 fields where there are 2 columns"),
        ("a.parquet", b"not parquet", "a.parquet: not a readable parquet file"),
        ("a.xlsx", b"", "a.xlsx: unknown kind of file '.xlsx' (known: .jsonl, .json, .csv, .tsv, .parquet)"),
    ],
)
def test_broken_files_name_the_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_records(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_missing_match(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.csv: no such file"):
        read_records(tmp_path / "none.csv")
    with pytest.raises(UserError, match="no file matches"):
        expand_paths([str(tmp_path / "*.csv")])
    with pytest.raises(UserError, match="no data file in this folder"):
        expand_paths([tmp_path])


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"pip install 'pf2lora\[parquet\]'"):
        read_records(tmp_path / "a.parquet")


def test_json_documents_for_other_tasks(tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text('{"data": [1]}')
    assert json_document(tmp_path / "squad.json") == {"data": [1]}


def test_globs_folders_and_repeats_have_one_order(tmp_path: Path) -> None:
    for name in ("c10", "c2", "c1"):
        write_jsonl(tmp_path / f"{name}.jsonl")
    (tmp_path / "README.md").write_text("not data")
    expected = [tmp_path / f"{name}.jsonl" for name in ("c1", "c2", "c10")]
    assert expand_paths([str(tmp_path / "*.jsonl")]) == expected
    assert expand_paths([tmp_path]) == expected
    assert expand_paths([expected[2], str(tmp_path / "*.jsonl")]) == [expected[2], *expected[:2]]


# --- names and columns -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "name"),
    [(1, "1"), (1.0, "1"), ("1.0", "1"), (" pos ", "pos"), (True, "true"), ("False", "false"), (4.5, "4.5")],
)
def test_labels_have_one_spelling(value: str | int | float, name: str) -> None:
    assert as_name(value) == name


def test_natural_order() -> None:
    assert natural_order(["10", "b", "2", "b", "a10", "a9"]) == ["2", "10", "a9", "a10", "b"]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (["id", "sentence", "label"], ("1", "2", None)),
        (["Review", "Sentiment", "n"], ("0", "1", None)),
        (["label", "premise", "hypothesis"], ("1", "0", "2")),
        (["index", "question", "sentence", "label"], ("1", "3", "2")),
        (["sentence2", "sentence1", "label"], ("1", "2", "0")),
        (["question1", "question2", "is_duplicate"], ("0", "2", "1")),
        (["content", "text", "target", "label"], ("1", "3", None)),
    ],
)
def test_guessed_columns(tmp_path: Path, header: list[str], expected: tuple[str, str, str | None]) -> None:
    path = write(tmp_path / "a.csv", [{name: str(i) for i, name in enumerate(header)}])
    row = read_rows(path)[0]
    assert (row.text, row.label, row.pair) == expected


def test_named_columns_win_over_guesses(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv", [{"text": "t", "premise": "p", "hypothesis": "h", "label": "l", "q": "q"}]
    )
    assert read_rows(path, text="text") == [TextRow("t", "l")]
    assert read_rows(path, text="text", pair="q", label="premise") == [TextRow("t", "p", "q")]
    assert read_rows(path, pair="hypothesis") == [TextRow("p", "l", "h")]
    assert read_rows(path, pair="q") == [TextRow("t", "l", "q")]


def test_wrong_columns_list_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [{"txet": "t", "label": "l"}])
    with pytest.raises(
        UserError, match=r"no column 'text' .*--text.*did you mean 'txet'.*columns: txet, label"
    ):
        read_rows(path, text="text")
    with pytest.raises(
        UserError, match=r"no column looks like the text; name it with --text \(columns: txet"
    ):
        read_rows(path)
    with pytest.raises(UserError, match="name it with --label"):
        read_rows(path, text="label")


# --- clients ---------------------------------------------------------------------------------------------


def test_one_file_per_client(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / "b.jsonl"), write(tmp_path / "a.csv", ROWS)]
    clients = load_clients(paths, test_ratio=0.2)
    assert [client.name for client in clients] == ["b", "a"]
    assert label_names(clients) == ["0", "1"]
    for client in clients:
        assert Counter(row.label for row in client.test) == {"0": 1, "1": 1}
        assert sorted(client.train + client.test, key=lambda row: row.text) == sorted(
            read_rows(paths[0]), key=lambda row: row.text
        )


def test_client_column_gives_the_same_as_files(tmp_path: Path) -> None:
    rows = [{**row, "site": site} for row in ROWS for site in ("s10", "s2")]
    pooled = load_clients([write_jsonl(tmp_path / "pool.jsonl", rows)], client_column="site", seed=3)
    for site in ("s10", "s2"):
        write_jsonl(tmp_path / "sites" / f"{site}.jsonl")
    assert pooled == load_clients([str(tmp_path / "sites" / "*.jsonl")], seed=3)


def test_a_split_does_not_depend_on_the_other_clients(tmp_path: Path) -> None:
    a, b = write_jsonl(tmp_path / "a.jsonl"), write_jsonl(tmp_path / "b.jsonl")
    both = load_clients([b, a], seed=1)
    assert both[1] == load_clients([a], seed=1)[0]
    assert both[0].test != both[1].test  # same rows, but drawn for another name
    assert load_clients([a], seed=2)[0].test != both[1].test


def test_split_keeps_every_label_in_training(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "label": label} for i, label in enumerate("aaaaaaaabbbc")]
    client = load_clients([write_jsonl(tmp_path / "a.jsonl", rows)], test_ratio=0.5)[0]
    assert len(client.test) == 6
    assert {row.label for row in client.train} == {"a", "b", "c"}
    tiny = load_clients([write_jsonl(tmp_path / "a.jsonl", ROWS[:4])], test_ratio=0.01)[0]
    assert (len(tiny.train), len(tiny.test)) == (3, 1)


def test_separate_test_files(tmp_path: Path) -> None:
    train = [write_jsonl(tmp_path / "train" / f"{name}.jsonl") for name in "ab"]
    test = [write_jsonl(tmp_path / "test" / f"{name}.jsonl", ROWS[: 2 + i]) for i, name in enumerate("ab")]
    clients = load_clients(train, test=test[::-1])
    assert [(c.name, len(c.train), len(c.test)) for c in clients] == [("a", 10, 2), ("b", 10, 3)]
    with pytest.raises(UserError, match="client 'b' has no test data"):
        load_clients(train, test=test[:1])
    with pytest.raises(UserError, match="client 'b' has test data but nothing to train on"):
        load_clients(train[:1], test=test)


def test_known_labels_replace_those_of_training(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"t{i}", "label": "x"} for i in range(5)])
    assert len(load_clients([path], labels=["x", "y"])) == 1
    with pytest.raises(UserError, match="client 'a': the label 'x' is unseen in training"):
        load_clients([path], labels=["y", "z"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "  "}, "a.jsonl, line 3: empty text in column 'text'"),
        ({"text": None}, "a.jsonl, line 3: empty text"),
        ({"text": 7}, "a.jsonl, line 3: column 'text' holds 7, not a text"),
        ({"label": None}, "a.jsonl, line 3: nothing in column 'label'"),
        ({"label": float("nan")}, "a.jsonl, line 3: nothing in column 'label'"),
        ({"label": ["x"]}, "a.jsonl, line 3: column 'label' holds ['x'], not a name"),
    ],
)
def test_bad_rows_name_their_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows: list[dict[str, Any]] = [dict(row) for row in ROWS]
    rows[2] |= change
    with pytest.raises(UserError) as error:
        load_clients([write_jsonl(tmp_path / "a.jsonl", rows)])
    assert message in str(error.value)


def test_bad_clients(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"two\.jsonl: client 'two' has 2 rows; at least 4"):
        load_clients([a, write_jsonl(tmp_path / "two.jsonl", ROWS[:2])])
    with pytest.raises(UserError, match="would both be client 'a'"):
        load_clients([a, write(tmp_path / "a.csv", ROWS)])
    with pytest.raises(UserError, match="only one label, '0'"):
        load_clients([write_jsonl(tmp_path / "one.jsonl", ROWS[::2])])
    with pytest.raises(UserError, match=r"other\.jsonl: no column 'text' \(columns: body, label\)"):
        load_clients([a, write_jsonl(tmp_path / "other.jsonl", [{"body": "b", "label": 1}] * 5)])
    with pytest.raises(
        UserError, match=r"a\.jsonl, line 2: the label '9' is unseen in training \(labels there: 0, 1\)"
    ):
        load_clients(
            [a], test=[write_jsonl(tmp_path / "t" / "a.jsonl", [ROWS[0], {"text": "t", "label": 9}])]
        )
    with pytest.raises(UserError, match=r"no column 'site' \(named by --client-column\)"):
        load_clients([a], client_column="site")
    with pytest.raises(UserError, match=r"p\.jsonl, line 1: '\.\./x' cannot name a client"):
        load_clients([write_jsonl(tmp_path / "p.jsonl", [{**ROWS[0], "site": "../x"}])], client_column="site")
    with pytest.raises(UserError, match=r"test ratio is 1\.5"):
        load_clients([a], test_ratio=1.5)
    with pytest.raises(UserError, match="seed is -1"):
        load_clients([a], seed=-1)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_files_as_pandas_writes_them(tmp_path: Path, suffix: str) -> None:
    """With an index column, quotes, line breaks inside texts, and labels that pandas made fractions of."""
    import pandas

    texts = ['she said "no"', "two\nlines", "tab\there, and a comma"]
    frame = pandas.DataFrame({"text": texts * 3, "label": [0.0, 1.0, 1.0] * 3})
    path = tmp_path / f"a{suffix}"
    if suffix == ".csv":
        frame.to_csv(path)
    elif suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)
    rows = read_rows(path)
    assert [(row.text, row.label) for row in rows] == list(zip(texts * 3, ["0", "1", "1"] * 3))
