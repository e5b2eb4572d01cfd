"""Conversations: what is read, the template's text, and a loss that is on the assistant's turns and nowhere else."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import loading
import pytest
from chat_templates import TEMPLATES, TEXTS, chat_tokenizer, marked

from pf2lora.data.client import Client
from pf2lora.data.files import Record
from pf2lora.errors import UserError
from pf2lora.tasks.generation.chat import ChatTemplate
from pf2lora.tasks.generation.conversations import Conversation, Message
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.settings import CHAT, PROMPTS, GenerationSettings
from pf2lora.tasks.generation.task import Generation

QUESTION, ANSWER = Message("user", "Where is the key?"), Message("assistant", "Under the stone.")
AGAIN, LAST = Message("user", "And the other one?"), Message("assistant", "  In the iron box, I think. ")
SYSTEM = Message("system", "You know where things are.")
TWO_TURNS = Conversation((QUESTION, ANSWER, AGAIN, LAST))
ENDS = {
    "chatml": "<|im_end|>",
    "llama-3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "phi-3": "<|end|>",
    "qwen-3": "<|im_end|>",
}
EVERY_TEMPLATE = pytest.mark.parametrize("name", list(TEMPLATES))


def task(template: str | None, **settings: Any) -> Generation:
    given: dict[str, Any] = {"max_length": 256, "max_new_tokens": 8}
    return Generation(chat_tokenizer(template), GenerationSettings(**given | settings), chat=True)


def learned(generation: Generation, row: Conversation) -> list[str]:
    """The stretches of tokens that carry loss, as texts."""
    (((ids, target),),) = generation.encoder.examples([row])
    parts = groupby(zip(ids, target), key=lambda pair: pair[1])
    return [str(generation.tokenizer.decode([i for i, _ in part])) for counts, part in parts if counts]


# --- the mask ----------------------------------------------------------------------------------------------


@EVERY_TEMPLATE
def test_the_assistants_turns_and_what_ends_them_carry_loss(name: str) -> None:
    generation = task(TEMPLATES[name])
    first, last = learned(generation, TWO_TURNS)
    assert first.strip() == ANSWER.content + ENDS[name]
    assert " ".join(last.split()).endswith((LAST.content.strip() + ENDS[name], "think. " + ENDS[name]))
    assert last.startswith("<think>") == (
        name == "qwen-3"
    )  # the model begins with what its prompt does not hold


@EVERY_TEMPLATE
@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
def test_the_mask_is_that_of_a_template_that_marks_it(name: str, system: bool) -> None:
    """transformers knows the assistant's tokens where a template says which they are: then both are the same."""
    generation = task(TEMPLATES[name])
    row = Conversation((SYSTEM, *TWO_TURNS.messages)) if system else TWO_TURNS
    if name == "mistral" and system:  # it writes the system in a prompt alone: test_chat_templates.py
        return
    (((ids, target),),) = generation.encoder.examples([row])
    accepted, _ = generation.encoder.chat.accepted(row)
    oracle: Any = generation.tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in accepted.messages],
        chat_template=marked(TEMPLATES[name]),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    assert ids == oracle["input_ids"][: len(ids)]
    assert target == oracle["assistant_masks"][: len(ids)]
    assert not any(oracle["assistant_masks"][len(ids) :])


@EVERY_TEMPLATE
@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
def test_the_assistant_may_speak_first(name: str, system: bool) -> None:
    """As in ShareGPT's rows: no prompt stands before its first turn, which is learned like the others. Where a template
    takes no such conversation, or no system before it, one line says so."""
    generation = task(TEMPLATES[name])
    row = Conversation((*((SYSTEM,) if system else ()), ANSWER, AGAIN, LAST))
    if name == "mistral" and system:
        return
    if name == "gemma":
        with pytest.raises(UserError, match="refuses a conversation"):
            generation.encoder.chat.tokens([row])
        return
    first, last = learned(generation, row)
    assert first.strip() == ANSWER.content + ENDS[name]
    assert " ".join(last.split()).endswith("think. " + ENDS[name]) or last.endswith("think." + ENDS[name])
    ((ids, target),) = generation.encoder.chat.tokens([row])
    oracle: Any = generation.tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in row.messages],
        chat_template=marked(TEMPLATES[name]),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    assert (ids, target) == (oracle["input_ids"][: len(ids)], oracle["assistant_masks"][: len(ids)])


def test_turns_after_which_a_template_writes_no_prompt() -> None:
    """As templates that want a user's question first: the conversation itself is written, so it is learned from."""
    wants = "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('no question') }}{% endif %}"
    generation = task(wants + TEMPLATES["chatml"])
    first, _ = learned(generation, Conversation((SYSTEM, ANSWER, AGAIN, LAST)))
    assert first == ANSWER.content + "<|im_end|>"


@EVERY_TEMPLATE
def test_the_prompt_is_what_stands_before_the_last_turn(name: str) -> None:
    generation = task(TEMPLATES[name])
    row = Conversation((QUESTION, ANSWER))
    (((ids, target),),) = generation.encoder.examples([row])
    (prompt,) = generation.encoder.prompts([row])
    assert prompt == ids[: target.index(1)] and all(target[len(prompt) :])
    stops = generation.tokenizer.convert_ids_to_tokens(generation.encoder.stops)
    assert set(stops) == {"</s>", ENDS[name]}


def test_a_system_that_the_template_does_not_know_goes_to_the_next_turn() -> None:
    generation = task(TEMPLATES["gemma"])
    row = Conversation((SYSTEM, QUESTION, ANSWER))
    text = generation.encoder.chat.written(row).text
    assert f"user\n{SYSTEM.content}\n\n{QUESTION.content}<end_of_turn>" in text
    assert "knows no system" in generation.notes[0]
    assert learned(generation, row) == [ANSWER.content + "<end_of_turn>"]


def test_a_tokenizer_without_a_template_gets_a_plain_one_and_that_is_said() -> None:
    generation = task(None)
    row = Conversation((SYSTEM, *TWO_TURNS.messages))
    assert generation.encoder.chat.written(row).text == (
        "System: You know where things are.\nUser: Where is the key?\nAssistant: Under the stone.</s>"
        "User: And the other one?\nAssistant: In the iron box, I think.</s>"
    )
    assert learned(generation, row) == [" Under the stone.</s>", " In the iron box, I think.</s>"]
    assert generation.notes == [
        "the tokenizer has no chat template: turns are written as 'User: …' and 'Assistant: …', each on a line"
    ]


def test_a_turn_that_nothing_ends_gets_the_end_of_text() -> None:
    bare = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    generation = task(bare)
    # Nor does it say whose turn it is: that is the model's to write.
    assert learned(generation, TWO_TURNS) == ["assistant: Under the stone.", f"assistant: {LAST.content}</s>"]
    assert generation.encoder.stops == [generation.tokenizer.eos_token_id]


def test_a_template_that_changes_what_was_said() -> None:
    """As those that drop the thoughts of earlier turns: what is left of them is learned."""
    dropping = TEMPLATES["chatml"].replace(
        "m['content'] + '<|im_end|>' }}]]", "m['content'].split('</think>')[-1] + '<|im_end|>' }}]]"
    )
    thought = Message("assistant", "<think>hm</think>Under it.")
    assert (
        learned(task(dropping), Conversation((QUESTION, thought, AGAIN, thought)))
        == ["Under it.<|im_end|>"] * 2
    )
    silent = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="leaves out, or changes, turns"):
        ChatTemplate(chat_tokenizer(silent), print).written(TWO_TURNS)


def test_what_the_window_cuts_off_is_told() -> None:
    generation = task(TEMPLATES["chatml"])
    (((ids, target),),) = generation.encoder.examples([TWO_TURNS])
    first = target.index(1)
    window = first + 4
    short = task(TEMPLATES["chatml"], max_length=window)
    late = Conversation((Message("user", " ".join(TEXTS * 3)), ANSWER))
    encoded = short.encode([[TWO_TURNS, late]], training=True)
    assert encoded.token_columns["input_ids"].tolist() == [ids[:window]]
    assert encoded.token_columns["target"].tolist() == [target[:window]]
    assert short.notes == [
        f"1 of 2 training prompts fill the window of {window} tokens (max_length): they are left out of training",
        f"1 training targets are cut to fit the window of {window} tokens (max_length): "
        f"{sum(target) - 4} of their tokens are lost",
    ]


# --- files -------------------------------------------------------------------------------------------------


def load_clients(paths: list[Path], **settings: Any) -> list[Client[Any]]:
    return loading.load_clients(paths, task="generation", **settings)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf8")
    return path


OPENAI = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]
SHAREGPT = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}]
EXCHANGE = Conversation((Message("user", "Hi?"), Message("assistant", "Ho.")))
FORMATS: dict[str, tuple[dict[str, Any], Conversation]] = {
    "messages": ({"messages": OPENAI}, EXCHANGE),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi?"}]}, OPENAI[1]]},
        EXCHANGE,
    ),
    "sharegpt": ({"id": "a", "conversations": SHAREGPT}, EXCHANGE),
    "sharegpt in messages": ({"messages": SHAREGPT}, EXCHANGE),
    "asked again": ({"messages": [*OPENAI, OPENAI[0]]}, EXCHANGE),
    "prompt and completion": ({"prompt": "Hi?", "completion": "Ho."}, EXCHANGE),
    "conversational prompt": ({"prompt": OPENAI[:1], "completion": OPENAI[1:]}, EXCHANGE),
    "alpaca": ({"instruction": "Hi?", "input": "", "output": "Ho."}, EXCHANGE),
    "alpaca with an input": (
        {"instruction": "Hi?", "input": "You.", "output": "Ho."},
        Conversation((Message("user", "Hi?\n\nYou."), Message("assistant", "Ho."))),
    ),
    "alpaca with a system": (
        {"instruction": "Hi?", "output": "Ho.", "system": "Be.", "category": "g"},
        Conversation((Message("system", "Be."), *EXCHANGE.messages), "g"),
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_known_by_their_columns(tmp_path: Path, kind: str) -> None:
    record, row = FORMATS[kind]
    (client,) = load_clients([jsonl(tmp_path / "a.jsonl", [record] * 5)])
    assert client.train == [row] * 4 and client.test == [row]
    settings = GenerationSettings()
    assert settings.labels([client]) == [CHAT]
    named: dict[str, Any] = settings.columns(
        [Record(record, "a", "line 1")]
    )  # what `pf2lora init` writes reads the same
    assert GenerationSettings(**named).rows([Record(record, "a", "line 1")]) == [row]
    assert settings.rows([Record(settings.to_record(row), "a", "line 1")]) == [row]


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_other_kinds_of_files(tmp_path: Path, suffix: str) -> None:
    from pf2lora.data.writing import write_records

    write_records(tmp_path / f"a.{suffix}", [{"messages": OPENAI}] * 5)
    (client,) = load_clients([tmp_path / f"a.{suffix}"])
    assert client.train == [EXCHANGE] * 4


def test_clients_may_write_conversations_down_in_different_ways(tmp_path: Path) -> None:
    records = {name: record for name, (record, row) in FORMATS.items() if row == EXCHANGE}
    files = [jsonl(tmp_path / f"{name}.jsonl", [record] * 5) for name, record in records.items()]
    assert all(client.train == [EXCHANGE] * 4 for client in load_clients(files))


def test_chat_is_what_the_user_says(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "Hi?", "target": "Ho."}] * 5)
    assert load_clients([file])[0].train[0] == PromptRow("Hi?", ("Ho.",))
    assert load_clients([file], chat=True)[0].train[0] == EXCHANGE
    file = jsonl(tmp_path / "b.jsonl", [{"prompt": "Hi?", "completion": "Ho."}] * 5)
    assert load_clients([file], chat=False)[0].train[0] == PromptRow("Hi?", ("Ho.",))
    file = jsonl(tmp_path / "c.jsonl", [{"talk": SHAREGPT}] * 5)
    assert load_clients([file], messages="talk")[0].train[0] == EXCHANGE
    file = jsonl(tmp_path / "d.jsonl", [{"messages": OPENAI}] * 5)
    with pytest.raises(UserError, match="'messages' holds conversations, which --no-chat cannot read"):
        load_clients([file], chat=False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"line 5: column 'messages' holds no turns; a conversation is \[\{\"role\""),
        ("hello", "line 5: column 'messages' holds 'hello', not a list of turns"),
        ([OPENAI[0], "ho"], "turn 2: 'ho' is no turn like"),
        ([{"content": "Hi?"}], "turn 1: nobody is named by 'role' or 'from'"),
        ([{"role": "usr", "content": "Hi?"}], r"turn 1: 'usr' is no role \(known: user, human"),
        ([{"role": "user", "content": " "}], "turn 1: the user says nothing"),
        ([OPENAI[0], {"role": "assistant", "content": None}], "turn 2: the assistant says nothing"),
        ([{"role": "user", "content": 7}], "turn 1: the user says 7, not a text"),
        ([OPENAI[0]], "line 5: no turn of the assistant to learn from"),
        ([OPENAI[1]], "line 5: nobody asks before the assistant answers"),
    ],
)
def test_bad_conversations_name_their_line(tmp_path: Path, messages: Any, message: str) -> None:
    rows = [{"messages": OPENAI}] * 4 + [{"messages": messages}]
    with pytest.raises(UserError, match=message) as error:
        load_clients([jsonl(tmp_path / "a.jsonl", rows)])
    assert "\n" not in str(error.value)


def test_what_is_asked_of_a_run_of_conversations() -> None:
    settings = GenerationSettings()

    def asked(record: dict[str, Any], *labels: str) -> Any:
        return settings.questions([Record(record, "a", "line 1")], labels)[0]

    question = Conversation(EXCHANGE.messages[:1])
    assert asked({"messages": OPENAI}, CHAT) == asked({"messages": OPENAI[:1]}, CHAT) == question
    assert (
        asked(settings.typed("Hi?"), CHAT) == asked({"instruction": "Hi?", "input": None}, CHAT) == question
    )
    assert asked(settings.typed("Hi?")) == PromptRow("Hi?", ())
    with pytest.raises(UserError, match="client 'a' has conversations, but the run knows only prompts"):
        settings.check([Client("a", [EXCHANGE], [EXCHANGE])], [])
    assert settings.agreed([CHAT]) == [CHAT] and settings.agreed([]) == settings.agreed([PROMPTS]) == [
        PROMPTS
    ]
    with pytest.raises(UserError, match="generation has no labels but 'chat'"):
        settings.agreed(["yes"])
