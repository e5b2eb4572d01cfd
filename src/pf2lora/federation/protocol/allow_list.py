"""What a message may hold. It is decoded and checked here once, at either end; what is not declared is refused.

A site's own allow-list decides what leaves it, whatever the server asks for: the site's installed code and its own
policy file (`local/privacy.json`) apply it to the whole message just before it is sent. The server applies the same
list to what it gets, and a site a list of requests to what the server sends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from reprlib import repr as short
from typing import Any

from pf2lora.core.method import Method
from pf2lora.federation.protocol import masked_fields
from pf2lora.federation.protocol.messages import (
    LONGEST_HEADER,
    Malformed,
    Message,
    decode,
    describe,
    layout_from,
    short_name,
)
from pf2lora.federation.protocol.policy import LIMITS
from pf2lora.federation.protocol.problems import PROBLEMS
from pf2lora.federation.protocol.wire import Wire

DIGEST, VERSION = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9A-Za-z.+-]{1,40}")
METRIC = re.compile(r"[A-Za-z0-9_@. -]{1,40}")
METRICS = 32  # scores that a task of another package may have
BYTES, BESIDE = (
    8,
    4,
)  # of a number, where it is masked; numbers for one of x: a control variate, say, goes beside it
MOST = 2**53  # beyond it a float no longer tells two counts apart

Check = Callable[[Any], bool]
Checks = Mapping[str, Check]


@dataclass(frozen=True)
class Declared:
    """The fields of one kind of message, each with the check of its value, and whether an adapter may be there."""

    required: Checks
    optional: Checks = field(default_factory=dict)
    tensors: bool = False


def is_count(value: Any) -> bool:
    """A whole number from 0 on."""
    return type(value) is int and 0 <= value < MOST


def is_positive(value: Any) -> bool:
    """A whole number from 1 on."""
    return is_count(value) and value > 0


def is_number(value: Any) -> bool:
    """A number that others can be added to: finite, and none so large that their squares are not."""
    return type(value) in (int, float) and abs(value) < MOST


def is_true(value: Any) -> bool:
    """A flag; one that is not set is not sent."""
    return value is True


def is_validation(value: Any) -> bool:
    """A count of validation rows and the sum of the served model's loss over them, perhaps that of the common adapter
    alone, and nothing else."""
    if not isinstance(value, dict) or set(value) - {"common"} != {"rows", "loss"}:
        return False
    return is_positive(value["rows"]) and is_number(value["loss"]) and is_number(value.get("common", 0))


def is_problem(value: Any) -> bool:
    """One of the fixed codes."""
    return isinstance(value, str) and value in PROBLEMS


def is_limit(value: Any) -> bool:
    """One of a policy's limits."""
    return isinstance(value, str) and value in LIMITS


def matches(pattern: re.Pattern[str]) -> Check:
    """The check for a text that is all of `pattern`."""
    return lambda value: isinstance(value, str) and bool(pattern.fullmatch(value))


ROUND: Checks = {"round": is_positive}
TAKE_BACK: Checks = {"take_back": is_positive}  # the round whose update was refused
MEASURE_SERVED: Checks = {"measure_served": is_true, **TAKE_BACK}
REQUESTS = {
    "hello": Declared(ROUND),
    "train": Declared(
        ROUND,
        {
            **MEASURE_SERVED,
            "measure_before": is_true,
            "shares": masked_fields.is_sealed,
            "change_of": is_count,  # the checksum of what the tensors are a change of
        },
        tensors=True,
    ),
    "measure": Declared(ROUND, MEASURE_SERVED, tensors=True),
    "finish": Declared(ROUND, TAKE_BACK, tensors=True),
    **{kind: Declared({**ROUND, **fields}) for kind, fields in masked_fields.REQUESTS.items()},
}
"""What the server sends. Whether its tensors are the common adapter is checked in the site's session."""

PROBLEM = Declared({**ROUND, "code": is_problem}, {"limit": is_limit, "allows": is_number})
ANSWERS: tuple[str, ...] = ("hello", "update", "scores", "problem", *masked_fields.ANSWERS)
"""The kinds of what a site sends."""


def read_request(data: object) -> Message:
    """The server's message in `data`, decoded and checked; `Malformed` if it is none."""
    message = decode(data)
    check_declared(message, REQUESTS)
    return message


class AllowList:
    """What a site sends: what the method declares to leave in a round, by names, shapes and precision, counts, sums of
    declared metrics, and sums of the validation loss.

    Without a `method` any possible description of an adapter may come in a hello, and no adapter. Without `metrics`
    a few of any name will do: the server does not know which those of another package's task are. In a private run
    (`wire`) an update and the steps of its round leave, and no figure that rows were counted or measured for. In a
    masked run an update is of whole numbers, and keys and shares of masks leave. What a message holds is bounded, and
    so is what it can be made of: the server writes down what sites told in every round.
    """

    def __init__(self, method: Method | None, metrics: tuple[str, ...] | None, wire: Wire) -> None:
        self.method, self.metrics, self.wire = method, metrics, wire
        self.entries = None if method is None else describe(method.layout)
        numbers = 0 if method is None else BESIDE * method.layout.size
        self.largest = LONGEST_HEADER + BYTES * numbers  # bytes of a whole message
        self.declared = self.answers()
        if wire.masked:
            own = masked_fields.ANSWERS.items()
            self.declared |= {kind: Declared({**ROUND, **fields}) for kind, fields in own}
            update = self.declared["update"]
            more = {**update.optional, **masked_fields.UPDATE}
            self.declared["update"] = replace(update, optional=more)

    def check(self, data: object, kinds: Collection[str] = ANSWERS) -> Message:
        """The message in `data`, which must be of one of `kinds` and as declared; else `Malformed`."""
        if isinstance(data, bytes) and len(data) > self.largest:
            raise Malformed(f"a message of {len(data)} bytes, of which there are {self.largest} at most")
        message = decode(data)
        check_declared(message, {kind: self.declared[kind] for kind in kinds if kind in self.declared})
        if message.tensors:  # the method "local" sends none
            if self.method is None:
                raise Malformed("an adapter before it was agreed what it looks like")
            self.wire.check_update(self.method, message.round, message.tensors)
        return message

    def answers(self) -> dict[str, Declared]:
        """The declared messages of a site, by kind."""
        digest, version = matches(DIGEST), matches(VERSION)
        hello: dict[str, Check] = {
            "model": digest,
            "labels": digest,
            "label_count": is_count,
            "layout": self.is_layout,
            "engine": version,
            "version": version,
        }
        if self.wire.private:
            return {
                "hello": Declared({**ROUND, **hello}),
                "update": Declared({**ROUND, "steps": is_positive}, tensors=True),
                "scores": Declared(ROUND),
                "problem": PROBLEM,
            }
        hello |= {"train_rows": is_positive, "test_rows": is_count}
        trained: Checks = {"steps": is_positive, "loss": is_number}
        measured: Checks = {"second_order": is_number, "served": self.is_scores, "before": self.is_scores}
        validated: Checks = {"validation": is_validation}
        return {
            "hello": Declared({**ROUND, **hello}),
            "update": Declared({**ROUND, **trained}, {**measured, **validated}, tensors=True),
            "scores": Declared(
                {**ROUND, "served": self.is_scores},
                {**validated, "before": self.is_scores, "deploy": self.is_scores},
            ),
            "problem": PROBLEM,
        }

    def is_layout(self, value: Any) -> bool:
        """This adapter's own description; where none is known yet, a possible one."""
        if self.entries is None:
            layout_from(value)  # its Malformed says more than False
            return True
        return bool(value == self.entries)

    def is_scores(self, value: Any) -> bool:
        """A count of rows, and sums over them for the declared metrics."""
        return (
            isinstance(value, dict)
            and len(value) <= METRICS + 1
            and is_count(value.get("rows"))
            and all(self.is_metric(name) and is_number(v) for name, v in value.items() if name != "rows")
        )

    def is_metric(self, name: str) -> bool:
        """A declared metric's name; where none are declared, a short plain one."""
        return bool(METRIC.fullmatch(name)) if self.metrics is None else name in self.metrics


def check_declared(message: Message, declared: Mapping[str, Declared]) -> None:
    """`Malformed` unless the message's kind is one of `declared` and its fields are what that kind has."""
    fields = message.fields
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in declared:
        raise Malformed(f"a message of kind {short(kind)} instead of {' or '.join(declared)}")
    known = declared[kind]
    for name in known.required:
        if name not in fields:
            raise Malformed(f"the field {name!r} of a {kind!r} message is missing")
    checks = {**known.required, **known.optional}
    for name, value in fields.items():
        if name != "kind" and not (name in checks and checks[name](value)):
            raise Malformed(
                f"the field {short(name)} of a {kind!r} message is not declared or not as declared"
            )
    if message.tensors and not known.tensors:
        first = short_name(min(message.tensors))
        raise Malformed(f"a {kind!r} message carries no tensors, this one has {first}")
