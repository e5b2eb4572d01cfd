"""What a result's types do not say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pf2lora.core.resampling import TIMES
from pf2lora.errors import UserError
from pf2lora.run.result import POINTS, ROUND_POINTS, Result, SeedRun


def check(result: Result, where: str) -> None:
    """What the types do not say: a result speaks of some client and method, and its lists have one number for each."""
    for name in ("clients", "methods"):
        if not getattr(result, name):
            raise UserError(f"{where}: {name} must have at least one entry")
    if result.metric not in result.metrics:
        raise UserError(f"{where}: metric must be one of {', '.join(result.metrics)}, not {result.metric!r}")
    for name, method in result.methods.items():
        if not method.runs and method.failed is None:
            raise UserError(f"{where}: methods.{name}.runs must have at least one entry")
        for i, run in enumerate(method.runs):
            place = f"{where}: methods.{name}.runs[{i}]"
            if result.metric not in run.served:
                raise UserError(
                    f"{place}.served.{result.metric} is missing (docs/result.md describes the file)"
                )
            _check_lengths(run, len(result.clients), len(result.labels), place)
    for name, baseline in result.baselines.items():
        for metric, table in baseline.scores.items():
            if len(table.per_client) != len(result.clients):
                raise UserError(
                    f"{where}: baselines.{name}.scores.{metric}.per_client must be a list of {len(result.clients)}, "
                    f"not of {len(table.per_client)}"
                )
    _check_newcomers(result, where)


def _check_newcomers(result: Result, where: str) -> None:
    """Each joined a method of the result under a name that is free there, and has a score for what it deploys."""
    clients = {client.name for client in result.clients}
    seen: set[tuple[str, str]] = set()
    for i, newcomer in enumerate(result.newcomers):
        place, name = f"{where}: newcomers[{i}]", newcomer.client.name
        if newcomer.method not in result.methods:
            raise UserError(
                f"{place}.method must be one of {', '.join(result.methods)}, not {newcomer.method!r}"
            )
        if name in clients or (name, newcomer.method) in seen:
            raise UserError(f"{place}.client.name must be a new one, not {name!r}")
        seen.add((name, newcomer.method))
        if result.metric not in newcomer.deploy:
            raise UserError(f"{place}.deploy.{result.metric} is missing (docs/result.md describes the file)")


def _check_lengths(run: SeedRun, clients: int, labels: int, place: str) -> None:
    def fits(values: Sequence[Any] | None, count: int, what: str) -> None:
        if values is not None and len(values) != count:
            raise UserError(f"{place}.{what} must be a list of {count}, not of {len(values)}")

    for point in POINTS:
        for metric, table in (run.at(point) or {}).items():
            fits(table.per_client, clients, f"{point}.{metric}.per_client")
    for candidate, scores in run.candidates.items():
        for metric, table in scores.items():
            fits(table.per_client, clients, f"candidates.{candidate}.{metric}.per_client")
    for point_name, resampled in run.resampled.items():
        fits(resampled.per_client, clients, f"resampled.{point_name}.per_client")
        fits(resampled.means, TIMES, f"resampled.{point_name}.means")
    fits(run.choices, clients, "choices")
    fits(run.confusion, clients, "confusion")
    for k, rows in enumerate(run.confusion or []):
        fits(rows, labels, f"confusion[{k}]")
        for i, row in enumerate(rows or []):
            fits(row, labels, f"confusion[{k}][{i}]")
    for i, record in enumerate(run.rounds):
        for what in ("train_loss", "validation_loss", "client_share", "second_order_share", "ranks"):
            fits(getattr(record, what), clients, f"rounds[{i}].{what}")
        for point in ROUND_POINTS:
            for metric, values in (getattr(record, point) or {}).items():
                fits(values, clients, f"rounds[{i}].{point}.{metric}")
        for k, ranks in enumerate(record.ranks or []):
            fits(ranks, len(run.layers), f"rounds[{i}].ranks[{k}]")
