"""A site's half of a run: what it does with a message from the server, and what it answers. Knows nothing of FLARE."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pf2lora.core.layout import Layout
from pf2lora.core.method import Loss, Method, State
from pf2lora.engines.batches import BatchSource
from pf2lora.engines.local import NonFiniteLoss, check_finite, local_steps
from pf2lora.engines.stepper import make_stepper
from pf2lora.federation.protocol import wire
from pf2lora.federation.protocol.state import Saved, StateFolder
from pf2lora.methods.hetlora import Ranked

Scores = dict[str, float]
"""`rows` and, by metric, the score times the rows: counts and sums, nothing about a single example."""


@dataclass(frozen=True)
class SiteWork:
    """What a site brings to a run, none of which leaves it but the declared facts."""

    site: str
    method: Method
    F: Loss
    source: BatchSource  # of one client
    initial: State
    measure: Callable[[State, int], Scores]  # with the state after a round
    facts: dict[str, Any]  # what the server checks before round 1
    metrics: tuple[str, ...]
    graphs: bool = True  # record the local step on a CUDA device
    export: Callable[[State, int], None] = lambda state, number: None

    @property
    def layout(self) -> Layout:
        return self.method.layout


class Worker:
    """Answers the server's messages: `hello`, `train`, `measure` and `finish`."""

    def __init__(self, work: SiteWork, folder: StateFolder, steps: int, dtype: torch.dtype) -> None:
        self.work, self.folder, self.steps, self.dtype = work, folder, steps, dtype
        self.stepper = make_stepper(work.F, work.initial.x.device, graphs=work.graphs)
        self.latest: Saved | None = None  # the newest state on disk, to spare a read

    def answer(self, data: bytes) -> bytes:
        """The reply to one message of the server."""
        fields, tensors = wire.decode(data)
        kind, number = fields["kind"], int(fields["round"])
        if kind == "hello":
            return wire.encode({"kind": "hello", "round": number} | self.work.facts)
        state, saved = self.received(number, tensors)
        if kind == "train":
            return self.train(number, state, saved.steps, fields)
        if kind == "finish":
            self.work.export(state, number - 1)
        return wire.encode(
            {"kind": "scores", "round": number, "served": self.work.measure(state, number - 1)}
        )

    def received(self, number: int, tensors: dict[str, torch.Tensor]) -> tuple[State, Saved]:
        """The state a round begins with: the site's own of its last round, with the server's x in it."""
        saved = self.latest
        if saved is None or saved.round >= number:
            saved = self.folder.newest_before(number, self.work.initial)
        if not tensors:  # before the first average, or a method that sends nothing
            return saved.state, saved
        common = wire.to_flat(self.work.layout, tensors).to(saved.state.x)
        return self.work.method.receive(saved.state, common), saved

    def train(self, number: int, state: State, done: int, fields: dict[str, Any]) -> bytes:
        """One round's local steps; the state is on disk before the update leaves."""
        work = self.work
        answer: dict[str, Any] = {"kind": "update", "round": number}
        if fields.get("measure_served"):
            answer["served"] = work.measure(state, number - 1)
        (variants_for_round,) = work.method.variants_for_round(state)
        state, report = local_steps(
            variants_for_round, work.F, state, work.source, [0], [done], self.steps, stepper=self.stepper
        )
        check_finite(report.loss.cpu(), [work.site], number)
        answer |= {"steps": self.steps, "loss": float(report.loss.sum())}
        if report.second_order is not None:
            share = float(report.second_order.sum())
            answer |= {"second_order": share} if math.isfinite(share) else {}
        if fields.get("measure_before"):
            answer["before"] = work.measure(state, number)
        state, leaves = work.method.send(state)
        if leaves.numel() and not bool(torch.isfinite(leaves).all()):
            raise NonFiniteLoss(f"the common adapter of {work.site!r} became infinite in round {number}")
        self.latest = Saved(number, done + self.steps, state)
        self.folder.save(self.latest)
        tensors = {}
        if leaves.numel():
            tensors = wire.to_tensors(work.layout, leaves[0], sent_rank(state), self.dtype)
        return wire.encode(answer, tensors)


def sent_rank(state: State) -> int | None:
    """HETLoRA's r_k: only that part of x leaves."""
    return int(state.opt.rank[0]) if isinstance(state.opt, Ranked) else None
