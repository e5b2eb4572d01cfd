"""A site's half of a run: what it does with a message from the server, and what it answers. Knows nothing of FLARE."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from pf2lora.core.method import State, StepStats
from pf2lora.core.privacy import clipped, standard_normal
from pf2lora.engines.bad_clients import REMEDY, UpdateLedger, change
from pf2lora.engines.steps import local_steps
from pf2lora.federation.protocol import masked_fields, private
from pf2lora.federation.protocol.checkpoints import Checkpoint, CheckpointFolder
from pf2lora.federation.protocol.messages import (
    Malformed,
    Message,
    encode,
    to_flat,
    to_tensors,
)
from pf2lora.federation.protocol.ring import TooLarge
from pf2lora.federation.protocol.secure_sum import AlreadySummed, LostKeys, Refused
from pf2lora.federation.protocol.site_models import SiteModels
from pf2lora.federation.protocol.site_setup import SiteSetup
from pf2lora.federation.protocol.wire import Memory, Wire, checksum, moved
from pf2lora.run.evaluation import finite
from pf2lora.run.validation import SampledJudges

logger = logging.getLogger("pf2lora")


class NotHeld(Exception):
    """The server sent a change of something that is not here."""


class SiteSession:
    """Answers the server's messages: `hello`, `train`, `measure` and `finish`."""

    def __init__(self, setup: SiteSetup, folder: CheckpointFolder, steps: int, wire: Wire) -> None:
        self.setup, self.folder, self.steps, self.wire = setup, folder, steps, wire
        self.models = SiteModels(setup.trial, folder)
        self.privacy = setup.trial.schedule.privacy
        self.latest: Checkpoint | None = None  # the newest state on disk, to spare a read
        self.served: torch.Tensor | None = None  # the server's answer that came last (n,)
        self.loss: float | None = None  # of the last round's steps, for the site itself

    def answer(self, request: Message) -> bytes:
        """The reply to one request of the server, as `read_request` gave it. An adapter that is not this site's is
        `Malformed`; a site's own problems are UserErrors."""
        kind, number = request.kind, request.round
        self.check_asked(kind, number)
        if kind in masked_fields.REQUESTS:
            return self.masks_answer(request)
        if kind == "hello":
            kept = ("train_rows", "test_rows") if self.privacy else ()  # at home
            return encode(
                {"kind": kind, "round": number} | {k: v for k, v in self.setup.facts.items() if k not in kept}
            )
        change_of = request.fields.get("change_of")
        if request.tensors:
            if number == 1:
                raise Malformed("the server sends an x for round 1, which begins where the plan says")
            arrives = self.setup.method.arrives(number - 1)
            self.wire.check_answer(arrives, request.tensors, change=change_of is not None)
        try:
            # Before a state is set aside or taken back: behind a sum, its parts would be there to be summed again.
            self.setup.ledger.check_unsummed(number)
            if kind == "train":
                self.setup.ledger.begin_training(number)
            state, saved = self.received(
                number, request.tensors, request.fields.get("take_back"), change_of=change_of
            )
        except AlreadySummed as error:
            return self.masks_problem(number, error)
        except NotHeld:
            logger.warning("%r sits round %d out: it gets all of x next", self.setup.client, number)
            return encode({"kind": "problem", "round": number, "code": "base"})
        if kind == "train":
            return self.train(number, state, saved, request.fields)
        if kind == "finish":
            self.setup.ledger.finish(number - 1)
        look = self.models.deploy if kind == "finish" else self.models.served
        found = look(state, saved, number - 1)
        if self.privacy:
            if kind == "finish":
                self.models.keep_scores(found)
            found = {}
        return encode({"kind": "scores", "round": number} | self.setup.policy.leaving(found))

    def check_asked(self, kind: str, number: int) -> None:
        """`Malformed` where the plan has no such round, or this site no part in it: what a run may ask of a site, and
        the ε that its noise was found for, are of the plan's rounds."""
        plan, looks = self.setup.plan, kind in ("measure", "finish")
        rounds = plan.run.training.rounds
        if kind != "hello" and number > rounds + looks:
            raise Malformed(f"the server asks to {kind} in round {number}, and the plan has {rounds} rounds")
        if kind != "hello" and not looks and self.setup.site not in plan.chosen(number):
            raise Malformed(f"the server asks for {kind} in round {number}, in which the plan has others")

    def received(
        self,
        number: int,
        tensors: dict[str, torch.Tensor],
        take_back: int | None = None,
        *,
        change_of: int | None = None,
    ) -> tuple[State, Checkpoint]:
        """The state round `number` begins with: the site's own of its last round, with the server's answer to the round
        before in it. The server may have refused what the site sent last, in round `take_back`. The answer may be a
        change of what the site was served in its last round, by its checksum `change_of`; `NotHeld` if it has none."""
        self.served, saved = None, self.latest
        if saved is None or saved.round >= number:
            saved = self.folder.newest_before(number, self.setup.initial, self.steps)
        if saved.round == 0:  # its state was cleaned up: batches whose sum is known are not drawn again
            saved = saved._replace(steps=self.setup.ledger.summed * self.steps)
        if saved.round == take_back:
            saved = self.latest = self.folder.take_back(saved, self.setup.initial)
        if not tensors:  # before the first average, or a method that sends nothing
            if (
                self.setup.masks is not None
            ):  # nobody else's x is another: masks cancel for all who were served none
                return saved.state._replace(x=self.setup.initial.x), saved
            return saved.state, saved
        method, held = self.setup.method, saved.wire.served
        if change_of is None:
            self.served = to_flat(method.arrives(number - 1), tensors)
        elif held is None or checksum(held) != change_of:
            raise NotHeld
        else:
            self.served = moved(method.arrives(number - 1), held, tensors)
        answer = self.served.to(saved.state.x)
        if self.privacy:
            answer = private.absolute(method, self.setup.initial, answer, number - 1)
        return method.receive(saved.state, answer, number - 1), saved

    def train(self, number: int, state: State, saved: Checkpoint, fields: dict[str, Any]) -> bytes:
        """One round's local steps; the state is on disk before the update leaves."""
        trial, method, received = self.setup.trial, self.setup.method, state
        answer: dict[str, Any] = {"kind": "update", "round": number}
        if fields.get("measure_served"):
            answer |= self.setup.policy.leaving(self.models.served(state, saved, number - 1))
        judges = SampledJudges(trial) if self.models.validated else None
        if judges and method.resizes_before(saved.steps, self.steps, judges.batches(0)):
            state = method.resize(state, judges([0]))
        (variant,) = method.variants_for_round(state, number)
        began = state
        rates = trial.schedule.rates_of(1).of_round(variant, [0], number, state.x)

        def train(clients: list[int]) -> tuple[State, StepStats]:
            return local_steps(
                variant,
                trial.F,
                began,
                trial.source,
                clients=clients,
                first_step=[saved.steps],
                steps=self.steps,
                stepper=trial.stepper,
                rates=rates,
            )

        ((_, (state, stats)),) = trial.room.passes([0], train)
        self.loss = finite(float(stats.loss.mean()))
        ledger = UpdateLedger(1, compare=False, largest=[saved.largest])
        bad = ledger.judge([0], stats.loss, change(began, state))
        ledger.close()
        if bad:
            return self.left_out(fields, received, saved, bad[0], stats.loss)
        answer |= {"steps": self.steps, "loss": float(stats.loss.sum())}
        if stats.second_order is not None:
            share = float(stats.second_order.sum())
            answer |= {"second_order": share} if math.isfinite(share) else {}
        if fields.get("measure_before"):
            before = self.models.before_averaging(state, number)
            answer |= self.setup.policy.leaving({"before": before})
        stays, leaves = method.send(state, number)
        if leaves.numel() and not bool(torch.isfinite(leaves).all()):
            return self.left_out(fields, received, saved, "what it would send is not finite", leaves)
        if self.privacy:
            answer = {"kind": "update", "round": number, "steps": self.steps}  # no figure of its rows leaves
            _, unmoved = method.send(began, number)
            leaves = clipped(leaves.double() - unmoved.double(), self.privacy.clip).to(leaves)
        unpruned = None if stays.x is state.x else state.x
        kept = Checkpoint(number, saved.steps + self.steps, stays, unpruned, ledger.largest[0])
        return self.update(answer, kept, leaves, saved.wire, fields)

    def update(
        self,
        answer: dict[str, Any],
        kept: Checkpoint,
        leaves: torch.Tensor,
        before: Memory,
        fields: dict[str, Any],
    ) -> bytes:
        """The message with what leaves, once what is `kept` is on disk; `fields` are the request's, and `before` is
        what the round before left over."""
        method, number, tensors = self.setup.method, answer["round"], dict[str, torch.Tensor]()
        (rank,) = method.ranks_of(kept.state)  # only that part of the common adapter leaves
        if leaves.numel() and self.setup.masks is None:
            served = {}
            if self.served is not None:
                served = to_tensors(method.arrives(number - 1), self.served, None, torch.float32)
            tensors, left = self.wire.update(method, number, leaves[0].cpu(), rank, served, before.residual)
            kept = kept if self.wire.exact else kept._replace(wire=Memory(self.served, left))
        self.latest = kept
        self.folder.save(kept)
        if leaves.numel() and self.setup.masks is not None:
            try:
                numbers = self.masked(leaves[0], fields)
            except (Refused, LostKeys, TooLarge) as error:
                return self.masks_problem(number, error)
            tensors, _ = self.wire.update(method, number, numbers, rank, {}, {})
            unopened = self.setup.masks.unopened(number)
            answer |= {"unopened": unopened} if unopened else {}
        return encode(answer, tensors)

    def masked(self, numbers: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
        """What leaves `(n,)` with the round's masks on it; in a private run, with this site's part of the noise."""
        masks, number = self.setup.masks, fields["round"]
        assert masks is not None
        if self.privacy:
            share, seed = masks.noise_share(number), self.setup.trial.seeds[0]
            drawn = standard_normal(numbers.numel(), self.privacy.seed, seed, number, masks.site)
            numbers = (
                numbers.cpu().double() + self.privacy.noise * self.privacy.clip * math.sqrt(share) * drawn
            )
        return masks.mask(numbers, fields, self.served)

    def masks_answer(self, request: Message) -> bytes:
        """The reply to a request for keys or shares."""
        if self.setup.masks is None:
            raise Malformed(f"a request for {request.kind} in a run without masks")
        try:
            return self.setup.masks.answer(request)
        except (Refused, LostKeys, AlreadySummed) as error:
            return self.masks_problem(request.round, error)

    def masks_problem(self, number: int, error: Exception) -> bytes:
        """The round goes on without this site; its own log says why."""
        logger.warning("%r is not in the masked sum of round %d: %s", self.setup.client, number, error)
        code = "summed" if isinstance(error, AlreadySummed) else "masks"
        return encode({"kind": "problem", "round": number, "code": code})

    def left_out(
        self, fields: dict[str, Any], received: State, saved: Checkpoint, reason: str, figures: torch.Tensor
    ) -> bytes:
        """A round that did not go well, as a client of a local run has it: the state it began with stays, the batches
        move on. The server is told the kind of problem, by whether the `figures` are finite; the log says more."""
        number = fields["round"]
        logger.warning("%r sits round %d out: %s; %s", self.setup.client, number, reason, REMEDY)
        kept = saved._replace(round=number, steps=saved.steps + self.steps, state=received, unpruned=None)
        if (
            self.privacy
        ):  # that it went wrong is a figure of its rows, too: it counts as zero, and nobody is told
            leaves = torch.zeros_like(self.setup.method.send(received, number)[1])
            answer = {"kind": "update", "round": number, "steps": self.steps}
            return self.update(answer, kept, leaves, saved.wire, fields)
        self.latest = kept
        self.folder.save(kept)
        code = "update" if bool(torch.isfinite(figures).all()) else "loss"
        return encode({"kind": "problem", "round": number, "code": code})
