"""What all methods and seeds of a run share: the clients' rows as tokens beside the frozen base model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from pf2lora.adapters.base_model import weights_digest
from pf2lora.adapters.quantised import quantise
from pf2lora.data.client import Client
from pf2lora.data.loading import load_clients
from pf2lora.data.memory import Tables
from pf2lora.data.suspicions import few_rows
from pf2lora.engines.batches import Encoded
from pf2lora.engines.processes import ALONE, Processes, current
from pf2lora.engines.room import Rooms
from pf2lora.errors import UserError
from pf2lora.run.config import Config
from pf2lora.tasks.base import Task

SAMPLE = 64  # validation rows of a client that are asked after every round
# cuBLAS with a workspace clears some of it before every large product: 176 times in a step of RoBERTa-base. Read at the
# process's first product; who has set either keeps it.
WITHOUT_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The task, its clients as tokens, and the base model on its device."""

    config: Config
    task: Task[Any, Any]
    clients: list[Client[Any]]
    base: PreTrainedModel
    train: Encoded
    test: Encoded
    validation: Encoded | None  # None: nobody has validation rows
    validation_sample: Encoded | None  # some of them, spread evenly: for what is asked after every round
    device: torch.device
    notes: tuple[str, ...] = ()  # what the data's reader has to say
    weights: str = ""  # a digest of the base model's
    processes: Processes = ALONE  # that share its clients

    @property
    def names(self) -> list[str]:
        return [client.name for client in self.clients]


def load_workload(
    config: Config,
    *,
    clients: Sequence[Client[Any]] | None = None,
    labels: Sequence[str] = (),
    metric: str | None = None,
    notes: Sequence[str] = (),
    tables: Tables | None = None,
) -> Workload:
    """Data, tokens and model that the config describes.

    `clients` are those that somebody has loaded already, and `notes` what was said of them; `labels` and the headline
    `metric` those that were agreed on beforehand; `tables` are rows in memory.
    """
    if not config.model.name:
        raise UserError("no base model is named: --model takes a hub name or a folder")
    device = choose_device(config.model.device)  # says what is wrong before anything is loaded
    told, agreed = list(notes), list(labels) or None
    if clients is None:
        seed = config.training.seed
        clients = load_clients(config.task, config.data, seed, labels=agreed, notes=told, tables=tables)
    told += few_rows(clients, config.training.batch_size)
    task = build_task(config, agreed or config.task.labels(clients), metric)
    task.rooms = Rooms.of(config.training.most_per_pass, config.training.micro_batch)
    base = load_base(config, task, device)
    workload = workload_of(config, task, clients, base, device)
    check_lengths(config, base, workload.train, workload.test)
    check_tokens(config, task, base, workload.train, workload.test)
    return replace(workload, notes=tuple(told), weights=weights_digest(base), processes=current())


def workload_of(
    config: Config,
    task: Task[Any, Any],
    clients: Sequence[Client[Any]],
    base: PreTrainedModel,
    device: torch.device,
) -> Workload:
    """The clients' rows as tokens, beside a task and a base model that are there."""
    train = task.encode([client.train for client in clients], training=True).to(device)
    test = task.encode([client.test for client in clients], training=False).to(device)
    clients, validation, sample = to_choose_by(task, clients, train)
    return Workload(
        config=config,
        task=task,
        clients=clients,
        base=base,
        train=train,
        test=test,
        validation=validation,
        validation_sample=sample,
        device=device,
    )


def to_choose_by(
    task: Task[Any, Any], clients: Sequence[Client[Any]], train: Encoded
) -> tuple[list[Client[Any]], Encoded | None, Encoded | None]:
    """The clients' validation rows as tokens, and a sample of them; None: nobody has any. A client of whose rows none
    has a loss (their prompts fill the window) has none to choose by: a mean of nothing is nobody's least."""
    found = list(clients)
    if not any(client.validation for client in found):
        return found, None, None
    validation = task.encode([client.validation for client in found], training=False)
    lost = [k for k, size in enumerate(validation.sizes()) if found[k].validation and not size]
    for k in lost:
        task.note(
            f"client {found[k].name!r}: none of its {len(found[k].validation)} validation rows has a target within "
            "max_length, so that it has nothing to choose by"
        )
        found[k] = replace(found[k], validation=[])
    if lost:
        return to_choose_by(task, found, train)
    few = task.encode([spread(client.validation, SAMPLE) for client in found], training=False)
    validation, few = (task.weighed(part.to(train.device), train) for part in (validation, few))
    return found, validation, few


def spread(rows: list[Any], most: int) -> list[Any]:
    """At most so many of the rows, evenly spaced: they may be sorted by label."""
    return rows if len(rows) <= most else [rows[i * len(rows) // most] for i in range(most)]


def build_task(config: Config, labels: Sequence[str], metric: str | None = None) -> Task[Any, Any]:
    """The task of a run, with the headline metric that was agreed on, or else its data set is known by."""
    return config.task.build(config.model.name, labels, metric or config.task.known_by(config.data.dataset))


def load_base(config: Config, task: Task[Any, Any], device: torch.device) -> PreTrainedModel:
    """The base model with the task's head, on its device."""
    base = task.load_model(config.model.name, DTYPES[config.model.precision])
    if config.model.quantization != "none":  # layer by layer: the device never holds all of it unrounded
        quantise(base, config.model.quantization, device)
    base.to(device)  # type: ignore[arg-type]
    return base


def choose_device(name: str) -> torch.device:
    """`auto` takes a CUDA device where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}; give auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was asked for, but torch sees no CUDA device here")
    if device.type == "cuda":
        for variable, value in WITHOUT_WORKSPACE.items():
            os.environ.setdefault(variable, value)
    return device


def check_lengths(config: Config, base: PreTrainedModel, *parts: Encoded) -> None:
    """The longest input must fit the model's table of positions, where it has one (RoBERTa's begins after padding); and
    there must be one: a prompt that fills its window leaves no room for what should follow."""
    tables = [
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in base.named_modules()
        if name.endswith(("position_embeddings", "wpe")) and isinstance(module, torch.nn.Embedding)
    ]
    positions = min(tables, default=math.inf)
    if not all(len(part.lengths) for part in parts):
        raise UserError(
            f"every test prompt fills the window of {getattr(config.task, 'max_length', None)} tokens, and no test row "
            f"has a loss: give a larger --max-length"
        )
    longest = max(int(part.lengths.max()) for part in parts)
    if longest > positions:
        raise UserError(
            f"an input has {longest} tokens, and {config.model.name!r} takes {positions}: give --max-length {positions}"
        )


def check_tokens(config: Config, task: Task[Any, Any], base: PreTrainedModel, *parts: Encoded) -> None:
    """Every token must have its place in the model's embeddings; one that was added to a tokenizer may have none."""
    known = getattr(base.get_input_embeddings(), "num_embeddings", math.inf)
    highest = max(int(part.token_columns["input_ids"].max()) for part in parts)
    if highest >= known:
        raise UserError(
            f"the tokenizer of {config.model.name!r} writes token {highest} "
            f"({task.tokenizer.convert_ids_to_tokens(highest)}), but the model has embeddings of {known} tokens: after "
            f"adding tokens, model.resize_token_embeddings(len(tokenizer)) makes room, and both are saved"
        )
