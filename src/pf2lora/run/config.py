"""What a run is: every setting with its default, from flags, a TOML file or Python, checked in one place.

A config has a table for each part of a run: `[model] [adapter] [training] [privacy] [task] [data] [output]`, and
`[methods.NAME]` for what differs for one method. On the command line and in Python the same settings have no tables:
`batch_size` of `[training]` is `--batch-size`, `name` of `[model]` is `--model`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pf2lora.adapters.spec import AdapterSpec
from pf2lora.core.rates import AUTO, RateSchedule
from pf2lora.data.settings import DataSettings
from pf2lora.errors import UserError, check_path, reading, shown, unknown
from pf2lora.methods import METHODS, SET_NAMES, resolved
from pf2lora.parsing import read_toml
from pf2lora.run.model_settings import ModelSettings
from pf2lora.run.privacy import PrivacySettings
from pf2lora.settings import (
    from_table,
    require_not_negative,
    require_positive,
    setting,
    settings_of,
    to_table,
)
from pf2lora.tasks import TASKS
from pf2lora.tasks.classification.settings import ClassificationSettings
from pf2lora.tasks.settings import TaskSettings

Value = str | int | float | bool | list[str]
KEPT = ("best", "last")
DEFAULT_TASK = ClassificationSettings


@dataclass(frozen=True)
class TrainingSettings:
    """Which methods, how long, and the parameters that they share; one of a method's own is in `[methods.NAME]`."""

    method: tuple[str, ...] = setting(
        ("pf2lora",),
        f"one or more methods ('pf2lora methods' lists them), sets of them ({', '.join(SET_NAMES)}), or "
        f"package.module:Class",
        everyday=True,
    )
    rounds: int = setting(20, "communication rounds", everyday=True)
    steps: int = setting(10, "local steps per round", everyday=True)
    batch_size: int = setting(16, "examples per client and batch", everyday=True)
    micro_batch: int | None = setting(
        None,
        "rows of a batch that are computed at once, which bounds memory (default: all, or what the device holds)",
    )
    lr: float | Literal["auto"] = setting(
        AUTO,
        "learning rate of the common adapter (AdamW), or auto: 3e-3 (generation: 9e-3), less above a width of 768",
        everyday=True,
    )
    client_lr: float | Literal["auto"] = setting(
        "auto",
        "learning rate of the client's own adapter (SGD), or auto: found by each client",
        everyday=True,
    )
    schedule: str = setting("constant", "how lr changes over the run: constant, linear or cosine (towards 0)")
    warmup: float = setting(0.0, "share of the run's local steps in which lr rises to its value")
    weight_decay: float = setting(0.01, "AdamW's weight decay")
    hypergradient_mode: str = setting("difference", "second-order term: exact, difference, none or auto")
    batches: int = setting(2, "independent batches per PF2LoRA step: 2 or 4")
    zeta_size: int | None = setting(None, "examples used for the second-order term (default: the batch)")
    participation: float = setting(1.0, "fraction of clients per round")
    weighting: str = setting("uniform", "average clients uniform or by size of their data")
    clients_per_pass: int | Literal["auto"] | None = setting(
        "auto", "clients trained in one pass, which bounds memory, or auto: as many as the device holds"
    )
    group_by_length: bool = setting(True, "rows of like length share a batch, which pads less")
    evaluate_every: int | None = setting(
        None,
        "rounds between evaluations (default: about ten in a run, or as few as take a tenth of its time)",
    )
    evaluate_before: bool = setting(
        True, "measure what clients have before averaging, too; off: only what they are served"
    )
    keep: str = setting("best", "the round that is kept: best (by each client's validation loss) or last")
    patience: int | None = setting(
        None, "stop after so many evaluations without a better mean validation loss (default: never)"
    )
    personal_steps: int | None = setting(
        None, "steps alone that a client may try before it deploys (default: three rounds' worth; 0: none)"
    )
    max_bad_clients: int | None = setting(
        None, "bad clients that a round may leave out before the method fails (default: half of its clients)"
    )
    strict: bool = setting(False, "stop at the first bad client or failed method")
    seed: int = setting(0, "seed of everything random", everyday=True)
    seeds: int = setting(1, "number of seeds, from --seed on", everyday=True)

    def __post_init__(self) -> None:
        twice = [name for name in self.method if self.method.count(name) > 1]
        if twice:
            raise UserError(f"the method {twice[0]!r} is named twice")
        object.__setattr__(self, "method", resolved(self.method))
        for name in self.method:
            METHODS.check(name)
        if not self.method:
            raise UserError(f"no method is named; choose from {', '.join(METHODS)}")
        require_positive(
            self, "rounds", "steps", "batch_size", "micro_batch", "seeds", "evaluate_every", "patience"
        )
        require_not_negative(self, "weight_decay", "seed")
        if self.lr != AUTO:
            require_positive(self, "lr")
        if self.client_lr != AUTO:
            require_not_negative(self, "client_lr")
        for name in ("personal_steps", "max_bad_clients"):
            if getattr(self, name) is not None:
                require_not_negative(self, name)
        if self.clients_per_pass != "auto":
            require_positive(self, "clients_per_pass")
        if self.keep not in KEPT:
            raise unknown("round to keep", self.keep, KEPT)
        RateSchedule(self.schedule, self.warmup)  # says what is wrong with them

    @property
    def most_per_pass(self) -> int | None:
        """How many clients may share a pass; None: all, unless the device's memory proves too small."""
        return None if self.clients_per_pass == "auto" else self.clients_per_pass


@dataclass(frozen=True)
class OutputSettings:
    """What is written, and where else it is logged."""

    title: str = setting("", "title of the report")
    out: str = setting("", "the run folder to write (default: runs/ and the command's name)")
    trackers: tuple[str, ...] = setting((), "also log to tensorboard, mlflow or wandb")
    checkpoint_every: int | None = setting(
        None,
        "rounds between checkpoints (default: as often as costs 2% of the time; 0: only when interrupted)",
    )
    keep_checkpoints: int = setting(2, "checkpoints that are kept, the last ones, while a run goes on")
    examples: int | None = setting(
        None,
        "test rows of each client whose texts are shown in result and report, in classification those that were wrong "
        "(default: 3 questions or prompts, no text that is classified)",
    )

    def __post_init__(self) -> None:
        require_positive(self, "keep_checkpoints")
        if self.checkpoint_every is not None:
            require_not_negative(self, "checkpoint_every")
        if self.examples is not None:
            require_not_negative(self, "examples")


@dataclass(frozen=True)
class Config:
    """The settings of a run. The defaults are what works for a user; the paper's values live in its presets."""

    model: ModelSettings = field(default_factory=ModelSettings)
    adapter: AdapterSpec = field(default_factory=AdapterSpec)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    task: TaskSettings[Any] = field(default_factory=DEFAULT_TASK)
    data: DataSettings = field(default_factory=DataSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    methods: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A method from elsewhere says its own name once it is imported; `prepare` looks then.
        if not any(":" in name for name in self.training.method):
            for name in self.methods:
                if name not in METHODS:
                    raise unknown("method in [methods]", name, METHODS)


TABLES: dict[str, type] = {
    "model": ModelSettings,
    "adapter": AdapterSpec,
    "training": TrainingSettings,
    "privacy": PrivacySettings,
    "data": DataSettings,
    "output": OutputSettings,
}
"""The tables that every run has; `[task]` is the task's own, and has its `name` beside its settings."""

NAMED = {"model": ("model", "name"), "task": ("task", "name")}
"""What a table's `name` is called where there are no tables."""


# --- from files and flags ----------------------------------------------------------------------------------


def config_file(folder: Path) -> Path:
    """The config of a run folder; an error says what the folder is instead."""
    with reading(check_path(folder), "run folder"):
        if not folder.is_dir():
            raise UserError(f"there is no run folder {str(folder)!r}")
        if not (folder / "config.toml").is_file():
            raise UserError(f"{str(folder)!r} is no run folder: it has no config.toml")
    return folder / "config.toml"


def from_dict(values: Mapping[str, Any], where: str = "config") -> Config:
    """A checked config from tables; an unknown key is an error with the nearest valid name."""
    known = [*TABLES, "task", "methods"]
    for key, table in values.items():
        if key not in known:
            hint = f": {key} belongs in [{place_of(key)}]" if place_of(key) else ""
            raise UserError(f"{where}: {unknown('table', key, known)}{hint}")
        if not isinstance(table, Mapping):
            raise UserError(f"{where}: [{key}] must be a table, not {shown(table)}")
    parts = {key: from_table(kind, values.get(key, {}), f"{where} [{key}]") for key, kind in TABLES.items()}
    task = dict(values.get("task", {}))
    kind = task_kind(task.pop("name", DEFAULT_TASK.name), f"{where} [task]")
    for name, table in values.get("methods", {}).items():
        if not isinstance(table, Mapping):
            raise UserError(
                f"{where}: [methods.{name}] must be a table of the method's settings, not {shown(table)}"
            )
        for key, value in table.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{where} [methods.{name}]: {key} must be a finite number, not {value}")
    methods = {name: dict(table) for name, table in values.get("methods", {}).items()}
    return Config(**parts, task=from_table(kind, task, f"{where} [task]"), methods=methods)


def task_kind(name: Any, where: str) -> type[TaskSettings[Any]]:
    """The settings of the task called `name`."""
    if not isinstance(name, str):
        raise UserError(f"{where}: name must be of type str, not {shown(name)}")
    return TASKS[name]


def place_of(name: str) -> str | None:
    """The table that a setting is in, where one has it."""
    found = [table for table, kind in TABLES.items() if name in settings_of(kind)]
    return found[0] if found else "task" if any(name in settings_of(TASKS[t]) for t in TASKS.own) else None


def in_tables(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings by name alone (flags, keyword arguments) in their tables; `methods` is a table already."""
    tables: dict[str, Any] = {}
    task = task_kind(settings.get("task", DEFAULT_TASK.name), where)
    for name, value in settings.items():
        if name == "methods":
            tables[name] = value
        elif name in NAMED:
            table, key = NAMED[name]
            tables.setdefault(table, {})[key] = value
        elif name in settings_of(task):
            tables.setdefault("task", {})[name] = value
        else:
            tables.setdefault(flat_place(name, task, where), {})[name] = value
    return tables


def flat_place(name: str, task: type[TaskSettings[Any]], where: str) -> str:
    """The table of a setting that is not the task's; another task's setting is an error that says so."""
    place = place_of(name)
    if place == "task":
        owners = " and ".join(t for t in TASKS.own if name in settings_of(TASKS[t]))
        raise UserError(f"{where}: {name} is a setting of {owners}, and the task is {task.name}")
    if place is None or name == "name":
        raise UserError(f"{where}: {unknown('setting', name, setting_names(task))}")
    return place


def setting_names(task: type[TaskSettings[Any]] = DEFAULT_TASK) -> list[str]:
    """Every setting by name alone."""
    own = [name for kind in (*TABLES.values(), task) for name in settings_of(kind) if name != "name"]
    return [*NAMED, *own]


def from_settings(settings: Mapping[str, Any], where: str = "config") -> Config:
    """A checked config from settings by name alone: `rounds=20, text="review"`."""
    return from_dict(in_tables(settings, where), where)


def from_toml(path: Path, over: Mapping[str, Any] | None = None) -> Config:
    """A config file; the tables `over` take precedence over it."""
    return from_dict(merged(read_toml(path), over or {}), str(path))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, table by table."""
    out = dict(base)
    for key, value in over.items():
        inside = out.get(key)
        out[key] = (
            merged(inside, value) if isinstance(value, Mapping) and isinstance(inside, Mapping) else value
        )
    return out


def with_found_model(config: Config) -> Config:
    """The model's folder by its whole path: a run is used from other folders, too."""
    folder = Path(config.model.name)
    if not config.model.name or not folder.is_dir():
        return config
    return replace(config, model=replace(config.model, name=str(folder.resolve())))


# --- and back ----------------------------------------------------------------------------------------------


def to_dict(config: Config) -> dict[str, Any]:
    """The whole config in its tables; settings that are None are left out, as TOML has no null."""
    tables = {key: to_table(getattr(config, key)) for key in TABLES}
    task = {"name": TASKS.name_of(type(config.task))} | to_table(config.task)
    ordered = {key: tables[key] for key in ("model", "adapter", "training", "privacy")}
    methods = {name: dict(table) for name, table in config.methods.items()}
    return ordered | {"task": task} | {key: tables[key] for key in ("data", "output")} | {"methods": methods}


def to_toml(config: Config) -> str:
    """The whole config as TOML."""
    import tomli_w

    return tomli_w.dumps(to_dict(config))


def difference(then: Any, now: Any, place: str = "") -> str:
    """The first setting in which two configs differ, with both values; nothing where they agree."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = [key for key in {**then, **now} if (place, key) not in {("", "output")}]
        inside = (difference(then.get(k), now.get(k), f"{place}.{k}" if place else k) for k in keys)
        return next(filter(None, inside), "")
    return "" if then == now else f"{place} was {then!r} and is {now!r}"


def to_commented_toml(config: Config) -> str:
    """The whole config as TOML for people: settings that are left open stand in it too, as comments with their help."""
    import tomli_w

    parts = []
    for table, values in to_dict(config).items():
        known = settings_of(TABLES.get(table, type(config.task))) if table != "methods" else {}
        left_open = {name: field.metadata["help"] for name, field in known.items() if name not in values}
        lines = [f"# {name} =  # {text}\n" for name, text in left_open.items()]
        parts.append(tomli_w.dumps({table: values}) + "".join(lines))
    return "\n".join(parts)
