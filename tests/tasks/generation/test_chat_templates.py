"""What templates do to a conversation: thoughts that they leave out, prompts that do not fit, systems that vanish."""

from __future__ import annotations

import datetime
from itertools import groupby
from typing import Any

import pytest
from chat_templates import QWEN_3_THINKING, R1_DISTILL, TEMPLATES, chat_tokenizer, marked
from transformers.utils import chat_template_utils

from pf2lora.errors import UserError
from pf2lora.tasks.generation.conversations import Conversation, Message
from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.generation.task import Generation

WHERE, STONE = Message("user", "Where is the key?"), Message("assistant", "Under the stone.")
OTHER, BOX = Message("user", "And the other one?"), Message("assistant", "In the iron box.")
SYSTEM = Message("system", "You know where things are.")
THINKING = Message("assistant", "<think>\nHm.\n</think>\n\nUnder the stone.")
THINKING_AGAIN = Message("assistant", "<think>\nSo.\n</think>\n\nIn the iron box.")
OTHERWISE = "asks for an answer with other words than it writes before one"


def task(template: str) -> Generation:
    settings = GenerationSettings(max_length=256, max_new_tokens=8)
    return Generation(chat_tokenizer(template), settings, chat=True)


def learned(generation: Generation, *turns: Message) -> list[str]:
    """The stretches of tokens that carry loss, as texts, of which the last follows the row's prompt."""
    row = Conversation(turns)
    (((ids, target),),) = generation.encoder.examples([row])
    (prompt,) = generation.encoder.prompts([row])
    assert ids[: len(prompt)] == prompt and all(target[len(prompt) :])
    parts = groupby(zip(ids, target), key=lambda pair: pair[1])
    return [str(generation.tokenizer.decode([i for i, _ in part])) for counts, part in parts if counts]


# --- thoughts and prompts ----------------------------------------------------------------------------------


def test_thoughts_of_earlier_turns_are_left_out_and_that_is_told() -> None:
    generation = task(QWEN_3_THINKING)
    assert learned(generation, WHERE, THINKING) == ["<think>\nHm.\n</think>\n\nUnder the stone.<|im_end|>"]
    assert not generation.notes
    assert learned(generation, WHERE, THINKING, OTHER, THINKING_AGAIN) == [
        "Under the stone.<|im_end|>",
        "<think>\nSo.\n</think>\n\nIn the iron box.<|im_end|>",
    ]
    assert generation.notes == [
        "the chat template leaves out thoughts, as of earlier turns: those are not learned"
    ]


@pytest.mark.parametrize(
    ("answer", "written"),
    [(STONE, "</think>\n\nUnder the stone.</s>"), (THINKING, "Hm.\n</think>\n\nUnder the stone.</s>")],
    ids=["answer", "thought"],
)
def test_a_prompt_that_begins_a_thought_is_what_is_trained_behind(answer: Message, written: str) -> None:
    generation = task(R1_DISTILL)
    assert learned(generation, WHERE, answer) == [written]
    (note,) = generation.notes
    assert OTHERWISE in note


def test_a_prompt_that_ends_a_thought_and_one_with_other_words() -> None:
    ended = task(R1_DISTILL.replace("<think>\n' }}", "<think>\n</think>\n\n' }}"))
    assert learned(ended, WHERE, THINKING) == ["Under the stone.</s>"]
    assert any(OTHERWISE in note for note in ended.notes)
    other = task(
        TEMPLATES["chatml"].replace("assistant\n' }}{% endif %}", "assistant\nReasons:\n' }}{% endif %}")
    )
    assert learned(other, WHERE, STONE, OTHER, BOX) == [
        "Under the stone.<|im_end|>",
        "In the iron box.<|im_end|>",
    ]
    assert any(OTHERWISE in note for note in other.notes)


def test_what_is_said_may_hold_anything() -> None:
    """Also what a place could be marked with, the template's own words, and what other turns say."""
    generation = task(TEMPLATES["chatml"])
    odd = [
        Message("assistant", text)
        for text in ("⟪turn 1⟫ ⟪turn 3⟫", "\ue000", "<|im_start|>assistant\nUnder", "a", "Where is the key?")
    ]
    for answer in odd:
        assert learned(generation, WHERE, answer, OTHER, answer) == [answer.content + "<|im_end|>"] * 2


# --- marks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_template_that_marks_its_turns_is_taken_at_its_word(name: str) -> None:
    unmarked = task(TEMPLATES[name])
    itself = task("")
    itself.tokenizer.chat_template = marked(TEMPLATES[name])
    row = Conversation((WHERE, STONE, OTHER, BOX))
    assert itself.encoder.examples([row]) == unmarked.encoder.examples([row])


def test_marks_of_a_part_of_a_turn() -> None:
    """What is not marked carries no loss, but what ends the turn does."""
    generation = task("")
    template = TEMPLATES["chatml"].replace(
        "[[{{ m['content'] + '<|im_end|>' }}]]", "[[{{ m['content'] }}]]{{ '<|im_end|>' }}"
    )
    generation.tokenizer.chat_template = marked(template.replace("[[", "{{ 'So: ' }}[["))
    row = Conversation((WHERE, STONE, OTHER, BOX))
    written = generation.encoder.chat.written(row)
    assert [written.text[slice(*turn)] for turn in written.turns] == [
        "Under the stone.<|im_end|>",
        "In the iron box.<|im_end|>",
    ]


# --- what the system says ----------------------------------------------------------------------------------


def test_a_system_that_a_template_drops_goes_to_the_next_turn() -> None:
    """Without a word, as Phi-3's first template; one that refuses it is in test_chat.py."""
    dropping = TEMPLATES["phi-3"].replace("{% else %}{{ '<|'", "{% elif m['role'] == 'user' %}{{ '<|'", 1)
    generation = task(dropping)
    row = Conversation((SYSTEM, WHERE, STONE))
    for text in (generation.encoder.chat.written(row).text, generation.encoder.chat.prompt(row)):
        assert f"<|user|>\n{SYSTEM.content}\n\n{WHERE.content}<|end|>" in text
    assert generation.notes == [
        "the chat template knows no system: what it says stands at the top of the next turn"
    ]


def test_a_system_that_stands_in_the_last_turn_is_told() -> None:
    """As Mistral's, which writes it in prompts alone: in training, too, the answer stands behind its prompt."""
    generation = task(TEMPLATES["mistral"])
    assert learned(generation, SYSTEM, WHERE, STONE, OTHER, BOX) == [
        " Under the stone.</s>",
        " In the iron box.</s>",
    ]
    text = generation.encoder.chat.written(Conversation((SYSTEM, WHERE, STONE, OTHER, BOX))).text
    assert f"[INST]{SYSTEM.content}\n\n{OTHER.content}[/INST]" in text and f"[INST]{WHERE.content}" in text
    assert any(
        "writes what the system says into the last turn of the user" in note for note in generation.notes
    )


# --- turns that do not alternate ---------------------------------------------------------------------------


def test_turns_of_one_role_become_one_where_a_template_wants_them_to_alternate() -> None:
    generation = task(TEMPLATES["gemma"])
    assert learned(generation, WHERE, OTHER, BOX) == ["In the iron box.<end_of_turn>"]
    assert f"user\n{WHERE.content}\n\n{OTHER.content}<end_of_turn>" in generation.encoder.chat.prompt(
        Conversation((WHERE, OTHER, BOX))
    )
    assert generation.notes == [
        "the chat template wants turns to alternate: several of the same one after another become one"
    ]
    alike = task(TEMPLATES["chatml"])
    assert learned(alike, WHERE, OTHER, BOX) == ["In the iron box.<|im_end|>"] and not alike.notes


def test_what_a_template_refuses_names_its_line() -> None:
    row = Conversation((STONE, OTHER, BOX), where="a.jsonl, line 3")
    with pytest.raises(
        UserError, match=r"^a.jsonl, line 3: .*refuses .*alternate.*turns assistant, user, assistant$"
    ):
        task(TEMPLATES["gemma"]).encoder.examples([row])


# --- the date ----------------------------------------------------------------------------------------------


def test_a_template_that_asks_for_the_date_gets_the_same_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    day = "{% macro day() %}{{ strftime_now('%d %B %Y, %Y-%m-%d, %-d') }}{% endmacro %}"
    dated = day + "{{ day() }}|{{ date_string }}\n"

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Later:
            return cls(2031, 1, 2)

    monkeypatch.setattr(chat_template_utils, "datetime", Later)
    generation = task(dated + TEMPLATES["chatml"])
    text = generation.encoder.chat.prompt(Conversation((WHERE,)))
    assert text.startswith("26 July 2024, 2024-07-26, 26|26 Jul 2024\n")
    assert learned(generation, WHERE, STONE) == ["Under the stone.<|im_end|>"]
