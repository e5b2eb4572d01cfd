"""Where a written text ends: by any of the tokens that end texts, special to the tokenizer or not."""

from __future__ import annotations

import pytest
from tiny_text_models import causal
from transformers import GenerationConfig

from pf2lora.tasks.generation.decoding import cut_at_end, end_tokens


@pytest.mark.parametrize(
    ("tokens", "stops", "text"),
    [
        ([5, 6, 2, 7, 2], {2}, [5, 6]),
        ([5, 9, 2], [2, 9], [5]),
        ((2, 5), frozenset({2}), []),
        ([5, 6], {2}, [5, 6]),
        ([5, 6], [], [5, 6]),
        ([], [2], []),
    ],
)
def test_a_text_is_what_stands_before_its_end(tokens: list[int], stops: set[int], text: list[int]) -> None:
    assert cut_at_end(tokens, stops) == text


def test_texts_end_as_in_training_and_as_the_model_ends_them() -> None:
    model = causal("llama")
    for own, ends in (([7, 8], [2, 9, 7, 8]), (8, [2, 9, 8]), (9, [2, 9]), (None, [2, 9])):
        model.generation_config = GenerationConfig(eos_token_id=own)
        assert end_tokens([2, 9], model) == ends
    model.generation_config = None  # type: ignore[assignment]
    assert end_tokens([2], model) == [2]
