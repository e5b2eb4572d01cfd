"""Reading `result.json` (docs/result.md) and what its readers share: figures over seeds, and when they differ."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pf2lora.errors import UserError

FORMAT = 1
FILE = "result.json"
POINTS = ("served", "before_averaging")  # the two moments a score is taken
Point = Literal["served", "before_averaging"]


@dataclass(frozen=True)
class Estimate:
    """A figure over seeds: its mean and its sample deviation, which one seed alone does not have."""

    mean: float
    deviation: float | None
    count: int


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """The mean and sample deviation of the values that are defined; None where none is."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return None
    deviation = statistics.stdev(known) if len(known) > 1 else None
    return Estimate(statistics.fmean(known), deviation, len(known))


def within_spread(a: Estimate, b: Estimate) -> bool | None:
    """Whether two means differ by no more than their seeds do: |a − b| ≤ √(σ_a² + σ_b²).

    None where either has one seed only: then nobody can tell.
    """
    if a.deviation is None or b.deviation is None:
        return None
    # Rounding must not turn two equal means into different ones.
    return abs(a.mean - b.mean) <= math.hypot(a.deviation, b.deviation) + 1e-12


def score(
    result: dict[str, Any], method: str, point: Point, metric: str, what: str = "mean"
) -> Estimate | None:
    """A method's `mean`, `worst` or `spread` over clients, over its seeds; None where it has no such point."""
    runs = result["methods"][method]["runs"]
    return estimate(((run[point] or {}).get(metric) or {}).get(what) for run in runs)


def client_scores(result: dict[str, Any], method: str, point: Point, metric: str) -> list[Estimate | None]:
    """The same, client by client, in the order of `result["clients"]`."""
    clients = range(len(result["clients"]))
    tables = [((run[point] or {}).get(metric) or {}) for run in result["methods"][method]["runs"]]
    return [estimate(t["per_client"][k] if t else None for t in tables) for k in clients]


def load(path: Path) -> dict[str, Any]:
    """The checked result of a run folder, or of a `result.json` itself. Figures that are not finite become None."""
    file = path if path.is_file() else path / FILE
    if not path.exists():
        raise UserError(f"{path}: no such run folder")
    if not file.is_file():
        raise UserError(f"{path}: no {FILE} here (a run writes it when it ends)")
    try:
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{file}: not valid JSON at {place}: {error.msg}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    check(content, str(file))
    return content


def check(result: Any, where: str) -> None:
    """Raise a UserError that names the first place where `result` is not what docs/result.md describes."""
    top = _Node(result, where, "")
    top.expect(dict, "an object")
    if result.get("format") != FORMAT:
        raise UserError(
            f"{where}: format {result.get('format')!r} is unknown to this version of pf2lora (known: {FORMAT})"
        )
    for name in ("title", "created", "task", "metric", "base_model"):
        top.get(name).expect(str, "a text")
    for name in ("config", "versions", "machine"):
        top.get(name).expect(dict, "an object")
    for metric in top.get("metrics").entries():
        metric.get("label").expect(str, "a text")
        metric.get("higher_is_better").expect(bool, "true or false")
        metric.get("percent").expect(bool, "true or false")
    if result["metric"] not in result["metrics"]:
        top.get("metric").fail(f"one of {', '.join(result['metrics'])}")
    for client in top.get("clients").items(at_least=1):
        client.get("name").expect(str, "a text")
        for size in ("train", "test"):
            client.get(size).number()
        for label in client.get("labels").entries():
            label.number()
    if not top.get("methods").entries():
        top.get("methods").fail("an object with at least one method")
    for method in top.get("methods").entries():
        method.get("label").expect(str, "a text")
        for run in method.get("runs").items(at_least=1):
            _check_run(run, result["metric"], len(result["clients"]))
    for example in top.get("examples").items():
        _check_example(example)


def _check_run(run: _Node, headline: str, clients: int) -> None:
    """One seed of one method."""
    run.get("seed").expect(int, "a whole number")
    run.get("served").get(headline)
    for point in POINTS:
        for table in run.get(point).entries(nullable=point == "before_averaging"):
            table.get("per_client").numbers(clients)
            for what in ("mean", "worst", "spread"):
                table.get(what).number(nullable=True)
    layers = len(run.get("layers").items())
    for entry in run.get("rounds").items():
        entry.get("round").expect(int, "a whole number")
        entry.get("train_loss").numbers(clients, nullable=True)
        for point in POINTS:
            for values in entry.get(point).entries(nullable=True):
                values.numbers(clients)
        for share in ("client_share", "second_order_share"):
            entry.get(share).numbers(clients, nullable=True)
        if entry.get("ranks").value is not None:
            for ranks in entry.get("ranks").items(exactly=clients):
                ranks.numbers(layers)
    for part in ("common", "client", "head"):
        run.get("parameters").get(part).number()
    for part in ("adapter", "head"):
        run.get("bytes_per_round").get(part).number()
    for cost in ("flops_per_round", "seconds", "peak_memory_bytes"):
        run.get(cost).number(nullable=True)
    for warning in run.get("warnings").items():
        warning.expect(str, "a text")


def _check_example(example: _Node) -> None:
    """One prompt with what each method made of it."""
    for name in ("client", "prompt"):
        example.get(name).expect(str, "a text")
    for text in example.get("references").items() + example.get("outputs").entries():
        text.expect(str, "a text")


@dataclass(frozen=True)
class _Node:
    """A value inside the file, with the place to name when it is wrong."""

    value: Any
    file: str
    place: str

    def fail(self, right: str) -> None:
        shown = json.dumps(self.value, ensure_ascii=False, default=str)
        found = shown if len(shown) <= 40 else shown[:39] + "…"
        raise UserError(f"{self.file}: {self.place or 'the file'} must be {right}, not {found}")

    def expect(self, kind: type, right: str) -> None:
        boolean_as_number = kind is int and isinstance(self.value, bool)
        if not isinstance(self.value, kind) or boolean_as_number:
            self.fail(right)

    def get(self, name: str) -> _Node:
        self.expect(dict, "an object")
        place = f"{self.place}.{name}" if self.place else name
        if name not in self.value:
            raise UserError(f"{self.file}: {place} is missing (docs/result.md describes the file)")
        return _Node(self.value[name], self.file, place)

    def entries(self, nullable: bool = False) -> list[_Node]:
        if nullable and self.value is None:
            return []
        self.expect(dict, "an object")
        return [self.get(name) for name in self.value]

    def items(self, at_least: int = 0, exactly: int | None = None) -> list[_Node]:
        self.expect(list, "a list")
        if len(self.value) < at_least:
            self.fail(f"a list of at least {at_least}")
        if exactly is not None and len(self.value) != exactly:
            self.fail(f"a list of {exactly}")
        return [_Node(item, self.file, f"{self.place}[{i}]") for i, item in enumerate(self.value)]

    def number(self, nullable: bool = False) -> None:
        if not (nullable and self.value is None) and not _is_number(self.value):
            self.fail("a number")

    def numbers(self, count: int, nullable: bool = False) -> None:
        """A list of `count` numbers, some of which may be null."""
        if nullable and self.value is None:
            return
        fits = isinstance(self.value, list) and len(self.value) == count
        if not fits or not all(v is None or _is_number(v) for v in self.value):
            self.fail(f"a list of {count} numbers (or null)")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
