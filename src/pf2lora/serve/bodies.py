"""What a request may ask for: its fields, checked. What is not supported is refused, unless it changes nothing."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pf2lora.errors import shown
from pf2lora.parsing import LARGEST_INTEGER, BadJSON, parse_json, refuse
from pf2lora.serve.errors import bad_request
from pf2lora.tasks.generation.conversations import ROLES, Message

UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # by OpenAI's names; with a value that changes nothing it is fine
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
}
IGNORED = {  # by OpenAI's names; they change no text
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
}

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
Stops = Annotated[list[NonEmpty], Field(max_length=4)]
MOST_AT_ONCE = 64  # prompts of a request, or texts for one of them
NAMED = (
    "role",
    "content",
    "type",
    "text",
    "tool_calls",
    "function_call",
    "include_usage",
)  # inside of fields; pydantic also names types
EITHER = {  # what may be of several kinds, of which pydantic names one
    "prompt": f"it must be a text, or a list of up to {MOST_AT_ONCE} texts (not tokens)",
    "stop": "it must be a text, or a list of up to 4 texts",
    "content": "it must be a text, or a list of parts of type text",
    "tool_calls": "there are no tools to be called",
    "function_call": "there are no functions to be called",
    "inputs": "it must be a list of one or more texts, or objects with the columns of the run's data",
}


class Body(BaseModel):
    """What every request has: a model's name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: NonEmpty

    @classmethod
    def fields_of(cls, found: dict[str, Any]) -> dict[str, Any]:
        """The fields that were sent; what is null is as good as absent."""
        return {name: value for name, value in found.items() if value is not None}


class Part(BaseModel):
    """A part of a field. As libraries send back what they got, with fields of their own: those are not looked at."""

    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(Part):
    include_usage: bool = False


class Sampled(Body):
    """How a text is written, and how it is handed over."""

    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_AT_ONCE)] = 1  # texts for each prompt
    stop: NonEmpty | Stops = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @classmethod
    def fields_of(cls, found: dict[str, Any]) -> dict[str, Any]:
        """Without what is null in fields of fields, too, and what changes nothing."""
        fields: dict[str, Any] = without_nulls({k: v for k, v in found.items() if k not in IGNORED})
        for name, harmless in UNSUPPORTED.items():
            if name in fields and not any(same(value := fields[name], each) for each in harmless):
                only = json.dumps(harmless[0])
                raise bad_request(f"{name} is {shown(value)}: only {only} is supported", name, "unsupported")
        return {name: value for name, value in fields.items() if name not in UNSUPPORTED}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens


class CompletionBody(Sampled):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MOST_AT_ONCE)]

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class TextPart(Part):
    type: Literal["text"]
    text: str


class MessageBody(Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    tool_calls: Annotated[list[Any], Field(max_length=0)] = []
    function_call: None = None

    def plain(self) -> Message:
        """As the turn of a conversation; `developer` is OpenAI's newer word for `system`."""
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        return Message(ROLES[self.role], text)


class ChatBody(Sampled):
    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class PredictBody(Body):
    inputs: Annotated[list[str | dict[str, Any]], Field(min_length=1)]


B = TypeVar("B", bound=Body)


def parsed(kind: type[B], data: bytes) -> B:
    """A request's body; an ApiError says what is wrong with it."""
    try:
        found = parse_json(data, refuse)
    except BadJSON as error:
        raise bad_request(f"the body is broken JSON{error.place}: {error}") from None
    if not isinstance(found, dict):
        raise bad_request(f"the body must be a JSON object, not {shown(found)}")
    fields = kind.fields_of(found)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise told(error, kind) from None


def without_nulls(value: Any) -> Any:
    """A value without the keys, at any depth, that hold nothing: libraries send those that they do not use."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def same(value: Any, other: Any) -> bool:
    """Equal as JSON has it, where true is no 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def told(error: ValidationError, kind: type[Body]) -> Exception:
    """The first thing that is wrong."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted(kind.model_fields))
        return bad_request(f"{shown(field)} is no parameter that this server knows ({known})", field)
    named = [str(part) for part in first["loc"] if isinstance(part, int) or part in NAMED or part == field]
    if first["type"] == "missing":
        return bad_request(f"{'.'.join(named)} is missing", field)
    words = [part for part in named if not part.isdigit()]
    right = EITHER.get(words[-1], first["msg"]) if words else first["msg"]
    return bad_request(f"{'.'.join(named)} is {shown(first['input'])}: {right}", field)
