"""The server's half of a run: what it accepts of a round, the merge, the checkpoint. Knows nothing of FLARE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pf2lora import atomic
from pf2lora.core.method import Updates, tensors_of
from pf2lora.engines.bad_clients import check_enough
from pf2lora.engines.local import merge_weights
from pf2lora.errors import UserError
from pf2lora.federation.protocol import private, robust, server_checkpoint
from pf2lora.federation.protocol.answers import Answers
from pf2lora.federation.protocol.checkpoints import restored, writing
from pf2lora.federation.protocol.masked import Summed, lost_sum, merge_sum
from pf2lora.federation.protocol.messages import Malformed
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.problems import OF_A_ROUND
from pf2lora.federation.protocol.records import RoundRecord
from pf2lora.federation.protocol.run_status import FINAL, read_final
from pf2lora.federation.protocol.server_checkpoint import Knowledge
from pf2lora.federation.protocol.stopping import QuorumMissed, middle_loss, out_of_patience
from pf2lora.federation.protocol.update_checks import bounded, odd_updates, starts
from pf2lora.run import privacy
from pf2lora.run.deploy import COMMON, candidate_names


class ServerSession(Answers):
    """Rounds of a plan, from the last finished one on. `folder` is the run's folder on the server."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        self.best: server_checkpoint.Best | None = None
        self.resume()

    @property
    def over(self) -> bool:
        """Whether no round is left: all are done, or patience is at its end."""
        training = self.config.training
        return self.done >= training.rounds or out_of_patience(training, self.records.losses)

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
        read = self.read(answers)
        refused = {site: answer.why for site, answer in read.items() if answer.why}
        messages = {site: answer.message for site, answer in read.items() if answer.message is not None}
        problems = {s: m.fields["code"] for s, m in messages.items() if m.kind == "problem"}
        stopped = [site for site, code in problems.items() if code not in OF_A_ROUND]
        updates = [site for site, m in messages.items() if m.kind == "update"]
        sent = [site for site in updates if site in self.rows]
        if summed is not None:
            refused |= {site: "it is not in the masked sum" for site in updates if site not in summed.sites}
        elif self.privacy is None:  # where updates get noise, who is left out may not depend on the others'
            refused |= odd_updates(self.rows, starts(self, sent), self.plan.norm_limit)
        kept = [s for s in self.plan.sites if s in updates and s not in refused]
        asked = len(self.chosen(number))
        self.check_strict([s for s in refused if s not in stopped], refused, number)
        if summed is not None and lost_sum(self, summed, problems, asked):
            refused |= dict.fromkeys(kept, f"the round has no sum ({summed.why})")
            kept = []
        elif len(kept) < self.plan.needed(asked) or (summed is not None and summed.total is None):
            raise QuorumMissed(number, len(kept), asked, self.plan, missing, refused)
        held = self.now_held()
        scores = {site: m.fields for site, m in messages.items() if site not in refused}
        self.judge_common(scores)  # before the merge: they are of what the round before served
        if summed is not None and summed.total is not None and kept:
            merge_sum(self, summed.total, len(kept))
        elif sent:
            self.merge(kept, number)
            self.ranks |= {site: read[site].rank for site in kept}
        self.rows.clear()
        record: RoundRecord = {
            "round": number,
            "seconds": seconds,
            "answered": kept,
            "missing": missing,
            "refused": refused,
            "take_back": [site for site in refused if site not in problems],
            "stopped": stopped,
            "bytes": {site: answer.size for site, answer in read.items()},
            "scores": scores,
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

    def merge(self, sites: list[str], number: int) -> None:
        """The method's answer to what these sites sent at the end of round `number`."""
        method, rows = self.known_method, self.rows
        if self.privacy is not None:
            expected, seed = len(self.chosen(number)), self.config.training.seed
            total = private.cut_sum(self.privacy, rows, sites)
            sent = private.noisy(self.privacy, method, self.common, total, expected, seed, number)
        elif self.plan.merge != "mean":
            middle = rows.merged(sites, lambda block: robust.merged(block, self.plan.merge))
            sent = private.one_row(middle, number)
        else:
            sizes = bounded({s: self.sites[s]["train_rows"] for s in sites})
            weights = merge_weights([sizes[s] for s in sites], self.config.training.weighting)
            sent = Updates(torch.empty(0), weights, tuple(self.plan.sites.index(s) for s in sites), number)
            if not method.needs_rows:
                mean = rows.merged(sites, lambda block: method.average(block, weights))
                sent = sent._replace(numbers=mean.unsqueeze(0), weights=torch.ones_like(weights[:1]))
            else:
                sent = sent._replace(numbers=rows.part(sites))
        self.common, self.kept = method.merge(sent, self.kept)

    def judge_common(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what the last round served, if the middle of the sites' losses with it is the least so far."""
        loss = middle_loss(answers, self.judged_by)
        if loss is None or self.common is None or self.config.training.keep == "last":
            return
        if self.best is None or loss < self.best.loss:
            self.best = server_checkpoint.Best(self.done, loss)
            server_checkpoint.write_best(self.folder, self.best, self.common)

    @property
    def judged_by(self) -> str:
        """The loss by which sites judge the common adapter: its own, where that is another than the served model's."""
        return COMMON if COMMON in candidate_names(self.known_method) else "loss"

    def chosen_common(self, final: Mapping[str, Mapping[str, Any]]) -> tuple[torch.Tensor | None, int | None]:
        """What all sites share, of the round in which it was best; of the last, as the `final` answers judge it, where
        no earlier one was better. And that round, where anybody judged."""
        last = middle_loss(final, self.judged_by)
        file = server_checkpoint.best_file(self.folder, self.done)
        if file is None or self.best is None or (last is not None and last < self.best.loss):
            return self.common, None if last is None or self.common is None else self.done
        _, common = server_checkpoint.read_best(file)
        if common.shape[-1:] != (self.known_method.arrives(self.best.round).size,):
            raise server_checkpoint.damaged(file, ValueError("a common adapter of another size"))
        return common, self.best.round

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
        """With the records, one file is all that a later server needs; the previous one stays until it is whole."""
        knowledge = Knowledge.of(self.done, self.ranks, self.sites)
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
            self.records.read(knowledge.done)
        except (Malformed, ValueError, KeyError, UserError) as error:
            raise server_checkpoint.damaged(path, error) from None
        self.done, self.ranks, self.sites = knowledge.done, knowledge.ranks, knowledge.sites
        self.kept = restored(self.kept, kept, path)
        server_checkpoint.forget_later(self.folder, self.done)
        if file := server_checkpoint.best_file(self.folder, self.done):
            self.best, _ = server_checkpoint.read_best(file)
