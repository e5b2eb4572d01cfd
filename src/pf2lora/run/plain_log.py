"""What a run says where there is no terminal: a line now and then, or every event as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any, TextIO

from pf2lora.errors import one_line
from pf2lora.run.events import (
    Event,
    MethodEnded,
    MethodStarted,
    Note,
    Progress,
    RoundEnded,
    RunEnded,
    RunStarted,
)
from pf2lora.run.screen import finished_line
from pf2lora.run.status import Status, left

LINE_EVERY = 15.0  # seconds between plain lines
OBJECT_EVERY = 5.0  # and between a log's events of progress


def to_stderr(line: str) -> None:
    print(one_line(line), file=sys.stderr, flush=True)


def json_line(event: str, values: Mapping[str, Any]) -> str:
    """An event as a log's line: its name, the time, and its values."""
    said = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
    return json.dumps(said | dict(values), ensure_ascii=False)


class Lines:
    """Listens, and says where the run stands in a line, at most every fifteen seconds, on standard error; notes as
    they come."""

    def __init__(
        self, on_note: Callable[[str], None] = to_stderr, clock: Callable[[], float] = time.monotonic
    ):
        self.status, self.on_note = Status(clock), on_note
        self.last = clock()

    def __call__(self, event: Event) -> None:
        self.status.take(event)
        now = self.status.clock()
        if isinstance(event, Note):
            self.on_note(event.line)
        elif isinstance(event, RunStarted):
            self.last = now
        elif isinstance(event, MethodEnded):
            ended = self.status.finished[-1]
            if ended.seconds >= LINE_EVERY and not ended.failed:
                self.last = now
                to_stderr(finished_line(ended))
        elif isinstance(event, Progress) and now - self.last >= LINE_EVERY:
            self.last = now
            to_stderr(self.line())

    def line(self) -> str:
        """`PF2LoRA, method 2 of 4: round 12 of 20, 14.2 steps/s, loss 0.412, …, 1 min 02 s left (of all: …)`."""
        now, parts = self.status, []
        parts += [now.where, now.rate]
        if now.loss is not None:
            parts.append(f"loss {now.loss:.3f}")
        if now.scores is not None:
            parts.append(
                f"{now.scores.text} after round {now.scores.round} (worst client: {now.scores.worst_text})"
            )
        parts.append(left(now.seconds_left))
        if now.run is not None and len(now.run.methods) > 1 and now.seconds_left_of_all is not None:
            parts.append(f"of all methods {left(now.seconds_left_of_all)}")
        return f"{now.which}: {', '.join(filter(None, parts))}"


class JsonLog:
    """Listens, and writes an object for every event in a line of its own (docs/first-run.md); of progress one every
    five seconds."""

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self.status = file or sys.stdout, Status(clock)
        self.last = clock()

    def __call__(self, event: Event) -> None:
        self.status.take(event)
        if isinstance(event, Progress):
            now = self.status.clock()
            if now - self.last < OBJECT_EVERY:
                return
            self.last = now
        print(json_line(event.name, self.values(event)), file=self.file, flush=True)

    def values(self, event: Event) -> dict[str, Any]:
        """An event's own values, as JSON has them."""
        now = self.status
        if isinstance(event, Progress):
            return {
                "method": event.method,
                "round": event.round,
                "evaluating": event.evaluating,
                "share": round(now.share, 4),
                "share_of_all": round(now.share_of_all, 4),
                "steps_per_second": rounded(now.steps_per_second),
                "seconds_left": rounded(now.seconds_left),
                "seconds_left_of_all": rounded(now.seconds_left_of_all),
            }
        if isinstance(event, RoundEnded):
            record = {key: value for key, value in asdict(event.record).items() if key != "ranks"}
            return {"method": event.method, "seed": event.seed} | record
        if isinstance(event, RunEnded):
            return ended(event)
        if isinstance(event, RunStarted):
            return {
                "methods": dict(event.methods),
                "clients": list(event.clients),
                "rounds": event.rounds,
                "seeds": event.seeds,
                "base_model": event.base_model,
                "device": event.device,
                "metrics": list(event.metrics),
            }
        if isinstance(event, MethodStarted | MethodEnded | Note):
            return {f.name: getattr(event, f.name) for f in fields(event)}
        return {}


def ended(event: RunEnded) -> dict[str, Any]:
    """The headline of each method, at the point by which methods are compared."""
    result = event.result
    scores = {}
    for name, method in result.methods.items():
        found = result.estimate(name, result.point, result.metric)
        worst = result.estimate(name, result.point, result.metric, "worst")
        scores[name] = {
            "label": method.label,
            "failed": method.failed,
            "mean": found and found.mean,
            "worst": worst and worst.mean,
        }
    return {"metric": result.metric, "point": result.point, "methods": scores}


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
