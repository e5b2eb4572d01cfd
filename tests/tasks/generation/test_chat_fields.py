"""What else rows of conversations say: the system beside them, calls of tools, thoughts, weights, history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import loading
import pytest
from chat_templates import QWEN_3_THINKING, TEMPLATES, chat_tokenizer

from pf2lora.data.client import Client
from pf2lora.data.files import Record
from pf2lora.errors import UserError
from pf2lora.tasks.generation.conversations import Conversation, Message
from pf2lora.tasks.generation.settings import CHAT, GenerationSettings
from pf2lora.tasks.generation.task import Generation

TURNS = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]
SYSTEM = Message("system", "Be.")
HI, HO = Message("user", "Hi?"), Message("assistant", "Ho.")
ARGUMENTS = {"city": "Bern"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
ASKED = {**CALL, "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}  # OpenAI's: a text
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALLING = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [ASKED]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "wet"},
    {"role": "assistant", "content": "Yes."},
]
CALLED = (
    Message("user", "Rain?"),
    Message("assistant", "", {"tool_calls": [CALL]}),
    Message("tool", "wet", {"tool_call_id": "c1", "name": "weather"}),
    Message("assistant", "Yes."),
)


def read(values: dict[str, Any], notes: list[str] | None = None) -> Any:
    (row,) = GenerationSettings().rows([Record(values, "a.jsonl", "line 3")], None, notes)
    return row


def chat(template: str | None) -> Generation:
    return Generation(
        chat_tokenizer(template), GenerationSettings(max_length=256, max_new_tokens=8), chat=True
    )


def learned(generation: Generation, row: Conversation) -> list[str]:
    written = generation.encoder.chat.written(row)
    return [written.text[slice(*turn)] for turn in written.turns]


FIELDS: dict[str, tuple[dict[str, Any], Conversation]] = {
    "a system beside turns": (
        {
            "system": "Be.",
            "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}],
        },
        Conversation((SYSTEM, HI, HO)),
    ),
    "the same system twice": (
        {"system": "Be.", "messages": [{"role": "system", "content": "Be."}, *TURNS]},
        Conversation((SYSTEM, HI, HO)),
    ),
    "two systems": (
        {"system": "Be.", "messages": [{"role": "system", "content": "So."}, *TURNS]},
        Conversation((Message("system", "Be.\n\nSo."), HI, HO)),
    ),
    "calls of tools": ({"messages": CALLING, "tools": [TOOL]}, Conversation(CALLED, tools=(TOOL,))),
    "tools as a text": (
        {"messages": TURNS, "tools": json.dumps([TOOL])},
        Conversation((HI, HO), tools=(TOOL,)),
    ),
    "a thought": (
        {"messages": [TURNS[0], {**TURNS[1], "reasoning_content": "Hm."}]},
        Conversation((HI, Message("assistant", "Ho.", {"reasoning_content": "Hm."}))),
    ),
    "a weight": (
        {"messages": [TURNS[0], {**TURNS[1], "weight": 0}, *TURNS]},
        Conversation((HI, Message("assistant", "Ho.", learned=False), HI, HO)),
    ),
    "a last turn without weight": (
        {"messages": [*TURNS, TURNS[0], {**TURNS[1], "weight": 0}]},
        Conversation((HI, HO)),
    ),
    "history": (
        {"instruction": "Hi?", "input": "", "output": "Ho.", "history": [["A?", "B."]], "system": "Be."},
        Conversation((SYSTEM, Message("user", "A?"), Message("assistant", "B."), HI, HO)),
    ),
    "history as a text": (
        {"prompt": "Hi?", "completion": "Ho.", "history": '[["A?", "B."]]'},
        Conversation((Message("user", "A?"), Message("assistant", "B."), HI, HO)),
    ),
    "an empty history": ({"prompt": "Hi?", "completion": "Ho.", "history": []}, Conversation((HI, HO))),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_fields_are_read_and_written_again(kind: str) -> None:
    values, row = FIELDS[kind]
    notes: list[str] = []
    assert read(values, notes) == row and not notes
    again = GenerationSettings().to_record(row)
    assert read(json.loads(json.dumps(again))) == row
    question = GenerationSettings().questions([Record(values, "a", "line 1")], [CHAT])[0]
    assert isinstance(question, Conversation)
    if kind != "a last turn without weight":
        assert (question.messages, question.tools) == (row.asked, row.tools)


def test_fields_that_nothing_reads_are_told_once(tmp_path: Path) -> None:
    odd = [{**TURNS[0], "id": 7, "mood": None}, {**TURNS[1], "refusal": "no"}]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"messages": odd}) + "\n") * 5)
    notes: list[str] = []
    clients: list[Client[Any]] = loading.load_clients([tmp_path], task="generation", notes=notes)
    assert len(clients) == 2
    assert [line for line in notes if "fields" in line] == [
        "fields of turns that are not read: 'id', 'refusal'"
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"messages": [{**TURNS[1], "weight": 0.5}]}, "turn 1: 'weight' is 0.5; it is 0"),
        ({"messages": [TURNS[0], {**TURNS[1], "weight": 0}]}, "to learn from: all have 'weight' 0"),
        ({"messages": [TURNS[0], {**TURNS[1], "thinking": 7}]}, "turn 2: the thought is 7, not a text"),
        (
            {"messages": [TURNS[0], {**TURNS[1], "tool_calls": "x"}]},
            "'tool_calls' holds 'x', not a list of calls",
        ),
        ({"messages": TURNS, "tools": "x"}, "column 'tools' holds 'x', not a list of descriptions of tools"),
        ({"prompt": "a", "completion": "b", "history": [["A?"]]}, r"holds \['A\?'\], not a list of pairs"),
        (
            {"messages": [TURNS[0], {"role": "assistant", "content": None}]},
            "turn 2: the assistant says nothing",
        ),
    ],
)
def test_bad_fields_name_their_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read(values)
    assert str(error.value).startswith("a.jsonl, line 3: ") and "\n" not in str(error.value)


def test_a_turn_without_weight_is_read_and_not_learned() -> None:
    generation = chat(TEMPLATES["chatml"])
    row = FIELDS["a weight"][1]
    written = generation.encoder.chat.written(row)
    assert written.text.count("Ho.") == 2
    assert [(turn.start > written.text.index("Ho."), turn.stop) for turn in written.turns] == [
        (True, len(written.text))
    ]


def test_calls_and_tools_are_written_by_the_template() -> None:
    generation = chat(QWEN_3_THINKING)
    row = Conversation(CALLED, tools=(TOOL,))
    call, last = learned(generation, row)
    assert call == '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call><|im_end|>'
    assert last.endswith("Yes.<|im_end|>")
    text = generation.encoder.chat.written(row).text
    assert '<tools>[{"type": "function"' in text and "<|im_start|>tool\nwet" in text
    assert not generation.notes
    assert Conversation(CALLED[:2]).targets == ('{"name": "weather", "arguments": {"city": "Bern"}}',)


def test_a_template_without_tools_is_told() -> None:
    generation = chat(TEMPLATES["chatml"])
    call, _ = learned(generation, Conversation(CALLED, tools=(TOOL,)))
    assert call == '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>'
    assert sorted(generation.notes) == [
        "the chat template describes no tools: the descriptions of rows are left out",
        "the chat template writes no calls of tools: they stand as <tool_call> in what is said",
    ]


@pytest.mark.parametrize("template", [QWEN_3_THINKING, TEMPLATES["chatml"]], ids=["qwen-3", "chatml"])
def test_thoughts_are_learned(template: str) -> None:
    """Also where the template knows no field for them: as they are written in texts."""
    generation = chat(template)
    by_field = Conversation((HI, Message("assistant", "Ho.", {"reasoning_content": "Hm."})))
    in_text = Conversation((HI, Message("assistant", "<think>\nHm.\n</think>\n\nHo.")))
    assert learned(generation, by_field) == learned(generation, in_text)
    assert learned(generation, by_field) == ["<think>\nHm.\n</think>\n\nHo.<|im_end|>"]
    assert not generation.notes
