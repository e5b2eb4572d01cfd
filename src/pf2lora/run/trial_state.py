"""A trial between two rounds, as the files of a snapshot, and back: bit by bit, so that it goes on as if nothing was.

shared.safetensors         what all clients share and what servers keep: nothing of any client
records.json               the rounds' records, which result.json and metrics.jsonl hold
clients/NAME.safetensors   a client's own: adapters, optimizer state, what it would deploy; for all seeds side by side
pooled.safetensors         the same of the one learner of a pooled method
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pf2lora.core.method import State, over_tensors, tensors_of
from pf2lora.engines.local import After, Round
from pf2lora.engines.processes import as_bytes
from pf2lora.engines.share import Share
from pf2lora.errors import UserError
from pf2lora.run import costs
from pf2lora.run.decode import decode
from pf2lora.run.deploy import BestCommon, Kept
from pf2lora.run.evaluation import Models
from pf2lora.run.gathering import all_steps, largest, steps_from_json, steps_to_json
from pf2lora.run.result import RoundRecord
from pf2lora.run.set_up import Trial
from pf2lora.run.snapshot import Damaged, Snapshot, encoded, packed, unpacked
from pf2lora.run.warnings import LeftOut
from pf2lora.run.watched import Watched
from pf2lora.run.workload import Workload

SHARED, RECORDS = "shared.safetensors", "records.json"
BEST = ("best.common", "best.personal", "best.losses")


# --- to files ----------------------------------------------------------------------------------------------


def summary(trial: Trial, done: Round, watched: Watched) -> dict[str, Any]:
    """What is said of a trial in the manifest: figures over all clients, and where it stands."""
    deployment = watched.deployment
    return {
        "round": done.number,
        "stopper": [above(watched.stopper.best), watched.stopper.waited],
        "steps": steps_to_json(trial, all_steps(trial, watched.steps)),
        "sent": [[sent.total, sent.times, sent.head] for sent in watched.sent],
        "seconds": watched.seconds,
        "left_out": watched.left_out,
        "evaluation_seconds": watched.evaluation_seconds,
        "resize_seconds": watched.resize_seconds,
        "memory": largest(trial, watched.peak_memory(trial) or 0),
        "common_losses": [above(best.loss) for best in deployment.common] if deployment else [],
        "common_rounds": [best.round for best in deployment.common] if deployment else [],
    }


def files(
    trial: Trial, done: Round, watched: Watched, common: Tensor | None, digests: Sequence[str]
) -> Iterator[tuple[str, bytes]]:
    """Every file. `common (seeds, P)` is what all clients share, where they share anything: an x that is just that is
    not written for every client. `digests` are of the clients' rows. Of several processes, each makes its own clients'
    and the first gets all; the others come away with what they know anyway."""
    rows_of = dict(zip(trial.whole.names, digests))
    deployment = watched.deployment
    shared = {} if common is None else {"common": common}
    if deployment is not None:
        shared |= {f"best.{s}": best.vector for s, best in enumerate(deployment.common)}
    shared |= {f"server.{i}": host(t).clone() for i, t in enumerate(tensors_of(done.after.servers))}
    yield SHARED, packed(shared, {})
    yield RECORDS, encoded([[asdict(record) for record in own] for own in watched.rounds])
    state, common = over_tensors(host, done.served), None if common is None else common.cpu()

    def of_learner(one: Own) -> bytes:
        tensors = {str(i): t.index_select(0, one.places) for i, t in enumerate(tensors_of(state))}
        if common is not None and torch.equal(tensors["0"], common):
            del tensors["0"]
        about: dict[str, Any] = {
            "steps_done": [done.after.steps_done[i] for i in one.numbers],
            "largest": [done.after.largest[i] for i in one.numbers],
        }
        if watched.moving is not None:
            about["still"] = [watched.moving.still[i] for i in one.places.tolist()]
        if not trial.method.pooled and deployment is not None:
            add_best(trial, tensors, about, deployment.best, one.places)
        return packed(tensors, about | {"rows": rows_of.get(one.name)})

    def of_client(one: Own) -> bytes:
        assert deployment is not None
        tensors: dict[str, Tensor] = {}
        about: dict[str, Any] = {"rows": rows_of[one.name]}
        add_best(trial, tensors, about, deployment.best, one.places)
        return packed(tensors, about)

    yield from gathered(trial, learners(trial), of_learner)
    if trial.method.pooled and deployment is not None:
        yield from gathered(trial, clients(trial), of_client)


def gathered(
    trial: Trial, everyone: Iterable[Own], file: Callable[[Own], bytes]
) -> Iterator[tuple[str, bytes]]:
    """Everyone's files, each made by the process that has the client."""
    processes = trial.share.processes
    for one in everyone:
        data = file(one) if one.owner == processes.rank else None
        if not processes.alone:
            travelled = processes.to_first(one.owner, None if data is None else as_bytes(data))
            data = None if travelled is None else travelled.numpy().tobytes()
        if data is not None:
            yield one.path, data


def add_best(
    trial: Trial, tensors: dict[str, Tensor], about: dict[str, Any], best: Kept, places: Tensor
) -> None:
    """What a client would deploy so far, where it was asked yet."""
    if best.models is not None:
        losses = of_width(best.losses.index_select(0, places), validation_rows(trial.whole))
        tensors |= {name: t.index_select(0, places) for name, t in zip(BEST, best.models)}
        tensors[BEST[-1]] = losses
        about["best"] = [list(best.which[i]) for i in places.tolist()]


class Own(NamedTuple):
    """A client's file: the process that makes it, and its rows, one for each seed, among this process's (no matter in
    another) and among all."""

    name: str
    path: str
    owner: int
    places: Tensor
    numbers: list[int]


def learners(trial: Trial) -> Iterator[Own]:
    """Each client that trains, with the rows of the trial's state."""
    path = "{}.safetensors" if trial.method.pooled else "clients/{}.safetensors"
    return owned(trial.learners, trial.names, len(trial.seeds), path)


def clients(trial: Trial) -> Iterator[Own]:
    """Each client of the run, with the rows of all models that are measured."""
    return owned(trial.share, trial.whole.names, len(trial.seeds), "clients/{}.safetensors")


def owned(share: Share, names: Sequence[str], seeds: int, path: str) -> Iterator[Own]:
    for k, name in enumerate(names):
        numbers = [s * len(names) + k for s in range(seeds)]
        places = torch.tensor(share.places(numbers), dtype=torch.int64)
        yield Own(name, path.format(name), share.owner(k), places, numbers)


def validation_rows(workload: Workload) -> int:
    """How many the client with most has."""
    return max(workload.validation.sizes(), default=0) if workload.validation is not None else 0


def of_width(losses: Tensor, width: int) -> Tensor:
    """The same losses; behind a client's last row there is nothing."""
    return pad(losses, (0, width - losses.shape[1]), value=torch.nan)


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
    count = len(trial.names) * len(trial.seeds)
    steps_done, updates = [0] * count, [0.0] * count
    best: list[tuple[list[int], dict[str, Tensor], Any]] = []
    for one in learners(trial):
        tensors, about = unpacked(snapshot.read(one.path))
        for i, steps, update in zip(one.numbers, about["steps_done"], about["largest"], strict=True):
            steps_done[i], updates[i] = int(steps), float(update)
        if not len(one.places):  # another process's
            continue
        for i, whole in enumerate(tensors_of(state)):
            fill(whole, one.places, shared["common"] if i == 0 and "0" not in tensors else tensors[str(i)])
        if watched.moving is not None:
            for i, still in zip(one.places.tolist(), about["still"], strict=True):
                watched.moving.still[i] = bool(still)
        if not trial.method.pooled:
            best.append((one.places.tolist(), tensors, about.get("best")))
    if trial.method.pooled and watched.deployment is not None:
        for one in clients(trial):
            tensors, about = unpacked(snapshot.read(one.path))
            if len(one.places):
                best.append((one.places.tolist(), tensors, about.get("best")))
    if watched.moving is not None:
        watched.moving.previous.copy_(state.y)
    restore_watched(snapshot, said, trial, watched)
    if watched.deployment is not None:
        restore_best(watched.deployment.best, best, validation_rows(trial.workload))
        watched.deployment.common = [
            BestCommon(math.inf if loss is None else float(loss), shared[f"best.{s}"], int(number))
            for s, (loss, number) in enumerate(zip(said["common_losses"], said["common_rounds"], strict=True))
        ]
    servers = tuple(trial.method.first_server(state.x[:0, 0]) for _ in trial.seeds)
    for i, kept in enumerate(tensors_of(servers)):
        fill(kept, torch.arange(len(kept)), shared[f"server.{i}"])
    return state, After(int(said["round"]), tuple(steps_done), tuple(updates), servers)


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
    if trial.share.processes.first:  # they are everybody's
        watched.steps.steps.update(steps_from_json(trial, said["steps"]))
    watched.sent = [costs.Sent(*map(int, sent)) for sent in said["sent"]]
    watched.evaluation_seconds, watched.resize_seconds = (
        float(said[name]) for name in ("evaluation_seconds", "resize_seconds")
    )
    watched.memory = int(said["memory"])


def restore_best(best: Kept, parts: Sequence[tuple[list[int], dict[str, Tensor], Any]], width: int) -> None:
    """What every learner would deploy so far, with its losses on `width` rows."""
    if not parts or parts[0][2] is None:
        return
    count = len(best.which)
    for _, tensors, _ in parts:
        tensors[BEST[-1]] = of_width(tensors[BEST[-1]], width)
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
