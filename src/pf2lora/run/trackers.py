"""Experiment trackers behind one small interface: TensorBoard, MLflow, Weights & Biases.

A tracker gets means over clients, per round; nobody's data, adapter or per-example value goes there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pf2lora.errors import missing_extra, unknown
from pf2lora.run.result import ROUND_POINTS, Numbers, RoundRecord


class Tracker(Protocol):
    """Where numbers of a run are shown."""

    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, config: dict[str, Any], title: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class MLflow:
    """A run of the MLflow server that its own environment variables name."""

    def __init__(self, folder: Path, config: dict[str, Any], title: str) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.start_run(run_name=title or folder.name)
        mlflow.log_params({k: v for k, v in config.items() if not isinstance(v, dict)})

    def log(self, values: dict[str, float], step: int) -> None:
        self.mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        self.mlflow.end_run()


class WeightsAndBiases:
    """A run of the project "pf2lora"; WANDB_MODE=offline keeps it here."""

    def __init__(self, folder: Path, config: dict[str, Any], title: str) -> None:
        import wandb

        self.run = wandb.init(project="pf2lora", name=title or folder.name, dir=str(folder), config=config)

    def log(self, values: dict[str, float], step: int) -> None:
        # Methods follow each other and each counts its rounds from 1, so the round is a value, not wandb's step.
        self.run.log(values | {"round": step})

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[Path, dict[str, Any], str], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


MODULES = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


def check(names: Sequence[str]) -> None:
    """Unknown trackers and packages that are not installed, said before anything is begun."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        try:
            importlib.import_module(MODULES[name])
        except ImportError:
            raise missing_extra(name, name, f"the tracker {name!r}") from None


def start(names: Sequence[str], folder: Path, config: dict[str, Any], title: str) -> list[Tracker]:
    """The trackers that a config names."""
    check(names)
    return [TRACKERS[name](folder, config, title) for name in names]


def round_values(method: str, seed: int, record: RoundRecord) -> dict[str, float]:
    """A round's means over clients, named `method/seed-0/served/accuracy`."""
    lists: dict[str, Numbers | None] = {
        "train_loss": record.train_loss,
        "validation_loss": record.validation_loss,
        "client_share": record.client_share,
        "second_order_share": record.second_order_share,
    }
    for point in ROUND_POINTS:
        lists |= {f"{point}/{m}": values for m, values in (getattr(record, point) or {}).items()}
    out = {}
    for name, values in lists.items():
        known = [v for v in values or [] if v is not None]
        if known:
            out[f"{method}/seed-{seed}/{name}"] = sum(known) / len(known)
    return out
