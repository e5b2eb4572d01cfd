"""The runs of a preset, each method by itself, so that what was interrupted goes on where it stopped.

A run's folder has `result.json`, as docs/result.md describes it, and the same of each method in `parts/METHOD.json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pf2lora.atomic import make_folder, write_json
from pf2lora.engines.bad_clients import Diverged
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.reproduce.preset import Run
from pf2lora.run.checkpoints import Checkpoints
from pf2lora.run.comparison import Watcher, compare, prepare
from pf2lora.run.config import Config, difference, from_dict, to_dict
from pf2lora.run.fingerprint import CannotGoOn
from pf2lora.run.interruption import Interrupted
from pf2lora.run.result import FILE, ExampleRecord, Result, load_result
from pf2lora.run.resuming import saying_how
from pf2lora.run.workload import Workload

Tell = Callable[[str], None]
PARTS = "parts"


@dataclass(frozen=True)
class Loader:
    """A run's data and model, loaded once and only if something is to be trained. `first` are prompts that come first
    among a client's test rows, so that the examples shown are of them; scores do not depend on the order."""

    config: Config
    first: Sequence[str] = ()

    def load(self) -> Workload:
        workload = prepare(self.config)
        if not self.first:
            return workload
        wanted = {_letters(prompt) for prompt in self.first}

        def later(row: Any) -> bool:
            return _letters(getattr(row, "prompt", "")) not in wanted

        clients = [replace(client, test=sorted(client.test, key=later)) for client in workload.clients]
        test = workload.task.encode([client.test for client in clients], training=False)
        return replace(workload, clients=clients, test=test.to(workload.device))


def _letters(text: str) -> str:
    """What is left of a prompt whichever way it was tokenised."""
    return re.sub(r"[\W_]", "", text.lower())


def same_prompt(a: str, b: str) -> bool:
    return _letters(a) == _letters(b)


def execute(run: Run, folder: Path, tell: Tell, first: Sequence[str] = ()) -> tuple[Result, list[str]]:
    """The result of a run: read where it is finished, else trained, each method by itself; and a line for each that
    diverged, which is no reason to lose the others."""
    config = run.config
    done = finished(folder / FILE, config)
    if done is not None:
        tell(f"{run.label}: {folder / FILE} has it already")
        return done, []
    loader, workload = Loader(config, first), None
    parts: list[Result] = []
    diverged: list[str] = []
    for method in config.training.method:
        one = replace(config, training=replace(config.training, method=(method,)))
        what = f"{run.label}: {METHODS[method].label}"
        file = folder / PARTS / f"{METHODS[method].name}.json"
        part = finished(file, one)
        if part is not None:
            tell(f"{what} is there already")
            parts.append(part)
            continue
        workload = workload or loader.load()
        tell(what)
        try:
            kept = file.with_suffix(".checkpoints")
            parts.append(go_on(kept, one, replace(workload, config=one), tell))
        except Diverged as error:
            diverged.append(f"{what} diverged: {error}")
            tell(diverged[-1])
            continue
        make_folder(file.parent)
        write_json(file, parts[-1].to_dict())
    if not parts:
        raise UserError(f"{run.label}: every method diverged")
    result = together(parts, config, run.label)
    if not diverged:
        write_json(folder / FILE, result.to_dict())
    return result, diverged


def go_on(folder: Path, config: Config, workload: Workload, tell: Tell = lambda line: None) -> Result:
    """The result of a config, whose checkpoints are in `folder` meanwhile. Where it was interrupted it goes on; where
    it cannot, as with another version, it starts anew: these runs are parts of something larger."""
    keeper = Checkpoints(folder, workload, None, tell, "the same command")
    try:
        keeper.load()
    except CannotGoOn as error:
        tell(f"{error}; it starts anew")
        keeper.remove()
    try:
        with saying_how(keeper.go_on, keeper):
            result = compare(config, Watcher(on_note=tell), workload, keeper)
    except Interrupted as stop:
        tell(str(stop))
        raise
    except Diverged:
        keeper.remove()
        raise
    keeper.remove()
    return result


def finished(file: Path, config: Config) -> Result | None:
    """The result in a file, where there is one of these settings; one of others is an error that says which."""
    if not file.is_file():
        return None
    result = load_result(file)
    before = to_dict(from_dict(result.config, str(file)))  # settings newer than the file have their default
    if other := difference(before, to_dict(config)):
        raise UserError(
            f"{file} is of other settings ({other}): name another folder with --out, or replace it with --force"
        )
    return result


def together(parts: Sequence[Result], config: Config, title: str) -> Result:
    """One result from those of single methods."""
    methods = {name: found for part in parts for name, found in part.methods.items()}
    examples: dict[tuple[str, str], ExampleRecord] = {}
    for example in (example for part in parts for example in part.examples):
        entry = examples.setdefault((example.client, example.prompt), replace(example, outputs={}))
        entry.outputs.update(example.outputs)
    shown = list(examples.values())
    return replace(parts[-1], title=title, config=to_dict(config), methods=methods, examples=shown)
