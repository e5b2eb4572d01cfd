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
    "n": (1,),
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

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
Stops = Annotated[list[NonEmpty], Field(max_length=4)]
MOST_AT_ONCE = 64  # prompts of a request
NAMED = (
    "role",
    "content",
    "type",
    "text",
    "name",
    "include_usage",
)  # inside of fields; pydantic also names types
EITHER = {  # what may be of several kinds, of which pydantic names one
    "prompt": f"it must be a text, or a list of up to {MOST_AT_ONCE} texts (not tokens)",
    "stop": "it must be a text, or a list of up to 4 texts",
    "content": "it must be a text, or a list of parts of type text",
    "inputs": "it must be a list of one or more texts, or objects with the columns of the run's data",
}


class Body(BaseModel):
    """What every request has: a model's name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: NonEmpty


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Sampled(Body):
    """How a text is written, and how it is handed over."""

    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)] | None = None
    stop: NonEmpty | Stops = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""  # OpenAI's, for its own statistics: nothing here asks for it

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


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class MessageBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str = ""

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
    """A request's body; an ApiError says what is wrong with it. A field that is null is as good as absent."""
    try:
        found = parse_json(data, refuse)
    except BadJSON as error:
        raise bad_request(f"the body is broken JSON{error.place}: {error}") from None
    if not isinstance(found, dict):
        raise bad_request(f"the body must be a JSON object, not {shown(found)}")
    fields = {name: value for name, value in found.items() if value is not None}
    for name, harmless in UNSUPPORTED.items():
        if name in fields and (value := fields.pop(name)) not in harmless:
            only = json.dumps(harmless[0])
            raise bad_request(f"{name} is {shown(value)}: only {only} is supported", name, "unsupported")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise told(error, kind) from None


def told(error: ValidationError, kind: type[Body]) -> Exception:
    """The first thing that is wrong."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted(kind.model_fields))
        return bad_request(f"{shown(field)} is no parameter that this server knows ({known})", field)
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return bad_request(f"{field} is missing", field)
    named = [str(part) for part in first["loc"] if isinstance(part, int) or part in NAMED or part == field]
    words = [part for part in named if not part.isdigit()]
    right = EITHER.get(words[-1], first["msg"]) if words else first["msg"]
    return bad_request(f"{'.'.join(named)} is {shown(first['input'])}: {right}", field)
