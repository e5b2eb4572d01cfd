"""SQuAD v1 and v2, from the hub or their official JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pf2lora.data.client import Pool
from pf2lora.data.files import Record
from pf2lora.data.settings import DataSettings
from pf2lora.errors import UserError, missing_extra
from pf2lora.tasks.question_answering.rows import Columns, QuestionRow, read_records, rows_of
from pf2lora.tasks.settings import Dataset

OFFICIAL = Columns("context", "question", "answers", "title")


@dataclass(frozen=True)
class SquadSet:
    """A version of SQuAD: its name on the hub and its official training file."""

    title: str
    hub: str
    file: str


SQUAD = {
    "squad": SquadSet("SQuAD v1.1", "rajpurkar/squad", "train-v1.1.json"),
    "squad_v2": SquadSet("SQuAD v2.0", "rajpurkar/squad_v2", "train-v2.0.json"),
}


def read_squad(name: str, path: str | Path | None, notes: list[str]) -> list[QuestionRow]:
    """The questions of a SQuAD training set (or of whichever official JSON file `path` is)."""
    if path is None:
        return _from_hub(SQUAD[name], notes)
    path = Path(path)
    file = path / SQUAD[name].file if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    return rows_of(read_records(file), OFFICIAL, notes)


def _from_hub(squad: SquadSet, notes: list[str]) -> list[QuestionRow]:
    try:
        import datasets
    except ImportError:
        purpose = f"{squad.title} from the hub (without it: --data-dir with {squad.file})"
        raise missing_extra("datasets", "hub", purpose) from None
    try:
        found = datasets.load_dataset(squad.hub, split="train")
    except Exception as error:  # the hub's failures have no common type
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{squad.title} cannot be had from the hub ({reason}); with --data-dir it is read from {squad.file}"
        ) from None
    records = [Record(dict(row), f"hub {squad.hub}", f"row {i}") for i, row in enumerate(found, 1)]
    return rows_of(records, OFFICIAL, notes)


def _dataset(name: str) -> Dataset[QuestionRow]:
    """As in the paper: the training set split by question, 80% to train on and 20% to test on, both shared out by
    topic among 4 clients."""

    def read(data: DataSettings, seed: int, notes: list[str]) -> Pool[QuestionRow]:
        rows = read_squad(name, data.data_dir, notes)
        from pf2lora.core.streams import numpy_generator  # numpy: help must not cost it
        from pf2lora.data.split import split_rows

        return Pool(*split_rows(rows, [""] * len(rows), data.test_ratio, numpy_generator(seed, "split")))

    return Dataset(SQUAD[name].title, read, num_clients=4, heterogeneity=0.5)


DATASETS = {name: _dataset(name) for name in SQUAD}
