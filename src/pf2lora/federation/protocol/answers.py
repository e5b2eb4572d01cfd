"""What sites answer in a round, read as it arrives: of an update the numbers go to the round's rows, or into a masked
sum, and only what it says beside them stays in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pf2lora.federation.protocol.messages import Malformed, Message, rank_of, to_flat
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.problems import told
from pf2lora.federation.protocol.rows import Rows
from pf2lora.federation.protocol.serving import Serving

Keep = Callable[[str, Tensor], None]
"""Where a site's numbers `(n,)` go, if not to the rows."""

AT_ONCE = 1 << 16  # numbers that are looked at together


class Answer(NamedTuple):
    """A site's answer: the message without its tensors, its size in bytes, the rank that it was cut to, and why the
    site is left out, by its own problem or because the message is not what it should be."""

    size: int
    message: Message | None = None
    rank: int | None = None
    why: str = ""


class Answers(Serving):
    """The answers of a run's rounds."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        self.rows = Rows(folder, plan.sites)
        self.barred: dict[
            str, str
        ] = {}  # from masked rounds, for as long as this server runs, with the reason

    def arrived(self, site: str, data: object, keep: Keep | None = None) -> Answer:
        """A site's answer to the next round's request, whatever it is. An update's numbers are kept in the rows, or
        where `keep` says, which gets the whole numbers of a masked one."""
        number, size = self.done + 1, len(data) if isinstance(data, bytes) else 0
        try:
            message = self.read_answer(data, "update" if site in self.chosen(number) else "scores", number)
            if message.tensors:
                if keep is not None:
                    keep(site, to_flat(self.known_method.leaves(number), message.tensors, torch.int64))
                else:
                    self.rows.put_parts(
                        site, self.known_method.leaves(number).size, self.parts(site, message)
                    )
        except Malformed as error:
            return Answer(size, why=str(error))
        rank = rank_of(self.known_method.leaves(number), message.tensors)
        why = told(message.fields, self.plan) if message.kind == "problem" else ""
        return Answer(size, message._replace(tensors={}), rank, why)

    def read(self, answers: Mapping[str, object]) -> dict[str, Answer]:
        """The answers to the next round, those that were not read as they arrived too."""
        return {s: a if isinstance(a, Answer) else self.arrived(s, a) for s, a in answers.items()}

    def read_answer(self, data: object, kind: str, number: int) -> Message:
        """A site's answer of `kind`, or its problem, for round `number`: as declared and finite, else `Malformed`."""
        message = self.allow_list(self.known_method).check(data, (kind, "problem"))
        if message.round != number:
            raise Malformed(f"a {message.kind!r} of round {message.round} instead of round {number}")
        if message.kind == "update" and bool(message.tensors) != self.known_method.federated:
            has = "with" if message.tensors else "without"
            raise Malformed(f"an update {has} the common adapter, in a run of {self.plan.method!r}")
        for name, tensor in message.tensors.items():
            if not finite(tensor):
                raise Malformed(f"the tensor {name!r} has values that are not finite")
        return message

    def parts(self, site: str, message: Message) -> Iterator[tuple[int, Tensor]]:
        """What a site sent, whatever it travelled as, entry by entry: where its numbers begin in the row, and they.
        `Malformed` where they are not finite."""
        for at, part in self.wire.updated(
            self.known_method, message.round, message.tensors, self.common_for(site)
        ):
            if not self.wire.exact and not finite(part):
                raise Malformed("its change makes values that are not finite")
            yield at, part


def finite(tensor: Tensor) -> bool:
    """Whether all numbers are, some at a time: what is in between takes memory, too."""
    return all(bool(torch.isfinite(part).all()) for part in tensor.flatten().split(AT_ONCE))
