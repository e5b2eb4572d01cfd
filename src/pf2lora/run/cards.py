"""The model card of an adapter's folder, README.md: what it is, what it learned from, how good it is, how it is loaded.

It holds counts, scores and versions, and nothing of anybody's texts; the common adapter's names no client.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pf2lora.adapters.peft import ADAPTER_CONFIG
from pf2lora.atomic import write_text
from pf2lora.methods import METHODS
from pf2lora.run import folder, numbers
from pf2lora.run.config import Config
from pf2lora.run.made_with import versions
from pf2lora.run.privacy import PrivacySpent
from pf2lora.run.result import Choice, ClientInfo, NewcomerRecord, OverClients, Result, SeedRun
from pf2lora.tasks.settings import Metric

CARD = "README.md"
NO_LICENCE = "unknown"  # as the hub spells it
PIPELINES = {
    "SEQ_CLS": "text-classification",
    "QUESTION_ANS": "question-answering",
    "CAUSAL_LM": "text-generation",
}
CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "CAUSAL_LM": "AutoModelForCausalLM",
}


@dataclass(frozen=True)
class About:
    """What a card says that is one adapter's own; the rest is the run's."""

    title: str
    trained_on: str
    scores: dict[str, dict[str, float | None]]  # by the column's heading and metric
    measured_on: str
    holds: str  # which of the candidates
    rounds: int  # that were done, which may be fewer than were asked for
    privacy: str = "no noise was added"
    lr: float | None = (
        None  # of the run's AdamW: a newcomer's adapter is not made by it, and earlier runs do not say
    )


def write_cards(out: Path, config: Config, result: Result) -> None:
    """The cards of the result's last method: results come as methods end."""
    name = list(result.methods)[-1]
    where = folder.place(out, config, name)
    run = next((run for run in result.methods[name].runs if run.seed == config.training.seed), None)
    if run is None:
        return
    if (where / "common" / ADAPTER_CONFIG).is_file():
        about = of_common(result, run)
        write_card(where / "common", config, name, about, result.metrics, result.created)
    for k, client in enumerate(result.clients):
        adapter = where / "clients" / client.name
        if (adapter / ADAPTER_CONFIG).is_file():
            about = of_client(result, run, k, client)
            write_card(adapter, config, name, about, result.metrics, result.created)


def write_newcomer_card(
    adapter: Path, config: Config, record: NewcomerRecord, metrics: dict[str, Metric]
) -> None:
    """The card of a client that joined later."""
    about = About(
        title=f"Adapter of {record.client.name}",
        trained_on=f"{rows_of(record.client)}, after the run of the other clients had ended",
        scores={"this adapter": record.deploy},
        measured_on=f"On {record.client.name}'s {record.client.test} test rows",
        holds=record.deploys.replace("_", " "),
        rounds=record.rounds,
    )
    write_card(adapter, config, record.method, about, metrics, record.created)


def write_site_card(
    adapter: Path,
    config: Config,
    method: str,
    client: ClientInfo,
    scores: dict[str, dict[str, float | None]],
    choice: Choice | None,
    rounds: int,
    metrics: dict[str, Metric],
    lr: float,
) -> None:
    """The card of what a site of a federation deploys after so many rounds: the site knows its own rows and scores, and
    nobody else's. `scores` are those of "deploy" and "served"."""
    noise = "noise on the common adapter: the run's record has its ε; what is the client's own is not covered"
    about = About(
        title=f"Adapter of {client.name}",
        trained_on=f"{rows_of(client)}; with the other sites of a federation",
        scores={"this adapter": scores["deploy"], "served after the last round": scores["served"]},
        measured_on=f"On {client.name}'s {client.test} test rows",
        holds=in_words(choice, rounds),
        rounds=rounds,
        lr=lr,
        **({"privacy": noise} if config.privacy.on else {}),
    )
    write_card(adapter, config, method, about, metrics, datetime.now(UTC).isoformat())


# --- what is said -------------------------------------------------------------------------------------------


def of_client(result: Result, run: SeedRun, k: int, client: ClientInfo) -> About:
    """A client's: its own rows and scores, and how many others there were."""
    others = len(result.clients) - 1
    chosen = of_one(run.deploy, k) if run.deploy is not None else of_one(run.served, k)
    rounds = run.rounds[-1].round
    return About(
        title=f"Adapter of {client.name}",
        trained_on=f"{rows_of(client)}; with {others} other client{'' if others == 1 else 's'}",
        scores={"this adapter": chosen, "served after the last round": of_one(run.served, k)},
        measured_on=f"On {client.name}'s {client.test} test rows",
        holds=in_words(run.choices[k] if run.choices else None, rounds),
        rounds=rounds,
        lr=run.settings.get("lr"),
        **price(run.privacy, "what is the client's own, and its choice, are not covered"),
    )


def of_common(result: Result, run: SeedRun) -> About:
    """The common one's: means over clients, who stay unnamed. Where noise hides them, how many rows they have, too."""
    clients, rows = len(result.clients), sum(client.train for client in result.clients)
    trained = f"{clients} clients" + ("" if run.privacy else f" with {rows} training rows in all")
    tables, rounds = run.candidates.get("common", run.served), run.rounds[-1].round
    holds, measured = "what all clients share", "Alone, on each client's own test rows, after the last round"
    if run.common_round not in (None, rounds):
        holds += f", round {run.common_round} of {rounds}: chosen by their losses on validation rows"
        measured += f" ({rounds}); that of round {run.common_round}, this one, was not measured"
    return About(
        title="Common adapter",
        trained_on=trained,
        scores={
            "mean over clients": {name: table.mean for name, table in tables.items()},
            "worst client": {name: table.worst for name, table in tables.items()},
        },
        measured_on=measured,
        holds=holds,
        rounds=rounds,
        lr=run.settings.get("lr"),
        **price(run.privacy),
    )


def of_one(tables: dict[str, OverClients], k: int) -> dict[str, float | None]:
    return {name: table.per_client[k] for name, table in tables.items()}


def price(spent: PrivacySpent | None, besides: str = "") -> dict[str, str]:
    """What differential privacy covers, where a run has it."""
    if spent is None:
        return {}
    return {"privacy": "; ".join(filter(None, [f"the common adapter: {spent.sentence()}", besides]))}


def rows_of(client: ClientInfo) -> str:
    chosen = f" ({client.validation} more to choose by)" if client.validation else ""
    return f"{client.train} rows{chosen} of {client.name}"


def in_words(choice: Choice | None, rounds: int) -> str:
    if choice is None:
        return "what the client is served after the last round"
    which = f"{choice.candidate.replace('_', ' ')}, round {choice.round} of {rounds}"
    return f"{which}: chosen on the client's validation rows"


# --- the page -----------------------------------------------------------------------------------------------


def write_card(
    adapter: Path, config: Config, method: str, about: About, metrics: dict[str, Metric], created: str
) -> None:
    peft = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf8"))
    write_text(adapter / CARD, card(config, method, about, metrics, created[:10], peft))


def card(
    config: Config, method: str, about: About, metrics: dict[str, Metric], day: str, peft: dict[str, Any]
) -> str:
    """The card in Markdown, with what the hub reads at its head."""
    base = public_base(config.model.name)
    kind = next(METHODS[asked] for asked in config.training.method if METHODS[asked].name == method)
    training, made = config.training, versions()
    facts = {
        "method": f"{kind.label}: {kind.summary}" if kind.summary else kind.label,
        "base model": f"`{base or Path(config.model.name).name}`" + ("" if base else " (a folder)"),
        "adapter": f"LoRA of rank {peft['r']} on {len(peft['target_modules'])} layers"
        + (f", with {', '.join(peft['modules_to_save'])}" if peft["modules_to_save"] else ""),
        "trained on": about.trained_on,
        "training": f"{about.rounds} round{'' if about.rounds == 1 else 's'} of {training.steps} steps, "
        f"batches of {training.batch_size}, {'' if about.lr is None else f'lr {about.lr:g}, '}seed {training.seed}",
        "holds": about.holds,
        "privacy": about.privacy,
        "made": f"{day} with " + ", ".join(f"{name} {number}" for name, number in made.items()),
    }
    return "\n".join(
        [
            head(base, PIPELINES.get(peft["task_type"] or "")),
            f"# {about.title}\n",
            "Trained by pf2lora: several parties fine-tuned one model together without pooling their data.\n",
            "| | |\n| --- | --- |",
            *(f"| {name} | {plain(value)} |" for name, value in facts.items()),
            f"\n## Scores\n\n{plain(about.measured_on)}.\n",
            table(about.scores, metrics),
            f"\n## Use\n\n```python\n{snippet(base, peft['task_type'] or '')}\n```\n",
            "## Before it is published\n",
            "No licence has been chosen (`license` above): the base model's terms and the owner of the data decide. An",
            "adapter is learned from texts and can tell something about them, even though none is in this folder.",
            "",
        ]
    )


def public_base(name: str) -> str:
    """The base model's name on the hub; a folder of somebody's machine is nobody else's business."""
    return "" if Path(name).is_absolute() or Path(name).is_dir() else name


def head(base: str, pipeline: str | None) -> str:
    lines = [f"license: {NO_LICENCE}", "library_name: peft"]
    lines += [f"base_model: {json.dumps(base)}"] if base else []
    lines += [f"pipeline_tag: {pipeline}"] if pipeline else []
    return "\n".join(["---", *lines, "tags: [lora, federated-learning, pf2lora]", "---", ""])


def table(scores: dict[str, dict[str, float | None]], metrics: dict[str, Metric]) -> str:
    """A line for each metric, a column for each of the scores."""
    lines = ["| | " + " | ".join(scores) + " |", "| --- |" + " ---: |" * len(scores)]
    for name, metric in metrics.items():
        shown = (numbers.score(column.get(name), metric) for column in scores.values())
        lines.append(f"| {metric.label}{' in %' if metric.percent else ''} | {' | '.join(shown)} |")
    return "\n".join(lines)


def snippet(base: str, task: str) -> str:
    kind = CLASSES.get(task, "AutoModel")
    return "\n".join(
        [
            "from peft import PeftModel",
            f"from transformers import AutoConfig, {kind}",
            "",
            'folder = "."  # this folder',
            f'base = "{base or "the base model"}"',
            f"model = {kind}.from_pretrained(base, config=AutoConfig.from_pretrained(folder))",
            "model = PeftModel.from_pretrained(model, folder)",
        ]
    )


def plain(text: str) -> str:
    """Text for a table's cell: a client may be called almost anything."""
    return " ".join(text.replace("|", "\\|").split())
