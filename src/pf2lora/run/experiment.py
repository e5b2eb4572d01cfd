"""A run, top to bottom: data, model, every method with every seed, one result."""

from __future__ import annotations

import gc
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

import pf2lora
from pf2lora.adapters.base_model import load_tokenizer
from pf2lora.data.client import Client
from pf2lora.engines.batches import Encoded
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.run import trial as trials
from pf2lora.run.config import Config, to_dict
from pf2lora.run.progress import track
from pf2lora.run.trial import Outcome, Workload
from pf2lora.tasks import from_config
from pf2lora.tasks.base import Task

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Watcher:
    """What is told about a run while it goes on."""

    on_round: Callable[[str, int, dict[str, Any]], None] = lambda method, seed, record: None
    on_outcome: Callable[[str, int, Outcome], None] = lambda method, seed, outcome: None
    on_note: Callable[[str], None] = lambda line: None


def choose_device(name: str) -> torch.device:
    """`auto` takes a CUDA device where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}; give auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was asked for, but torch sees no CUDA device here")
    return device


class TaskKind(NamedTuple):
    """How a kind of task reads its data and is built."""

    # load(config, notes) -> the clients and the label names (or none); it adds to `notes`, if given
    load: Callable[..., tuple[list[Client[Any]], list[str]]]
    build: Callable[[Config, list[str]], Task[Any, Any]]
    read: Callable[[Config, Path, list[str]], list[Any]]  # the rows of one more file


def load_texts(config: Config, notes: list[str] | None = None) -> tuple[list[Client[Any]], list[str]]:
    from pf2lora.data.spec import load
    from pf2lora.tasks.classification.rows import label_names

    clients = load(config.data, config.seed)
    return list(clients), label_names(clients)


def build_classification(config: Config, labels: list[str]) -> Task[Any, Any]:
    from pf2lora.data.spec import headline
    from pf2lora.tasks.classification.task import Classification

    tokenizer = load_tokenizer(config.model)
    return Classification(
        tokenizer, labels, max_length=config.max_length or 128, headline=headline(config.data)
    )


def read_texts(config: Config, file: Path, labels: list[str]) -> list[Any]:
    from pf2lora.data.files import columns_of, read_records
    from pf2lora.tasks.classification.rows import check_labels, choose_columns, rows_of

    records, data = read_records(file), config.data
    rows = rows_of(records, choose_columns(columns_of(records), file, data.text, data.pair, data.label))
    check_labels([Client(file.stem, [], rows)], known=labels, held_out={file.stem: records})
    return list(rows)


TASKS: dict[str, TaskKind] = {
    "classification": TaskKind(load_texts, build_classification, read_texts),
    "question-answering": TaskKind(
        from_config.load_questions, from_config.build_question_answering, from_config.read_questions
    ),
    "generation": TaskKind(
        from_config.load_prompts, from_config.build_generation, from_config.read_prompt_rows
    ),
}


def rebuild_task(config: Config, labels: list[str]) -> Task[Any, Any]:
    """The task of a run that was saved."""
    return TASKS[config.task].build(config, labels)


def prepare(config: Config) -> Workload:
    """Data, tokens and the frozen base model."""
    if not config.model:
        raise UserError("no base model is named: --model takes a hub name or a folder")
    choose_device(config.device)  # these two say what is wrong before anything is loaded
    trials.schedule_of(config, config.seed)
    notes: list[str] = []
    clients, labels = TASKS[config.task].load(config, notes)
    workload = build_workload(config, clients, labels, notes)
    for name in config.method:  # a mistake in the last method should not cost the training of the first
        trials.set_up(workload, name, config.seed).model.remove()
    return workload


def build_workload(
    config: Config, clients: list[Client[Any]], labels: list[str], notes: Sequence[str] = ()
) -> Workload:
    """Clients that are loaded, as tokens, beside the base model."""
    device = choose_device(config.device)
    task = TASKS[config.task].build(config, labels)
    task.clients_per_pass = config.clients_per_pass
    base = task.load_model(config.model, DTYPES[config.precision])
    base.to(device)  # type: ignore[arg-type]
    train = task.encode([client.train for client in clients], training=True).to(device)
    test = task.encode([client.test for client in clients], training=False).to(device)
    check_lengths(config, base, train, test)
    return Workload(config, task, clients, base, train, test, device, tuple(notes))


def check_lengths(config: Config, base: PreTrainedModel, *parts: Encoded) -> None:
    """The longest input must fit the model's table of positions, where it has one (RoBERTa's begins after padding)."""
    tables = [
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in base.named_modules()
        if name.endswith(("position_embeddings", "wpe")) and isinstance(module, torch.nn.Embedding)
    ]
    positions = min(tables, default=math.inf)
    longest = max(int(part.lengths.max()) for part in parts)
    if longest > positions:
        raise UserError(
            f"an input has {longest} tokens, and {config.model!r} takes {positions}: give --max-length {positions}"
        )


def run(config: Config, watcher: Watcher | None = None, workload: Workload | None = None) -> dict[str, Any]:
    """Every method with every seed; the result as docs/result.md describes it."""
    watcher = watcher or Watcher()
    workload = workload or prepare(config)
    methods: dict[str, Any] = {}
    seeds = range(config.seed, config.seed + config.seeds)
    told: set[str] = set()
    examples: dict[tuple[int, int], dict[str, Any]] = {}
    tell_notes(workload, watcher, told)
    for name in config.method:
        second_order = trials.method_settings(config, name).get(
            "hypergradient_mode", config.hypergradient_mode
        )
        if hasattr(METHODS[name], "hypergradient_mode") and second_order == "exact":
            watcher.on_note(
                f"{name}: exact second order, so its attention runs on the kernel that has a double backward"
            )
        methods[name] = {"label": METHODS[name].label, "runs": []}
        for seed in seeds:
            outcome = run_one(workload, name, seed, watcher)
            methods[name]["runs"].append(outcome.record)
            tell_notes(workload, watcher, told)
            if seed == config.seed:
                add_examples(examples, workload, name, outcome)
            watcher.on_outcome(name, seed, outcome)
            outcome.model.remove()
            del outcome
            gc.collect()
    return describe(workload) | {"methods": methods, "examples": list(examples.values())}


def tell_notes(workload: Workload, watcher: Watcher, told: set[str]) -> None:
    """What the data and the task have to say, each line once."""
    for note in (*workload.notes, *workload.task.notes):
        if note not in told:
            told.add(note)
            watcher.on_note(note)


def add_examples(
    examples: dict[tuple[int, int], dict[str, Any]], workload: Workload, method: str, outcome: Outcome
) -> None:
    """A method's answers to a few rows of each client, beside those of the other methods."""
    for k, shown in enumerate(outcome.examples):
        for i, example in enumerate(shown):
            entry: dict[str, Any] = {
                "client": workload.names[k],
                "prompt": example.prompt,
                "references": list(example.references),
                "outputs": {},
            }
            examples.setdefault((k, i), entry)["outputs"][method] = example.output


def run_one(workload: Workload, name: str, seed: int, watcher: Watcher) -> Outcome:
    """One method with one seed, with its progress."""
    config = workload.config
    trial = trials.set_up(workload, name, seed)
    what = METHODS[name].label + (f", seed {seed}" if config.seeds > 1 else "")
    steps = config.rounds * config.steps * trials.clients_per_round(trial)
    try:
        with track(steps, f"{what}: client steps") as advance:
            outcome = trials.run(trial, lambda record: watcher.on_round(name, seed, record), advance)
    except BaseException:
        trial.model.remove()
        raise
    for line in trials.what_auto_did(trial.method, outcome.record["rounds"]):
        watcher.on_note(f"{what}: {line}")
    return outcome


def describe(workload: Workload) -> dict[str, Any]:
    """The parts of a result that no method changes."""
    config, task = workload.config, workload.task
    metric = next(iter(task.metrics))
    names = [METHODS[name].label for name in config.method]
    what = " and ".join(names) if len(names) < 3 else f"{len(names)} methods"
    return {
        "format": 1,
        "title": config.title or f"{what} on {len(workload.clients)} clients",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": task.name,
        "metric": metric,
        "metrics": {name: asdict(m) for name, m in task.metrics.items()},
        "base_model": config.model,
        "clients": [
            {"name": c.name, "train": len(c.train), "test": len(c.test), "labels": task.describe(c.train)}
            for c in workload.clients
        ],
        "config": to_dict(config),
        "versions": versions(),
        "machine": machine(workload.device),
    }


def versions() -> dict[str, str]:
    import transformers

    return {
        "pf2lora": pf2lora.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {"device": str(device), "name": name, "cores": os.cpu_count(), "memory_bytes": memory}
