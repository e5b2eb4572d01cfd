"""The folder of a run: what is written while it goes on, and what can be loaded from it afterwards.

    config.toml      every setting
    metrics.jsonl    one line per round, as it happens
    result.json      docs/result.md
    report.html      the report
    common/          the common adapter, a PEFT folder
    clients/NAME/    each client's adapter (common and own in one), a PEFT folder
    state/           x and each client's own y as this package loads them again (safetensors)

A run of several methods keeps common/, clients/ and state/ of each under methods/METHOD/ (first seed).
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pf2lora.adapters.peft import save_peft
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.layout import Layout
from pf2lora.errors import UserError
from pf2lora.run import config as configs
from pf2lora.run.config import Config
from pf2lora.tasks.base import Task

ADAPTER_FILES = (
    "common/adapter_*",
    "clients/*/adapter_*",
    "clients/*/onboarding.json",
    "state/run.json",
    "state/common.safetensors",
    "state/clients/*.safetensors",
)
RUN_FILES = (
    *("config.toml", "metrics.jsonl", "result.json", "report.html", "tensorboard/events.out.tfevents.*"),
    *ADAPTER_FILES,
    *(f"methods/*/{pattern}" for pattern in ADAPTER_FILES),
)


def run_files(folder: Path) -> list[Path]:
    """The files in `folder` that a run wrote, and no others: a user's own `clients/` may well lie beside them."""
    return [path for pattern in RUN_FILES for path in sorted(folder.glob(pattern))]


def check_free(folder: Path, *, force: bool) -> None:
    """An output folder that holds another run is refused, unless it may be replaced."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"the output folder {str(folder)!r} is a file; choose another --out")
    held = run_files(folder)
    if held and not force:
        raise UserError(
            f"{str(folder)!r} holds another run ({held[0].relative_to(folder)}); choose another --out, or --force "
            f"to replace it"
        )


def claim(folder: Path, *, force: bool) -> None:
    """Make the run folder. One that holds another run is left alone, unless forced; other files never go."""
    check_free(folder, force=force)
    try:
        for path in run_files(folder):
            path.unlink()
            for parent in path.relative_to(folder).parents:  # deepest first; "." is the run folder itself
                if parent.name and not any((folder / parent).iterdir()):
                    (folder / parent).rmdir()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the output folder {str(folder)!r} cannot be made: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf8")
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n")


def append_metrics(folder: Path, method: str, seed: int, record: dict[str, Any]) -> None:
    """One line per round."""
    line = {"method": method, "seed": seed, "time": time.time()} | {
        k: v for k, v in record.items() if k != "ranks"
    }
    with (folder / "metrics.jsonl").open("a", encoding="utf8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Saved:
    """What a run saves of a method: the names, the settings that loading needs, and nobody's data."""

    method: str
    seed: int
    task: str
    labels: list[str]
    clients: list[str]
    pairs: bool = False  # rows are pairs of texts


def place(folder: Path, config: Config, method: str) -> Path:
    """Where a method's adapters are."""
    return folder if len(config.method) == 1 else folder / "methods" / method


def named(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    views = layout.unpack(flat.detach().float().cpu()[None])
    return {name: t[0].contiguous().clone() for name, t in views.items()}


def save_client(
    where: Path, model: TwoLevelModel, name: str, x: Tensor, y: Tensor, task: str, base: str
) -> None:
    """A client's PEFT folder, and its x and y as this package loads them again."""
    save_peft(where / "clients" / name, model, x, y, task, base)
    own = {f"y.{n}": t for n, t in named(model.y, y).items()} | {
        f"x.{n}": t for n, t in named(model.x, x).items()
    }
    folder = where / "state" / "clients"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(own, folder / f"{name}.safetensors")


def save_common(where: Path, model: TwoLevelModel, common: Tensor, task: str, base: str) -> None:
    """The common adapter: nothing of any client's own is in it."""
    y = torch.zeros(model.y.size)
    save_peft(where / "common", model, common, y, task, base)
    (where / "state").mkdir(parents=True, exist_ok=True)
    save_file(named(model.x, common), where / "state" / "common.safetensors")


def save_description(where: Path, saved: Saved) -> None:
    (where / "state").mkdir(parents=True, exist_ok=True)
    write_json(where / "state" / "run.json", saved.__dict__)


def read_description(where: Path) -> Saved:
    file = where / "state" / "run.json"
    try:
        return Saved(**json.loads(file.read_text(encoding="utf8")))
    except FileNotFoundError:
        raise UserError(f"{where}: the run has saved no adapters (it did not finish)") from None
    except (json.JSONDecodeError, TypeError) as error:
        raise UserError(f"{file}: damaged ({error})") from None


def flat(layout: Layout, tensors: dict[str, Tensor], file: Path) -> Tensor:
    """The flat row of saved tensors, checked against the layout."""
    for entry in layout.entries:
        if entry.name not in tensors or tuple(tensors[entry.name].shape) != entry.shape:
            raise UserError(
                f"{file}: no tensor {entry.name!r} of shape {entry.shape}; the file does not fit this run"
            )
    return layout.pack({n: t[None] for n, t in tensors.items()}) if layout.entries else torch.zeros(1, 0)


def read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error})") from None


@dataclass(frozen=True)
class LoadedRun:
    """A run folder, opened: the base model with its adapters' places, the task, and the clients' names."""

    folder: Path
    config: Config
    saved: Saved
    task: Task[Any, Any]
    model: TwoLevelModel
    device: torch.device

    @property
    def where(self) -> Path:
        return place(self.folder, self.config, self.saved.method)

    def common(self) -> tuple[Tensor, Tensor]:
        """The common x `(1, P)` and an empty y."""
        file = self.where / "state" / "common.safetensors"
        if not file.exists():
            raise UserError(f"{self.folder}: method {self.saved.method!r} has no common adapter")
        return flat(self.model.x, read_tensors(file), file).to(self.device), self.zero_y()

    def zero_y(self) -> Tensor:
        return torch.zeros(1, self.model.y.size, device=self.device)

    def client(self, name: str | None) -> tuple[Tensor, Tensor]:
        """A client's `(1, P)` and `(1, Q)`; without a name, the common adapter alone."""
        if name is None:
            return self.common()
        file = self.where / "state" / "clients" / f"{name}.safetensors"
        if name not in self.saved.clients:
            raise UserError(
                f"{self.folder} has no client {name!r}; its clients: {', '.join(self.saved.clients)}"
            )
        if self.saved.method == "centralized":  # one model for all
            return self.common()
        tensors = read_tensors(file)
        parts = {
            prefix: {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            for prefix in ("x.", "y.")
        }
        x, y = flat(self.model.x, parts["x."], file), flat(self.model.y, parts["y."], file)
        return x.to(self.device), y.to(self.device)


def read_config(folder: Path) -> Config:
    """The config of a run folder."""
    if not folder.is_dir():
        raise UserError(f"there is no run folder {str(folder)!r}")
    if not (folder / "config.toml").is_file():
        raise UserError(f"{str(folder)!r} is no run folder: it has no config.toml")
    return configs.from_toml(folder / "config.toml")


def load_run(folder: Path, method: str | None = None, device: str = "auto") -> LoadedRun:
    """Open a run folder for one of its methods."""
    from pf2lora.run.experiment import DTYPES, choose_device, rebuild_task
    from pf2lora.run.trial import adapter_spec

    config = read_config(folder)
    name = method or config.method[0]
    if name not in config.method:
        raise UserError(f"{folder} has no method {name!r}; its methods: {', '.join(config.method)}")
    saved = read_description(place(folder, config, name))
    where = choose_device(device)
    task = rebuild_task(config, saved.labels)
    base = task.load_model(config.model, DTYPES[config.precision])
    base.to(where)  # type: ignore[arg-type]
    return LoadedRun(folder, config, saved, task, TwoLevelModel(base, adapter_spec(config, name)), where)
