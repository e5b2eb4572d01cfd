"""How good a site's models are, and which one it deploys: a client of a local run measures and chooses the same way.

The site chooses by its own validation rows and keeps its best model so far in its state folder, so that one that is
started again chooses the same. All that this gives for the server are counts of rows and sums over them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import torch

from pf2lora.atomic import write_json
from pf2lora.core.method import State, StepStats
from pf2lora.engines.local import Round
from pf2lora.federation.protocol.allow_list import is_number
from pf2lora.federation.protocol.checkpoints import (
    BEST,
    Checkpoint,
    CheckpointFolder,
    StateFolderError,
    writing,
)
from pf2lora.parsing import parse_json
from pf2lora.run.cards import write_site_card
from pf2lora.run.deploy import COMMON, SERVED, Deployment, Kept, candidates
from pf2lora.run.evaluation import Models, finite, measure, models_in_use
from pf2lora.run.folder import save_client
from pf2lora.run.result import Choice, ClientInfo
from pf2lora.run.set_up import Trial

SCORES = "scores.json"  # its own, beside that
CHOICE = "deploy.json"  # beside the adapter that the site deploys

Sums = dict[str, float]
"""`rows`, and what was summed over them: nothing about a single example. What is no number cannot be sent and is left
out."""


class SiteModels:
    """The models of a site's one client after a round; `trial` is of that client."""

    def __init__(self, trial: Trial, folder: CheckpointFolder) -> None:
        self.trial, self.folder = trial, folder
        self.validated = trial.workload.validation is not None

    def before_averaging(self, state: State, number: int) -> Sums:
        """The scores with what round `number`'s local steps left."""
        return self.scores(models_in_use(self.trial, state, number, received=False))

    def served(self, state: State, saved: Checkpoint, number: int) -> dict[str, Sums]:
        """The scores and the validation loss with what the site is served after round `number`. `saved` is the site's
        own last round, which need not be that one. A model that is the best so far is kept."""
        served = models_in_use(self.trial, state, number)
        answer = {"served": self.scores(served)}
        if self.validated:
            answer |= validation_sums(self.look(round_of(state, saved, number), served))
        return answer

    def deploy(self, state: State, saved: Checkpoint, number: int) -> dict[str, Sums]:
        """The same at the run's end, with the score of what the site chose to deploy, which is written."""
        served = models_in_use(self.trial, state, number)
        answer = {"served": self.scores(served, final=True)}
        if self.trial.workload.task.writes and self.trial.method.federated and saved.round == number:
            before = models_in_use(self.trial, saved.before, number, received=False)
            answer["before"] = self.scores(before, final=True)
        if not self.validated:
            self.export(served)
            self.write_card(answer, None, number)
            return answer
        done = round_of(state, saved, number)
        deployment = self.look(done, served)
        answer |= validation_sums(deployment)
        deployment.try_personal_steps(done, served)
        deployment.choose()
        (choice,) = deployment.choices()
        self.export(deployment.models, choice)
        is_served = (choice.candidate, choice.round) == (SERVED, number)
        answer["deploy"] = answer["served"] if is_served else self.scores(deployment.models, final=True)
        self.write_card(answer, choice, number)
        return answer

    def look(self, done: Round, served: Models) -> Deployment:
        """Judge a round's candidates beside the best of the rounds before; the best of all is on disk then."""
        deployment = Deployment(self.trial)
        found = self.folder.newest(BEST, done.number)
        if found is not None:
            deployment.best = self.read_best(found)
        deployment.look(done, dict(candidates(self.trial, done, served)), None)
        self.write_best(deployment.best, done.number)
        return deployment

    def write_best(self, best: Kept, number: int) -> None:
        """Keep the best model as it is after round `number`, with its losses; its scores are asked again at the end."""
        assert best.models is not None
        tensors = best.models._asdict() | {"losses": best.losses}
        self.folder.write(BEST, number, tensors, {"which": json.dumps(best.which[0])})

    def read_best(self, number: int) -> Kept:
        """The best model as it was after round `number`."""
        tensors, header = self.folder.read(BEST, number)
        best, start = Kept(1), self.trial.state
        try:
            candidate, of_round = parse_json(header["which"])
            best.models = Models(*(tensors.pop(name) for name in Models._fields))
        except (KeyError, TypeError, ValueError):
            raise StateFolderError(
                f"the state {self.folder.path(BEST, number)} is damaged", "state"
            ) from None
        shapes = (best.models.common.shape, best.models.personal.shape)
        if tensors.keys() != {"losses"} or shapes != (start.x.shape, start.y.shape):
            raise StateFolderError(
                f"the state {self.folder.path(BEST, number)} belongs to another adapter; use another state folder",
                "state",
            )
        best.which = [(str(candidate), int(of_round))]
        best.losses = tensors["losses"]
        return best

    def scores(self, models: Models, *, final: bool = False) -> Sums:
        """The test rows, and by metric the score times them; those of written text in the `final` scores alone."""
        scores = measure(self.trial, models, final=final).scores
        rows = len(self.trial.workload.clients[0].test)
        sums = {name: v * rows for name, (value,) in scores.items() if (v := finite(value)) is not None}
        return {"rows": rows} | {name: total for name, total in sums.items() if is_number(total)}

    def keep_scores(self, found: dict[str, Sums]) -> None:
        """The scores of a private run's end, which do not leave: for the site itself."""
        (name,) = self.trial.workload.names
        with writing(self.folder.folder):
            write_json(scores_file(self.folder.folder, name), found)

    def export(self, models: Models, choice: Choice | None = None) -> None:
        """Write what the site deploys, and what it chose."""
        workload = self.trial.workload
        (name,), base = workload.names, workload.config.model.name
        with writing(self.folder.folder):
            save_client(
                *(self.folder.folder, self.trial.model, name, models.common[0], models.personal[0]),
                *(workload.task.peft_type, base),
            )
            if choice is not None:
                write_json(choice_file(self.folder.folder, name), asdict(choice))

    def write_card(self, answer: dict[str, Sums], choice: Choice | None, rounds: int) -> None:
        """The model card beside what the site deploys: for itself, whatever may leave."""
        workload = self.trial.workload
        (client,) = workload.clients
        known = ClientInfo(client.name, len(client.train), len(client.test), {}, len(client.validation))
        adapter = self.folder.folder / "clients" / client.name
        scores = {point: means(answer.get(point, answer["served"])) for point in ("deploy", "served")}
        how = workload.config, self.trial.method.name, known, scores, choice, rounds
        with writing(self.folder.folder):
            write_site_card(adapter, *how, workload.task.metrics, self.trial.method.lr)


def means(sums: Sums) -> dict[str, float | None]:
    """Scores of sums over rows."""
    return {
        name: value / sums["rows"] if sums["rows"] else None for name, value in sums.items() if name != "rows"
    }


def scores_file(folder: Path, client: str) -> Path:
    """Where a site's state folder of a run says how good its models are."""
    return folder / "clients" / client / SCORES


def choice_file(folder: Path, client: str) -> Path:
    """Where a site's state folder of a run says what the site chose."""
    return folder / "clients" / client / CHOICE


def round_of(state: State, saved: Checkpoint, number: int) -> Round:
    """Round `number` as a client of a local run would see it, as far as candidates are made of it: before the average
    it had what its own last round left."""
    nothing = torch.empty(0)
    return Round(number, [0], StepStats(nothing), saved.before, state, nothing, 0.0)


def validation_sums(deployment: Deployment) -> dict[str, Sums]:
    """The validation rows with the sum of the served model's loss over them, and where the common adapter alone is
    another model, of that one's."""
    losses = deployment.served.losses[0]
    rows, total = int((~losses.isnan()).sum()), float(losses.nansum())
    if not rows or not math.isfinite(total):
        return {}
    sums: Sums = {"rows": rows, "loss": total}
    if COMMON in deployment.last:
        common = float(deployment.last[COMMON].losses[0].nansum())
        sums |= {"common": common} if is_number(common) else {}
    return {"validation": sums}
