"""What a task says about itself before anything is loaded: its settings, how it reads rows, which data sets it knows.

A task is a folder: `settings.py` with a subclass of `TaskSettings`, and a `Task` that it builds. Nothing here loads
torch, so that the command line can show every task's flags at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pf2lora.core.rates import RATE
from pf2lora.data.client import Client, Pool
from pf2lora.data.files import Record, read_records
from pf2lora.data.settings import DataSettings
from pf2lora.errors import UserError
from pf2lora.settings import column_settings

if TYPE_CHECKING:
    from pf2lora.tasks.base import Task

Row = TypeVar("Row")


@dataclass(frozen=True)
class Metric:
    """How a score is shown."""

    label: str
    higher_is_better: bool = True
    percent: bool = True


@dataclass(frozen=True)
class Dataset(Generic[Row]):
    """A data set by name. `read(data, seed, notes)` gives its rows, which go to clients as in the paper unless the
    user says otherwise; `metric` is the one that it is known by."""

    title: str
    read: Callable[[DataSettings, int, list[str]], Pool[Row]]
    partition: str = "heterogeneity"
    num_clients: int = 8
    heterogeneity: float = 0.9
    metric: str | None = None


@dataclass(frozen=True)
class TaskSettings(ABC, Generic[Row]):
    """A task's settings: its own fields (`setting(default, help)`) become flags and the TOML table `[task]`."""

    name: ClassVar[str]
    datasets: ClassVar[Mapping[str, Dataset[Any]]] = {}
    labelled: ClassVar[bool] = (
        False  # clients must agree on labels, which nobody who sees only some of them knows
    )
    rate: ClassVar[float] = RATE  # what `lr = "auto"` is for a model that is not wide

    def read_records(self, path: str | Path) -> list[Record]:
        """All records of one file, in whatever formats the task's data comes in."""
        return read_records(path)

    @abstractmethod
    def rows(
        self,
        records: Sequence[Record],
        like: Sequence[Record] | None = None,
        notes: list[str] | None = None,
    ) -> list[Row]:
        """Records as rows. Columns that the user did not name are guessed, from the records `like` where given (those
        of the first client: all clients have the same columns). What the user should know is added to `notes`."""

    def columns(self, records: Sequence[Record]) -> dict[str, str]:
        """The columns that `rows` takes, by the settings that name them: those named, and by their names those not."""
        return {name: given for name in column_settings(type(self)) if (given := getattr(self, name))}

    def likely_columns(self, records: Sequence[Record], besides: Sequence[str] = ()) -> dict[str, str]:
        """The same where names may tell nothing: by what stands in the columns, for somebody to look at. Those
        `besides` are taken for something else."""
        return self.columns(records)

    def questions(
        self, records: Sequence[Record], labels: Sequence[str], traits: Sequence[str] = ()
    ) -> list[Row]:
        """Records without what is to be found (a label, an answer, a text) as rows to be answered, for a run that
        remembers `labels` and `traits`. What stands there all the same is not looked at."""
        return self.rows(records)

    def typed(self, line: str, traits: Sequence[str] = ()) -> dict[str, Any]:
        """A line that somebody typed, as the record that `questions` takes."""
        raise UserError(f"{self.name} takes data files alone: give --file")

    @abstractmethod
    def build(self, model: str, labels: Sequence[str], metric: str | None = None) -> Task[Row, Any]:
        """The task itself, for the base model `model` (a hub name or a folder); `metric` is the headline."""

    def known_by(self, dataset: str | None) -> str | None:
        """The metric that a data set is known by, if it is one of the task's."""
        known = self.datasets.get(dataset or "")
        return known.metric if known else None

    def metric_names(self, labels: Sequence[str], metric: str | None = None) -> tuple[str, ...] | None:
        """The names of the scores that the task which `build` makes of these has, for who has no base model to build it
        with (a federation's server); None where only the task itself knows them."""
        return None

    def labels(self, clients: Sequence[Client[Row]]) -> list[str]:
        """What all clients must agree on and a saved run remembers: the names of the outputs."""
        return []

    def agreed(self, labels: Sequence[str]) -> list[str]:
        """What those agree on who see their own rows alone (the sites of a federation), from the `labels` that somebody
        named; a UserError where they must be named, or cannot be these."""
        if self.labelled and not labels:
            raise UserError(
                "--labels is missing: no one sees all the data, so the labels are named (--labels neg,pos)"
            )
        if labels and not self.labelled:
            raise UserError(f"{self.name} has no labels: leave --labels out")
        return list(labels)

    def traits(self, clients: Sequence[Client[Row]]) -> list[str]:
        """What else a saved run must remember to take rows as in training ("pairs", say)."""
        return []

    def check(
        self,
        clients: Sequence[Client[Row]],
        labels: Sequence[str],
        test_records: Mapping[str, Sequence[Record]] | None = None,
    ) -> None:
        """Raise a UserError where rows do not fit the labels; `test_records` name the lines of test files."""

    def to_record(self, row: Row) -> dict[str, Any]:
        """A row as a line of a data file, from which `rows` makes the same row again."""
        return {k: v for k, v in asdict(row).items() if v is not None}  # type: ignore[call-overload]

    def record_columns(self, rows: Sequence[Row]) -> dict[str, str]:
        """The columns of such records, by the settings that name them, where they are not guessed right."""
        return {}

    def asked(self, row: Row) -> tuple[str, ...]:
        """What a row asks, without its answer: rows that ask the same are one row twice."""
        return (repr(row),)

    def split_key(self, row: Row) -> str:
        """What a held-out part keeps the shares of."""
        return ""

    @abstractmethod
    def partition_key(self, row: Row) -> str:
        """What clients differ by when rows are shared out: a label, a topic, a category."""
