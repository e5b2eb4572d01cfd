"""What a reproduction leaves behind: `NAME.json` with everything, and `NAME.md` to be read and pasted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from pf2lora.methods import METHODS
from pf2lora.reproduce import tables
from pf2lora.reproduce.markdown import table
from pf2lora.reproduce.preset import Preset, Run
from pf2lora.reproduce.running import same_prompt
from pf2lora.reproduce.tables import Finding
from pf2lora.run.config import Config, to_dict
from pf2lora.run.made_with import versions
from pf2lora.run.result import Point, SeedRun

# Settings that say where and how a run was made, not what of the paper was changed.
BESIDE = {"model.device", "data.data_dir", "training.seed", "training.seeds", "training.evaluate_every"}


def changes(paper: Run, run: Run) -> list[str]:
    """The settings of a run that are not the preset's, with the preset's values."""
    found = []
    then, now = flat(to_dict(paper.config)), flat(to_dict(run.config))
    for key in {**then, **now}:
        if then.get(key) != now.get(key) and key not in BESIDE and not key.startswith("output."):
            found.append(f"{key} = {_value(now.get(key))} (preset: {_value(then.get(key))})")
    return found


def flat(table: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Tables of tables by dotted names."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{place}.{key}" if place else key
        out |= flat(value, name) if isinstance(value, dict) else {name: value}
    return out


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else f"{value}"


def heading(paper: Preset, preset: Preset) -> str:
    """The title, which names a model that stands in for the paper's."""
    models = dict.fromkeys(
        (a.config.model.name, b.config.model.name) for a, b in zip(paper.runs, preset.runs)
    )
    swaps = [f"{_short(now)} in place of {then}" for then, now in models if then != now]
    return f"{preset.title}, with {' and '.join(swaps)}" if swaps else preset.title


def _short(model: str) -> str:
    """A folder by its last two names."""
    return "/".join(Path(model).parts[-2:]) if Path(model).is_absolute() else model


def setting_lines(paper: Preset, findings: Sequence[Finding]) -> list[str]:
    """Machine, seeds and settings, and what is not as in the preset; what all runs have in common is said once."""
    originals = {run.name: run for run in paper.runs}
    lines: dict[str, list[str]] = {}
    for finding in findings:
        made = [made_with(finding)]
        changed = changes(originals[finding.run.name], finding.run)
        for line in (*made, *(f"changed: {line}" for line in changed)):
            lines.setdefault(line, []).append(finding.run.label)
    every = len(findings)
    return [
        line if len(labels) == every else f"{', '.join(labels)}: {line}" for line, labels in lines.items()
    ]


def made_with(finding: Finding) -> str:
    """`roberta-base, float32, seeds 0 to 2, cuda:0 (NVIDIA H200), torch 2.13.0`; what is counted has no machine."""
    if finding.result is None:
        return f"counted with torch {versions()['torch']}, transformers {versions()['transformers']}"
    config, result = finding.run.config, finding.result
    first, count = config.training.seed, config.training.seeds
    seeds = f"seed {first}" if count == 1 else f"seeds {first} to {first + count - 1}"
    machine = f"{result.machine.get('device', '?')} ({result.machine.get('name', '?')})"
    torch = f"torch {result.versions.get('torch', '?')}"
    parts = (config.model.name, config.model.precision, seeds, machine, torch)
    return ", ".join(parts)


def rate_lines(findings: Sequence[Finding]) -> list[str]:
    """The rates that a search chose, with how many it tried."""
    found = []
    for finding in findings:
        for search in finding.searches:
            rates = ", ".join(f"{name} = {value:g}" for name, value in search.chosen.items())
            label = METHODS[search.method].label
            found.append(f"{finding.run.label}, {label}: {rates} (best of {len(search.tries)} tries)")
    return found


def example_lines(preset: Preset, findings: Sequence[Finding]) -> list[str]:
    """Generated texts beside the paper's, those of the paper's own prompts first."""
    lines: list[str] = []
    shown = [e for f in findings if f.result for e in f.result.examples]
    for quoted in preset.examples:
        ours = [e for e in shown if same_prompt(e.prompt, quoted.prompt)]
        lines.append(f"- **{quoted.prompt}**")
        lines += [f"    - reference: {ours[0].references[0]}"] if ours and ours[0].references else []
        for method, text in quoted.outputs.items():
            label = METHODS[method].label
            lines += [f"    - {label}, ours: {e.outputs[method]}" for e in ours[:1] if method in e.outputs]
            lines.append(f"    - {label}, the paper: {text}")
        if not ours:
            lines.append("    - ours: this prompt is not among the test rows that were shown")
    return lines


def markdown(paper: Preset, preset: Preset, findings: Sequence[Finding], figures: Sequence[str]) -> str:
    """The page."""
    parts = [f"# {heading(paper, preset)}", f"{preset.source}. `pf2lora reproduce {preset.name}`"]
    parts.append(table(tables.head(findings), tables.cells(findings)))
    parts += [f"![{preset.title}]({figure})" for figure in figures if figure.endswith(".svg")]
    parts.append(_list(setting_lines(paper, findings)))
    parts.append(_list([*preset.notes, *(line for f in findings for line in f.diverged)]))
    if rates := rate_lines(findings):
        parts += ["## Rates, by a grid search", _list(rates)]
    if examples := example_lines(preset, findings):
        parts += ["## Generated texts", "\n".join(examples)]
    trained = [finding for finding in findings if finding.result is not None]
    if trained:
        names = [tables.QUANTITIES[name].label for name in tables.COSTS]
        costs = [row for finding in trained for row in tables.cost_rows(finding)]
        parts += ["## What it cost", table(("run", "method", *names), costs)]
    page = "\n\n".join(part for part in parts if part) + "\n"
    return page.replace("<", "&lt;")  # Markdown takes HTML for what it is, and a generated text may hold some


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def to_json(paper: Preset, preset: Preset, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything, for programs: scores are fractions, as in result.json."""
    return {
        "preset": preset.name,
        "title": heading(paper, preset),
        "source": preset.source,
        "notes": list(preset.notes),
        "settings": setting_lines(paper, findings),
        "rows": [_row(row) for finding in findings for row in tables.rows(finding)],
        "runs": [_run(finding) for finding in findings],
    }


def _row(row: tables.Row) -> dict[str, Any]:
    return {
        "run": row.run.name,
        "method": row.method,
        "quantity": row.quantity,
        "served": None if row.served is None else asdict(row.served),
        "before_averaging": None if row.before is None else asdict(row.before),
        "paper": row.paper,
    }


def _scores(runs: Sequence[SeedRun]) -> dict[str, dict[str, list[float | None]]]:
    """Every metric at every point, a number for each seed: the mean over clients."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for point in get_args(Point):
        at = [run.at(point) or {} for run in runs]
        metrics = dict.fromkeys(name for scores in at for name in scores)
        found[point] = {name: [s[name].mean if name in s else None for s in at] for name in metrics}
    return found


def _run(finding: Finding) -> dict[str, Any]:
    config: Config = finding.run.config
    result = finding.result
    return {
        "name": finding.run.name,
        "label": finding.run.label,
        "config": to_dict(config),
        "counted": finding.counted,
        "scores": None if result is None else {name: _scores(m.runs) for name, m in result.methods.items()},
        "machine": result.machine if result else None,
        "versions": result.versions if result else versions(),
        "created": result.created if result else None,
        "diverged": list(finding.diverged),
        "grid": [asdict(search) | {"chosen": search.chosen} for search in finding.searches],
    }
