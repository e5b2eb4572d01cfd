"""Tables as the programs of this world write them: pandas, Excel, packed, with the wrong name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from little_world import command_line
from loading import load_clients

from pf2lora.adapters.base_model import check_reachable
from pf2lora.data.files import name_of, read_records, read_tsv
from pf2lora.data.tables import delimiter_of
from pf2lora.errors import UserError

AWKWARD = [
    {"text": 'she said "well", and left', "label": "a"},
    {"text": "one\ttab; and, commas", "label": "b"},
    {"text": "two\nlines", "label": "a"},
    {"text": "plain", "label": "b"},
    {"text": '"all in quotes"', "label": "a"},
]


def values(path: Path) -> list[dict[str, Any]]:
    return [record.values for record in read_records(path)]


@pytest.mark.parametrize(
    ("suffix", "delimiter"), [(".csv", ","), (".csv", ";"), (".csv", "\t"), (".csv", "|"), (".tsv", "\t")]
)
def test_what_pandas_writes_is_read(suffix: str, delimiter: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows{suffix}"
    pd.DataFrame(AWKWARD).to_csv(file, sep=delimiter, index=False)
    assert values(file) == AWKWARD


def test_a_tsv_file_without_quoting_keeps_its_quotes(tmp_path: Path) -> None:
    """As in GLUE's files: a quote is a character like any other."""
    lines = ["sentence\tlabel", '"gorgeous" and deceptive\t1', 'a "film"\t0', '"quoted"\t1', 'half a "\t0']
    file = tmp_path / "rows.tsv"
    file.write_text("\n".join(lines) + "\n")
    wanted = [line.split("\t")[0] for line in lines[1:]]
    assert [v["sentence"] for v in values(file)] == wanted
    assert [r.values["sentence"] for r in read_tsv(file)] == wanted
    file.write_text('sentence\tlabel\n"quoted"\t1\n')  # nothing that would have needed the quotes
    assert values(file) == [{"sentence": '"quoted"', "label": "1"}]


def test_published_files_are_cut_at_tabs_whatever_they_hold(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text('sentence\tlabel\n"say ""yes"""\t1\n')
    assert values(file)[0]["sentence"] == 'say "yes"'
    assert next(iter(read_tsv(file))).values["sentence"] == '"say ""yes"""'


def test_a_column_of_commas_does_not_mislead() -> None:
    assert delimiter_of("text;label\none, two, three;a\nfour;b\n") == ";"
    assert delimiter_of("text,label\none; two; three,a\nfour,b\n") == ","
    assert delimiter_of("text\nonly one column\n") == ","


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".tsv"])
def test_packed_files_are_read_and_name_their_client(kind: str, tmp_path: Path) -> None:
    rows = [{"text": f"text {i}", "label": str(i % 2)} for i in range(10)]
    plain = tmp_path / f"north{kind}"
    if kind in (".csv", ".tsv"):
        pd.DataFrame(rows).to_csv(plain, sep="\t" if kind == ".tsv" else ",", index=False)
    else:
        plain.write_text("\n".join(map(json.dumps, rows)) if kind == ".jsonl" else json.dumps(rows))
    packed = tmp_path / "packed" / f"north{kind}.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert values(packed) == values(plain)
    (client,) = load_clients(clients=(str(packed.parent),))
    assert client.name == name_of(packed) == "north"


def test_a_packed_file_that_is_none(tmp_path: Path) -> None:
    whole = gzip.compress(b"text,label\na,b\n" * 100)
    for data, message in ((b"text,label\n", "not a gzip file"), (whole[:-20], "ends before its end")):
        (tmp_path / "rows.csv.gz").write_bytes(data)
        with pytest.raises(UserError, match=message):
            read_records(tmp_path / "rows.csv.gz")


def test_lines_of_json_in_a_json_file(tmp_path: Path) -> None:
    rows = [{"text": "a {brace}", "label": "1"}, {"text": "b", "label": "2"}]
    file = tmp_path / "rows.json"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert values(file) == rows
    file.write_text(json.dumps(rows, indent=1))
    assert values(file) == rows
    file.write_text(json.dumps(rows[0]) + "\n{broken}\n")
    with pytest.raises(UserError, match="line 2: broken JSON"):
        read_records(file)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere", None, "nowhere: no such file or folder"),
        ("nowhere.csv", None, "nowhere.csv: no such file$"),
        ("notes.docx", "x", "unknown kind of file '.docx'"),
        (
            "one.csv",
            "text\na\nb\nc\nd\ne\n",
            r"no column looks like the label; .* \(there is no other column\)",
        ),
        (
            "scores.csv",
            "text,label\n" + "".join(f"t{i},{i / 7:.3f}\n" for i in range(12)),
            "regression is another",
        ),
    ],
)
def test_messages_that_say_what_is_wrong(
    name: str, content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_clients(clients=(str(tmp_path / name),))


def test_a_mistyped_model_path_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "minilm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no model folder 'models/minlm'; did you mean 'models/minilm'\?"):
        check_reachable("models/minlm")
    check_reachable("sentence-transformers/all-MiniLM-L6-v2")


def test_a_config_with_a_byte_order_mark(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text("\ufeff[training]\nrounds = 7\n", encoding="utf8")
    code, out, _ = command_line(monkeypatch, capsys, "train", file, "--print-config")
    assert code == 0 and "rounds = 7" in out
