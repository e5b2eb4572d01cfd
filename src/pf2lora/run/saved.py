"""A run folder, opened again: the base model with a method's adapters, to predict, measure, add clients or export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pf2lora.adapters.base_model import weights_digest
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.layout import Layout
from pf2lora.data.client import check_apart, check_name
from pf2lora.errors import UserError, reading, shown
from pf2lora.methods import METHODS
from pf2lora.parsing import read_json, read_tensors
from pf2lora.run import config as configs
from pf2lora.run import instance_weights
from pf2lora.run.config import Config
from pf2lora.run.decode import decode
from pf2lora.run.folder import JOINED, SavedMethod, place
from pf2lora.run.set_up import adapter_spec
from pf2lora.run.workload import build_task, choose_device, load_base
from pf2lora.tasks.base import Task


@dataclass(frozen=True)
class LoadedRun:
    """A run folder, opened: the base model with its adapters' places, the task, and the clients' names."""

    folder: Path
    config: Config
    saved: SavedMethod
    task: Task[Any, Any]
    model: TwoLevelModel
    device: torch.device

    @property
    def where(self) -> Path:
        return place(self.folder, self.config, METHODS[self.saved.method].name)

    def common(self) -> tuple[Tensor, Tensor]:
        """The common adapter `(1, P)` and no personal one `(1, Q)`."""
        file = self.where / "state" / "common.safetensors"
        if not file.exists():
            raise UserError(f"{self.folder}: method {self.saved.method!r} has no common adapter")
        return flat(self.model.common_layout, read_tensors(file)[0], file).to(self.device), self.no_personal()

    def no_personal(self) -> Tensor:
        return torch.zeros(1, self.model.personal_layout.size, device=self.device)

    def client(self, name: str | None) -> tuple[Tensor, Tensor]:
        """A client's `(1, P)` and `(1, Q)`; without a name, the common adapter alone."""
        if name is None:
            return self.common()
        file = self.file_of(name)
        if name not in self.saved.clients:
            raise UserError(
                f"{self.folder} has no client {name!r}; its clients: "
                f"{', '.join(self.saved.clients) or 'none (a fetched run has the common adapter alone)'}"
            )
        if self.saved.shares_one_model and not self.joined_later(name):
            return self.common()
        tensors, _ = read_tensors(file)
        parts = {
            prefix: {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            for prefix in ("common.", "personal.")
        }
        common, personal = (
            flat(self.model.common_layout, parts["common."], file),
            flat(self.model.personal_layout, parts["personal."], file),
        )
        return common.to(self.device), personal.to(self.device)

    def file_of(self, name: str) -> Path:
        """Where a client's own x and y are; nowhere, if all clients share one model, or this one's are at its site."""
        return self.where / "state" / "clients" / f"{name}.safetensors"

    def joined_later(self, name: str) -> bool:
        """Whether a client came when the run had ended (run/onboarding.py)."""
        return (self.where / "clients" / name / JOINED).exists()

    def answers(
        self, client: str | None, rows: list[Any], own_rows: Sequence[Any] | None = None
    ) -> list[Any]:
        """A client's answers to rows, by the same path as in training. With some `own_rows` of the client's, FedDPA
        weighs its two adapters anew for each row."""
        if own_rows is not None:
            return instance_weights.answers(self, client, rows, own_rows)
        common, personal = self.client(client)
        encoded = self.task.encode([rows], training=False).to(self.device)
        return self.task.predict(self.model, common, personal, encoded, final=True)[0]


def read_config(folder: Path) -> Config:
    """The config of a run folder."""
    return configs.from_toml(configs.config_file(folder))


def read_description(where: Path) -> SavedMethod:
    """What a run saved of a method."""
    file = where / "state" / "run.json"
    with reading(file):
        if not file.exists():
            raise UserError(f"{where}: the run has saved no adapters (it did not finish)")
    found = decode(SavedMethod, read_json(file), f"{file}: damaged")
    for name in found.clients:
        check_name(name, file)  # it becomes a path
    check_apart(found.clients, file)
    return found


def flat(layout: Layout, tensors: dict[str, Tensor], file: Path) -> Tensor:
    """The flat row of saved tensors, checked against the layout: all of it and no more, finite float32 numbers."""
    for entry in layout.entries:
        found = tensors.get(entry.name)
        if found is None or tuple(found.shape) != entry.shape or found.dtype != torch.float32:
            raise UserError(
                f"{file}: no tensor {entry.name!r} of shape {entry.shape} in float32; the file does not fit this run"
            )
        if not bool(torch.isfinite(found).all()):
            raise UserError(f"{file}: the tensor {entry.name!r} holds numbers that are not finite")
    more = tensors.keys() - layout.by_name.keys()
    if more:
        raise UserError(f"{file}: {shown(min(more))} is no tensor of this run; the file does not fit it")
    return layout.pack({n: t[None] for n, t in tensors.items()}) if layout.entries else torch.zeros(1, 0)


def load_run(
    folder: str | Path,
    method: str | None = None,
    device: str = "auto",
    *,
    model: str | Path | None = None,
    on_note: Callable[[str], None] = lambda line: None,
) -> LoadedRun:
    """Open a run folder for one of its methods (default: the first). `model` says where its base model is now, if
    that is another place; other weights than those it was trained on are told to `on_note` then, and refused
    otherwise."""
    folder = Path(folder)
    config = read_config(folder)
    trained_on = config.model.name
    if model is not None:
        config = replace(config, model=replace(config.model, name=str(model)))
    elif Path(trained_on).is_absolute() and not Path(trained_on).is_dir():
        raise UserError(
            f"{folder}: its base model was in {trained_on!r}, where none is now; --model names its place"
        )
    by_name = {METHODS[asked].name: asked for asked in config.training.method}
    asked = by_name.get(method or next(iter(by_name)), method or "")
    if asked not in config.training.method:
        raise UserError(f"{folder} has no method {method!r}; its methods: {', '.join(by_name)}")
    saved = read_description(place(folder, config, METHODS[asked].name))
    if (saved.method, saved.task) != (asked, config.task.name):
        raise UserError(
            f"{folder}: its config is of {asked!r} on {config.task.name}, its adapters are of {shown(saved.method)} on "
            f"{shown(saved.task)}"
        )
    if config.task.labelled and len(set(saved.labels)) < max(2, len(saved.labels)):
        raise UserError(f"{folder}: state/run.json is damaged: it must name two or more labels, each once")
    where = choose_device(device)
    task = build_task(config, saved.labels)
    base = load_base(config, task, where)
    if saved.weights and weights_digest(base) != saved.weights:
        then = f", revision {saved.revision}" if saved.revision else ""
        line = f"{config.model.name!r} has other weights than the run was trained on ({trained_on!r}{then})"
        if model is None:
            raise UserError(f"{folder}: {line}; --model names a folder with the right ones")
        on_note(line)
    return LoadedRun(folder, config, saved, task, TwoLevelModel(base, adapter_spec(config, asked)), where)
