"""What a run was begun with, and whether it can go on with what there is now: to the last bit, or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pf2lora.core.rates import RateSchedule
from pf2lora.engines.batches import Encoded
from pf2lora.errors import UserError
from pf2lora.run.config import Config, difference, to_dict
from pf2lora.run.made_with import versions
from pf2lora.run.rounds import EVALUATIONS, measured_rounds
from pf2lora.run.workload import Workload

JUDGED_OTHERWISE = {  # settings that are not compared as they are written
    "output": None,  # where it goes and what is said of it changes no number
    "data": None,  # the rows themselves are compared
    # The weights themselves are, and the device that was found; layers that are run again give the same numbers.
    "model": ("name", "device", "checkpointing"),
    "training": ("method", "rounds", "evaluate_every", "clients_per_pass", "micro_batch"),
}


class CannotGoOn(UserError):
    """A run cannot go on from what is there; the message names the difference and what would be right."""


@dataclass(frozen=True)
class Fingerprint:
    """What the numbers of a run depend on."""

    settings: dict[str, Any]
    rows: str  # a digest over all clients
    weights: str
    device: str
    threads: int
    versions: dict[str, str]
    processes: int = 1


def fingerprint(workload: Workload, of_clients: Sequence[str]) -> Fingerprint:
    """Of a run that begins now; `of_clients` are the digests of the clients' rows."""
    made_with = {name: version for name, version in versions().items() if name != "python"}
    rows = hashlib.sha256("".join(of_clients).encode()).hexdigest()
    return Fingerprint(
        to_dict(workload.config),
        rows,
        workload.weights,
        str(workload.device),
        torch.get_num_threads(),
        made_with,
        workload.processes.size,
    )


def rows_digests(workload: Workload) -> list[str]:
    """Of each client: its name, its rows as they were read, and as tokens."""
    found = []
    for k, client in enumerate(workload.clients):
        digest = hashlib.sha256(repr(client).encode("utf8", "backslashreplace"))
        for part in (workload.train, workload.test, workload.validation):
            if part is not None:
                for column in token_rows(part, k):
                    digest.update(column.cpu().contiguous().numpy().tobytes())
        found.append(digest.hexdigest())
    return found


def token_rows(part: Encoded, k: int) -> list[Tensor]:
    start, stop = part.starts[k : k + 2]
    columns = {**part.token_columns, **part.row_columns}
    return [torch.from_numpy(part.lengths[start:stop]), *(column[start:stop] for column in columns.values())]


# --- then and now ------------------------------------------------------------------------------------------


def check_same(then: Fingerprint, now: Fingerprint, whose_rows: Callable[[], str]) -> list[str]:
    """CannotGoOn where the numbers would be others; else a line for each change that is safe. `whose_rows` names the
    client whose rows changed, where that is known."""
    for package, version in then.versions.items():
        if now.versions.get(package) != version:
            raise CannotGoOn(
                f"it was begun with {package} {version}, and this is {now.versions.get(package)}"
            )
    if then.device != now.device:
        raise CannotGoOn(f"it was begun on {then.device}, and this is {now.device}")
    if then.weights != now.weights:
        name = difference(then.settings["model"]["name"], now.settings["model"]["name"], "model.name")
        raise CannotGoOn(f"the base model has other weights ({name or 'of the same name'})")
    if other := difference(compared(then.settings), compared(now.settings)):
        raise CannotGoOn(f"it was begun with other settings ({other})")
    if then.rows != now.rows:
        other = difference(then.settings["data"], now.settings["data"], "data")
        raise CannotGoOn(f"the clients have other rows ({other or whose_rows()})")
    check_methods(then.settings["training"]["method"], now.settings["training"]["method"])
    lines = []
    per_pass = [f.settings["training"].get("clients_per_pass", "auto") for f in (then, now)]
    if per_pass[0] != per_pass[1]:
        lines.append(f"clients_per_pass was {per_pass[0]} and is {per_pass[1]}: same up to rounding")
    if then.processes != now.processes:
        lines.append(f"processes were {then.processes} and are {now.processes}: same up to rounding")
    if then.threads != now.threads:
        lines.append(
            f"it was begun with {then.threads} threads, and now has {now.threads}: same up to rounding"
        )
    return lines


def compared(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that must be the same."""
    found = {}
    for table, values in settings.items():
        left_out = JUDGED_OTHERWISE.get(table, ())
        if left_out is not None:
            found[table] = {name: value for name, value in values.items() if name not in left_out}
    return found


def check_methods(then: Sequence[str], now: Sequence[str]) -> None:
    """A comparison may get further methods: each is by itself."""
    if list(then) != list(now) and not (len(then) > 1 and set(then) <= set(now)):
        raise CannotGoOn(f"it was begun with other methods ({', '.join(then)}; now {', '.join(now)})")


def check_rounds(
    then: dict[str, Any],
    now: Config,
    reached: int,
    finished: Sequence[str],
    times: Callable[[int], int] = lambda rounds: EVALUATIONS,
) -> None:
    """More rounds (or fewer) are safe where what was done so far is what a run of that length does, too; `times` says
    how often one of so many rounds is evaluated where nobody says."""
    before, after = then["training"]["rounds"], now.training.rounds
    every = then["training"].get("evaluate_every"), now.training.evaluate_every
    if before == after and every[0] == every[1]:
        return
    if finished:
        raise CannotGoOn(f"rounds was {before} and is {after}, and {finished[0]} has finished with {before}")
    if before != after and now.privacy.dp_epsilon is not None:
        raise CannotGoOn(
            f"rounds was {before} and is {after}, and dp_epsilon's noise is that of {before} rounds: with dp_noise a "
            "run can go on for longer, at a larger ε"
        )
    if before != after and not RateSchedule(now.training.schedule, now.training.warmup).is_constant:
        raise CannotGoOn(
            f"rounds was {before} and is {after}, and the schedule of its rates is that of {before} rounds"
        )
    if after <= reached:
        raise CannotGoOn(f"rounds was {before} and is {after}, and it has done {reached} already")
    lengths = (before, every[0]), (after, every[1])
    measured = [{r for r in measured_rounds(of, n, times(of)) if r <= reached} for of, n in lengths]
    if measured[0] != measured[1]:
        old = every[0] or min(measured_rounds(before, None, times(before)))
        raise CannotGoOn(
            f"rounds was {before} and is {after}, of which other ones would be measured: give --evaluate-every {old}"
        )
