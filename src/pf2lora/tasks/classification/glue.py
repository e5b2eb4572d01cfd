"""The paper's GLUE sets, from a folder of the official files or from the hub. GLUE's test labels are secret,
so the dev set is what clients are tested on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pf2lora.data.client import Pool
from pf2lora.data.files import Record, read_tsv, require_column
from pf2lora.data.settings import DataSettings
from pf2lora.errors import UserError, missing_extra
from pf2lora.tasks.classification.rows import TextRow
from pf2lora.tasks.settings import Dataset


@dataclass(frozen=True)
class Layout:
    """One way in which a set's files are laid out in its folder, and its columns in them."""

    train: str
    test: tuple[str, ...]
    text: str
    label: str
    pair: str | None = None
    header: tuple[str, ...] | None = None  # column names, where the files have no header line
    optional: frozenset[str] = frozenset()  # test files that may be absent
    short_lines: bool = False  # the published file has a few lines with too few fields


@dataclass(frozen=True)
class GlueTask:
    """A GLUE set: its label names in the order of their numbers, its headline metric, its files."""

    title: str
    labels: tuple[str, ...]
    metric: str
    hub: Layout  # `train` and `test` are names of splits
    folders: tuple[Layout, ...]
    heterogeneity: float = 0.9  # the paper's

    def row(self, record: Record, layout: Layout) -> TextRow:
        """The record as a row. Texts are taken as they stand: a few of QQP's are empty."""
        pair = str(record.values[layout.pair]) if layout.pair else None
        return TextRow(str(record.values[layout.text]), self._label(record, layout.label), pair)

    def _label(self, record: Record, column: str) -> str:
        value = record.name(column)
        if value in self.labels:
            return value
        if value.isdecimal() and int(value) < len(self.labels):
            return self.labels[int(value)]
        raise UserError(f"{record.where}: {value!r} is no label of {self.title} ({', '.join(self.labels)})")


def _hub(text: str, pair: str | None = None, test: tuple[str, ...] = ("validation",)) -> Layout:
    return Layout("train", test, text, "label", pair)


_COLA_HEADER = ("source", "label", "mark", "sentence")
_COLA_DEV = ("in_domain_dev.tsv", "out_of_domain_dev.tsv")
_MNLI_DEV = ("dev_matched.tsv", "dev_mismatched.tsv")  # both: the paper counts 20k test pairs

GLUE: dict[str, GlueTask] = {
    "cola": GlueTask(
        "CoLA",
        ("unacceptable", "acceptable"),
        "matthews",
        _hub("sentence"),
        (
            Layout("train.tsv", ("dev.tsv",), "sentence", "label", header=_COLA_HEADER),
            Layout("in_domain_train.tsv", _COLA_DEV, "sentence", "label", header=_COLA_HEADER),
        ),
        heterogeneity=0.3,
    ),
    "sst2": GlueTask(
        "SST-2",
        ("negative", "positive"),
        "accuracy",
        _hub("sentence"),
        (Layout("train.tsv", ("dev.tsv",), "sentence", "label"),),
    ),
    "mnli": GlueTask(
        "MNLI",
        ("entailment", "neutral", "contradiction"),
        "accuracy",
        _hub("premise", "hypothesis", ("validation_matched", "validation_mismatched")),
        (
            Layout(
                "train.tsv",
                _MNLI_DEV,
                "sentence1",
                "gold_label",
                "sentence2",
                optional=frozenset({"dev_mismatched.tsv"}),
            ),
        ),
    ),
    "qqp": GlueTask(
        "QQP",
        ("not_duplicate", "duplicate"),
        "accuracy",
        _hub("question1", "question2"),
        (Layout("train.tsv", ("dev.tsv",), "question1", "is_duplicate", "question2", short_lines=True),),
    ),
    "qnli": GlueTask(
        "QNLI",
        ("entailment", "not_entailment"),
        "accuracy",
        _hub("question", "sentence"),
        (Layout("train.tsv", ("dev.tsv",), "question", "label", "sentence"),),
    ),
}


def read_glue(name: str, folder: str | Path | None = None) -> Pool[TextRow]:
    """The rows of a GLUE set, from a folder of its official files or else from the hub.

    With their records: a partition may go by another column, like MNLI's genre.
    """
    task = GLUE[name]
    if folder is None:
        layout = task.hub
        train, test = (_from_hub(name, task, splits) for splits in ((layout.train,), layout.test))
    else:
        place, layout = _find(name, task, Path(folder))
        tests = [file for file in layout.test if (place / file).is_file() or file not in layout.optional]
        train, test = (_from_files(place, layout, files) for files in ((layout.train,), tests))
    train_rows, test_rows = ([task.row(record, layout) for record in part] for part in (train, test))
    return Pool(train_rows, test_rows, train, test, task.labels)


def _dataset(name: str) -> Dataset[TextRow]:
    def read(data: DataSettings, seed: int, notes: list[str]) -> Pool[TextRow]:
        return read_glue(name, data.data_dir)

    task = GLUE[name]
    return Dataset(task.title, read, heterogeneity=task.heterogeneity, metric=task.metric)


DATASETS = {name: _dataset(name) for name in GLUE}


def _find(name: str, task: GlueTask, folder: Path) -> tuple[Path, Layout]:
    """The set's own folder and how its files lie: `folder`, or one in it with a usual name for the set."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    inside = [place for place in sorted(folder.iterdir()) if place.is_dir() and _names(place, name)]
    for place in [*inside, folder]:
        for layout in task.folders:
            if (place / layout.train).is_file():
                return place, layout
    files = " or ".join(layout.train for layout in task.folders)
    raise UserError(
        f"{folder}: {task.title} is not there ({files}, in this folder or in {task.title}/ below it)"
    )


def _names(place: Path, name: str) -> bool:
    """Whether the folder is named after the set: SST-2, sst2, glue_sst2, …"""
    return re.sub(r"[^a-z0-9]", "", place.name.lower()).removeprefix("glue") == name


def _from_files(place: Path, layout: Layout, files: Iterable[str]) -> list[Record]:
    records: list[Record] = []
    for file in files:
        path = place / file
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        found = list(read_tsv(path, layout.header, layout.short_lines))
        if not found:
            raise UserError(f"{path}: no rows in this file")
        _check_columns(found[0], layout)
        records += found
    return records


def _from_hub(name: str, task: GlueTask, splits: Sequence[str]) -> list[Record]:
    try:
        import datasets
    except ImportError:
        raise missing_extra(
            "datasets", "hub", f"{task.title} from the hub (without it: --data-dir with the official files)"
        ) from None
    records = []
    for split in splits:
        try:
            rows = datasets.load_dataset("nyu-mll/glue", name, split=split)
        except Exception as error:  # the hub's failures have no common type
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"{task.title} cannot be had from the hub ({reason}); "
                "with --data-dir it is read from a folder of the official files"
            ) from None
        records += [Record(row, f"hub glue/{name} {split}", f"row {i}") for i, row in enumerate(rows, 1)]
    _check_columns(records[0], task.hub)
    return records


def _check_columns(record: Record, layout: Layout) -> None:
    for column in filter(None, (layout.text, layout.pair, layout.label)):
        require_column(column, list(record.values), record.file)
