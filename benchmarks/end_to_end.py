"""A whole run of SST-2, from rows to exported adapters, beside what a user would run instead.

(a) this project: `pf2lora.federate` with its defaults (evaluation as often as takes a tenth of the time, at both points
    of a round; what each client deploys chosen on validation rows, adapters in PEFT's format, cards, report), with
    HOMLoRA and with PF2LoRA;
(b) PEFT and a loop of one's own: one base model, the clients one after another, their adapter and head put in place,
    AdamW, shuffled batches padded to their longest row; HOMLoRA, evaluated as often, what is served only;
(c) transformers' Trainer for every client and round on the same model, as Flower's and NVIDIA FLARE's examples do with
    theirs inside a client's `fit`; not evaluated, no messages, one process.

All train on the same clients' rows (GLUE's rule, h = 0.9). (b) and (c) are done for a few rounds, whose time a round is
multiplied: every round of theirs is alike.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from timing import machine, synchronize, versions
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from pf2lora.atomic import write_json
from pf2lora.cli.show import quiet_libraries
from pf2lora.run.api import run
from pf2lora.run.cadence import rounds_to_evaluate
from pf2lora.run.comparison import prepare
from pf2lora.run.config import Config, from_settings
from pf2lora.run.set_up import first_rate
from pf2lora.run.workload import DTYPES, Workload, choose_device

RANK = 8


def our_config(given: argparse.Namespace, method: str) -> Config:
    settings: dict[str, Any] = {
        "model": given.model,
        "method": [method],
        "dataset": "sst2",
        "data_dir": given.data_dir,
        "num_clients": given.clients,
        "heterogeneity": 0.9,
        "max_length": 128,
        "rounds": given.rounds,
        "rank": RANK,
    }
    if given.limit:
        settings["limit"] = given.limit
    return from_settings(settings, "end_to_end.py")


def ours(given: argparse.Namespace, method: str) -> dict[str, Any]:
    """A whole run of the package into a folder, and where its time went."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run(our_config(given, method), Path(folder) / "run")
        seconds = time.perf_counter() - started
        adapters = len(list(Path(folder).rglob("adapter_model.safetensors")))
    (own,) = result.methods.values()
    record = own.runs[0]
    headline = next(iter(record.served))
    asked, resized = record.evaluation_seconds or 0.0, record.resize_seconds or 0.0
    return {
        "way": "pf2lora",
        "method": method,
        "seconds": seconds,
        "steps_seconds": record.seconds,
        "ms_a_step": 1000 * record.seconds / (given.rounds * result.config["training"]["steps"]),
        "evaluation_seconds": asked,
        "resize_seconds": resized,
        "evaluation_share": asked
        / seconds,  # of the whole run; with the steps that clients try alone at the end
        "resize_share": resized / seconds,
        "evaluated": sum(r.served is not None for r in record.rounds),
        "adapters": adapters,
        "rounds_timed": given.rounds,
        headline: record.served[headline].mean,
    }


class OneModel:
    """The other ways' base model under PEFT, and the clients' rows as they would hold them."""

    def __init__(self, workload: Workload) -> None:
        config = workload.config
        self.workload, self.device, self.training = workload, workload.device, config.training
        self.lr = first_rate(workload, config.training.method[0])
        base = AutoModelForSequenceClassification.from_pretrained(
            config.model.name, num_labels=len(workload.task.labels), dtype=DTYPES[config.model.precision]
        )
        names = ["query", "value"] if any("query" in n for n, _ in base.named_modules()) else ["q", "v"]
        lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names, task_type="SEQ_CLS")
        self.model = get_peft_model(base, lora).to(self.device)
        self.collate = DataCollatorWithPadding(workload.task.tokenizer)
        self.train = [self.encoded(client.train) for client in workload.clients]
        self.test = [self.encoded(client.test) for client in workload.clients]

    def encoded(self, rows: Any) -> list[dict[str, Any]]:
        labels = self.workload.task.labels
        tokens = self.workload.task.tokenizer([row.text for row in rows], truncation=True, max_length=128)
        return [
            {**{name: column[i] for name, column in tokens.items()}, "labels": labels.index(row.label)}
            for i, row in enumerate(rows)
        ]

    def federated(self, rounds: int, fit: Callable[[int], None]) -> Iterator[None]:
        """Rounds of federated averaging: every client from the common state, one after another."""
        common = {name: t.clone() for name, t in get_peft_model_state_dict(self.model).items()}
        for _ in range(rounds):
            total = {name: torch.zeros_like(t) for name, t in common.items()}
            for k in range(len(self.train)):
                set_peft_model_state_dict(self.model, common)
                fit(k)
                for name, t in get_peft_model_state_dict(self.model).items():
                    total[name] += t.detach() / len(self.train)
            common = total
            set_peft_model_state_dict(self.model, common)
            yield

    def fit_by_hand(self, k: int) -> None:
        loader: DataLoader[Any] = DataLoader(
            self.train[k],  # type: ignore[arg-type]
            batch_size=self.training.batch_size,
            shuffle=True,
            collate_fn=self.collate,
        )
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr, weight_decay=self.training.weight_decay)
        self.model.train()
        for _, batch in zip(range(self.training.steps), loader):
            loss = self.model(**batch.to(self.device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def fit_by_trainer(self, k: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=self.training.steps,
                per_device_train_batch_size=self.training.batch_size,
                learning_rate=self.lr,
                weight_decay=self.training.weight_decay,
                lr_scheduler_type="constant",
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=self.device.type == "cpu",
            )
            Trainer(
                self.model,
                arguments,
                train_dataset=self.train[k],
                data_collator=self.collate,
            ).train()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean accuracy of the served model over the clients."""
        self.model.eval()
        found = []
        for rows in self.test:
            right = 0
            for batch in DataLoader(rows, batch_size=64, collate_fn=self.collate):  # type: ignore[arg-type]
                answers = self.model(**batch.to(self.device)).logits.argmax(-1)
                right += int((answers == batch["labels"].to(self.device)).sum())
            found.append(right / max(1, len(rows)))
        return sum(found) / len(found)

    def export(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for k in range(len(self.train)):
                self.model.save_pretrained(str(Path(folder) / str(k)))


def timed(run: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - started


def theirs(given: argparse.Namespace, way: str) -> dict[str, Any]:
    """A few rounds of another way, and what a whole run of them takes."""
    started = time.perf_counter()
    workload = prepare(our_config(given, "homlora"))
    one = OneModel(workload)
    before = time.perf_counter() - started
    fit = one.fit_by_hand if way == "peft" else one.fit_by_trainer
    rounds = one.federated(given.their_rounds, fit)
    first, *rest = (timed(lambda: next(rounds), one.device) for _ in range(given.their_rounds))
    a_round = sum(rest) / len(rest)
    evaluation = timed(one.evaluate, one.device) if way == "peft" else 0.0
    export = timed(one.export, one.device)
    evaluations = len(rounds_to_evaluate(workload)) * evaluation  # as often as ours
    whole = before + first + (given.rounds - 1) * a_round + evaluations + export
    return {
        "way": way,
        "method": "homlora",
        "seconds": whole,
        "steps_seconds": first + (given.rounds - 1) * a_round,
        "ms_a_step": 1000 * a_round / workload.config.training.steps,
        "evaluation_seconds": evaluations,
        "rounds_timed": given.their_rounds,
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="an encoder: a hub name or a folder")
    parser.add_argument("--data-dir", required=True, help="the folder of SST-2")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=100, help="of 10 steps")
    parser.add_argument("--their-rounds", type=int, default=4, help="rounds of the other ways that are timed")
    parser.add_argument("--limit", type=int, help="only so many rows")
    parser.add_argument("--ways", nargs="+", default=["homlora", "pf2lora", "peft", "trainer"])
    parser.add_argument("--json", type=Path, help="write the rows here, after each way")
    given = parser.parse_args(argv)
    quiet_libraries()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    about = {
        "model": given.model,
        "clients": given.clients,
        "rounds": given.rounds,
        "machine": machine(choose_device("auto")),
        "versions": versions("torch", "transformers", "peft"),
    }
    rows = []
    for way in given.ways:
        found = theirs(given, way) if way in ("peft", "trainer") else ours(given, way)
        rows.append(found | about)
        print(
            json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}), flush=True
        )
        if given.json:
            write_json(given.json, rows)
    return rows


if __name__ == "__main__":
    main()
