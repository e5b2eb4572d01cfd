"""A site's half of a run: what it does with a message from the server, and what it answers. Knows nothing of FLARE."""

from __future__ import annotations

import math
from typing import Any

import torch

from pf2lora.core.method import State
from pf2lora.engines.local import NonFiniteLoss, check_finite, local_steps
from pf2lora.engines.stepper import make_stepper
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.checkpoints import Checkpoint, CheckpointFolder
from pf2lora.federation.protocol.site_setup import SiteSetup
from pf2lora.methods.hetlora import Ranked


class SiteSession:
    """Answers the server's messages: `hello`, `train`, `measure` and `finish`."""

    def __init__(self, setup: SiteSetup, folder: CheckpointFolder, steps: int, dtype: torch.dtype) -> None:
        self.setup, self.folder, self.steps, self.dtype = setup, folder, steps, dtype
        self.stepper = make_stepper(setup.F, setup.initial.x.device, graphs=setup.graphs)
        self.latest: Checkpoint | None = None  # the newest state on disk, to spare a read

    def answer(self, data: bytes) -> bytes:
        """The reply to one message of the server."""
        fields, tensors = messages.decode(data)
        kind, number = fields["kind"], int(fields["round"])
        if kind == "hello":
            return messages.encode({"kind": "hello", "round": number} | self.setup.facts)
        state, saved = self.received(number, tensors)
        if kind == "train":
            return self.train(number, state, saved.steps, fields)
        if kind == "finish":
            self.setup.export(state, number - 1)
        return messages.encode(
            {"kind": "scores", "round": number, "served": self.setup.measure(state, number - 1)}
        )

    def received(self, number: int, tensors: dict[str, torch.Tensor]) -> tuple[State, Checkpoint]:
        """The state a round begins with: the site's own of its last round, with the server's x in it."""
        saved = self.latest
        if saved is None or saved.round >= number:
            saved = self.folder.newest_before(number, self.setup.initial)
        if not tensors:  # before the first average, or a method that sends nothing
            return saved.state, saved
        common = messages.to_flat(self.setup.layout, tensors).to(saved.state.x)
        return self.setup.method.receive(saved.state, common), saved

    def train(self, number: int, state: State, done: int, fields: dict[str, Any]) -> bytes:
        """One round's local steps; the state is on disk before the update leaves."""
        setup = self.setup
        answer: dict[str, Any] = {"kind": "update", "round": number}
        if fields.get("measure_served"):
            answer["served"] = setup.measure(state, number - 1)
        (variants_for_round,) = setup.method.variants_for_round(state)
        state, report = local_steps(
            variants_for_round, setup.F, state, setup.source, [0], [done], self.steps, stepper=self.stepper
        )
        check_finite(report.loss.cpu(), [setup.site], number)
        answer |= {"steps": self.steps, "loss": float(report.loss.sum())}
        if report.second_order is not None:
            share = float(report.second_order.sum())
            answer |= {"second_order": share} if math.isfinite(share) else {}
        if fields.get("measure_before"):
            answer["before"] = setup.measure(state, number)
        state, leaves = setup.method.send(state)
        if leaves.numel() and not bool(torch.isfinite(leaves).all()):
            raise NonFiniteLoss(f"the common adapter of {setup.site!r} became infinite in round {number}")
        self.latest = Checkpoint(number, done + self.steps, state)
        self.folder.save(self.latest)
        tensors = {}
        if leaves.numel():
            tensors = messages.to_tensors(setup.layout, leaves[0], sent_rank(state), self.dtype)
        return messages.encode(answer, tensors)


def sent_rank(state: State) -> int | None:
    """HETLoRA's r_k: only that part of x leaves."""
    return int(state.opt.rank[0]) if isinstance(state.opt, Ranked) else None
