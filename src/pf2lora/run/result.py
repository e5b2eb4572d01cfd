"""What came out of a run: built in one place, written and read as `result.json` (docs/result.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pf2lora.errors import UserError, check_path, reading, unknown
from pf2lora.parsing import read_json
from pf2lora.run.decode import decode
from pf2lora.run.differences import Resampled
from pf2lora.run.estimates import Estimate, estimate
from pf2lora.run.privacy import PrivacySpent
from pf2lora.tasks.settings import Metric

FORMAT = 3
FILE = "result.json"
Point = Literal["served", "before_averaging", "deploy"]
ROUND_POINTS: tuple[Point, ...] = ("served", "before_averaging")  # the moments of a round that are measured
POINTS: tuple[Point, ...] = (*ROUND_POINTS, "deploy")  # and what a client takes in the end

Numbers = list[float | None]
"""A number per client; None where it was not taken or is undefined."""


@dataclass(frozen=True)
class ClientInfo:
    """A client: its name, its rows, and its training rows per label (or topic, category, …)."""

    name: str
    train: int
    test: int
    labels: dict[str, int]
    validation: int = 0


@dataclass(frozen=True)
class OverClients:
    """A metric of every client, with its mean, its worst client and its spread (population deviation).

    The three are None where a client's score is not a finite number: such a client does not drop out of a mean.
    """

    per_client: Numbers
    mean: float | None
    worst: float | None
    spread: float | None


@dataclass(frozen=True)
class RoundRecord:
    """One round. Scores are by metric and client, None in rounds without evaluation; `train_loss` is None where a
    client did not take part or was left out; `ranks` are client × layer."""

    round: int
    seconds: float
    train_loss: Numbers
    validation_loss: Numbers | None = None  # of the served models
    served: dict[str, Numbers] | None = None
    before_averaging: dict[str, Numbers] | None = None
    client_share: Numbers | None = None  # ‖s̃·D_kC_k‖ / ‖s·BA‖
    second_order_share: Numbers | None = None  # of the hypergradient's norm
    ranks: list[list[int]] | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # bad clients by name, with the reason


@dataclass(frozen=True)
class Choice:
    """What a client deploys: the candidate and its round, with its validation loss, and that of each candidate of the
    last round."""

    candidate: str
    round: int
    validation_loss: float | None
    last_round: dict[str, float | None]


@dataclass(frozen=True)
class Parameters:
    """Trainable parameters of a client, the mean over clients: a method may train fewer with some."""

    common: float
    client: float
    head: float


@dataclass(frozen=True)
class SentBytes:
    """What a client sends up in a round, the mean over rounds and clients."""

    adapter: float
    head: float

    @property
    def total(self) -> float:
        return self.adapter + self.head


@dataclass(frozen=True)
class SeedRun:
    """One method with one seed. `seconds` are the rounds' steps and exchange, `evaluation_seconds` all that validation
    and test rows are asked, with the steps that clients try alone at the end; memory and time are the method's own."""

    seed: int
    served: dict[str, OverClients]
    before_averaging: dict[str, OverClients] | None
    deploy: dict[str, OverClients] | None  # None: without validation rows there is nothing to choose by
    choices: list[Choice] | None  # by client
    candidates: dict[str, dict[str, OverClients]]  # what all clients would score with the same candidate
    rounds: list[RoundRecord]
    layers: list[str]
    parameters: Parameters
    bytes_per_round: SentBytes
    flops_per_round: float | None
    seconds: float
    evaluation_seconds: float | None
    peak_memory_bytes: int | None
    warnings: list[str] = field(default_factory=list)
    privacy: PrivacySpent | None = None  # what the common adapter costs each client, where that is bounded
    resampled: dict[str, Resampled] = field(default_factory=dict)  # by point, where the metric can be
    # By client: test rows by right label and by answer, of what it deploys; None: the task has no labels, or too many.
    confusion: list[list[list[int]] | None] | None = None
    resize_seconds: float | None = (
        None  # of `evaluation_seconds`, in which validation rows were asked before steps
    )
    common_round: int | None = None  # of the common adapter that is kept, where validation rows choose it
    settings: dict[str, Any] = field(default_factory=dict)  # the method's own, as set up: what `auto` came to

    def at(self, point: Point) -> dict[str, OverClients] | None:
        """The final scores at a point of the round, or of what clients deploy."""
        return {"served": self.served, "before_averaging": self.before_averaging, "deploy": self.deploy}[
            point
        ]

    @property
    def deployed_loss(self) -> float | None:
        """The mean validation loss of what clients deploy: what settings can be chosen by."""
        known = [c.validation_loss for c in self.choices or () if c.validation_loss is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class MethodResult:
    """A method's runs, one per seed; where it `failed`, why, and the runs of the seeds that ended before."""

    label: str
    runs: list[SeedRun]
    failed: str | None = None


@dataclass(frozen=True)
class ExampleRecord:
    """A question or prompt of a client with what each method answered."""

    client: str
    prompt: str
    references: list[str]
    outputs: dict[str, str]


@dataclass(frozen=True)
class Baseline:
    """What no training gives, by metric: the model at round 0, or an answer that looks at no text."""

    label: str
    scores: dict[str, OverClients]


@dataclass(frozen=True)
class NewcomerRecord:
    """A client that joined a method's run after it had ended (run/onboarding.py). `scores` are of what it could deploy,
    by candidate and metric, `errors` the headline's standard errors over its test rows; the candidate it deploys is
    the `choice`'s, or `served` where it had no validation rows to choose by."""

    client: ClientInfo
    method: str
    created: str
    rounds: int
    served: str  # the candidate that it deploys unless another is clearly better
    choice: Choice | None
    deploy: dict[str, float | None]
    scores: dict[str, dict[str, float | None]]
    errors: dict[str, float] = field(default_factory=dict)
    client_lr: str | None = None  # as it was given, where it has an adapter of its own

    @property
    def deploys(self) -> str:
        return self.served if self.choice is None else self.choice.candidate


@dataclass(frozen=True)
class Scores:
    """A method's scores of one metric: `per_client` by name, means over seeds."""

    per_client: dict[str, float | None]
    mean: float | None
    worst: float | None
    spread: float | None

    def __getitem__(self, client: str) -> float | None:
        return self.per_client[client]


@dataclass(frozen=True)
class Result:
    """Every method with every seed on the same clients. All scores are fractions, losses are nats, sizes bytes."""

    title: str
    created: str
    task: str
    metric: str
    metrics: dict[str, Metric]
    base_model: str
    clients: list[ClientInfo]
    config: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    methods: dict[str, MethodResult]
    examples: list[ExampleRecord] = field(default_factory=list)
    newcomers: list[NewcomerRecord] = field(default_factory=list)
    baselines: dict[str, Baseline] = field(default_factory=dict)  # "untrained", "trivial"
    labels: list[str] = field(default_factory=list)  # the rows and columns of "confusion"
    format: int = FORMAT

    # --- reading it -----------------------------------------------------------------------------------------

    @property
    def failed(self) -> dict[str, str]:
        """The methods that failed, with the reason."""
        return {name: m.failed for name, m in self.methods.items() if m.failed is not None}

    @property
    def point(self) -> Point:
        """What methods are compared by: what clients deploy, or what they are served where not all chose."""
        runs = [run for method in self.methods.values() for run in method.runs]
        return "deploy" if all(run.deploy is not None for run in runs) else "served"

    def served(self, metric: str | None = None, method: str | None = None) -> Scores:
        """The scores after the last average: of `metric` (default: the headline) for `method` (the first)."""
        return self.scores("served", metric, method)

    def deploy(self, metric: str | None = None, method: str | None = None) -> Scores:
        """The scores of what each client deploys, chosen on its validation rows."""
        return self.scores("deploy", metric, method)

    def before_averaging(self, metric: str | None = None, method: str | None = None) -> Scores:
        """The same before the last average, where the method has such a point."""
        return self.scores("before_averaging", metric, method)

    def scores(self, point: Point, metric: str | None = None, method: str | None = None) -> Scores:
        metric, method = self._metric(metric), self._method(method)
        means = [e.mean if e else None for e in self.client_estimates(method, point, metric)]
        whole = {what: self.estimate(method, point, metric, what) for what in ("mean", "worst", "spread")}
        return Scores(
            dict(zip([client.name for client in self.clients], means)),
            **{what: e.mean if e else None for what, e in whole.items()},
        )

    def client(self, name: str, method: str | None = None) -> dict[str, float | None]:
        """One client's served scores by metric."""
        names = [client.name for client in self.clients]
        if name not in names:
            raise unknown("client", name, names)
        return {metric: self.served(metric, method)[name] for metric in self.metrics}

    def table(self) -> Any:
        """A row per method: a pandas frame where pandas is installed, else a list of dicts."""
        rows = [self._row(name) for name in self.methods]
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows).set_index("method")

    def _row(self, name: str) -> dict[str, Any]:
        runs = self.methods[name].runs
        row: dict[str, Any] = {"method": name}
        for point in POINTS:
            found = self.estimate(name, point, self.metric)
            row[point] = found.mean if found else None
        worst = self.estimate(name, self.point, self.metric, "worst")
        row["worst client"] = worst.mean if worst else None
        row["bytes per round"] = runs[0].bytes_per_round.total if runs else None
        row["seconds"] = sum(run.seconds for run in runs)
        return row | ({"failed": self.failed.get(name, "")} if self.failed else {})

    def _repr_html_(self) -> str:
        """For notebooks."""
        import html

        table = self.table()
        shown = table.to_html() if hasattr(table, "to_html") else f"<pre>{html.escape(str(table))}</pre>"
        return f"<b>{html.escape(self.title)}</b>, {html.escape(self.metrics[self.metric].label)}{shown}"

    def estimate(self, method: str, point: Point, metric: str, what: str = "mean") -> Estimate | None:
        """A method's `mean`, `worst` or `spread` over clients, over its seeds; None where it has no such point."""
        tables = [(run.at(point) or {}).get(metric) for run in self.methods[method].runs]
        return estimate(getattr(table, what) if table else None for table in tables)

    def client_estimates(self, method: str, point: Point, metric: str) -> list[Estimate | None]:
        """The same, client by client."""
        tables = [(run.at(point) or {}).get(metric) for run in self.methods[method].runs]
        clients = range(len(self.clients))
        return [estimate(table.per_client[k] if table else None for table in tables) for k in clients]

    def _metric(self, metric: str | None) -> str:
        if metric is not None and metric not in self.metrics:
            raise unknown("metric", metric, self.metrics)
        return metric or self.metric

    def _method(self, method: str | None) -> str:
        if method is not None and method not in self.methods:
            raise unknown("method", method, self.methods)
        return method or next(iter(self.methods))

    # --- as a file ------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """As result.json has it, the format first."""
        return {"format": self.format} | asdict(self)


def load_result(path: str | Path) -> Result:
    """The checked result of a run folder, or of a `result.json` itself. Figures that are not finite become None."""
    path = check_path(Path(path))
    with reading(path, "run folder"):
        file = path if path.is_file() else path / FILE
        if not path.exists():
            raise UserError(f"{path}: no such run folder")
        if not file.is_file():
            raise UserError(f"{path}: no {FILE} here (a run writes it when it ends)")
    return from_json(read_json(file, constants=lambda _: None), str(file))


def from_json(content: Any, where: str) -> Result:
    """The result in what `json` read; a UserError names the first place that docs/result.md does not describe."""
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise UserError(
            f"{where}: format {content.get('format')!r} is unknown to this version of pf2lora (known: {FORMAT})"
        )
    from pf2lora.run.result_check import check

    result = decode(Result, content, where, "docs/result.md")
    check(result, where)
    return result
