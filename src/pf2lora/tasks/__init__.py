"""Tasks, a folder each: settings, reading, loss, predictions and scores of one task, together."""

from __future__ import annotations

from typing import Any

from pf2lora.registry import Registry
from pf2lora.tasks.settings import TaskSettings

TASKS: Registry[TaskSettings[Any]] = Registry(
    "task",
    {
        "classification": "pf2lora.tasks.classification.settings:ClassificationSettings",
        "question-answering": "pf2lora.tasks.question_answering.settings:QuestionAnsweringSettings",
        "generation": "pf2lora.tasks.generation.settings:GenerationSettings",
    },
    "pf2lora.tasks.settings:TaskSettings",
)
