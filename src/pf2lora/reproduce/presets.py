"""The paper's tables and figures as presets: TOML files beside this package, or a user's own copy of one.

A preset holds what every run has (`title`, `source`: its place in the paper, `needs`, `notes`, the config's tables) and
its `[[runs]]`: a name, the tables that differ, and the paper's numbers by quantity and method. A run may begin where
another one ends (`like = "glue-roberta-base/cola"`), and `[vary]` makes a run of each value of one setting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pf2lora.errors import UserError, shown, unknown
from pf2lora.methods import METHODS
from pf2lora.reproduce.preset import Example, Grid, Paper, Preset, Run
from pf2lora.run.config import TABLES, from_dict, merged, read_toml

FOLDER = Path(str(files("pf2lora"))) / "presets"
EVERYWHERE: dict[str, Any] = {"training": {"lr": 1e-3}, "data": {"validation_ratio": 0.0}}
"""Config tables that every preset begins with: where the paper's experiments differ from a user's defaults. The rate is
that of methods which the paper does not have: stored tables were made with it."""

CONFIG_TABLES = (*TABLES, "task", "methods")
FIGURES = ("bars", "lines", "losses", "none")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


# --- finding -----------------------------------------------------------------------------------------------


def preset_names() -> list[str]:
    """Our presets, as files are named; nothing is read."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def title_of(name: str) -> str:
    """A preset's title, which is its file's first line: help must not cost the reading of all presets."""
    with (FOLDER / f"{name}.toml").open(encoding="utf8") as file:
        return file.readline().partition("=")[2].strip().strip('"')


def load_preset(name: str) -> Preset:
    """A preset by name, or a file of the same form."""
    if name.endswith(".toml"):
        return parse(Path(name).stem, read_toml(Path(name)), name)
    if name not in preset_names():
        raise unknown("preset", name, preset_names())
    return parse(name, _content(name), f"preset {name}")


@cache
def _content(name: str) -> dict[str, Any]:
    return read_toml(FOLDER / f"{name}.toml")


# --- reading -----------------------------------------------------------------------------------------------

PRESET_KEYS = (
    *("title", "source", "needs", "notes", "percent", "figure", "axis"),
    *("grid", "vary", "runs", "examples", *CONFIG_TABLES),
)
RUN_KEYS = (
    *("name", "label", "like", "paper", "show", "vary", "of", "at", "shape", "length"),
    *CONFIG_TABLES,
)


def parse(name: str, content: Mapping[str, Any], where: str) -> Preset:
    """A checked preset; what is wrong is said with its place."""
    if not NAME.fullmatch(name):
        raise UserError(f"{where}: {name!r} is no name for a preset; letters, digits, '.', '_' and '-' are")
    _check_keys(content, PRESET_KEYS, where)
    if not isinstance(content.get("runs"), list) or not content["runs"]:
        raise UserError(f"{where}: a preset needs at least one [[runs]]")
    percent = _get(content, "percent", bool, where, False)
    runs = tuple(run for i in range(len(content["runs"])) for run in _runs(content, i, percent, where))
    names = [run.name for run in runs]
    if twice := [n for n in names if names.count(n) > 1]:
        raise UserError(f"{where}: two runs are called {twice[0]!r}")
    figure = _get(content, "figure", str, where, "bars")
    if figure not in FIGURES:
        raise UserError(f"{where}: {unknown('figure', figure, FIGURES)}")
    if figure == "lines" and any(run.at is None for run in runs):
        raise UserError(f"{where}: a figure of lines needs the varied value of every run ([vary], or `at`)")
    return Preset(
        name,
        _get(content, "title", str, where),
        _get(content, "source", str, where, ""),
        _strings(content, "needs", where),
        runs,
        _strings(content, "notes", where),
        percent,
        figure,
        _get(content, "axis", str, where, ""),
        _grid(content, where),
        tuple(
            _example(e, f"{where}, [[examples]] {i}") for i, e in enumerate(content.get("examples", []), 1)
        ),
    )


def _runs(content: Mapping[str, Any], number: int, percent: bool, where: str) -> Iterator[Run]:
    """The runs that an entry of `[[runs]]` stands for: one, or one for each value of what varies."""
    entry = content["runs"][number]
    name = _get(entry, "name", str, f"{where}, [[runs]] {number + 1}")
    where = f"{where}, run {name}"
    if not NAME.fullmatch(name):
        raise UserError(f"{where}: a run's name becomes a folder: letters, digits, '.', '_' and '-'")
    _check_keys(entry, RUN_KEYS, where)
    tables = merged(_tables_of(content, entry, where), {})
    vary = merged(content.get("vary", {}), entry.get("vary", {}))
    whole = {
        "label": _get(entry, "label", str, where, name),
        "show": _strings(entry, "show", where),
        "shape": dict(_get(entry, "shape", dict, where, {})),
        "length": _get(entry, "length", int, where, 128),
    }
    paper = _get(entry, "paper", dict, where, {})
    if not vary:
        of, at = _get(entry, "of", str, where, whole["label"]), entry.get("at")
        at = None if at is None else _number(at, f"{where}: at")
        yield _run(name, tables, paper, percent, where, **whole, of=of, at=at)
        return
    setting, values = _vary(vary, where)
    for i, value in enumerate(values):
        of_value = merged(tables, _nested(setting.split("."), value))
        told = whole | {"label": f"{whole['label']}, {vary.get('label', setting)} = {value:g}"}
        picked = {q: {m: _item(v, i, len(values), where) for m, v in t.items()} for q, t in paper.items()}
        one = {**told, "of": whole["label"], "at": float(value)}
        yield _run(f"{name}-{value:g}", of_value, picked, percent, where, **one)


def _run(
    name: str, tables: Mapping[str, Any], paper: Mapping[str, Any], percent: bool, where: str, **rest: Any
) -> Run:
    # The paper's runs are in float32 wherever they are done, unless somebody says otherwise.
    config = from_dict(merged({"model": {"precision": "float32"}}, tables), where)
    numbers: Paper = {}
    for quantity, by_method in paper.items():
        if not isinstance(by_method, Mapping):
            raise UserError(f"{where}: paper.{quantity} must be a table of numbers by method")
        for method, value in by_method.items():
            if method not in METHODS:
                raise UserError(f"{where}: paper.{quantity}: {unknown('method', method, METHODS)}")
            number = _number(value, f"{where}: paper.{quantity}.{method}")
            numbers.setdefault(quantity, {})[method] = number / 100 if percent else number
    return Run(name, config=config, paper=numbers, **rest)


def _tables_of(content: Mapping[str, Any], entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A run's config tables: those of every preset, of the run that it is like, the preset's, its own."""
    tables = EVERYWHERE
    if like := entry.get("like"):
        preset, _, run = str(like).partition("/")
        if preset not in preset_names():
            raise UserError(f"{where}: like: {unknown('preset', preset, preset_names())}")
        other = _content(preset)
        found = {str(r.get("name")): r for r in other["runs"]}
        if run not in found:
            raise UserError(f"{where}: like: {unknown(f'run of {preset}', run, found)}")
        tables = _tables_of(other, found[run], f"preset {preset}")
    for part in (content, entry):
        tables = merged(tables, {key: part[key] for key in CONFIG_TABLES if key in part})
    return tables


def _vary(vary: Mapping[str, Any], where: str) -> tuple[str, list[float]]:
    _check_keys(vary, ("setting", "values", "label"), f"{where} [vary]")
    setting, values = _get(vary, "setting", str, f"{where} [vary]"), vary.get("values")
    if not isinstance(values, list) or not values:
        raise UserError(f"{where} [vary]: values must be a list of numbers")
    for value in values:
        _number(value, f"{where} [vary]: values")
    return setting, values


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    return {path[0]: _nested(path[1:], value) if len(path) > 1 else value}


def _item(values: Any, i: int, count: int, where: str) -> Any:
    if not isinstance(values, list) or len(values) != count:
        raise UserError(f"{where}: the paper's numbers must be lists of {count}, one for each value")
    return values[i]


def _grid(content: Mapping[str, Any], where: str) -> Grid | None:
    if "grid" not in content:
        return None
    where = f"{where} [grid]"
    table = _get(content, "grid", dict, where)
    _check_keys(table, ("values", "rates"), where)
    if not isinstance(table.get("values"), list) or len(table["values"]) < 2:
        raise UserError(f"{where}: values must be a list of at least two rates")
    values = sorted({_number(v, f"{where}: values") for v in table["values"]})
    if values[0] <= 0:
        raise UserError(f"{where}: a rate must be above 0, not {values[0]:g}")
    rates = _get(table, "rates", dict, where, {})
    for method in rates:
        if method not in METHODS:
            raise UserError(f"{where}: {unknown('method', method, METHODS)}")
    return Grid(tuple(values), {method: _strings(rates, method, where) for method in rates})


def _example(entry: Any, where: str) -> Example:
    _check_keys(entry, ("client", "prompt", "outputs"), where)
    outputs = {m: _get(entry["outputs"], m, str, where) for m in _get(entry, "outputs", dict, where)}
    return Example(_get(entry, "client", str, where, ""), _get(entry, "prompt", str, where), outputs)


def _check_keys(table: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(table, Mapping):
        raise UserError(f"{where} must be a table, not {shown(table)}")
    for key in table:
        if key not in known:
            raise UserError(f"{where}: {unknown('key', key, known)}")


def _get(table: Any, key: str, kind: type, where: str, default: Any = None) -> Any:
    if not isinstance(table, Mapping):
        raise UserError(f"{where} must be a table, not {shown(table)}")
    value = table.get(key, default)
    if value is None:
        raise UserError(f"{where}: {key} is missing")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where}: {key} must be of type {kind.__name__}, not {shown(value)}")
    return value


def _strings(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = table.get(key, [])
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise UserError(f"{where}: {key} must be a list of strings, not {shown(values)}")
    return tuple(values)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where} must be a number, not {shown(value)}")
    return float(value)
