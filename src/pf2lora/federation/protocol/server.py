"""The server's half of a run: what it accepts of a round, the merge, the checkpoint. Knows nothing of FLARE."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pf2lora import atomic
from pf2lora.core.method import Updates, tensors_of
from pf2lora.engines.bad_clients import check_enough
from pf2lora.engines.local import merge_weights
from pf2lora.federation.protocol import private, robust, server_checkpoint
from pf2lora.federation.protocol.checkpoints import restored, writing
from pf2lora.federation.protocol.masked import Summed, lost_sum, merge_sum
from pf2lora.federation.protocol.messages import Malformed, Message, rank_of
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.problems import OF_A_ROUND, told
from pf2lora.federation.protocol.records import RoundRecord
from pf2lora.federation.protocol.run_status import FINAL, read_final
from pf2lora.federation.protocol.server_checkpoint import Knowledge
from pf2lora.federation.protocol.serving import Serving
from pf2lora.federation.protocol.stopping import QuorumMissed, out_of_patience
from pf2lora.federation.protocol.update_checks import bounded, odd_updates, starts
from pf2lora.run import privacy


class ServerSession(Serving):
    """Rounds of a plan, from the last finished one on. `folder` is the run's folder on the server."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        self.resume()

    @property
    def over(self) -> bool:
        """Whether no round is left: all are done, or patience is at its end."""
        training = self.config.training
        return self.done >= training.rounds or out_of_patience(training, (r["scores"] for r in self.records))

    def spent(self) -> privacy.PrivacySpent | None:
        """What the rounds that are done cost every site."""
        seed = self.config.training.seed
        return privacy.spent(self.config, self.privacy, len(self.plan.sites), seed, self.done)

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
        vectors = dict[str, Tensor]()
        if summed is None:
            vectors, infinite = self.rows(updates)
            refused |= infinite
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
        held = self.now_held()
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
        self.held = held
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

    def rows(self, updates: Mapping[str, Message]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What each site sent, and why some of it is left out."""
        found, refused = dict[str, Tensor](), dict[str, str]()
        for site, message in updates.items():
            try:
                if message.tensors:
                    found[site] = self.sent_by(site, message)
            except Malformed as error:
                refused[site] = str(error)
        return found, refused

    def sent_by(self, site: str, message: Message) -> Tensor:
        """What a site sent `(n,)`, whatever it travelled as. `Malformed` where that is not finite."""
        row = self.wire.updated(self.known_method, message.round, message.tensors, self.common_for(site))
        if not bool(torch.isfinite(row).all()):
            raise Malformed("its change makes values that are not finite")
        return row

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
        server_checkpoint.write(self.folder, knowledge, self.common, tensors_of(self.kept), self.held)

    def resume(self) -> None:
        """Go on after the last finished round, if there is one."""
        path = server_checkpoint.newest(self.folder)
        if path is None:
            return
        knowledge, self.common, kept, self.held = server_checkpoint.read(path)
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
