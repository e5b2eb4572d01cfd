"""What a run is: every setting with its default, from flags, a TOML file or Python, checked in one place.

Top-level keys are the command line's flags (`batch_size` is `--batch-size`), `[data]` holds the data's, and
`[methods.NAME]` what differs for one method: `[methods.hetlora]` with `penalty = 1e-3`, say.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pf2lora.data.spec import DataSpec
from pf2lora.errors import UserError, unknown

Value = str | int | float | bool | list[str]

TASKS = ("classification", "question-answering", "generation")
METHOD_NAMES = ("pf2lora", "pf2lora-joint", "homlora", "per-fedavg", "hetlora", "centralized", "local")
PRECISIONS = ("float32", "bfloat16")


def setting(default: Any, help: str) -> Any:
    """A setting with the one line that `--help` and the docs show."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Config:
    """The settings of a run. The defaults are what works for a user; the paper's values live in its presets."""

    model: str = setting("", "base model: a Hugging Face hub name or a folder")
    task: str = setting("classification", "classification, question-answering or generation")
    method: tuple[str, ...] = setting(("pf2lora",), f"one or more of {', '.join(METHOD_NAMES)}")
    rounds: int = setting(20, "communication rounds")
    steps: int = setting(10, "local steps per round")
    batch_size: int = setting(16, "examples per client and batch")
    max_length: int | None = setting(
        None, "longest input in tokens (default: 128; question answering 384, generation 512)"
    )
    rank: int = setting(8, "rank r of the common adapter")
    client_rank: int = setting(2, "rank of the client's own adapter, below --rank")
    lr: float = setting(1e-3, "learning rate of the common adapter (AdamW)")
    client_lr: float = setting(0.03, "learning rate of the client's own adapter (SGD)")
    weight_decay: float = setting(0.01, "AdamW's weight decay")
    hypergradient_mode: str = setting("difference", "second-order term: exact, difference, none or auto")
    batches: int = setting(2, "independent batches per PF2LoRA step: 2 or 4")
    zeta_size: int | None = setting(None, "examples used for the second-order term (default: the batch)")
    scaling: float = setting(1.0, "s, the common adapter's scaling (lora_alpha / r)")
    client_scaling: float = setting(1.0, "the client adapter's scaling")
    dropout: float = setting(0.0, "dropout on the adapters' input")
    targets: tuple[str, ...] = setting(
        (), "layers to adapt: names, endings or patterns (default: query and value)"
    )
    head: str = setting("shared", "the task's head: shared, personal or frozen")
    participation: float = setting(1.0, "fraction of clients per round")
    weighting: str = setting("uniform", "average clients uniform or by size of their data")
    clients_per_pass: int | None = setting(None, "clients trained in one pass, bounds memory (default: all)")
    group_by_length: bool = setting(True, "rows of like length share a batch, which pads less")
    compile: bool = setting(
        False, "compile the model: faster steps after about a minute, for long runs on CUDA"
    )
    graphs: bool = setting(True, "on CUDA, record a local step once and replay it")
    evaluate_every: int | None = setting(None, "rounds between evaluations (default: about ten in a run)")
    seed: int = setting(0, "seed of everything random")
    seeds: int = setting(1, "number of seeds, from --seed on")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    precision: str = setting("float32", "precision of the base model: float32 or bfloat16")
    title: str = setting("", "title of the report")
    out: str = setting("", "the run folder to write (default: runs/ and the command's name)")
    trackers: tuple[str, ...] = setting((), "also log to tensorboard, mlflow or wandb")
    # question answering
    stride: int = setting(128, "tokens that neighbouring windows of a long context share")
    max_answer_tokens: int = setting(30, "longest answer in tokens")
    no_answer_threshold: float = setting(0.5, "no answer is given if its probability is above this")
    # generation
    beams: int = setting(10, "beam width; 1 is greedy")
    length_penalty: float = setting(0.8, "above 0 favours long texts, below 0 short ones")
    no_repeat_ngram: int = setting(4, "so many tokens of a text are never repeated (0: allowed)")
    max_new_tokens: int = setting(64, "longest generated text in tokens")
    separator: str | None = setting(
        None, "text between prompt and target (default: the beginning-of-text token)"
    )
    data: DataSpec = field(default_factory=DataSpec)
    methods: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.method:
            if name not in METHOD_NAMES:
                raise unknown("method", name, METHOD_NAMES)
        for name in self.methods:
            if name not in METHOD_NAMES:
                raise unknown("method in [methods]", name, METHOD_NAMES)
        if not self.method:
            raise UserError(f"no method is named; choose from {', '.join(METHOD_NAMES)}")
        twice = [name for name in self.method if self.method.count(name) > 1]
        if twice:
            raise UserError(f"the method {twice[0]!r} is named twice")
        if self.task not in TASKS:
            raise unknown("task", self.task, TASKS)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        positive = ("rounds", "steps", "batch_size", "max_length", "rank", "seeds", "evaluate_every", "lr")
        for name in positive:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name} is {value}; it must be above 0")
        for name in ("client_lr", "weight_decay", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 0 or more")


def read_toml(path: Path) -> dict[str, Any]:
    """The contents of a config file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise UserError(f"there is no config file {str(path)!r}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def from_dict(values: Mapping[str, Any], where: str = "config") -> Config:
    """A checked config from nested values; an unknown key is an error with the nearest valid name."""
    top = {k: v for k, v in values.items() if k not in ("data", "methods")}
    tables = {key: values.get(key, {}) for key in ("data", "methods")}
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            raise UserError(f"{where}: [{key}] must be a table")
    for name, table in tables["methods"].items():
        if not isinstance(table, Mapping):
            raise UserError(
                f"{where}: [methods.{name}] must be a table of the method's settings, not {table!r}"
            )
    methods = {name: dict(table) for name, table in tables["methods"].items()}
    return Config(
        **_checked(Config, top, where),
        data=DataSpec(**_checked(DataSpec, tables["data"], f"{where} [data]")),
        methods=methods,
    )


def from_toml(path: Path, flags: Mapping[str, Any] | None = None) -> Config:
    """A config file, with flags taking precedence over it."""
    return from_dict(merged(read_toml(path), flags or {}), str(path))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, table by table."""
    out = dict(base)
    for key, value in over.items():
        inside = out.get(key)
        out[key] = (
            merged(inside, value) if isinstance(value, Mapping) and isinstance(inside, Mapping) else value
        )
    return out


def to_dict(config: Config) -> dict[str, Any]:
    """The whole config as nested values; settings that are None are left out, as TOML has no null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items() if v is not None}
        return list(value) if isinstance(value, tuple) else value

    result: dict[str, Any] = plain(dataclasses.asdict(config))
    return result


def to_toml(config: Config) -> str:
    """The whole config as TOML."""
    import tomli_w

    return tomli_w.dumps(to_dict(config))


def option_types(kind: type) -> dict[str, Any]:
    """The settings of a dataclass with their types, tables left out."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.name not in ("data", "methods")}


def _checked(kind: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = option_types(kind)
    checked = {}
    for key, value in values.items():
        if key not in known:
            error = unknown("key", key, known)
            raise UserError(f"{where}: {error}")
        checked[key] = convert(value, known[key], f"{where}: {key}")
    return checked


def convert(value: Any, kind: Any, where: str) -> Any:
    """`value` as `kind` (str, int, float, bool, tuple[str, ...], or one of them or None)."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in options:
        return None
    wanted = next(option for option in options if option is not type(None))
    if typing.get_origin(wanted) is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise UserError(f"{where} must be a list of strings, not {value!r}")
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is float and isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} must be a finite number, not {value!r}")
    if isinstance(value, wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    raise UserError(f"{where} must be of type {wanted.__name__}, not {value!r}")
