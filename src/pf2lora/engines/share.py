"""Whose clients are whose: the clients of a run, shared out over its processes, and what belongs to all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pf2lora.core.method import Method, State, StepStats, Updates, over_tensors
from pf2lora.engines.bad_clients import UpdateLedger
from pf2lora.engines.processes import ALONE, Processes
from pf2lora.engines.steps import Trained


@dataclass(frozen=True)
class Share:
    """`owned` has, for each process, the positions of its clients among all, in order. Client k of a process with seed
    number s is its learner `s · own + k`, and learner `s · clients + owned[rank][k]` among all.

    `copied`: all processes have the same, one learner on everybody's data; the first trains it.
    """

    processes: Processes
    owned: tuple[tuple[int, ...], ...]
    copied: bool = False

    @classmethod
    def of_one(cls, clients: int) -> Share:
        """All clients in one process."""
        return cls(ALONE, (tuple(range(clients)),))

    def of_copies(self) -> Share:
        """The one learner of a pooled method, which every process has."""
        return Share(self.processes, ((0,),) * self.processes.size, copied=True)

    @property
    def clients(self) -> int:
        """All of them."""
        return 1 if self.copied else sum(map(len, self.owned))

    @property
    def here(self) -> tuple[int, ...]:
        """The positions of this process's clients."""
        return self.owned[self.processes.rank]

    @property
    def trains(self) -> bool:
        """Whether this process trains its learners."""
        return not self.copied or self.processes.first

    def owner(self, client: int) -> int:
        """The process that has a client."""
        return next(rank for rank, owned in enumerate(self.owned) if client in owned)

    def own(self, s: int) -> slice:
        """This process's learners of the seed at position `s`."""
        return slice(s * len(self.here), (s + 1) * len(self.here))

    def learners(self, seeds: int, rank: int | None = None) -> list[int]:
        """What the learners of a process (this one) are called among all."""
        owned = self.here if rank is None else self.owned[rank]
        return [s * self.clients + k for s in range(seeds) for k in owned]

    def places(self, learners: Iterable[int]) -> list[int]:
        """Where those of these learners are that this process has."""
        if self.processes.alone:
            return list(learners)
        place = {k: j for j, k in enumerate(self.here)}
        found = (divmod(i, self.clients) for i in learners)
        return [s * len(self.here) + place[k] for s, k in found if k in place]

    def everyone(self, values: Sequence[Any]) -> list[Any]:
        """Every learner's value, in order, from those of this process's; values that JSON knows."""
        return self.in_order(self.processes.gather(list(values)))

    def in_order(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """What every process has of its learners, learner by learner."""
        if self.copied or self.processes.alone:
            return list(parts[0])
        seeds = len(parts[0]) // len(self.owned[0])
        found: dict[int, Any] = {}
        for rank, part in enumerate(parts):
            found.update(zip(self.learners(seeds, rank), part, strict=True))
        return [found[i] for i in range(len(found))]


def shared_out(loads: Sequence[float], size: int) -> tuple[tuple[int, ...], ...]:
    """Clients with these loads over `size` processes: the heaviest first, each to who has least."""
    owned: list[list[int]] = [[] for _ in range(size)]
    total = [0.0] * size
    for k in sorted(range(len(loads)), key=lambda k: -loads[k]):
        rank = min(range(size), key=lambda r: (total[r], len(owned[r])))
        owned[rank].append(k)
        total[rank] += loads[k]
    return tuple(tuple(sorted(own)) for own in owned)


# --- a round -----------------------------------------------------------------------------------------------


def of_everyone(share: Share, trained: Trained, ledger: UpdateLedger, like: Tensor) -> Trained:
    """What the local steps of all processes tell, and `ledger` with all of their updates."""
    if share.processes.alone:
        return trained
    numbers = ledger.numbers
    own = trained.of(trained.learners) if trained.learners else None
    shares = None if own is None or own.second_order is None else own.second_order.tolist()
    told = share.processes.gather(
        {
            "learners": [numbers[i] for i in trained.learners],
            "losses": None if own is None else own.loss.tolist(),
            "shares": shares,
            "bad": [[numbers[i], why] for i, why in trained.bad.items()],
            "updates": [[i, *update] for i, update in ledger.now.items()],
        }
    )
    found = Trained([], [], {})
    for said in told:
        if said["learners"]:
            found.learners.extend(said["learners"])
            figures = (said["losses"], said["shares"])
            found.stats.append(
                StepStats(*(None if v is None else torch.tensor(v, dtype=like.dtype) for v in figures))  # type: ignore[arg-type]
            )
        found.bad.update(dict(said["bad"]))
        ledger.now.update({i: (moved, size) for i, moved, size in said["updates"]})
    return found


def copy_first(share: Share, state: State) -> None:
    """A pooled learner's state, from the process that trains it."""
    if share.copied:
        over_tensors(lambda t: share.processes.copy_first(t) or t, state)  # type: ignore[func-returns-value]


def at_server(share: Share, method: Method, own: Updates) -> Updates:
    """What a server gets from all processes; `own` has this one's rows, with their weights among all, and every
    participant's position. One row, the weighted mean, where the method's server asks for no more."""
    processes, positions = share.processes, own.clients
    if processes.alone or share.copied:
        return own
    if not method.needs_rows:
        mean = processes.total(own.weights.to(own.numbers) @ own.numbers)
        return own._replace(numbers=mean.unsqueeze(0), weights=own.weights.new_ones(1))
    took_part = set(positions)
    by_rank = [[k for k in owned if k in took_part] for owned in share.owned]
    place = {k: i for i, k in enumerate(k for owned in by_rank for k in owned)}
    at = torch.tensor([place[k] for k in positions])
    counts = list(map(len, by_rank))
    rows, weights = (torch.cat(processes.rows(t, counts)) for t in (own.numbers, own.weights))
    return own._replace(numbers=rows[at.to(rows.device)], weights=weights[at.to(weights.device)])
