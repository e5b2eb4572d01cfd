"""Texts that are drawn: by their own seed whoever shares the pass, by the model's probabilities, within the nucleus."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from chat_templates import TEMPLATES, chat_tokenizer
from language_models import adapted_model
from tokenizers_for_tests import byte_level

from pf2lora.errors import UserError
from pf2lora.tasks.generation.decoding import Decoding, Drawn
from pf2lora.tasks.generation.sampling import Sampler
from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.generation.task import Generation

TOKENIZER = byte_level(["The pizza place is near the river."] * 20)
PROMPTS = [["pizza", "a longer one about noodles", "tapas"], ["fish and chips"]]


def texts(**settings: Any) -> list[list[str]]:
    batch = settings.pop("batch", 3)
    given: dict[str, Any] = {"max_length": 64, "max_new_tokens": 12}
    task = Generation(TOKENIZER, GenerationSettings(**given | settings), generation_batch=batch)
    model, x, y = adapted_model("gpt2", 2)
    return task.generate(model, x.detach(), y.detach(), PROMPTS)


def test_what_is_drawn_depends_on_the_seed_and_not_on_who_is_beside() -> None:
    together = texts(temperature=1.0)
    assert together == texts(temperature=1.0, batch=1) == texts(temperature=1.0)
    assert together != texts(temperature=1.0, sampling_seed=1)


def test_cold_or_narrow_it_is_the_likeliest() -> None:
    greedy = texts(beams=1, no_repeat_ngram=0)
    assert texts(temperature=1e-4) == texts(temperature=1.0, top_p=1e-6) == greedy
    assert texts(temperature=1.0) != greedy


def test_tokens_are_drawn_by_their_probabilities_within_the_nucleus() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]]).expand(20_000, -1)
    for temperature, top_p, kept in ((1.0, 1.0, 4), (0.5, 1.0, 4), (1.0, 0.7, 2)):
        drawn = Drawn([Sampler(temperature, top_p, seed) for seed in range(len(scores))])(
            scores[:, :0].long(), scores
        )
        assert torch.equal(drawn.isfinite().sum(1), torch.ones(len(scores), dtype=torch.long))
        counts = Counter(drawn.argmax(1).tolist())
        shares = (scores[0] / temperature).softmax(0)[:kept]
        shares = shares / shares.sum()
        assert set(counts) == set(range(kept))
        for token, share in enumerate(shares.tolist()):
            assert counts[token] / len(scores) == pytest.approx(share, abs=0.02)


def test_a_model_that_is_broken_still_writes() -> None:
    drawn = Drawn([Sampler(1.0, 1.0, 0)])(torch.zeros(1, 0).long(), torch.full((1, 5), torch.nan))
    assert drawn.isfinite().sum() == 1


def test_defaults_follow_from_what_is_written() -> None:
    def of(chat: bool, **settings: Any) -> tuple[int, int, float]:
        found = Decoding.of(GenerationSettings(**settings), chat=chat)
        return found.beams, found.no_repeat_ngram, found.temperature

    assert of(False) == (10, 4, 0.0) and of(True) == (1, 0, 0.0)
    assert of(False, temperature=0.7) == (1, 0, 0.7)
    assert of(True, beams=3, no_repeat_ngram=2) == (3, 2, 0.0)
    config = Decoding.of(GenerationSettings(), chat=True).config([1, 2], 0)
    assert config.eos_token_id == [1, 2] and config.num_beams == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be 0 or more"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"temperature": 1.0, "beams": 4}, "temperature 1.0 draws a text, and beams 4 search for one"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GenerationSettings(**settings)


def test_answers_end_with_their_turn() -> None:
    """A conversation's text ends with the template's own token, and is scored by ROUGE where nothing else is said."""
    tokenizer = chat_tokenizer(TEMPLATES["chatml"])
    task = Generation(tokenizer, GenerationSettings(), scores="answers", chat=True)
    assert list(task.metrics) == ["rouge_l", "rouge_1", "rouge_2", "exact_match", "loss", "perplexity"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in task.encoder.stops
