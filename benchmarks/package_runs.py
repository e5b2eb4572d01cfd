"""What the real runs share: a config from flags, the package's own run of it, and a row for every finished method.

Every setting of `pf2lora train` is a flag; `--config FILE.toml` holds the same settings and those of single methods
(`[methods.per-fedavg]`). Flags win over the file, and the file over a script's defaults.
"""

from __future__ import annotations

import argparse
import os
import sys
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

from rich.text import Text
from timing import machine, versions

from pf2lora.atomic import write_json
from pf2lora.cli.options import Choice, choices
from pf2lora.cli.show import quiet_libraries
from pf2lora.data.client import Client
from pf2lora.run import config as configs
from pf2lora.run.comparison import Watcher, compare
from pf2lora.run.config import Config
from pf2lora.run.result import OverClients, RoundRecord
from pf2lora.run.set_up import check_methods
from pf2lora.run.trial import Outcome
from pf2lora.run.workload import Workload, load_workload
from pf2lora.tasks import TASKS

DATA = Path(os.environ.get("PF2LORA_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
OWN = ("task", "out")  # a script's task is given, and its --out is the JSON file


# --- flags -------------------------------------------------------------------------------------------------


def parser(description: str | None, task: str) -> argparse.ArgumentParser:
    """The options that every real run has, and all settings of the package."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    options.add_argument("--out", type=Path, required=True, help="the JSON file to write, after every method")
    options.add_argument("--summary", type=Path, help="also write the figures without the texts here")
    options.add_argument("--config", type=Path, help="a TOML file of settings, as `pf2lora train` takes it")
    options.add_argument("--first-clients", type=int, help="only the first so many clients")
    settings = options.add_argument_group("settings of the package")
    for name, choice in choices().items():
        if name in setting_names(task):
            add_setting(settings, choice)
    return options


def setting_names(task: str) -> list[str]:
    return [name for name in configs.setting_names(TASKS[task]) if name not in OWN]


def add_setting(options: argparse._ArgumentGroup, choice: Choice) -> None:
    """A flag that leaves no trace where it is not given."""
    help = Text.from_markup(choice.help).plain.replace("%", "%%")
    kinds = [kind for kind in typing.get_args(choice.kind) or (choice.kind,) if kind is not NoneType]
    kept: dict[str, Any] = {"dest": choice.name, "help": help, "default": argparse.SUPPRESS}
    if choice.is_list:
        options.add_argument(*choice.flags, nargs="+", **kept)
    elif kinds == [bool]:
        options.add_argument(choice.flags[0].split("/")[0], action=argparse.BooleanOptionalAction, **kept)
    else:
        options.add_argument(*choice.flags, type=kinds[0], **kept)


def config_of(given: argparse.Namespace, task: str, defaults: dict[str, Any]) -> Config:
    """The config; clients' own files take the place of the default data set. Measured at the end alone, unless the
    user says otherwise: generated text takes longer than training."""
    flags = {name: value for name, value in vars(given).items() if name in setting_names(task)}
    over = configs.in_tables({"task": task} | flags, "command line")
    if given.config:
        over = configs.merged(configs.read_toml(given.config), over)
    tables = configs.in_tables({"task": task} | defaults, "defaults")
    if over.get("data", {}).get("clients"):
        del tables["data"]
    config = configs.from_dict(configs.merged(tables, over), "command line")
    training = config.training
    return replace(
        config, training=replace(training, evaluate_every=training.evaluate_every or training.rounds)
    )


# --- the run -----------------------------------------------------------------------------------------------


def workload_of(
    config: Config, clients: Sequence[Client[Any]], notes: Sequence[str], given: argparse.Namespace
) -> Workload:
    """The workload of the clients that the options leave, every method set up once."""
    quiet_libraries()
    workload = load_workload(config, clients=clients[: given.first_clients])
    workload = replace(workload, notes=tuple(notes))
    check_methods(workload)
    return workload


def run(workload: Workload, given: argparse.Namespace, **about: Any) -> dict[str, Any]:
    """Every method with every seed, written and said in one line as soon as it is done; `about` goes into the file as
    it is."""
    config = workload.config
    rows: dict[str, Any] = {}
    notes: list[str] = []
    result = {
        "settings": configs.to_dict(config),
        "versions": versions("torch", "transformers"),
        "machine": machine(workload.device),
        "clients": [{"name": c.name, "train": len(c.train), "test": len(c.test)} for c in workload.clients],
        "methods": rows,
        "notes": notes,
        **about,
    }

    def on_round(method: str, seed: int, record: RoundRecord) -> None:
        if (
            record.round in (1, config.training.rounds)
            or record.round % -(-config.training.rounds // 10) == 0
        ):
            loss = mean_loss(record)
            print(
                f"{method}: round {record.round}/{config.training.rounds}, training loss {loss:.4f}",
                flush=True,
            )

    def on_outcome(method: str, seed: int, outcome: Outcome) -> None:
        name = method if config.training.seeds == 1 else f"{method}, seed {seed}"
        rows[name] = row_of(outcome)
        result["items"] = [
            [{"prompt": e.prompt, "references": list(e.references)} for e in client]
            for client in outcome.examples
        ]
        save(result, given.out, given.summary)
        print(line(name, rows[name]), flush=True)

    every = replace(config, output=replace(config.output, examples=sys.maxsize))  # not only a report's few
    compare(every, Watcher(on_round, on_outcome, notes.append), replace(workload, config=every))
    save(result, given.out, given.summary)
    return result


def row_of(outcome: Outcome) -> dict[str, Any]:
    """A finished run: what the clients deploy after the last round, and what it took. Measuring includes the point
    before the average, where the method has one."""
    record = outcome.record
    return {
        "scores": means(record.served),
        "before_averaging": means(record.before_averaging) if record.before_averaging else None,
        "per_client": [
            {metric: over.per_client[k] for metric, over in record.served.items()}
            for k in range(len(outcome.examples))
        ],
        "train_loss": [mean_loss(r) for r in record.rounds],
        "train_seconds": round(record.seconds, 1),
        "evaluation_seconds": round(record.evaluation_seconds or 0.0, 1),
        "outputs": [[example.output for example in client] for client in outcome.examples],
    }


def means(scores: dict[str, OverClients]) -> dict[str, float | None]:
    return {metric: over.mean for metric, over in scores.items()}


def mean_loss(record: RoundRecord) -> float:
    """The training loss of a round, over the clients that took part."""
    known = [loss for loss in record.train_loss if loss is not None]
    return sum(known) / len(known)


# --- what is shown and written -----------------------------------------------------------------------------


def shown(value: float | None) -> str:
    return "absent" if value is None else f"{value:.4f}"


def line(name: str, row: dict[str, Any]) -> str:
    scores = ", ".join(f"{metric} {shown(value)}" for metric, value in row["scores"].items())
    return (
        f"{name}: {scores}; {row['train_seconds']} s of training, {row['evaluation_seconds']} s of measuring"
    )


def print_table(result: dict[str, Any]) -> None:
    """One line per method, the mean over clients of each served score."""
    methods = result["methods"]
    names = list(next(iter(methods.values()))["scores"])
    print("\n| method | " + " | ".join(names) + " | training loss, first and last round | seconds |")
    print("| --- " * (len(names) + 3) + "|")
    for name, row in methods.items():
        scores = [shown(row["scores"][n]) for n in names]
        losses = f"{row['train_loss'][0]:.3f} → {row['train_loss'][-1]:.3f}"
        seconds = f"{row['train_seconds']} + {row['evaluation_seconds']}"
        print(f"| {name} | " + " | ".join([*scores, losses, seconds]) + " |")
    for note in result["notes"]:
        print(f"note: {note}")


def print_answers(result: dict[str, Any], clients: int, answers: int) -> None:
    """Some clients' first answers beside each other."""
    for k, client in enumerate(result["clients"][:clients]):
        for i, item in enumerate(result["items"][k][:answers]):
            print(f"\n{client['name']}: {item['prompt']}\n  reference: {item['references'][0]}")
            for method, row in result["methods"].items():
                print(f"  {method}: {row['outputs'][k][i]}")


def without_texts(result: dict[str, Any]) -> dict[str, Any]:
    """The result as `benchmarks/results/` keeps it: every figure, and none of the data's texts."""
    methods = {
        name: {k: v for k, v in row.items() if k != "outputs"} for name, row in result["methods"].items()
    }
    return {k: v for k, v in result.items() if k != "items"} | {"methods": methods}


def save(result: dict[str, Any], out: Path, summary: Path | None) -> None:
    for path, content in ((out, result), (summary, without_texts(result))):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, content)
