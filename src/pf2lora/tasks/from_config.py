"""Question answering and generation as a run's config describes them: their data, and the task itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pf2lora.adapters.base_model import load_tokenizer
from pf2lora.data.client import Client
from pf2lora.data.spec import DataSpec
from pf2lora.data.split import rng_for, subsample
from pf2lora.errors import UserError, unknown
from pf2lora.run.config import Config
from pf2lora.tasks.generation import prompts
from pf2lora.tasks.generation.e2e import load_e2e
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.task import SCORERS, Decoding, Generation
from pf2lora.tasks.generation.webnlg import load_webnlg
from pf2lora.tasks.question_answering import squad
from pf2lora.tasks.question_answering.squad import SQUAD, QuestionRow
from pf2lora.tasks.question_answering.task import ANSWERABLE, UNANSWERABLE, QuestionAnswering, Reading

PROMPT_SETS = ("e2e", "webnlg")
MAX_LENGTH = {"question-answering": 384, "generation": 512}


def check_source(spec: DataSpec, task: str, known: tuple[str, ...]) -> None:
    """Choices that this task's data does not have are errors: none is silently left out."""
    if bool(spec.clients) == (spec.dataset is not None):
        raise UserError(
            f"data for {task} comes from files (--clients FILES…) or from one of {', '.join(known)} (--dataset NAME)"
        )
    if spec.dataset is not None and spec.dataset not in known:
        raise unknown(f"data set for {task}", spec.dataset, known)
    if spec.partition is not None:
        raise UserError(f"--partition is for classification: {task} has its own rule, or one client per file")
    foreign = {"--text": spec.text, "--pair": spec.pair, "--label": spec.label}
    for flag, value in foreign.items():
        if value is not None:
            raise UserError(f"{flag} names a column for classification; {task} has columns of its own")


def limited(clients: list[Client[Any]], limit: int | None, seed: int) -> list[Client[Any]]:
    """At most `limit` training rows of each client."""
    if limit is None:
        return clients
    return [
        replace(c, train=subsample(c.train, [""] * len(c.train), limit, rng_for(seed, "limit", c.name)))
        for c in clients
    ]


# --- question answering ----------------------------------------------------------------------------------


def load_questions(config: Config, notes: list[str] | None = None) -> tuple[list[Client[Any]], list[str]]:
    """The clients, and whether there are questions without an answer, as "label names"."""
    spec = config.data
    check_source(spec, "question answering", tuple(SQUAD))
    if spec.dataset is not None:
        clients = squad.load_squad(
            spec.dataset,
            spec.data_dir,
            clients=spec.num_clients or squad.PAPER_CLIENTS,
            heterogeneity=spec.heterogeneity,
            test_ratio=spec.test_ratio,
            seed=config.seed,
            notes=notes,
        )
    else:
        clients = squad.load_clients(
            spec.clients,
            context=spec.context,
            question=spec.question,
            answers=spec.answers,
            client_column=spec.client_column,
            test=spec.test,
            test_ratio=spec.test_ratio,
            seed=config.seed,
            notes=notes,
        )
    silent = any(not row.answers for client in clients for row in [*client.train, *client.test])
    return limited(list(clients), spec.limit, config.seed), [ANSWERABLE, *([UNANSWERABLE] if silent else [])]


def build_question_answering(config: Config, labels: list[str]) -> QuestionAnswering:
    reading = Reading(
        stride=config.stride,
        max_answer_tokens=config.max_answer_tokens,
        no_answer_threshold=config.no_answer_threshold,
    )
    return QuestionAnswering(
        load_tokenizer(config.model),
        max_length=config.max_length or MAX_LENGTH[config.task],
        no_answers=UNANSWERABLE in labels,
        reading=reading,
    )


def read_questions(config: Config, file: Path, labels: list[str]) -> list[QuestionRow]:
    spec = config.data
    rows = squad.read_questions(file, None, spec.context, spec.question, spec.answers)
    if UNANSWERABLE not in labels:
        for row in rows:
            if not row.answers:
                raise UserError(
                    f"{file}: the question {row.question!r} has no answer, but the run knows only answerable ones"
                )
    return rows


# --- generation ------------------------------------------------------------------------------------------


def load_prompts(config: Config, notes: list[str] | None = None) -> tuple[list[Client[Any]], list[str]]:
    """The clients; there are no labels."""
    spec = config.data
    check_source(spec, "generation", PROMPT_SETS)
    clients: list[Client[PromptRow]]
    if spec.dataset is None:
        clients = prompts.load_clients(
            spec.clients,
            prompt=spec.prompt,
            target=spec.target,
            client_column=spec.client_column,
            test=spec.test,
            test_ratio=spec.test_ratio,
            seed=config.seed,
        )
    elif spec.data_dir is None:
        raise UserError(
            f"--dataset {spec.dataset} needs --data-dir, the folder or archive of the official files"
        )
    elif spec.dataset == "e2e":
        clients = load_e2e(spec.data_dir, spec.num_clients or 8)
    else:
        clients = load_webnlg(spec.data_dir, spec.num_clients or 8, notes)
    return limited(list(clients), spec.limit, config.seed), []


def build_generation(config: Config, labels: list[str]) -> Generation:
    decoding = Decoding(
        beams=config.beams,
        length_penalty=config.length_penalty,
        no_repeat_ngram=config.no_repeat_ngram,
        max_new_tokens=config.max_new_tokens,
    )
    return Generation(
        load_tokenizer(config.model),
        max_length=config.max_length or MAX_LENGTH[config.task],
        separator=config.separator,
        decoding=decoding,
        scores=config.data.dataset if config.data.dataset in SCORERS else "e2e",
    )


def read_prompt_rows(config: Config, file: Path, labels: list[str]) -> list[PromptRow]:
    from pf2lora.data.files import read_records

    records = read_records(file)
    columns = prompts.choose_columns(records, config.data.prompt, config.data.target)
    return prompts.rows_of(records, columns)
