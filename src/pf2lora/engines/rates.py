"""Which rates every learner has at every local step, where they are not the method's own numbers.

A rate that changes is a tensor, one number for each client of a pass: so a recorded step reads it like its batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pf2lora.core.method import Method
from pf2lora.core.rates import RateSchedule

StepRates = Mapping[str, Tensor]
"""Fields of a method as tensors (M, 1), for one local step; none where they are numbers, as usual."""


@dataclass(frozen=True)
class Rates:
    """`schedule` is over `rounds` rounds of `steps` local steps. Its clock is the run's, not the client's: who sits a
    round out has the next one's rates like everybody, and a site knows them by the round's number alone.

    `own` has what is a federation's own, of several that are trained side by side, each of `clients` learners. In steps
    alone after the last round the scheduled rates are `alone` times their numbers.
    """

    schedule: RateSchedule
    rounds: int
    steps: int
    clients: int
    own: tuple[Mapping[str, float], ...] = ()
    alone: float = 1.0

    def outside(
        self, method: Method, learners: Sequence[int], like: Tensor, *, alone: bool = False
    ) -> StepRates:
        """The rates of what is no local step of a round: fine-tuning before use, and steps `alone` after the last."""
        changed = method.scheduled if alone and self.alone != 1 else ()
        values = {name: self.values(method, learners, name) for name in sorted({*changed}.union(*self.own))}
        return {
            name: like.new_tensor(rates).unsqueeze(1) * (self.alone if name in changed else 1)
            for name, rates in values.items()
            if any(rates)
        }

    def of_round(
        self, method: Method, learners: Sequence[int], number: int, like: Tensor
    ) -> Sequence[StepRates]:
        """The rates of each local step of round `number` (from 1), of the dtype and on the device of `like`; an empty
        list where there are none but the method's own."""
        # Those that change in steps alone are no numbers here either: what is recorded here is replayed there.
        scheduled = set() if self.schedule.is_constant and self.alone == 1 else set(method.scheduled)
        factors = torch.ones(self.steps, 1, 1, dtype=torch.float64)
        if scheduled:
            first, total = (number - 1) * self.steps, self.rounds * self.steps
            of_steps = [self.schedule.factor(first + i, total) for i in range(self.steps)]
            factors = torch.tensor(of_steps, dtype=torch.float64).view(-1, 1, 1)
        found = {}
        for name in sorted(scheduled.union(*self.own)):
            values = self.values(method, learners, name)
            if not any(values):  # "auto", or a rate of 0: it stays what it is
                continue
            rates = torch.tensor(values, dtype=torch.float64).view(1, -1, 1)
            rates = rates * factors if name in scheduled else rates.expand(self.steps, -1, 1)
            found[name] = rates.to(like)  # one copy to the device for all steps of a round
        return [{name: rates[i] for name, rates in found.items()} for i in range(self.steps)] if found else []

    def values(self, method: Method, learners: Sequence[int], name: str) -> list[float]:
        """A field's number for each learner; 0 where it is a word."""
        common = getattr(method, name)
        found = (self.own[i // self.clients].get(name, common) if self.own else common for i in learners)
        return [0.0 if isinstance(value, str) else value for value in found]
