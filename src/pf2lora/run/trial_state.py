"""A trial between two rounds, as the files of a snapshot, and back: bit by bit, so that it goes on as if nothing was.

shared.safetensors         what all clients share and what servers keep: nothing of any client
records.json               the rounds' records, which result.json and metrics.jsonl hold
clients/NAME.safetensors   a client's own: adapters, optimizer state, what it would deploy; for all seeds side by side
pooled.safetensors         the same of the one learner of a pooled method
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor

from pf2lora.core.method import State, over_tensors, tensors_of
from pf2lora.engines.local import After, Round
from pf2lora.errors import UserError
from pf2lora.run import costs
from pf2lora.run.decode import decode
from pf2lora.run.deploy import Kept
from pf2lora.run.evaluation import Models
from pf2lora.run.result import RoundRecord
from pf2lora.run.set_up import Trial
from pf2lora.run.snapshot import Damaged, Snapshot, encoded, packed, unpacked
from pf2lora.run.warnings import LeftOut
from pf2lora.run.watched import Watched

SHARED, RECORDS = "shared.safetensors", "records.json"
BEST = ("best.common", "best.personal", "best.losses")


# --- to files ----------------------------------------------------------------------------------------------


def summary(trial: Trial, done: Round, watched: Watched) -> dict[str, Any]:
    """What is said of a trial in the manifest: figures over all clients, and where it stands."""
    deployment = watched.deployment
    return {
        "round": done.number,
        "stopper": [above(watched.stopper.best), watched.stopper.waited],
        "steps": [
            [changed(trial, method), [[list(lengths), times] for lengths, times in done_with.items()]]
            for method, done_with in watched.steps.steps.items()
        ],
        "sent": [[sent.total, sent.times, sent.head] for sent in watched.sent],
        "seconds": watched.seconds,
        "left_out": watched.left_out,
        "evaluation_seconds": watched.evaluation_seconds,
        "memory": watched.peak_memory(trial) or 0,
        "common_losses": [above(loss) for loss, _ in deployment.common] if deployment else [],
    }


def files(
    trial: Trial, done: Round, watched: Watched, common: Tensor | None, digests: Sequence[str]
) -> Iterator[tuple[str, bytes]]:
    """Every file. `common (seeds, P)` is what all clients share, where they share anything: an x that is just that is
    not written for every client. `digests` are of the clients' rows."""
    rows_of = dict(zip(trial.workload.names, digests))
    deployment = watched.deployment
    shared = {} if common is None else {"common": common}
    if deployment is not None:
        shared |= {f"best.{s}": vector for s, (_, vector) in enumerate(deployment.common)}
    shared |= {f"server.{i}": host(t).clone() for i, t in enumerate(tensors_of(done.after.servers))}
    yield SHARED, packed(shared, {})
    yield RECORDS, encoded([[asdict(record) for record in own] for own in watched.rounds])
    state, common = over_tensors(host, done.served), None if common is None else common.cpu()
    for name, path, rows in learners(trial):
        tensors = {str(i): t.index_select(0, rows) for i, t in enumerate(tensors_of(state))}
        if common is not None and torch.equal(tensors["0"], common):
            del tensors["0"]
        about: dict[str, Any] = {
            "steps_done": [done.after.steps_done[i] for i in rows.tolist()],
            "largest": [done.after.largest[i] for i in rows.tolist()],
        }
        if watched.moving is not None:
            about["still"] = [watched.moving.still[i] for i in rows.tolist()]
        if not trial.method.pooled and deployment is not None:
            add_best(tensors, about, deployment.best, rows)
        yield path, packed(tensors, about | {"rows": rows_of.get(name)})
    if trial.method.pooled and deployment is not None:
        for name, path, rows in clients(trial):
            tensors, about = {}, {"rows": rows_of[name]}
            add_best(tensors, about, deployment.best, rows)
            yield path, packed(tensors, about)


def add_best(tensors: dict[str, Tensor], about: dict[str, Any], best: Kept, rows: Tensor) -> None:
    """What a client would deploy so far, where it was asked yet."""
    if best.models is not None:
        tensors |= {name: t.index_select(0, rows) for name, t in zip(BEST, (*best.models, best.losses))}
        about["best"] = [list(best.which[i]) for i in rows.tolist()]


def learners(trial: Trial) -> Iterator[tuple[str, str, Tensor]]:
    """Each client that trains, the file of its own, and its rows in the trial's state, one for each seed."""
    count = len(trial.source.clients)
    for k, name in enumerate(trial.source.clients):
        path = f"{name}.safetensors" if trial.method.pooled else f"clients/{name}.safetensors"
        yield name, path, torch.arange(k, count * len(trial.seeds), count)


def clients(trial: Trial) -> Iterator[tuple[str, str, Tensor]]:
    """Each client of the workload, the file of its own, and its rows among all models that are measured."""
    count = len(trial.workload.clients)
    for k, name in enumerate(trial.workload.names):
        yield name, f"clients/{name}.safetensors", torch.arange(k, count * len(trial.seeds), count)


def changed(trial: Trial, method: Any) -> dict[str, Any]:
    """What a variant of the trial's method has changed: its fields that are not the method's own."""
    pairs = ((f.name, getattr(method, f.name)) for f in fields(method))
    return {name: value for name, value in pairs if value != getattr(trial.method, name)}


def above(value: float) -> float | None:
    """A least value so far; None where there is none yet, as JSON knows no infinity."""
    return None if value == math.inf else value


def host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


# --- and back ----------------------------------------------------------------------------------------------


def restore(snapshot: Snapshot, trial: Trial, watched: Watched) -> tuple[State, After]:
    """The learners' state and where the run stands; `watched` becomes what it was. Damaged where it does not fit."""
    try:
        return restored(snapshot, snapshot.about["trial"], trial, watched)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, UserError) as error:
        raise Damaged(f"it does not fit this run ({type(error).__name__}: {error})") from None


def restored(snapshot: Snapshot, said: dict[str, Any], trial: Trial, watched: Watched) -> tuple[State, After]:
    shared, _ = unpacked(snapshot.read(SHARED))
    state = over_tensors(torch.empty_like, trial.state)
    steps_done, largest = [0] * len(state.x), [0.0] * len(state.x)
    best: list[tuple[list[int], dict[str, Tensor], Any]] = []
    for _, path, rows in learners(trial):
        tensors, about = unpacked(snapshot.read(path))
        for i, whole in enumerate(tensors_of(state)):
            fill(whole, rows, shared["common"] if i == 0 and "0" not in tensors else tensors[str(i)])
        for i, steps, update in zip(rows.tolist(), about["steps_done"], about["largest"], strict=True):
            steps_done[i], largest[i] = int(steps), float(update)
        if watched.moving is not None:
            for i, still in zip(rows.tolist(), about["still"], strict=True):
                watched.moving.still[i] = bool(still)
        if not trial.method.pooled:
            best.append((rows.tolist(), tensors, about.get("best")))
    if trial.method.pooled and watched.deployment is not None:
        for _, path, rows in clients(trial):
            tensors, about = unpacked(snapshot.read(path))
            best.append((rows.tolist(), tensors, about.get("best")))
    if watched.moving is not None:
        watched.moving.previous.copy_(state.y)
    restore_watched(snapshot, said, trial, watched)
    if watched.deployment is not None:
        restore_best(watched.deployment.best, best)
        watched.deployment.common = [
            (math.inf if loss is None else float(loss), shared[f"best.{s}"])
            for s, loss in enumerate(said["common_losses"])
        ]
    servers = tuple(trial.method.first_server(state.x[:0, 0]) for _ in trial.seeds)
    for i, kept in enumerate(tensors_of(servers)):
        fill(kept, torch.arange(len(kept)), shared[f"server.{i}"])
    return state, After(int(said["round"]), tuple(steps_done), tuple(largest), servers)


def restore_watched(snapshot: Snapshot, said: dict[str, Any], trial: Trial, watched: Watched) -> None:
    """The records and the figures over all clients."""
    records = json.loads(snapshot.read(RECORDS))
    watched.rounds = [[decode(RoundRecord, record, RECORDS) for record in own] for own in records]
    if [own[-1].round for own in watched.rounds] != [int(said["round"])] * len(trial.seeds):
        raise ValueError(f"{RECORDS} has other rounds")
    watched.seconds = [float(seconds) for seconds in said["seconds"]]
    watched.left_out = [{name: LeftOut(*found) for name, found in own.items()} for own in said["left_out"]]
    least, watched.stopper.waited = said["stopper"]
    watched.stopper.best = math.inf if least is None else float(least)
    for fields_changed, done_with in said["steps"]:
        method = replace(trial.method, **fields_changed) if fields_changed else trial.method
        watched.steps.steps[method] = {tuple(lengths): times for lengths, times in done_with}
    watched.sent = [costs.Sent(*map(int, sent)) for sent in said["sent"]]
    watched.evaluation_seconds, watched.memory = float(said["evaluation_seconds"]), int(said["memory"])


def restore_best(best: Kept, parts: Sequence[tuple[list[int], dict[str, Tensor], Any]]) -> None:
    """What every learner would deploy so far."""
    if not parts or parts[0][2] is None:
        return
    count = len(best.which)
    first = (parts[0][1][name] for name in BEST)
    common, personal, best.losses = (t.new_empty(count, *t.shape[1:]) for t in first)
    best.models = Models(common, personal)
    for rows, tensors, which in parts:
        for name, whole in zip(BEST, (common, personal, best.losses)):
            fill(whole, torch.tensor(rows), tensors[name])
        for i, (candidate, number) in zip(rows, which, strict=True):
            best.which[i] = str(candidate), int(number)


def fill(whole: Tensor, rows: Tensor, part: Tensor) -> None:
    """Some learners' rows, which must be of the very kind."""
    if part.shape != (len(rows), *whole.shape[1:]) or part.dtype != whole.dtype:
        raise ValueError(f"{tuple(part.shape)} of {part.dtype} where {tuple(whole[rows].shape)} are wanted")
    whole[rows] = part
