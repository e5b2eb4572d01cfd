"""Written answers end where any of the tokens does that the model or the template ends a text with."""

from __future__ import annotations

from typing import Any

import pytest
from language_models import VOCABULARY, adapted_model
from tokenizers_for_tests import byte_level

from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.generation.task import Generation

SETTINGS = GenerationSettings(max_length=64, max_new_tokens=8, beams=1, no_repeat_ngram=0)


def test_an_answer_ends_at_the_models_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is no special token to the tokenizer, of several in its generation config."""
    tokenizer = byte_level(["The pizza place is near the river."] * 20, VOCABULARY)
    task = Generation(tokenizer, SETTINGS)
    model, x, y = adapted_model("gpt2", 1)
    decoded: list[list[int]] = []

    def decode(rows: Any, **options: Any) -> list[str]:
        decoded.extend([int(token) for token in row] for row in rows)
        return [str(tokenizer.decode(row, **options)) for row in rows]

    monkeypatch.setattr(tokenizer, "batch_decode", decode)
    task.generate(model, x.detach(), y.detach(), [["pizza"]])
    (tokens,) = decoded
    at, end = next((at, token) for at, token in enumerate(tokens) if token != tokens[0])
    assert len(tokens) == 8 and end not in tokenizer.all_special_ids
    decoded.clear()
    monkeypatch.setattr(model.model.generation_config, "eos_token_id", [0, end])
    ((text,),) = task.generate(model, x.detach(), y.detach(), [["pizza"]])
    assert decoded == [tokens[:at]] and text == str(tokenizer.decode(tokens[:at])).strip()
