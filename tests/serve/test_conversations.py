"""Conversations of several turns, as OpenAI's client library keeps and sends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import GREEDY, Served, serving


@pytest.fixture(scope="module")
def served(generation_run: Path) -> Iterator[Served]:
    with serving(generation_run) as running:
        yield running


def answer(served: Served, *messages: Any) -> str:
    found = served.client().chat.completions.create(model="north", messages=messages, **GREEDY)
    return found.choices[0].message.content or ""


def test_what_was_answered_is_sent_back_in_every_way(served: Served) -> None:
    """As the library's object, with its fields that are null; and as users write it themselves."""
    asked = {"role": "user", "content": "soup"}
    chat = served.client().chat.completions
    said = chat.create(model="north", messages=[asked], **GREEDY).choices[0].message  # type: ignore[list-item]
    again = {"role": "user", "content": [{"type": "text", "text": "br"}, {"type": "text", "text": "ead"}]}
    plain = answer(served, asked, {"role": "assistant", "content": said.content}, again)
    nothing = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "annotations": None}
    assert set(nothing) < set(said.model_dump())
    sent: list[Any] = [
        said,
        said.model_dump(),
        said.to_dict(),
        {"role": "assistant", "content": said.content} | nothing,
        {"role": "assistant", "content": said.content, "tool_calls": [], "annotations": [], "id": "msg_1"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": said.content, "annotations": [], "audio": None}],
        },
    ]
    for message in sent:
        assert answer(served, asked, message, again) == plain
    asked_by_name = asked | {"name": "me"}
    assert answer(served, asked_by_name, said, again | {"name": None}) == plain


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "content": None, "refusal": None}, "messages.1.content is missing"),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
            "messages.1.tool_calls is [{'id': '1'}]: there are no tools to be called",
        ),
        (
            {"role": "assistant", "content": "x", "function_call": {"name": "f"}},
            "messages.1.function_call is {'name': 'f'}: there are no functions to be called",
        ),
        ({"role": "assistant", "content": [None]}, "messages.1.content is [None]: it must be a text, or"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            "or a list of parts of type text",
        ),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages.1.role is 'tool'"),
        (None, "messages.1 is None"),
    ],
)
def test_what_cannot_be_taken_is_one_line(served: Served, message: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        answer(served, {"role": "user", "content": "soup"}, message, {"role": "user", "content": "bread"})
    assert isinstance(error.value.body, dict)
    told = error.value.body["message"]
    assert words in told and "\n" not in told and error.value.param == "messages", told
