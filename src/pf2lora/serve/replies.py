"""Texts as OpenAI's API hands them over: whole, or piece by piece as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pf2lora.serve.errors import ApiError
from pf2lora.serve.writing import Piece, TextJob


class Reply:
    """The reply to one request; a completion's is here, a chat's below."""

    prefix, whole_object, part_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, jobs: Sequence[TextJob], n: int = 1) -> None:
        self.jobs, self.n = jobs, n
        self.common = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole_choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def part_choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def first(self) -> list[dict[str, Any]]:
        """What comes before a stream's first text."""
        return []

    def usage(self) -> dict[str, int]:
        asked = sum(len(job.prompt) for job in self.jobs[:: self.n])  # one for all of its texts
        written = sum(job.written for job in self.jobs)
        return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}

    async def whole(self, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        texts, reasons = ["" for _ in self.jobs], ["" for _ in self.jobs]
        async for piece in pieces:
            texts[piece.index] += piece.text
            reasons[piece.index] = piece.finish or ""
        choices = [
            {"index": i, "logprobs": None, "finish_reason": reason} | self.whole_choice(text)
            for i, (text, reason) in enumerate(zip(texts, reasons))
        ]
        return {"object": self.whole_object, "choices": choices, "usage": self.usage()} | self.common

    async def events(self, pieces: AsyncIterator[Piece], *, with_usage: bool) -> AsyncIterator[str]:
        """The lines of a stream. What goes wrong on the way can no longer be a status: it is an event."""

        def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
            return event({"object": self.part_object, "choices": choices} | self.common | more)

        beside: dict[str, Any] = {"usage": None} if with_usage else {}
        try:
            for choice in self.first():
                yield chunk([choice], **beside)
            async for piece in pieces:
                choice = {"index": piece.index, "logprobs": None, "finish_reason": piece.finish}
                yield chunk([choice | self.part_choice(piece.text)], **beside)
        except ApiError as error:
            yield event(error.body())
            return
        if with_usage:
            yield chunk([], usage=self.usage())
        yield "data: [DONE]\n\n"


class ChatReply(Reply):
    prefix, whole_object, part_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole_choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def part_choice(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def first(self) -> list[dict[str, Any]]:
        said = {"role": "assistant", "content": ""}
        rest = {"delta": said, "logprobs": None, "finish_reason": None}
        return [{"index": job.index} | rest for job in self.jobs]


def event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values, ensure_ascii=False)}\n\n"
