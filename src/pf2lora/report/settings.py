"""The settings of a run, as the report shows them: what was asked for, and what `auto` came to."""

from __future__ import annotations

from typing import Any

from pf2lora.run.result import Result


def settings(result: Result) -> dict[str, str]:
    """The config, flat; beside a setting of training that is `auto` is what the methods were set up with."""
    rows = flat(result.config)
    for name, asked in result.config.get("training", {}).items():
        if asked == "auto" and (found := resolved(result, name)):
            rows[f"training.{name}"] += f" ({', '.join(found)})"
    return rows


def resolved(result: Result, name: str) -> list[str]:
    """What methods without a value of their own have of it; none where they find it while they train."""
    tables = result.config.get("methods", {})
    following = [method.runs for own, method in result.methods.items() if name not in tables.get(own, {})]
    values = [run.settings.get(name) for runs in following for run in runs]
    return [*dict.fromkeys(f"{value:g}" for value in values if isinstance(value, float))]


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """A config as `section.key`: value, as one would write it in TOML."""
    rows: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            rows |= flat(value, f"{prefix}{key}.")
        else:
            rows[prefix + key] = _toml(value)
    return rows


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "–" if value is None else f'"{value}"' if isinstance(value, str) else str(value)


def differences(runs: list[Result]) -> list[tuple[str, list[str]]]:
    """The settings in which the runs differ."""
    configs = [
        {"base model": _toml(r.base_model)} | settings(r) | {"machine": str(r.machine.get("name"))}
        for r in runs
    ]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key, "–") for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
