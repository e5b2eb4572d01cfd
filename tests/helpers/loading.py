"""Clients and rows as a run's settings describe them, for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pf2lora.data import loading
from pf2lora.data.client import Client
from pf2lora.run.config import from_settings


def load_clients(
    paths: Sequence[str | Path] = (),
    *,
    task: str = "classification",
    seed: int = 0,
    labels: Sequence[str] | None = None,
    notes: list[str] | None = None,
    **settings: Any,
) -> list[Client[Any]]:
    """The clients of files or, with `dataset`, of a data set; `settings` are the command line's, but that no row is set
    aside for validation unless they say so."""
    given: dict[str, Any] = {
        "task": task,
        "clients": [str(path) for path in paths],
        "validation_ratio": 0,
    } | settings
    given |= {key: [str(path) for path in given[key]] for key in ("test", "validation") if key in given}
    given |= {key: str(given[key]) for key in ("data_dir",) if key in given}
    config = from_settings(given, "test")
    return loading.load_clients(config.task, config.data, seed, labels=labels, notes=notes)


def read_rows(path: Path, *, task: str = "classification", **columns: str) -> list[Any]:
    """One file's rows, as they are."""
    config = from_settings({"task": task} | columns, "test")
    return config.task.rows(config.task.read_records(path))
