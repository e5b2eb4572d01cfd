"""The package from Python: one call for what `pf2lora train` and `pf2lora compare` do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pf2lora.errors import UserError, unknown
from pf2lora.run import config as configs
from pf2lora.run import folder as run_folder
from pf2lora.run import trackers
from pf2lora.run.config import Config
from pf2lora.run.trial import Outcome, Workload

DATA_KEYS = tuple(configs.option_types(configs.DataSpec))
SETTINGS = (*configs.option_types(Config), *DATA_KEYS)


def federate(
    *,
    model: str | Path,
    clients: Sequence[str | Path] | str | Path = (),
    method: str | Sequence[str] = "pf2lora",
    out: str | Path | None = None,
    force: bool = False,
    methods: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train `method` on `clients` (one file each) and return the result, as docs/result.md describes it.

    `settings` are the command line's: `rounds=50`, `client_lr=0.03`, `text="review"`, `dataset="sst2"`, … With
    `out`, the run folder with adapters and report is written there; one that holds another run is only replaced
    with `force`.
    """
    for key in settings:
        if key not in SETTINGS:
            raise UserError(f"federate(): {unknown('setting', key, SETTINGS)}")
    files = [clients] if isinstance(clients, str | Path) else clients
    data = {key: value for key, value in settings.items() if key in DATA_KEYS}
    top = {key: value for key, value in settings.items() if key not in DATA_KEYS}
    top |= {"model": str(model), "method": method, "out": "" if out is None else str(out)}
    tables = {"data": data | {"clients": [str(file) for file in files]}, "methods": methods or {}}
    config = configs.from_dict(top | tables, "federate()")
    return run(config, Path(out) if out is not None else None, force=force)


def run(
    config: Config,
    out: Path | None,
    *,
    force: bool = False,
    on_note: Callable[[str], None] = lambda line: None,
    workload: Workload | None = None,
) -> dict[str, Any]:
    """Run a config; with `out`, into a run folder, line by line as it happens."""
    from pf2lora import report
    from pf2lora.run import experiment

    if out is None:
        return experiment.run(config, experiment.Watcher(on_note=on_note), workload)
    run_folder.check_free(out, force=force)
    trackers.check(config.trackers)
    workload = workload or experiment.prepare(config)
    run_folder.claim(out, force=force)  # only now: bad input must not cost the run that is there
    run_folder.write_text(out / "config.toml", configs.to_toml(config))
    tracking = trackers.start(config.trackers, out, configs.to_dict(config), config.title)

    def on_round(method: str, seed: int, record: dict[str, Any]) -> None:
        run_folder.append_metrics(out, method, seed, record)
        for tracker in tracking:
            tracker.log(trackers.round_values(method, seed, record), record["round"])

    def on_outcome(method: str, seed: int, outcome: Outcome) -> None:
        if seed == config.seed:
            save_adapters(out, workload, method, seed, outcome)

    try:
        result = experiment.run(config, experiment.Watcher(on_round, on_outcome, on_note), workload)
    finally:
        for tracker in tracking:
            tracker.close()
    run_folder.write_json(out / "result.json", result)
    report.build([result], out / "report.html")
    return result


def save_adapters(out: Path, workload: Workload, method: str, seed: int, outcome: Outcome) -> None:
    """The adapters of one method: the common one, and each client's unless all clients are served the same."""
    config, task = workload.config, workload.task
    where = run_folder.place(out, config, method)
    if outcome.common is not None:
        run_folder.save_common(where, outcome.model, outcome.common, task.name, config.model)
    if method != "centralized":
        for k, name in enumerate(workload.names):
            run_folder.save_client(
                where, outcome.model, name, outcome.x[k], outcome.y[k], task.name, config.model
            )
    labels = list(getattr(task, "labels", []))
    pairs = any(getattr(row, "pair", None) is not None for client in workload.clients for row in client.train)
    saved = run_folder.Saved(method, seed, task.name, labels, workload.names, pairs)
    run_folder.save_description(where, saved)
