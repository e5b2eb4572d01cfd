"""The site's allow-list: a message leaves only if every part of it is declared. It fails closed.

The server may ask for anything; what goes out is decided here, by the site's own installed code and its own policy
file (`local/privacy.json`), on the whole message, just before it is sent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from pf2lora.core.layout import Layout
from pf2lora.federation.protocol import messages

PROBLEMS = {
    "disk-full": "the disk of its state folder is full",
    "unwritable": "its state folder cannot be written",
    "busy": "its state folder is in use by another process",
    "state": "its saved state cannot be used",
    "loss": "its loss stopped being a number; a smaller lr or client_lr usually helps",
    "data": "its data or model could not be loaded",
    "labels": "its data has labels that the federation does not name",
    "refused": "its own allow-list refused the message: nothing was sent",
    "failed": "it failed",
}
"""All that a site says about its own troubles; the details stay in its own log."""

DIGEST, VERSION = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9A-Za-z.+-]{1,40}")
METRIC = re.compile(r"[A-Za-z0-9_@. -]{1,40}")


class Refused(Exception):
    """A message that must not leave the site."""


class AllowList:
    """Knows the names, shapes and dtype of the common adapter and the declared metrics.

    A site checks what it sends, the server what it gets; the server does not know the metrics' names (None).
    """

    def __init__(self, layout: Layout, metrics: tuple[str, ...] | None, dtype: torch.dtype) -> None:
        self.layout, self.metrics, self.dtype = layout, metrics, dtype
        self.entries = messages.describe(layout)

    def check(self, data: object) -> None:
        """Raise `Refused` unless `data` is a declared message."""
        if not isinstance(data, bytes):
            raise Refused(f"a message is bytes, not {type(data).__name__}")
        try:
            fields, tensors = messages.decode(data)
        except messages.Malformed as error:
            raise Refused(f"no message of pf2lora: {error}") from None
        checks = {"hello": HELLO, "update": UPDATE, "scores": SCORES, "problem": PROBLEM}
        declared = checks.get(str(fields.get("kind")))
        if declared is None:
            raise Refused(f"a message of kind {fields.get('kind')!r} is not declared")
        for name, value in fields.items():
            if name != "kind" and (name not in declared or not declared[name](self, value)):
                raise Refused(
                    f"the field {name!r} of a {fields['kind']!r} message is not declared or not as declared"
                )
        if fields["kind"] == "update" and (tensors or self.layout.shared):
            self.check_adapter(tensors)
        elif tensors:
            raise Refused(
                f"a {fields['kind']!r} message carries no tensors, this one has {sorted(tensors)[0]!r}"
            )

    def check_adapter(self, tensors: dict[str, torch.Tensor]) -> None:
        if not tensors:  # the method "local" sends nothing
            return
        try:
            messages.check_tensors(self.layout, tensors, self.dtype)
        except messages.Malformed as error:
            raise Refused(str(error)) from None

    def is_scores(self, value: Any) -> bool:
        """A count of rows, and sums over them for the declared metrics."""
        return (
            isinstance(value, dict)
            and is_count(value.get("rows"))
            and all(self.is_metric(name) and is_number(v) for name, v in value.items() if name != "rows")
        )

    def is_metric(self, name: str) -> bool:
        return bool(METRIC.fullmatch(name)) if self.metrics is None else name in self.metrics


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def matches(pattern: re.Pattern[str]) -> Callable[[AllowList, Any], bool]:
    return lambda allow_list, value: isinstance(value, str) and bool(pattern.fullmatch(value))


Declared = dict[str, Callable[[AllowList, Any], bool]]

ROUND: Declared = {"round": lambda allow_list, v: is_count(v)}
HELLO: Declared = ROUND | {
    "model": matches(DIGEST),
    "labels": matches(DIGEST),
    "label_count": lambda allow_list, v: is_count(v),
    "train_rows": lambda allow_list, v: is_count(v),
    "test_rows": lambda allow_list, v: is_count(v),
    "layout": lambda allow_list, v: v == allow_list.entries,
    "engine": matches(VERSION),
    "version": matches(VERSION),
}
UPDATE: Declared = ROUND | {
    "steps": lambda allow_list, v: is_count(v),
    "loss": lambda allow_list, v: is_number(v),
    "second_order": lambda allow_list, v: is_number(v),
    "served": lambda allow_list, v: allow_list.is_scores(v),
    "before": lambda allow_list, v: allow_list.is_scores(v),
}
SCORES: Declared = ROUND | {"served": lambda allow_list, v: allow_list.is_scores(v)}
PROBLEM: Declared = ROUND | {"code": lambda allow_list, v: v in PROBLEMS}
