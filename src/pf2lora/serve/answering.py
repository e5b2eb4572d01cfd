"""Labels and answers by models of the other tasks: the rows that wait, of whatever clients, are answered together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pf2lora.data.files import Record
from pf2lora.errors import UserError, one_line
from pf2lora.run.saved import LoadedRun
from pf2lora.serve.errors import bad_request
from pf2lora.serve.worker import Worker, check_device, explained


@dataclass(eq=False)
class RowsJob:
    """Rows to be answered by one model."""

    model: str
    rows: list[Any]
    tell: Callable[[Any], None] = field(kw_only=True)
    owner: str = ""
    cancelled: bool = False


class Answerer(Worker[RowsJob]):
    """Answers the rows of all jobs that wait, at most `size` jobs, in the stacked passes of an evaluation."""

    def __init__(
        self,
        loaded: LoadedRun,
        adapters: Mapping[str, tuple[Tensor, Tensor]],
        size: int,
        most_waiting: int,
        most_of_one: int | None = None,
    ) -> None:
        super().__init__(most_waiting, most_of_one)
        self.loaded, self.adapters, self.size = loaded, adapters, size

    def turn(self) -> None:
        jobs = self.take(self.size)
        try:
            self._answer(jobs)
        except UserError:  # somebody's rows cannot be used: the others' can
            if len(jobs) == 1:
                raise
            for job in jobs:
                try:
                    self._answer([job])
                except UserError as error:
                    job.tell(explained(error))
        self.done(jobs)

    def reset(self) -> None:
        check_device(self.loaded.device)

    def _answer(self, jobs: list[RowsJob]) -> None:
        """Each model's rows, of all its jobs, beside the other models'."""
        if not jobs:
            return
        task, device = self.loaded.task, self.loaded.device
        models = list(dict.fromkeys(job.model for job in jobs))
        rows = [[row for job in jobs if job.model == model for row in job.rows] for model in models]
        common, personal = (torch.cat(parts).to(device) for parts in zip(*(self.adapters[m] for m in models)))
        encoded = task.encode(rows, training=False).to(device)
        found = task.predict(self.loaded.model, common, personal, encoded, final=True)
        answers = {model: iter(map(task.answer, of, asked)) for model, of, asked in zip(models, found, rows)}
        for job in jobs:
            job.tell([next(answers[job.model]) for _ in job.rows])


def rows_of(loaded: LoadedRun, inputs: list[str | dict[str, Any]]) -> list[Any]:
    """A request's inputs as rows: a text as one types it, or an object with the columns of the run's data."""
    settings, saved = loaded.config.task, loaded.saved
    try:
        records = [
            Record(
                settings.typed(given, saved.traits) if isinstance(given, str) else given,
                "inputs",
                f"row {i}",
            )
            for i, given in enumerate(inputs, 1)
        ]
        if any(not given.strip() for given in inputs if isinstance(given, str)):
            raise UserError("an empty text cannot be answered")
        return settings.questions(records, saved.labels, saved.traits)
    except UserError as error:
        raise bad_request(one_line(error), "inputs") from None
