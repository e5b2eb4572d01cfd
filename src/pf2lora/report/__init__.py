"""The report: one HTML file with everything in it, which opens without a network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pf2lora import __version__
from pf2lora.atomic import make_folder, write_text
from pf2lora.errors import UserError
from pf2lora.report import choices, findings, newcomers, payload, settings, views
from pf2lora.report import summary as summaries
from pf2lora.run import numbers
from pf2lora.run.measured import by_measured_metric
from pf2lora.run.result import Result

if TYPE_CHECKING:
    import jinja2

HERE = Path(__file__).parent
# One script in this order: each file uses names of those before it.
SCRIPTS = (
    "dom.js",
    "stats.js",
    "linechart.js",
    "curves.js",
    "scatter.js",
    "clients.js",
    "choices.js",
    "ranks.js",
    "errors.js",
    "examples.js",
    "tables.js",
    "main.js",
)
GENERATOR = "pf2lora report"


def build(runs: Result | Sequence[Result], out: str | Path, names: list[str] | None = None) -> Path:
    """Write the report of one result, or the comparison of several, to `out`, and return its path.

    `runs` are results as `federate` and `load_result` return them; `names` tell several apart (default: their titles).
    The file appears whole or not at all.
    """
    out = Path(out)
    html = render([runs] if isinstance(runs, Result) else list(runs), names)
    make_folder(out.parent)
    write_text(out, html)
    return out


def is_ours(page: Path) -> bool:
    """Whether a file is a report of pf2lora, which may be replaced."""
    with page.open(encoding="utf-8", errors="replace") as file:
        return GENERATOR in file.read(2000)


@cache
def templates() -> jinja2.Environment:
    """Made once: reading the templates takes as long as training a tiny model."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["grouped"] = views.grouped
    return environment


def render(runs: list[Result], names: list[str] | None = None) -> str:
    """The page as text."""
    from markupsafe import Markup

    runs = [by_measured_metric(run) for run in runs]
    metric = shared_metric(runs)
    names = _distinct(names or [r.title for r in runs])
    series = views.all_series(runs, names)
    script = "(() => {\n'use strict';\n" + "\n".join(_text(name) for name in SCRIPTS) + "})();"
    theme = _text("theme.js")
    page = templates().get_template("compare.jinja" if len(runs) > 1 else "run.jinja")
    return page.render(
        generator=GENERATOR,
        version=__version__,
        # Only these two scripts may run, whatever a client is called, and nothing may be fetched.
        script_hashes=[_hash(theme), _hash(script)],
        theme_script=Markup(theme),
        script=Markup(script),
        style=Markup(_text("report.css")),
        data=Markup(payload.embedded(payload.payload(runs, series, metric))),
        runs=runs,
        names=names,
        failed=views.failed(runs, names),
        has=views.parts_present(runs),
        seed_counts=views.seed_counts(series),
        metric=runs[0].metrics[metric],
        headline=views.headline(series, metric),
        decisive=views.decisive(series),
        baselines=baselines(runs[0], metric) if len(runs) == 1 else [],
        summary=summaries.summary(runs[0]) if len(runs) == 1 else {},
        choices=choices.table(series, metric),
        newcomers=newcomers.table(runs[0], metric) if len(runs) == 1 else {},
        costs=views.costs(series),
        warnings=views.warnings(series),
        several_seeds=any(len(s.seeds) > 1 for s in series),
        same_clients=views.same_clients(runs),
        findings=findings.findings(runs[0]) if len(runs) == 1 else [],
        client_data=views.client_data(runs[0]),
        config=settings.settings(runs[0]),
        machine=views.machine(runs[0]),
        differences=settings.differences(runs),
    )


def baselines(run: Result, metric: str) -> list[dict[str, str]]:
    """Rows of the headline table that no training gives."""
    info = run.metrics[metric]
    known = [(b.label, b.scores[metric]) for b in run.baselines.values() if metric in b.scores]
    return [
        {"label": label}
        | {what: numbers.score(getattr(s, what), info) for what in ("mean", "worst", "spread")}
        for label, s in known
        if s.mean is not None
    ]


def shared_metric(runs: list[Result]) -> str:
    """The metric that all runs can be compared by: the first run's headline, or its next one that all have."""
    first = runs[0]
    for other in runs[1:]:
        if other.task != first.task:
            raise UserError(
                f"runs of different tasks have no common table: {first.title!r} is {first.task}, "
                f"{other.title!r} is {other.task}"
            )
    for name in [first.metric, *first.metrics]:
        if all(name in run.metrics for run in runs):
            return name
    raise UserError(f"the runs measure no common metric ({', '.join(run.metric for run in runs)})")


def _distinct(names: list[str]) -> list[str]:
    """The names, numbered where two are the same."""
    return [
        f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
