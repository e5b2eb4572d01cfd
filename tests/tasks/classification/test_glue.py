"""GLUE sets: the real CoLA and SST-2 where they are at hand, and small files of each official format."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loading import load_clients

from pf2lora.errors import UserError
from pf2lora.tasks.classification.glue import GLUE, read_glue
from pf2lora.tasks.classification.rows import TextRow


def load_glue(name: str, folder: Path | None = None) -> tuple[list[TextRow], list[TextRow]]:
    pool = read_glue(name, folder)
    return pool.train, pool.test


def write_tsv(path: Path, *rows: str) -> None:
    """Rows with spaces for tabs: "a | b" is two fields."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row.split(" | ")) + "\n" for row in rows), encoding="utf-8")


# --- the real sets ---------------------------------------------------------------------------------------


def test_real_cola(shared_data: Path) -> None:
    train, test = load_glue("cola", shared_data)
    assert (len(train), len(test)) == (8551, 527 + 516)
    assert train[0] == TextRow(
        "Our friends won't buy this analysis, let alone the next one we propose.", "acceptable"
    )
    assert Counter(row.label for row in train) == {"acceptable": 6023, "unacceptable": 2528}


def test_real_sst2(shared_data: Path) -> None:
    train, test = load_glue("sst2", shared_data / "glue_sst2")
    assert (len(train), len(test)) == (67349, 872)
    assert Counter(row.label for row in test) == {"positive": 444, "negative": 428}
    assert train[0] == TextRow("hide new secretions from the parental units ", "negative")


# --- the official formats --------------------------------------------------------------------------------


def test_sst2_quotes_are_ordinary_characters(tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv", "sentence | label", '" unbalanced  | 0', "fine | 1")
    write_tsv(tmp_path / "dev.tsv", "sentence | label", "good | 1")
    assert load_glue("sst2", tmp_path) == (
        [TextRow('" unbalanced ', "negative"), TextRow("fine", "positive")],
        [TextRow("good", "positive")],
    )


def test_cola_in_both_layouts(tmp_path: Path) -> None:
    for name in ("glue/train.tsv", "original/in_domain_train.tsv"):
        write_tsv(tmp_path / name, "gj04 | 1 |  | They sang.", "gj04 | 0 | * | They sing it out the.")
    write_tsv(tmp_path / "glue" / "dev.tsv", "a | 1 |  | In.", "b | 0 | * | Out.")
    write_tsv(tmp_path / "original" / "in_domain_dev.tsv", "a | 1 |  | In.")
    write_tsv(tmp_path / "original" / "out_of_domain_dev.tsv", "b | 0 | * | Out.")
    glue, original = (load_glue("cola", tmp_path / layout) for layout in ("glue", "original"))
    assert glue == original
    assert glue[0] == [TextRow("They sang.", "acceptable"), TextRow("They sing it out the.", "unacceptable")]
    assert glue[1] == [TextRow("In.", "acceptable"), TextRow("Out.", "unacceptable")]


MNLI = "index | promptID | pairID | genre | sentence1_binary_parse | sentence2_binary_parse | sentence1_parse"
MNLI += " | sentence2_parse | sentence1 | sentence2 | label1"
MNLI_ROW = "0 | 31193 | 31193n | {genre} | ( p ) | ( h ) | (ROOT p) | (ROOT h) | {p} | {h} | neutral"


def test_mnli_tests_on_matched_and_mismatched(tmp_path: Path) -> None:
    folder = tmp_path / "MNLI"
    train = [MNLI_ROW.format(genre="fiction", p="P", h="H") + " | neutral"]
    write_tsv(folder / "train.tsv", MNLI + " | gold_label", *train)
    dev = " | label2 | label3 | label4 | label5 | gold_label"
    for name, label in (("matched", "entailment"), ("mismatched", "contradiction")):
        row = MNLI_ROW.format(genre="travel", p=name, h="H") + f" | a | b | c | d | {label}"
        write_tsv(folder / f"dev_{name}.tsv", MNLI + dev, row)
    data = read_glue("mnli", tmp_path)
    assert data.train == [TextRow("P", "neutral", "H")]
    assert data.test == [TextRow("matched", "entailment", "H"), TextRow("mismatched", "contradiction", "H")]
    assert (data.train_records or [])[0].name("genre") == "fiction"
    (folder / "dev_mismatched.tsv").unlink()
    assert load_glue("mnli", tmp_path)[1] == data.test[:1]
    (folder / "dev_matched.tsv").unlink()
    with pytest.raises(UserError, match=r"dev_matched\.tsv: no such file"):
        load_glue("mnli", tmp_path)


def test_qqp_passes_over_its_broken_lines(tmp_path: Path) -> None:
    header = "id | qid1 | qid2 | question1 | question2 | is_duplicate"
    write_tsv(tmp_path / "QQP" / "train.tsv", header, "1 | 2 | 3 | How? | Why? | 0", "4 | 5 | cut off")
    write_tsv(tmp_path / "QQP" / "dev.tsv", header, "1 | 2 | 3 | How? | How so? | 1")
    train, test = load_glue("qqp", tmp_path)
    assert train == [TextRow("How?", "not_duplicate", "Why?")]
    assert test == [TextRow("How?", "duplicate", "How so?")]


def test_qnli(tmp_path: Path) -> None:
    for name, label in (("train", "not_entailment"), ("dev", "entailment")):
        row = f"0 | When? | In 1990. | {label}"
        write_tsv(tmp_path / "glue_qnli" / f"{name}.tsv", "index | question | sentence | label", row)
    assert load_glue("qnli", tmp_path) == (
        [TextRow("When?", "not_entailment", "In 1990.")],
        [TextRow("When?", "entailment", "In 1990.")],
    )


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown data set for classification 'sst3'; did you mean 'sst2'\?"):
        load_clients(dataset="sst3", data_dir=tmp_path)
    with pytest.raises(
        UserError, match=r"SST-2 is not there \(train\.tsv, in this folder or in SST-2/ below it"
    ):
        load_glue("sst2", tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        load_glue("sst2", tmp_path / "none")
    write_tsv(tmp_path / "train.tsv", "sentence | label", "fine | 2")
    with pytest.raises(UserError, match=r"train\.tsv: no column 'question' .*columns: sentence, label"):
        load_glue("qnli", tmp_path)
    with pytest.raises(UserError, match=r"train\.tsv, line 1: 2 fields where there are 4 columns"):
        load_glue("cola", tmp_path)
    write_tsv(tmp_path / "dev.tsv", "sentence | label", "fine | 1")
    with pytest.raises(
        UserError, match=r"train\.tsv, line 2: '2' is no label of SST-2 \(negative, positive\)"
    ):
        load_glue("sst2", tmp_path)


# --- the hub ---------------------------------------------------------------------------------------------


def hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_hub_rows_have_numbered_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, name: str, split: str) -> list[dict[str, Any]]:
        assert (path, name) == ("nyu-mll/glue", "mnli")
        label = {"train": 1, "validation_matched": 0, "validation_mismatched": 2}[split]
        return [{"premise": split, "hypothesis": "H", "label": label, "idx": 0}]

    hub(monkeypatch, load_dataset)
    train, test = load_glue("mnli")
    assert train == [TextRow("train", "neutral", "H")]
    assert [row.label for row in test] == ["entailment", "contradiction"]


def test_unreachable_hub_names_the_folder_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, name: str, split: str) -> None:
        raise ConnectionError("Couldn't reach the hub\nwith more lines")

    hub(monkeypatch, load_dataset)
    with pytest.raises(UserError) as error:
        load_glue("qqp")
    assert "Couldn't reach the hub" in str(error.value)
    assert "--data-dir" in str(error.value)
    assert "\n" not in str(error.value)


def test_without_datasets_the_extra_and_the_folder_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"--data-dir .*pip install 'pf2lora\[hub\]'"):
        load_glue("qqp")


def test_registry() -> None:
    assert {name: task.metric for name, task in GLUE.items()} == {
        "cola": "matthews",
        "sst2": "accuracy",
        "mnli": "accuracy",
        "qqp": "accuracy",
        "qnli": "accuracy",
    }
