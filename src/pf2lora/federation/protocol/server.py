"""The server's half of a run: whom it asks, what it accepts, the merge, the checkpoint. Knows nothing of FLARE."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from pf2lora import atomic
from pf2lora.core.layout import Layout
from pf2lora.core.method import Method, Updates, tensors_of
from pf2lora.core.randomness import participants
from pf2lora.engines.bad_clients import check_enough
from pf2lora.engines.local import merge_weights
from pf2lora.errors import UserError
from pf2lora.federation.protocol import private, robust, server_checkpoint
from pf2lora.federation.protocol.agreement import check_fits, keep_plan
from pf2lora.federation.protocol.allow_list import AllowList
from pf2lora.federation.protocol.checkpoints import restored, writing
from pf2lora.federation.protocol.masked import Summed, check_maskable, lost_sum, merge_sum
from pf2lora.federation.protocol.messages import (
    Malformed,
    Message,
    dtype_named,
    encode,
    layout_from,
    rank_of,
    to_flat,
    to_tensors,
)
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.problems import OF_A_ROUND, told
from pf2lora.federation.protocol.run_status import FINAL, read_final
from pf2lora.federation.protocol.server_checkpoint import Knowledge
from pf2lora.federation.protocol.stopping import QuorumMissed, out_of_patience
from pf2lora.federation.protocol.update_checks import bounded, check_rows, odd_updates, starts
from pf2lora.methods import METHODS
from pf2lora.run import privacy
from pf2lora.run.set_up import merging_method


class RoundRecord(TypedDict):
    """What the server keeps of a round, as JSON. Names are the sites'."""

    round: int
    seconds: float
    answered: list[str]  # whose updates were merged
    missing: list[str]  # who was asked and did not answer in time
    refused: dict[str, str]  # who was left out, and why
    take_back: list[str]  # of these, whose update was refused here: the site undoes its round
    stopped: list[str]  # who said that it cannot go on
    bytes: dict[str, int]  # the size of each answer
    scores: dict[str, dict[str, Any]]  # the fields of each answer that was not refused


class ServerSession:
    """Rounds of a plan, from the last finished one on. `folder` is the run's folder on the server."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder, self.config = plan, folder, plan.run
        self.dtype = dtype_named(plan.wire)
        self.privacy = privacy.mechanism(
            self.config, METHODS[plan.method], len(plan.sites), (self.config.training.seed,)
        )
        self.done = 0  # finished rounds
        # The method's answer after them: to all, or one for each site. In a private run, its difference to the start.
        self.common: Tensor | None = None
        self.kept: Any = ()  # what the method keeps between rounds
        self.sites: dict[str, dict[str, Any]] = {}  # what each said of itself
        self.ranks: dict[str, int | None] = {}  # of the last updates; HETLoRA's sites get it truncated to it
        self.method: Method | None = None
        self.records: list[RoundRecord] = []
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            keep_plan(plan, folder / "plan.json")
        self.resume()

    # --- who is there ---------------------------------------------------------------------------------------

    def register(self, site: str, data: object) -> None:
        """Take a site's answer to a hello. `Malformed` if it is none; a UserError that names the site and the remedy
        if the site has a problem, or does not fit the others."""
        message = self.allow_list(None).check(data, ("hello", "problem"))
        facts = message.fields
        if message.kind == "problem":
            raise UserError(f"{site} cannot take part: {told(facts, self.plan)} (its own log says more)")
        for other, seen in self.sites.items():
            if other != site:
                check_fits(site, facts, other, seen)
        if self.config.training.weighting == "size" and site in self.sites:
            check_rows(site, facts, self.sites[site])
        self.sites[site] = facts
        if self.method is None:
            self.know_method(facts)

    def know_method(self, facts: Mapping[str, Any]) -> None:
        """The method, from a site's description of its adapter."""
        self.method = server_method(self.plan, layout_from(facts["layout"]))
        if self.plan.masked or self.plan.merge != "mean":
            check_maskable(self.method)
        self.kept = self.method.first_server(torch.zeros(0))

    @property
    def known_method(self) -> Method:
        """The method, which takes the sites' description of their adapter."""
        assert self.method is not None, "no site has said hello"
        return self.method

    @property
    def layout(self) -> Layout:
        """The common adapter, as the sites described it."""
        return self.known_method.layout

    def chosen(self, number: int) -> list[str]:
        """Who takes part in round `number` by the plan, present or not."""
        every = self.plan.sites
        return [
            every[k]
            for k in participants(
                self.config.training.seed, number, len(every), self.config.training.participation
            )
        ]

    @property
    def over(self) -> bool:
        """Whether no round is left: all are done, or patience is at its end."""
        training = self.config.training
        return self.done >= training.rounds or out_of_patience(training, (r["scores"] for r in self.records))

    def allow_list(self, method: Method | None) -> AllowList:
        """What a site may have sent."""
        private = self.privacy is not None
        return AllowList(method, None, self.dtype, private=private, masked=self.plan.masked)

    def spent(self) -> privacy.PrivacySpent | None:
        """What the rounds that are done cost every site."""
        seed = self.config.training.seed
        return privacy.spent(self.config, self.privacy, len(self.plan.sites), seed, self.done)

    # --- requests -------------------------------------------------------------------------------------------

    def hello(self) -> bytes:
        """The request that a site introduces itself."""
        return encode({"kind": "hello", "round": self.done + 1})

    def requests(
        self, present: list[str], measured: set[int], more: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, bytes]:
        """The next round's request to each site that is there: train, or only measure what was served last. `more` are
        further fields for some of them."""
        number, found = self.done + 1, {}
        chosen, served = self.chosen(number), self.done in measured
        for site in present:
            fields: dict[str, Any] = {"kind": "train", "round": number}
            if served:
                fields["measure_served"] = True
            if site not in chosen:
                if not served:
                    continue
                fields["kind"] = "measure"
            elif number in measured:
                fields["measure_before"] = True
            fields |= (more or {}).get(site, {})
            found[site] = encode(fields | self.undo(site), self.common_for(site))
        return found

    def finish_requests(self, present: list[str]) -> dict[str, bytes]:
        """After the last round: the last average, to keep and to measure; for those that have not got it."""
        fields: dict[str, Any] = {"kind": "finish", "round": self.done + 1}
        sites = [site for site in present if site in self.unserved()]
        return {site: encode(fields | self.undo(site), self.common_for(site)) for site in sites}

    def unserved(self) -> list[str]:
        """The sites that have not yet told their last scores."""
        told = read_final(self.folder)
        return [s for s in self.plan.sites if told.get(s, {}).get("round") != self.done + 1]

    def undo(self, site: str) -> dict[str, int]:
        """The round that a site is to undo: its last one, where what it sent then was refused."""
        for record in reversed(self.records):
            if site in record["answered"] or site in record["refused"]:
                return {"take_back": record["round"]} if site in record.get("take_back", ()) else {}
        return {}

    def common_for(self, site: str) -> dict[str, Tensor]:
        """The last answer as this site gets it; nothing before the first average."""
        if self.common is None:
            return {}
        own = self.common if self.common.dim() == 1 else self.common[self.plan.sites.index(site)]
        return to_tensors(self.known_method.arrives(self.done), own, self.ranks.get(site), self.dtype)

    # --- answers --------------------------------------------------------------------------------------------

    def finish_round(
        self, answers: Mapping[str, object], seconds: float, missing: list[str], summed: Summed | None = None
    ) -> RoundRecord:
        """Check the updates, merge the usable ones, save. The record says who was left out and why. Of a masked round
        the server has their sum alone."""
        number = self.done + 1
        read, refused = self.read(answers, number)
        problems = {s: m.fields["code"] for s, m in read.items() if m.kind == "problem"}
        stopped = [site for site, code in problems.items() if code not in OF_A_ROUND]
        updates = {site: m for site, m in read.items() if m.kind == "update"}
        leaves = self.known_method.leaves(number)
        vectors = {}
        if summed is None:
            vectors = {site: to_flat(leaves, m.tensors) for site, m in updates.items() if m.tensors}
            if self.privacy is None:  # where updates get noise, who is left out may not depend on the others'
                refused |= odd_updates(vectors, starts(self, vectors), self.plan.norm_limit)
        else:
            refused |= {site: "it is not in the masked sum" for site in updates if site not in summed.sites}
        kept = [s for s in self.plan.sites if s in updates and s not in refused]
        asked = len(self.chosen(number))
        self.check_strict([s for s in refused if s not in stopped], refused, number)
        if summed is not None and lost_sum(self, summed, problems, asked):
            refused |= dict.fromkeys(kept, f"the round has no sum ({summed.why})")
            kept = []
        elif len(kept) < self.plan.needed(asked) or (summed is not None and summed.total is None):
            raise QuorumMissed(number, len(kept), asked, self.plan, missing, refused)
        if summed is not None and summed.total is not None and kept:
            merge_sum(self, summed.total, len(kept))
        elif vectors:
            self.merge(kept, vectors, number)
            self.ranks |= {s: rank_of(leaves, updates[s].tensors) for s in kept}
        record: RoundRecord = {
            "round": number,
            "seconds": seconds,
            "answered": kept,
            "missing": missing,
            "refused": refused,
            "take_back": [site for site in refused if site not in problems],
            "stopped": stopped,
            "bytes": {site: len(data) if isinstance(data, bytes) else 0 for site, data in answers.items()},
            "scores": {site: m.fields for site, m in read.items() if site not in refused},
        }
        self.records.append(record)
        self.done = number
        self.save()
        return record

    def check_strict(self, bad: list[str], why: Mapping[str, str], number: int) -> None:
        """`Diverged` where the run allows fewer bad sites in a round than there are; else the quorum decides."""
        training, asked = self.config.training, self.chosen(number)
        if training.strict or training.max_bad_clients is not None:
            reasons = {asked.index(site): why[site] for site in bad if site in asked}
            most = 0 if training.strict else training.max_bad_clients
            check_enough(reasons, [range(len(asked))], asked, number, most)

    def read(self, answers: Mapping[str, object], number: int) -> tuple[dict[str, Message], dict[str, str]]:
        """The answers to round `number`, and why sites are left out: a message that is not what it should be, or a
        problem that the site itself tells."""
        read: dict[str, Message] = {}
        refused: dict[str, str] = {}
        chosen = self.chosen(number)
        for site, data in answers.items():
            try:
                read[site] = self.read_answer(data, "update" if site in chosen else "scores", number)
            except Malformed as error:
                refused[site] = str(error)
                continue
            if read[site].kind == "problem":
                refused[site] = told(read[site].fields, self.plan)
        return read, refused

    def read_answer(self, data: object, kind: str, number: int) -> Message:
        """A site's answer of `kind`, or its problem, for round `number`: as declared and finite, else `Malformed`."""
        message = self.allow_list(self.known_method).check(data, (kind, "problem"))
        if message.round != number:
            raise Malformed(f"a {message.kind!r} of round {message.round} instead of round {number}")
        if message.kind == "update" and bool(message.tensors) != self.known_method.federated:
            has = "with" if message.tensors else "without"
            raise Malformed(f"an update {has} the common adapter, in a run of {self.plan.method!r}")
        for name, tensor in message.tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise Malformed(f"the tensor {name!r} has values that are not finite")
        return message

    def merge(self, sites: list[str], vectors: Mapping[str, Tensor], number: int) -> None:
        """The method's answer to what these sites sent at the end of round `number`."""
        rows = torch.stack([vectors[s] for s in sites])
        if self.privacy is not None:
            expected, seed = len(self.chosen(number)), self.config.training.seed
            sent = private.noisy(self.privacy, self.known_method, self.common, rows, expected, seed, number)
            self.common, self.kept = self.known_method.merge(sent, self.kept)
            return
        if self.plan.merge != "mean":
            sent = private.one_row(robust.merged(rows, self.plan.merge), number)
            self.common, self.kept = self.known_method.merge(sent, self.kept)
            return
        sizes = bounded({s: self.sites[s]["train_rows"] for s in sites})
        weights = merge_weights([sizes[s] for s in sites], self.config.training.weighting)
        positions = tuple(self.plan.sites.index(s) for s in sites)
        sent = Updates(rows, weights, positions, number)
        self.common, self.kept = self.known_method.merge(sent, self.kept)

    def finish(self, answers: Mapping[str, object]) -> None:
        """The last scores, and the end."""
        scores = read_final(self.folder)
        for site, data in answers.items():
            try:
                scores[site] = self.read_answer(data, "scores", self.done + 1).fields
            except Malformed as error:
                scores[site] = {"kind": "problem", "reason": str(error)}
        with writing(self.folder):
            atomic.write_json(self.folder / FINAL, scores)
        self.save()

    # --- the checkpoint -------------------------------------------------------------------------------------

    def save(self) -> None:
        """One file holds everything a later server needs; the previous one stays until this one is whole."""
        knowledge = Knowledge(self.done, self.ranks, self.records, self.sites, time.time())
        server_checkpoint.write(self.folder, knowledge, self.common, tensors_of(self.kept))

    def resume(self) -> None:
        """Go on after the last finished round, if there is one."""
        path = server_checkpoint.newest(self.folder)
        if path is None:
            return
        knowledge, self.common, kept = server_checkpoint.read(path)
        try:
            self.know_method(server_checkpoint.facts_of(knowledge, path))
            answered = self.known_method.arrives(knowledge.done).size
            if self.common is not None and self.common.shape[-1:] != (answered,):
                raise ValueError("a common adapter of another size")
        except (Malformed, ValueError, KeyError) as error:
            raise server_checkpoint.damaged(path, error) from None
        self.done, self.records, self.ranks = knowledge.done, knowledge.records, knowledge.ranks
        self.sites = knowledge.facts
        self.kept = restored(self.kept, kept, path)


def server_method(plan: Plan, layout: Layout) -> Method:
    """The method as the server needs it: only `merge` is called, and it sees only what is shared."""
    return merging_method(plan.run, plan.method, layout, len(plan.sites))
