"""The first `run.toml`: a task and its columns guessed from a user's files, the settings written with their help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pf2lora.data.client import Client
from pf2lora.data.files import Record, columns_of, expand_paths
from pf2lora.data.guessing import client_column
from pf2lora.data.settings import DataSettings
from pf2lora.errors import UserError
from pf2lora.run.config import TABLES, in_tables, task_kind
from pf2lora.settings import settings_of, to_table
from pf2lora.tasks import TASKS
from pf2lora.tasks.generation.settings import CHAT
from pf2lora.tasks.settings import TaskSettings

MODELS = {"generation": "gpt2"}
CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # small, and its tokenizer has a chat template
MODEL = "roberta-base"  # of the other tasks
HEAD = """\
# Written by `pf2lora init`; flags of a command win over it. `pf2lora train run.toml --print-config` shows every
# setting there is. What is behind a # is a default. Paths are seen from the folder that a command is given in.
"""


def first_records(task: TaskSettings[Any], clients: Sequence[str]) -> tuple[list[Record], int]:
    """The records of the first file, and how many files there are."""
    files = expand_paths(clients)
    return task.read_records(files[0]), len(files)


def guessed_task(clients: Sequence[str]) -> str:
    """The task whose columns the first file has, by their names; else classification, for which any text with a few
    labels will do."""
    for name in TASKS.own:
        task = TASKS[name]()
        try:
            task.columns(first_records(task, clients)[0])
        except UserError:
            continue
        return name
    return next(iter(TASKS.own))


def guessed_client_column(records: Sequence[Record], files: int) -> str | None:
    """The column that names clients, where one file holds all of them."""
    return client_column(records) if files == 1 else None


def guessed_columns(
    task: TaskSettings[Any], records: Sequence[Record], besides: Sequence[str]
) -> dict[str, str]:
    """The task's columns; those `besides` are taken. Rows must be readable by them."""
    found = task.likely_columns(records, besides)
    replace(task, **found).rows(records)
    return found


def likely_model(task: TaskSettings[Any], records: Sequence[Record]) -> str:
    """A small model of the task's kind, to begin with; for conversations one that has learned to talk."""
    if CHAT in task.labels([Client("", task.rows(records), [])]):
        return CHAT_MODEL
    return MODELS.get(task.name, MODEL)


def in_every_file(task: TaskSettings[Any], columns: Mapping[str, str], clients: Sequence[str]) -> bool:
    """Whether all files have these columns: where they differ, they are found in each file by their names."""
    return all(
        set(columns.values()) <= {*columns_of(task.read_records(file))} for file in expand_paths(clients)
    )


def commented_toml(settings: Mapping[str, Any]) -> str:
    """These settings (by name alone, as flags are) in their tables, each with its help, and beside them as comments
    the everyday ones that were left as they are."""
    tables = in_tables(settings, "init")
    kind = task_kind(settings.get("task", next(iter(TASKS.own))), "init")
    parts = [HEAD]
    for table, known in {"task": kind, "data": DataSettings, **TABLES}.items():
        given = dict(tables.get(table, {}))
        lines = [f'name = "{given.pop("name")}"  # {", ".join(TASKS)}'] if table == "task" and given else []
        defaults = to_table(known())
        # A default that a machine decides is left to the machine that the run is on.
        defaults |= {
            n: f.default for n, f in settings_of(known).items() if n in defaults and f.default == "auto"
        }
        for name, field in settings_of(known).items():
            if name in given:
                lines.append(_line(name, given[name], field.metadata["help"]))
            elif name in defaults and (field.metadata["everyday"] or name in BESIDE):
                lines.append("# " + _line(name, defaults[name], field.metadata["help"]))
        if lines:
            parts.append("\n".join([f"[{table}]", *lines]) + "\n")
    return "\n".join(parts)


LONG = 80  # characters of a list
BESIDE = ("max_length", "test_ratio", "validation_ratio")  # of the data and the task: what is looked at next


def _line(name: str, value: Any, about: str) -> str:
    """`name = value  # about`; a list that is too long for that has a line for each of its values."""
    import tomli_w

    several = isinstance(value, list | tuple)
    written = [
        tomli_w.dumps({"": item}).partition("= ")[2].strip() for item in (value if several else [value])
    ]
    if not several:
        return f"{name} = {written[0]}  # {about}"
    if len(written) < 2 or sum(map(len, written)) < LONG:
        return f"{name} = [{', '.join(written)}]  # {about}"
    return "\n".join([f"{name} = [  # {about}", *(f"  {item}," for item in written), "]"])
